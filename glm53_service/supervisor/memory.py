"""Memory of a node: is there enough to start a rank, and must a running one be stopped to save the node.

A Spark that runs out of memory does not kill the engine, it freezes: no log, no ssh, a power cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from glm53_service.artifacts.cache import give_back
from glm53_service.engines.base import Engine
from glm53_service.errors import UnavailableError
from glm53_service.settings import Settings, Supervision
from glm53_service.supervisor.world import World
from glm53_service.system import GIB, Memory, largest_processes, read_memory

POLL_SECONDS = 2.0

WARN_GIB = 6.0
"""MemAvailable of a serving node that is worth a warning: TensorFold idles at 7 GiB on the head, and a prompt
of a million tokens takes it to 4.7 to 5.6 (published figures of its Spark recipe).
"""

WARN_ENDS_GIB = 6.5

NEAR = 2.0
"""Below that many times its limit a node is looked at more often: a load takes memory by GB a second."""


def start_problem(settings: Settings, engine: Engine, memory: Memory) -> str:
    """Return why no rank can be started in `memory`; empty when one can.

    MemFree and MemAvailable both count: CUDA cannot take page cache at once (written weights: 41.5 GiB free,
    115.7 available on a GB10), and vLLM's check has been seen to read the one and torch the other.
    """
    times, least = settings.supervision, min(memory.free, memory.available) / GIB
    if least < times.min_free_gib:
        name = "MemFree" if memory.free <= memory.available else "MemAvailable"
        return f"{name} is {least:.1f} GiB, {times.min_free_gib:g} needed (supervision.min_free_gib)"
    if memory.available / GIB < times.load_guard_gib:
        return (
            f"MemAvailable is {memory.available / GIB:.1f} GiB, and a loading rank is stopped below"
            f" {times.load_guard_gib:g} (supervision.load_guard_gib)"
        )
    return engine.memory_problem(settings, memory)


async def wait_for_memory(
    world: World, settings: Settings, engine: Engine, others: Callable[[], Mapping[str, Memory]]
) -> None:
    """Return once this node, and each of `others` (by name), has the memory for a rank.

    The kernel takes an ended engine's memory back late (62, 88, 99, 118 GiB within a minute), so it is
    waited for, `min_free_wait_seconds` at most; UnavailableError then names every node that lacks it, with
    what would fit, and this node's largest processes.
    """
    deadline = world.clock() + settings.supervision.min_free_wait_seconds
    while True:
        nodes = {"": read_memory(world.root), **others()}
        short = {
            name: text for name, memory in nodes.items() if (text := start_problem(settings, engine, memory))
        }
        if not short:
            return
        if "" in short:
            # Page cache of the weights counts against CUDA, and nothing else would ever give it back.
            await asyncio.to_thread(give_back, Path(settings.model.path))
        if world.clock() >= deadline:
            break
        await world.sleep(POLL_SECONDS)
    poorest_first = sorted(short, key=lambda name: min(nodes[name].free, nodes[name].available))
    found = "; ".join(f"{name}: {short[name]}" if name else short[name] for name in poorest_first)
    raise UnavailableError(
        f"{found}; the largest processes here: {', '.join(largest_processes(world.root))}",
        hint="end what holds it (a desktop, another engine), or ask for less: the poorest node decides",
    )


def guard_limit(times: Supervision, *, loading: bool) -> float:
    """Return the limit in GiB that holds now; 0: there is no guard."""
    return times.load_guard_gib if loading else times.steady_guard_gib


def guard_problem(times: Supervision, memory: Memory, *, node: str, loading: bool) -> str:
    """Return why the rank on `node` must be stopped at once; empty while there is memory."""
    limit = guard_limit(times, loading=loading)
    if memory.available >= limit * GIB:
        return ""
    doing, key = ("loading", "load") if loading else ("serving", "steady")
    return (
        f"memory guard: MemAvailable is {memory.available / GIB:.1f} GiB on {node} while {doing},"
        f" limit {limit:g} (supervision.{key}_guard_gib)"
    )


def memory_warning(memory: Memory, *, loading: bool, warned: bool) -> str:
    """Return the warning of a node that serves with little memory; `warned`: it was warned of already."""
    limit = WARN_ENDS_GIB if warned else WARN_GIB
    if loading or memory.available >= limit * GIB:
        return ""
    return f"only {memory.available / GIB:.1f} GiB are available while serving (a warning below {WARN_GIB:g})"
