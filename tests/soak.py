"""`make soak`: an hour of mixed load on the TensorFold double, in which nothing may be found wrong.

On the lab, or with `--here` as processes of this machine (tests/here.py), which leaves the lab free.

Phases follow each other: users who ask short and long things, streams that are broken off, more requests at
once than there are slots, wrong requests, prompts that fill for seconds, a pool that is full, and silence, in
which the pair asks itself. Every phase is drawn from a seeded generator, so a run can be had again. A moment
in which the gate was not ready, or an epoch that ended, is a false alarm.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import yaml

from lab.api import Lab
from lab.playbook import ROOT, playbook
from lab.tensorfold.checkpoint import write_checkpoint, write_drafter
from lab.tensorfold.image import PROGRAM
from tests.bench import cpu_ticks, unit_pids
from tests.crowd import wait_until_serving
from tests.faults.harness import GATE, stamp
from tests.faults.ways import live
from tests.here import TICKS, ProcessDocker, gate_host, pss_mib, supervise, ticks
from tests.lab.conftest import HEAD, WORKER, Pair
from tests.unit.doubles import free_port

SEED = 53
NAMES = ("a", "b")
LOOK_SECONDS = 0.5
WORDS = ("copper", "lamp", "river", "seven", "glass", "under", "train", "winter")


@dataclass
class Soak:
    """What a soak has seen so far. `requests` counts by kind, `wrong` are answers that should not be."""

    ends: float
    model: str
    base: str
    epoch: int
    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    looks: int = 0
    answered: set[float] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.ends


async def soak(site: Site, seconds: float, *, seed: int = SEED) -> Soak:
    """Load a serving pair for `seconds` and return what was seen."""
    now = await asyncio.to_thread(wait_until_serving, site.gate)
    seen = Soak(ends=time.monotonic() + seconds, model=now["model"], base=now["endpoint"], epoch=now["epoch"])
    chance = random.Random(seed)
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session:
        watcher = asyncio.create_task(watch(session, site.gate, seen))
        while not seen.over:
            phase = chance.choice((users, users, burst, slow_prefill, full_pool, silence, silence))
            await phase(site, session, seen, chance)
        watcher.cancel()
    return seen


# Phases


async def users(_: Site, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Three users who ask, read, think and ask again for a minute."""
    ends = min(seen.ends, time.monotonic() + 60)

    async def one(mine: random.Random) -> None:
        while time.monotonic() < ends:
            await mine.choice(ASKS)(session, seen, mine)
            await asyncio.sleep(mine.expovariate(1.0))

    await asyncio.gather(*(one(random.Random(chance.random())) for _ in range(3)))


async def burst(_: Site, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Twelve requests at once: most of them wait."""
    await asyncio.gather(*(chat(session, seen, random.Random(chance.random())) for _ in range(12)))


async def slow_prefill(site: Site, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Prompts that take six seconds to fill, as a million tokens take a quarter of an hour."""
    await switched(site, "slow_prefill=6", session, seen, chance)


async def full_pool(site: Site, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A pool for one request: the others wait, and that is not stuck."""
    await switched(site, "full_pool", session, seen, chance)


async def switched(
    site: Site, fault: str, session: aiohttp.ClientSession, seen: Soak, chance: random.Random
) -> None:
    """Three requests under a switch of the double."""
    await asyncio.to_thread(site.switch, fault)
    await asyncio.sleep(0.3)
    await asyncio.gather(*(chat(session, seen, random.Random(chance.random())) for _ in range(3)))
    await asyncio.to_thread(site.switch, "clear")
    await asyncio.sleep(0.3)


async def silence(_: Site, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Nobody asks for half a minute."""
    del session, chance
    await asyncio.sleep(max(0.0, min(32.0, seen.ends - time.monotonic())))


# Requests


def body(seen: Soak, text: str, **more: Any) -> dict[str, Any]:
    """Return a chat request."""
    return {"model": seen.model, "messages": [{"role": "user", "content": text}], **more}


async def post(session: aiohttp.ClientSession, seen: Soak, kind: str, data: Any, expected: int = 200) -> str:
    """Post a chat request, note an answer of another status than `expected`, and return its text."""
    seen.requests[kind] += 1
    try:
        async with session.post(f"{seen.base}/chat/completions", json=data) as response:
            text = await response.text()
            if response.status != expected:
                seen.wrong.append(f"{kind}: HTTP {response.status}: {text[:100]}")
            return text
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        return ""


async def chat(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A question with an answer of some words."""
    words = chance.randint(5, 120)
    text = await post(session, seen, "chat", body(seen, f"Write {words} words.", max_tokens=400))
    if text and "word1" not in text:
        seen.wrong.append(f"chat: {text[:100]}")


async def stream(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """The same, streamed."""
    data = body(seen, f"Write {chance.randint(20, 200)} words.", max_tokens=400, stream=True)
    if "[DONE]" not in await post(session, seen, "stream", data):
        seen.wrong.append("stream: no [DONE]")


async def broken_off(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A stream whose client goes away."""
    seen.requests["broken off"] += 1
    data = body(seen, "Write 400 words.", max_tokens=800, stream=True)
    async with session.post(f"{seen.base}/chat/completions", json=data) as response:
        await response.content.read(chance.randint(1, 2000))


async def long_prompt(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Some ten thousand words before the question."""
    text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(2_000, 20_000)))
    await post(session, seen, "long prompt", body(seen, f"{text}. What is 7 + 5?", max_tokens=20))


async def wrong(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A request that the engine refuses."""
    data = chance.choice(({"messages": "no list"}, body(seen, "x", n=2)))
    await post(session, seen, "wrong", data, expected=400)


ASKS: tuple[Callable[[aiohttp.ClientSession, Soak, random.Random], Awaitable[None]], ...] = (
    chat,
    chat,
    stream,
    broken_off,
    long_prompt,
    wrong,
)


# What is watched


async def watch(session: aiohttp.ClientSession, gate: str, seen: Soak) -> None:
    """Look at the gate twice a second, for ever."""
    while True:
        async with session.get(gate) as response:
            now = await response.json()
        seen.looks += 1
        seen.answered.add(now["answered_at"])
        if not now["ready"] or now["epoch"] != seen.epoch:
            at = datetime.now(UTC)
            seen.alarms.append(f"{at:%H:%M:%S} epoch {now['epoch']} {now['state']}: {now['reasons']}")
            seen.epoch = now["epoch"]
        await asyncio.sleep(LOOK_SECONDS)


# Where the pair runs


class Site(Protocol):
    """A serving pair: its gate, a switch of its double, and (PSS in MiB, CPU ticks) of each supervisor."""

    gate: str

    def switch(self, fault: str) -> None:
        """Write a line into rank 0's control file."""

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return what each supervisor costs by now."""


class OnLab:
    """The pair on the lab's hosts."""

    gate = GATE

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def switch(self, fault: str) -> None:
        """Write a line into rank 0's control file."""
        live(fault)(self._pair)

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return what each supervisor's unit costs by now."""
        return {host: (self._mib(host), cpu_ticks(self._pair, host)) for host in (HEAD, WORKER)}

    def _mib(self, host: str) -> float:
        files = [f"/proc/{pid}/smaps_rollup" for pid in unit_pids(self._pair, host)]
        return int(self._pair.sh(host, "awk", "/^Pss:/ {sum += $2} END {print sum}", *files)) / 1024


class Here:
    """The pair as processes of this machine; they end with the context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "tensorfold").symlink_to(PROGRAM)
        write_checkpoint(folder / "model")
        write_drafter(folder / "drafter")
        peers, gate = free_port(), free_port()
        self.gate = f"http://{gate_host(1)}:{gate}/status"
        self._argv = [sys.executable, "-m", "tests.soak", "--folder", str(folder), "--ports"]
        self._argv += [str(port) for port in (peers, gate, free_port(), free_port())]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Here:
        for name in NAMES:
            with (self._folder / f"{name}.log").open("wb") as log:
                argv = [*self._argv, "--be", name]
                self._processes[name] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()

    def switch(self, fault: str) -> None:
        """Write a line into rank 0's control file."""
        (folder,) = (self._folder / NAMES[0] / "cache").glob("*/tf-double")
        (folder / "control").write_text(f"{fault}\n", encoding="ascii")

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return what each supervisor costs by now."""
        return {name: (pss_mib(p.pid), ticks(p.pid)) for name, p in self._processes.items()}


def settings(folder: Path, gate: int, api: int, rendezvous: int) -> str:
    """Return settings.yaml: the lab's for the double, but for what is where."""
    given = yaml.safe_load((ROOT / "lab/tensorfold/variables.yml").read_text(encoding="utf-8"))
    return yaml.safe_dump(
        {
            "version": 1,
            "cluster": "unit",
            "engine": "tensorfold",
            "device": "cpu",
            "image": given["glm53_image"],
            "model": {"path": str(folder / "model"), "name": given["glm53_model_name"]},
            "api": {"port": api},
            "gate": {"port": gate},
            "canary": given["glm53_canary"],
            "drafter": {**given["glm53_drafter"], "path": str(folder / "drafter")},
            "tensorfold": {**given["glm53_tensorfold"], "rendezvous_port": rendezvous},
            "supervision": given["glm53_supervision"],
        }
    )


async def be(name: str, folder: Path, ports: Sequence[int]) -> None:
    """Be one of the two supervisors."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    peers, *others = ports
    await supervise(name, NAMES, peers, folder, settings(folder, *others), ProcessDocker(folder))


def report(site: Site, seconds: float, where: str) -> int:
    """Soak, print what was seen, and return 1 when there was a false alarm or a wrong answer."""
    wait_until_serving(site.gate)
    began, before = time.monotonic(), site.figures()
    seen = asyncio.run(soak(site, seconds))
    took, after = time.monotonic() - began, site.figures()
    print(f"{stamp()}, {took / 60:.1f} min on the double, {where}")
    print("requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(seen.requests.items())))
    print(f"looks at the gate: {seen.looks}; right idle checks: {len(seen.answered) - 1}")
    for name, (mib, spent) in before.items():
        share = (after[name][1] - spent) / TICKS / took * 100
        mibs = f"PSS {mib:.1f} MiB before, {after[name][0]:.1f} after"
        print(f"supervisor {name}: {mibs}, {share:.2f} % of a core")
    print(f"false alarms: {len(seen.alarms)}", *seen.alarms[:20], sep="\n  ")
    print(f"wrong answers: {len(seen.wrong)}", *seen.wrong[:20], sep="\n  ")
    return 1 if seen.alarms or seen.wrong else 0


def main() -> int:
    """Soak a pair on the lab, which site.yml sets up first, or here."""
    parser = argparse.ArgumentParser(description="an hour of mixed load on the TensorFold double")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--here", action="store_true", help="as processes of this machine")
    parser.add_argument("--be", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be:
        asyncio.run(be(given.be, given.folder, given.ports))
        return 0
    if given.here:
        with tempfile.TemporaryDirectory() as folder, Here(Path(folder)) as site:
            return report(site, given.minutes * 60, "as processes on loopback")
    lab = Lab()
    lab.up()
    argv, environment = playbook(lab, "site.yml", "-e", "@lab/tensorfold/variables.yml")
    if subprocess.run(argv, cwd=ROOT, env=environment, check=False, stdout=sys.stderr).returncode:
        return 1
    return report(OnLab(Pair(lab)), given.minutes * 60, "on the lab")


if __name__ == "__main__":
    sys.exit(main())
