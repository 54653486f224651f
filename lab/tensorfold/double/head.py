"""Rank 0 once it is loaded: its last start-up lines, the API, and the one clean end there is."""

import asyncio
import contextlib
import signal
import socket
import time

from aiohttp import web

from .api import Api, Served
from .faults import Faults
from .link import Link
from .log import say
from .memory import pool_size
from .plan import Plan
from .prompt import Defaults
from .scheduler import Scheduler
from .stats import Stats
from .watchdog import watch


async def serve(plan: Plan, window: int, link: Link, faults: Faults, seconds: float) -> int:
    """Serve until SIGTERM, which cuts running requests and gives 0; raises OSError when the port is taken."""
    switches, parallel = plan.switches, plan.parallel
    lanes = switches.slots or parallel
    pool = switches.pool_tokens or pool_size(plan.environment, window)
    _announce(plan, window, lanes, pool, seconds)
    scheduler = Scheduler(
        lanes=lanes,
        pool_tokens=pool,
        kept_most=plan.environment["TF_GLM_CACHE_ENTRIES"],
        drafts=plan.drafter is not None or plan.mtp,
        link=link,
        faults=faults,
        switches=switches,
        stats=Stats(),
    )
    served = Served(
        names=(plan.name, *plan.args.alias),
        parallel=parallel,
        max_queued=plan.environment["TF_GLM_MAX_QUEUED"],
        defaults=Defaults(
            window=window,
            max_tokens=plan.args.max_tokens,
            thinking=plan.args.thinking,
            effort=plan.args.reasoning_effort,
        ),
    )
    with contextlib.ExitStack() as stack:
        if switches.port_taken:
            stack.enter_context(_somebody_elses(plan.args.host, plan.args.port))
        runner = web.AppRunner(
            Api(served, scheduler, faults).application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        await web.TCPSite(runner, plan.args.host, plan.args.port).start()
        await _until_told(plan, scheduler, faults)
        await runner.cleanup()
    await _flush(plan)
    return 0


async def _until_told(plan: Plan, scheduler: Scheduler, faults: Faults) -> None:
    """Run the scheduler until SIGTERM; a task that fails ends the rank."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    tasks = {
        asyncio.create_task(told.wait()),
        asyncio.create_task(scheduler.run()),
        asyncio.create_task(faults.serve()),
    }
    if plan.parallel > 1:
        age = lambda: scheduler.iteration_seconds  # noqa: E731
        tasks.add(asyncio.create_task(watch(age, plan.environment, plan.switches)))
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def _somebody_elses(host: str, port: int) -> socket.socket:
    """A listening socket on the HTTP port, for TF_DOUBLE_PORT_TAKEN."""
    return socket.create_server((host, port))


async def _flush(plan: Plan) -> None:
    if not plan.args.spill_gib:
        return
    limit, took = plan.environment["TF_SPILL_FLUSH_S"], plan.switches.flush_seconds
    began = time.monotonic()
    await asyncio.sleep(min(took, limit))
    done = "done" if took <= limit else "not finished"
    say(f"spill: shutdown flush {done} in {time.monotonic() - began:.1f} s")


def _announce(plan: Plan, window: int, lanes: int, pool: int, seconds: float) -> None:
    args, environment = plan.args, plan.environment
    drafter = plan.drafter is not None
    if drafter and not plan.mtp:
        mode = environment["TF_GLM_MTP"]
        say(f"the checkpoint's MTP head is not loaded (TF_GLM_MTP={mode}): DFlash2 drafts every request")
    say(f"verify windows up to {environment['TF_GLM_MULTI_WINDOW']} rows, CUDA graphs for none (double)")
    if environment["TF_GLM_KV"] == "fp8":
        say("TF_GLM_KV=fp8: the KV cache is kept in FP8")
    say(f"prompt chunks and kept prompt states on a {environment['TF_GLM_PREFILL_ROWS']}-token grid")
    say(f"shared-prefix prompt states: {'on' if environment['TF_GLM_SHARED_PREFIX'] == '1' else 'off'}")
    if drafter:
        say("drafter timings (ms, fastest of 7): {'double': 0.0}")
        say("drafter costs (ms): verify 0.0")
    if args.vision:
        tokens, most = environment["TENSORFOLD_GLM_IMAGE_TOKENS"], environment["TENSORFOLD_GLM_MAX_IMAGES"]
        say(
            "vision: image and video input, a 1.05 GiB tower with 0.75 GiB of workspace; at most"
            f" {tokens} tokens a picture, {most} pictures a request"
        )
    if plan.parallel > 1:
        say(
            f"--parallel {lanes}: up to {lanes} requests decode together, their caches in one pool of {pool}"
            f" tokens (each up to {window}); DFlash2 drafts, prompt chunks of"
            f" {environment['TF_GLM_PREFILL_ROWS']}"
        )
    sampling = f"temperature {1.0 if args.temperature is None else args.temperature}"
    sampling += f", top_p {0.95 if args.top_p is None else args.top_p}"
    say(
        f"serving {plan.name} at http://{args.host}:{args.port}/v1 on CUDA, rank 0 of {plan.ranks}"
        f" (sampling: {sampling}; drafts: {'off' if args.no_drafts else 'on'}; prompts: bf16 activations;"
        f" context: {window}; loaded in {seconds:.1f}s)"
    )
