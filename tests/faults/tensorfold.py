"""TensorFold's own faults, as its double shows them."""

from __future__ import annotations

from tests.faults.harness import Drill
from tests.faults.ways import guarded, healed, live, starting
from tests.lab.conftest import HEAD, WORKER, Pair

STILL = "no counter of the engine has moved"


def no_leak(pair: Pair) -> None:
    """Take the leak and the drill's guard away."""
    healed(pair)
    guarded("load_guard_gib", 0.5)(pair)


def start(name: str, switches: str, said: str, *, limit: float = 20.0, host: str = HEAD) -> Drill:
    """Return a drill of a start under the double's `switches` on one host."""
    inject = starting(switches, host)
    return Drill(name=name, inject=inject, start=True, limit=limit, said=said, heal=healed)


DRILLS = (
    Drill(name="rank 0 exits 0 unasked", inject=live("crash=0"), limit=1.0, said="rank 0 exited with code 0"),
    Drill(name="rank 1 exits 1", inject=live("crash=1", WORKER), limit=1.0, said="exited with code"),
    Drill(
        name="hang: an iteration never ends", inject=live("hang", request=True), limit=17.0, said="iteration"
    ),
    Drill(name="silent peer", inject=live("silent", WORKER, request=True), limit=17.0, said="iteration"),
    Drill(name="frozen tokens", inject=live("frozen", request=True), limit=17.0, said=STILL),
    Drill(name="out-of-step latch", inject=live("out_of_step", request=True), limit=2.0, said="out of step"),
    Drill(
        name="a message is skipped",
        inject=live("skip_message", request=True),
        limit=2.0,
        said="out of step|expected rank 0's message|exited with code 1",
    ),
    Drill(name="/health wants a key", inject=live("health_401"), limit=8.0, said="wants a key"),
    Drill(name="/health is reduced", inject=live("health_reduced"), limit=8.0, said="says no more than"),
    start("replies !!!!", "TF_DOUBLE_FAULT=bangs", "one character over and over"),
    start("empty replies", "TF_DOUBLE_FAULT=empty", "answered nothing"),
    start("one word repeated", "TF_DOUBLE_FAULT=repeated", "one word over and over"),
    start("wrong model id", "TF_DOUBLE_FAULT=model_id=other", "/v1/models lists other"),
    start(
        "window too large: refit", "TF_DOUBLE_LARGEST_WINDOW=393216", "start 2: the window is 393216 tokens"
    ),
    start("NCCL error 2, once", "TF_DOUBLE_NCCL_ERROR_2=1", "start 2: once more as it was"),
    start(
        "NCCL error 2, until the split is off",
        "TF_DOUBLE_NCCL_ERROR_2=9",
        "start 3: the split of prompt chunks is off",
    ),
    start(
        "peer never loads",
        "TF_DOUBLE_NEVER_LOADS=1\\nTF_DOUBLE_LOAD_CPU=0",
        "no rank showed a sign of life",
        limit=40.0,
        host=WORKER,
    ),
    start("fewer slots than asked for", "TF_DOUBLE_SLOTS=2", "serves 2 requests at once, 4 were asked for"),
    start("the drafter fails", "TF_DOUBLE_DRAFTER_FAILS=1", "start 2: FALLBACK: drafter mtp"),
    Drill(
        name="memory runs out while loading",
        prepare=guarded("load_guard_gib"),
        inject=starting("TF_DOUBLE_LEAK=400:1600\\nTF_DOUBLE_LOAD_SECONDS=6", WORKER),
        start=True,
        limit=20.0,
        said="memory guard: MemAvailable is .* while loading",
        heal=no_leak,
    ),
    Drill(
        name="memory runs out while serving",
        prepare=guarded("steady_guard_gib"),
        inject=live("leak=400:1600", WORKER),
        limit=10.0,
        said="memory guard: MemAvailable is .* while serving",
        heal=guarded("steady_guard_gib", 0.25),
    ),
    start("crash 2 s after every start", "TF_DOUBLE_CRASH=2:1", "rank 0 exited with code 1"),
    start("API port taken during the load", "TF_DOUBLE_PORT_TAKEN=1", "[Aa]ddress already in use"),
    Drill(
        name="false alarm: prefill of 15 minutes, scaled",
        inject=live("slow_prefill=6", request=True),
        heal=live("clear"),
    ),
    Drill(
        name="false alarm: full pool, requests wait",
        inject=live("full_pool", request=True),
        heal=live("clear"),
    ),
)
