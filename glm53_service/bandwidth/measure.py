"""How fast a rail is, by ib_write_bw: small buffers, a few seconds, one rail and direction at a time, never
while the pair serves.

A card that came up wrong looks healthy everywhere else: 200000 Mb/s, PCIe Gen5 x4, and 13 Gb/s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from glm53_service.bandwidth.gather import Gathered
from glm53_service.errors import CommandError, UnavailableError, UsageError
from glm53_service.fabric.rails import Rail
from glm53_service.files import write_durably
from glm53_service.run import Runner

HEALTHY_GBITS = 80.0
STALE_GBITS = (8.0, 25.0)
"""NVIDIA's check-connectx-bandwidth: from 80 on it is healthy, 8 to 25 is the stale initialisation. One twin
of a healthy cable gives 92 to 109 Gb/s.
"""

PORT = 12000
PAIRS = 4
SECONDS = 5
MOST_SECONDS = 30
BUFFER_BYTES = 65536
MOST_BUFFER_BYTES = 16 * 1024 * 1024
"""Of one of four queue pairs. Memory is shared with the system: tests with gigabytes froze Sparks."""

STALE_CURE = (
    "the card came up wrong. Keep the cables, update both nodes and reboot both; else shut both down, unplug"
    " USB-C and the power adapters for 60 s, start, and measure again; else ask NVIDIA's support"
)


class Verdict(StrEnum):
    """What a speed means."""

    HEALTHY = "healthy"
    STALE = "stale"
    LOW = "low"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One rail in one direction. `at` in Unix seconds, `gbits` in Gb/s (10^9 bits)."""

    at: float
    source: str
    target: str
    rail: int
    hca: str
    gbits: float

    @property
    def verdict(self) -> Verdict:
        """Return what the speed means."""
        return judge(self.gbits)


def judge(gbits: float) -> Verdict:
    """Return what a rail's speed in Gb/s means."""
    if gbits >= HEALTHY_GBITS:
        return Verdict.HEALTHY
    low, high = STALE_GBITS
    return Verdict.STALE if low <= gbits <= high else Verdict.LOW


def argv(rail: Rail, number: int, *, seconds: int, buffer_bytes: int, server: str = "") -> tuple[str, ...]:
    """Return the command of one side; with a `server` address that of the side that sends.

    UsageError for a test that is longer or larger than what a serving machine may be asked for.
    """
    if not 1 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds {seconds}: expected 1 to {MOST_SECONDS}")
    if not 4096 <= buffer_bytes <= MOST_BUFFER_BYTES:
        raise UsageError(
            f"--bytes {buffer_bytes}: expected 4096 to {MOST_BUFFER_BYTES}",
            hint="more tells nothing new, and tests with gigabytes freeze a Spark: the memory is shared",
        )
    if rail.hca is None or rail.gid_index is None:
        raise UnavailableError(
            f"rail {number} ({rail.netdev}) has no RDMA device with a RoCE v2 GID",
            hint="glm53 fabric says why",
        )
    device = ("-d", rail.hca, "-i", "1", "-x", str(rail.gid_index), "-p", str(PORT + number))
    test = ("-q", str(PAIRS), "-s", str(buffer_bytes), "-D", str(seconds), "-F", "--report_gbits")
    return ("ib_write_bw", *device, *test, *((server,) if server else ()))


MIB_A_SECOND = 8 * 1024 * 1024 / 1e9


def parse(text: str) -> float:
    """Return the average in Gb/s of what ib_write_bw prints (perftest 4.5 to 24): the row below its header.

    UnavailableError when there is none, or no number in it.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines[:-1]):
        unit = re.search(r"BW average\[(Gb|MB|MiB)/sec\]", line)
        if unit:
            row = lines[number + 1].split()
            if len(row) >= 4 and re.fullmatch(r"\d+(\.\d+)?", row[3]):
                return float(row[3]) * (1.0 if unit[1] == "Gb" else MIB_A_SECOND)
    said = " ".join(text.split())[-200:]
    raise UnavailableError(f"ib_write_bw printed no result: {said or 'nothing'}")


async def run_side(command: Sequence[str], runner: Runner) -> str:
    """Run one side to its end; UnavailableError names what is missing."""
    try:
        return await runner(command)
    except CommandError as error:
        last = (error.err or error.out).strip().splitlines()[-1:] or ["nothing"]
        raise UnavailableError(
            f"`{' '.join(command)}` ended with {error.code}: {last[0]}",
            hint="does the other side wait, does a firewall drop the port, do both sides name one rail?",
        ) from None
    except UnavailableError as error:
        raise UnavailableError(error.message, hint="apt install perftest, on every node") from None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What bandwidth.json holds: the newest result of each rail and direction, and the newest all-gather."""

    version: int = 1
    results: tuple[Result, ...] = ()
    gathered: Gathered | None = None


def remember(path: Path, new: Result | Gathered) -> None:
    """Keep `new` in `path`, in place of what was measured the same way before."""
    kept = read_kept(path)
    if isinstance(new, Gathered):
        kept = msgspec.structs.replace(kept, gathered=new)
    else:
        same = (new.source, new.target, new.rail)
        others = [old for old in kept.results if (old.source, old.target, old.rail) != same]
        ordered = sorted([*others, new], key=lambda r: (r.source, r.target, r.rail))
        kept = msgspec.structs.replace(kept, results=tuple(ordered))
    write_durably(path, msgspec.json.format(msgspec.json.encode(kept), indent=1).decode() + "\n")
    path.chmod(0o644)


def read_kept(path: Path) -> Kept:
    """Return what is in `path`; nothing where there is no such file, or it is none of ours."""
    try:
        return kept_in(path.read_text(encoding="utf-8"))
    except OSError:
        return Kept()


def kept_in(text: str) -> Kept:
    """Return what is in the text of such a file."""
    try:
        return msgspec.json.decode(text, type=Kept)
    except msgspec.DecodeError:
        return Kept()
