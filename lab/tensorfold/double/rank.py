"""A rank from its first line to its end."""

import argparse
import asyncio
import contextlib
import faulthandler
import signal
import sys
import time
from collections.abc import Mapping

from .faults import Faults
from .follower import Follower
from .kernels import build_kernels
from .link import Link, for_ever
from .log import say
from .memory import choose_window
from .plan import Plan, make_plan
from .rendezvous import Rendezvous, Store
from .switches import SwitchError, read_switches

READY_SECONDS = 3600.0
TELL_SECONDS = 60.0
BURN_SECONDS = 0.05


def serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the rank; returns its exit code, or raises what ended it."""
    try:
        switches = read_switches(environ, args.rank)
    except SwitchError as error:
        print(f"tensorfold double: {error}", file=sys.stderr)
        return 2
    if switches.pid1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    plan = make_plan(args, environ, switches)
    plan.checkpoint.announce(plan.name, plan.rank, plan.ranks)
    try:
        return asyncio.run(_run(plan))
    except KeyboardInterrupt:
        return 0


async def _run(plan: Plan) -> int:
    faults = Faults(plan.switches)
    faults.start_crash()
    with contextlib.suppress(OSError):  # no cache folder, no control file
        plan.switches.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    store = Store()
    if plan.rank == 0:
        await store.start(plan.args.master_port)
    rendezvous = Rendezvous(plan.rank, plan.ranks, plan.switches)
    await rendezvous.connect(plan.args.master, plan.args.master_port)
    await rendezvous.meet()
    link = _link(plan, rendezvous)
    await link.connect()
    _fail_nccl(plan)
    await build_kernels(plan.extensions, plan.switches)
    window = await _agree(plan, rendezvous)
    await _load(plan, faults)
    await _wait_for_all(plan, rendezvous)
    seconds = time.monotonic() - began
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if plan.rank == 0:
        from . import head  # a follower has no use for an HTTP server

        return await head.serve(plan, window, link, faults, seconds)
    return await Follower(plan, rendezvous, link, faults).run(seconds)


def _link(plan: Plan, rendezvous: Rendezvous) -> Link:
    named = plan.environment["TF_ROCE_WAIT_S"]
    limited = plan.environment["TF_GLM_COMM"] == "roce"
    return Link(rendezvous, plan.switches.scaled(named) if limited else None, named)


def _fail_nccl(plan: Plan) -> None:
    """Fail with NCCL error 2 while fewer starts did than the switch says, and the split is on."""
    switches = plan.switches
    if not switches.nccl_error_2 or plan.environment["TF_GLM_HC_SPLIT"] == "0":
        return
    counter = switches.folder / f"nccl-errors-rank{plan.rank}"
    counter.parent.mkdir(parents=True, exist_ok=True)
    count = int(counter.read_text()) if counter.is_file() else 0
    if count < switches.nccl_error_2:
        counter.write_text(f"{count + 1}\n")
        raise RuntimeError("NCCL error 2: unhandled system error")


async def _agree(plan: Plan, rendezvous: Rendezvous) -> int:
    """The window that every rank can hold; raises on every rank when there is none or settings differ."""
    memory, problem = plan.memory, plan.checkpoint.problem()
    told = {
        "problem": bool(problem),
        "flags": [memory.native, memory.requested],
        "largest": memory.largest,
        "settings": plan.compared(),
    }
    everyone = await rendezvous.gather("geometry", told)
    if any(each["problem"] for each in everyone):
        cause = problem or "another rank could not read its checkpoint; check both folders/configs"
        raise ValueError(f"CUDA startup memory geometry could not be established on every rank: {cause}")
    if any(each["flags"] != told["flags"] for each in everyone):
        raise ValueError(
            "CUDA ranks have different native windows or context flags; start both with the same flags"
        )
    window = choose_window(memory.requested, min(each["largest"] for each in everyone))
    say(
        f"CUDA rank {plan.rank} startup estimate {memory.estimate_gib(window):.2f} GiB within"
        f" {memory.budget_gib:.2f} GiB; native {memory.native}, allocated prompt/reply window {window},"
        f" cache slots {plan.environment['TF_GLM_CACHE_ENTRIES']}"
    )
    _compare([each["settings"] for each in everyone])
    return window


def _compare(settings: list[list[str]]) -> None:
    first = settings[0]
    for rank, other in enumerate(settings):
        if other != first:
            mine, theirs = sorted(set(first) - set(other)), sorted(set(other) - set(first))
            names = sorted({pair.partition("=")[0] for pair in mine + theirs})
            raise RuntimeError(
                f"the two ranks were started with different settings ({', '.join(names)}):"
                f" rank 0 [{', '.join(mine)}], rank {rank} [{', '.join(theirs)}]"
            )


async def _load(plan: Plan, faults: Faults) -> None:
    """Load the weights: silently, using CPU as told."""
    switches = plan.switches
    if switches.leak is not None:
        faults.start_leak(switches.leak)
    if switches.never_loads:
        await for_ever()
    end = time.monotonic() + switches.load_seconds
    while (left := end - time.monotonic()) > 0:
        busy = time.thread_time() + min(left, BURN_SECONDS) * switches.load_cpu
        while time.thread_time() < busy:
            pass
        await asyncio.sleep(min(left, BURN_SECONDS) * (1 - switches.load_cpu))
    if plan.drafter is not None:
        plan.drafter.load(fails=switches.drafter_fails)


async def _wait_for_all(plan: Plan, rendezvous: Rendezvous) -> None:
    """Return when every rank has loaded; raises RuntimeError, naming one that has not, after an hour."""
    began = time.monotonic()
    rank, switches = plan.rank, plan.switches
    rendezvous.put(f"loaded/{rank}", True)
    for peer in range(plan.ranks):
        waiting = asyncio.create_task(rendezvous.get(f"loaded/{peer}"))
        told = 0
        while not (await asyncio.wait({waiting}, timeout=switches.scaled(TELL_SECONDS)))[0]:
            told += 1
            if time.monotonic() - began >= switches.scaled(READY_SECONDS):
                raise RuntimeError(f"rank {rank} finished loading but rank {peer} has not after 60 min")
            say(f"rank {rank} finished loading; waiting for rank {peer} ({told * TELL_SECONDS:.0f} s)")
        waiting.result()
