"""`glm53 bandwidth`: one side of a measurement; playbooks/bandwidth.yml runs both sides of all of them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from glm53_service.bandwidth.gather import Gathered, gather
from glm53_service.bandwidth.measure import Result, Verdict, argv, parse, read_kept, remember, run_side
from glm53_service.errors import (
    EXIT_BANDWIDTH_LOW,
    EXIT_BANDWIDTH_STALE,
    BusyError,
    UnavailableError,
    UsageError,
)
from glm53_service.fabric.probe import probe
from glm53_service.fabric.rails import Rail
from glm53_service.node import Node, Peer
from glm53_service.run import Runner, run

BUSY = ("preparing", "starting", "checking", "serving", "running", "ending")
GATHER_SECONDS = 150.0
"""For an all-gather's container: its libraries are read from disk, and the nodes wait for each other."""

GRACE_SECONDS = 30.0
"""Beyond the test itself: for the other side to come, and for the queue pairs to be set up."""

EXITS = {Verdict.HEALTHY: 0, Verdict.STALE: EXIT_BANDWIDTH_STALE, Verdict.LOW: EXIT_BANDWIDTH_LOW}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for: a rail, a node on its other end, the role, and how much."""

    rail: int
    peer: str
    serve: bool
    seconds: int
    buffer_bytes: int


def show_command(path: Path, *, as_json: bool) -> int:
    """Print what was measured last, and return the code of the worst."""
    kept = read_kept(path)
    codes = [EXITS[result.verdict] for result in kept.results]
    lines = [line(result) for result in kept.results]
    if kept.gathered:
        codes.append(EXIT_BANDWIDTH_LOW if kept.gathered.problem else 0)
        lines.append(gather_line(kept.gathered))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(kept), indent=1).decode())
    else:
        print("\n".join(lines) or "nothing was measured yet: playbooks/bandwidth.yml does it")
    return max(codes, default=0)


def gather_command(
    node: Node,
    image: str,
    path: Path,
    status: Mapping[str, Any] | None,
    *,
    cuda: bool,
    root: Path = Path("/"),
) -> int:
    """Run this node's part of an all-gather; rank 0 keeps the result. BusyError as above."""
    refuse_when_busy(status)
    runner = functools.partial(run, timeout_seconds=GATHER_SECONDS)
    found = asyncio.run(gather(node, image=image, cuda=cuda, runner=runner, root=root, at=time.time()))
    if found.rank == 0:
        remember(path, found)
    print(gather_line(found))
    return EXIT_BANDWIDTH_LOW if found.problem else 0


def measure_command(
    node: Node, wish: Wish, path: Path, status: Mapping[str, Any] | None, *, root: Path = Path("/")
) -> int:
    """Run one side; the sending side keeps the result in `path`, prints it, and returns its code.

    BusyError while a rank is here: `status` is what the gate says, None when the supervisor does not run.
    """
    refuse_when_busy(status)
    runner = functools.partial(run, timeout_seconds=wish.seconds + GRACE_SECONDS)
    result = asyncio.run(measure(node, wish, runner, root=root))
    if result is None:
        return 0
    remember(path, result)
    print(line(result))
    return EXITS[result.verdict]


def refuse_when_busy(status: Mapping[str, Any] | None) -> None:
    """Raise BusyError when a rank is here, or about to be."""
    state = str(status.get("state", "")) if status else ""
    if state in BUSY:
        raise BusyError(
            f"the pair is {state}: a measurement would take the link from it",
            hint="systemctl stop glm53-head, measure, start it again",
        )


async def measure(node: Node, wish: Wish, runner: Runner, *, root: Path) -> Result | None:
    """Return the result of the sending side; None on the side that only receives."""
    rail, peer = await _rail(node, wish, runner, root), _peer(node, wish)
    target = "" if wish.serve else peer.fabric[wish.rail]
    command = argv(rail, wish.rail, seconds=wish.seconds, buffer_bytes=wish.buffer_bytes, server=target)
    said = await run_side(command, runner)
    if wish.serve:
        return None
    return Result(
        at=time.time(),
        source=node.node,
        target=peer.node,
        rail=wish.rail,
        hca=str(rail.hca),
        gbits=round(parse(said), 2),
    )


async def _rail(node: Node, wish: Wish, runner: Runner, root: Path) -> Rail:
    fabric = await probe(node.me.fabric, rdma=True, runner=runner, root=root, wishes=node.me.wishes)
    if fabric.trouble:
        raise UnavailableError(fabric.trouble.text, hint=fabric.trouble.fix)
    address = node.me.fabric[wish.rail] if wish.rail < len(node.me.fabric) else ""
    rail = next((rail for rail in fabric.rails if rail.address == address), None)
    if rail is None:
        why = "; ".join(map(str, fabric.warnings)) or f"this node has {len(node.me.fabric)}"
        raise UnavailableError(f"there is no usable rail {wish.rail}: {why}", hint="glm53 fabric")
    return rail


def _peer(node: Node, wish: Wish) -> Peer:
    others = [peer for peer in node.nodes if peer.node != node.node]
    if not wish.peer and len(others) == 1:
        return others[0]
    found = next((peer for peer in others if peer.node == wish.peer), None)
    if found is None:
        raise UsageError(f"--peer {wish.peer!r}: expected one of {', '.join(peer.node for peer in others)}")
    return found


def gather_line(found: Gathered) -> str:
    """Return an all-gather for a person."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(found.at))
    return (
        f"all-gather of {found.bytes / 1e6:.0f} MB over {found.world} nodes ({found.backend}):"
        f" {found.gbytes:.2f} GB/s, {found.problem or 'right'} ({when} UTC)"
    )


def line(result: Result) -> str:
    """Return one result for a person."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(result.at))
    return (
        f"rail {result.rail} ({result.hca}) {result.source} -> {result.target}: {result.gbits:.1f} Gb/s,"
        f" {result.verdict} ({when} UTC)"
    )
