"""TensorFold's own faults, as its double shows them."""

from __future__ import annotations

from tests.faults.harness import Drill
from tests.faults.ways import guarded, healed, live, starting
from tests.lab.conftest import WORKER, Pair

STILL = "no counter of the engine has moved"


def no_leak(pair: Pair) -> None:
    """Take the leak and the drill's guard away."""
    healed(pair)
    guarded("load_guard_gib", 0.5)(pair)


def reply(name: str, fault: str, said: str) -> Drill:
    """Return a drill of a start whose answers, or whose API, are wrong."""
    inject = starting(f"TF_DOUBLE_FAULT={fault}")
    return Drill(name=name, inject=inject, start=True, limit=20.0, said=said, heal=healed)


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
    reply("replies !!!!", "bangs", "one character over and over"),
    reply("empty replies", "empty", "answered nothing"),
    reply("one word repeated", "repeated", "one word over and over"),
    reply("wrong model id", "model_id=other", "/v1/models lists other"),
    Drill(
        name="window too large: refit",
        inject=starting("TF_DOUBLE_LARGEST_WINDOW=393216"),
        start=True,
        limit=20.0,
        said="start 2: the window is 393216 tokens",
        heal=healed,
    ),
    Drill(
        name="NCCL error 2, once",
        inject=starting("TF_DOUBLE_NCCL_ERROR_2=1"),
        start=True,
        limit=20.0,
        said="start 2: once more as it was",
        heal=healed,
    ),
    Drill(
        name="NCCL error 2, until the split is off",
        inject=starting("TF_DOUBLE_NCCL_ERROR_2=9"),
        start=True,
        limit=20.0,
        said="start 3: the split of prompt chunks is off",
        heal=healed,
    ),
    Drill(
        name="peer never loads",
        inject=starting("TF_DOUBLE_NEVER_LOADS=1\\nTF_DOUBLE_LOAD_CPU=0", WORKER),
        start=True,
        limit=40.0,
        said="no rank showed a sign of life",
        heal=healed,
    ),
    Drill(
        name="fewer slots than asked for",
        inject=starting("TF_DOUBLE_SLOTS=2"),
        start=True,
        limit=20.0,
        said="serves 2 requests at once, 4 were asked for",
        heal=healed,
    ),
    Drill(
        name="the drafter fails",
        inject=starting("TF_DOUBLE_DRAFTER_FAILS=1"),
        start=True,
        limit=20.0,
        said="start 2: FALLBACK: drafter mtp",
        heal=healed,
    ),
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
    Drill(
        name="crash 2 s after every start",
        inject=starting("TF_DOUBLE_CRASH=2:1"),
        start=True,
        limit=20.0,
        said="rank 0 exited with code 1",
        heal=healed,
    ),
    Drill(
        name="API port taken during the load",
        inject=starting("TF_DOUBLE_PORT_TAKEN=1"),
        start=True,
        limit=20.0,
        said="[Aa]ddress already in use",
        heal=healed,
    ),
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
