"""What both engines share: the model, where things answer, the canary, the supervisor's times."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1024, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A repository of the hub at one revision: a commit, since a branch changes under you."""

    repository: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    revision: Annotated[
        str, Meta(pattern=r"^[0-9a-f]{40}$", description="a commit; a branch or tag can change under you")
    ]

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision[:12]}"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot directory, the same path on every node, and the id that the API gives it.

    `source` is where `glm53 download` gets it, `fallback` where from when that is gone. Left out: what the
    path of a hub cache says, else the engine's recipe.
    """

    path: Annotated[str, Meta(pattern=r"^/\S+$")]
    name: Annotated[str, Meta(pattern=r"^\S+$")]
    source: Source | None = None
    fallback: Source | None = None


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0 serves. Without a key it stays on loopback unless `without_key` says otherwise."""

    port: Port = 8888
    bind: Literal["loopback", "management"] = "loopback"
    without_key: bool = False


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Where /live, /ready, /status and /metrics answer; `management` keeps loopback as well."""

    port: Port = 8889
    bind: Literal["loopback", "management"] = "loopback"


class CanarySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A question with a known answer: no rank set is called ready before it gave it.

    It is asked as it is, and again after `long_lines` lines of text (0: not; None: 200, or what fits in half
    the window), for a model can be right on short prompts and collapse on long ones. A pair that nobody asks
    is asked every `idle_seconds` (0: never). `timeout_seconds` is for an answer of a pair that served
    already; the questions of a start have `first_seconds`, for a first request may compile kernels: two
    minutes were seen.
    """

    prompt: Annotated[str, Meta(min_length=1)] = "What is 2+2? Answer with a number only."
    expect: Annotated[str, Meta(min_length=1)] = r"\b4\b"
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 256
    timeout_seconds: Seconds = 120.0
    first_seconds: Seconds = 600.0
    long_lines: Annotated[int, Meta(ge=0, le=20000)] | None = None
    idle_seconds: Annotated[float, Meta(ge=0)] = 600.0


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the supervisor, in seconds on each node's own monotonic clock.

    `stop_grace_seconds` leaves room below the units' TimeoutStopSec (120). The window for faults is long
    enough to hold `faults_allowed` starts that each take many minutes.
    `stall_seconds`: one scheduler iteration of a serving engine that shows them (TensorFold's own watchdog
    takes 300). `still_seconds`: requests run and no counter of the engine moves; longer than any prefill:
    a prompt of a million tokens takes a quarter of an hour and moves nothing on some paths.
    `start_busy_seconds`: how long CPU time alone counts as life of a start; longer than a kernel search
    without a word (36 minutes were reported), for a wait that spins in NCCL looks alike.

    `load_guard_gib`, `steady_guard_gib`: MemAvailable of a node below which both ranks are stopped while they
    load and while they serve; 0: never. A Spark without memory freezes instead of killing the engine.
    Published values contradict each other: 16 GiB while loading and no start below 20 (another engine,
    an open pull request), 5 and 3 (another model). The defaults must not end what is healthy.
    TensorFold keeps 14.5 GiB of reserve and peaks some 10 GiB above its estimate while it loads, so 4.5
    may be left, and it is then ready with 7 to 10.5; a prompt of a million tokens leaves 4.7 to 5.6.
    """

    heartbeat_seconds: Seconds = 1.0
    lease_seconds: Seconds = 4.0
    peer_lost_seconds: Seconds = 8.0
    start_stall_seconds: Seconds = 900.0
    start_busy_seconds: Seconds = 3600.0
    stall_seconds: Seconds = 300.0
    still_seconds: Seconds = 1800.0
    stop_grace_seconds: Annotated[float, Meta(gt=0, le=60)] = 20.0
    faults_allowed: Count = 5
    faults_window_seconds: Seconds = 7200.0
    min_free_gib: Annotated[float, Meta(ge=0)] = 0.0
    load_guard_gib: Annotated[float, Meta(ge=0)] = 4.0
    steady_guard_gib: Annotated[float, Meta(ge=0)] = 3.0
    min_free_wait_seconds: Annotated[float, Meta(ge=0)] = 180.0


LONG_LINES = 200
TOKENS_A_LINE = 20
"""More than a line of the long canary takes: about 14 tokens with the usual tokenizers."""


def long_lines(canary: CanarySettings, window: int | None) -> int:
    """Return after how many lines of text the canary is asked again; `window` in tokens, None: not known."""
    if canary.long_lines is not None:
        return canary.long_lines
    return LONG_LINES if window is None else min(LONG_LINES, window // 2 // TOKENS_A_LINE)


def canary_problems(canary: CanarySettings, window: int | None) -> list[str]:
    """Return what is wrong with the canary; `window` as in long_lines."""
    problems = []
    try:
        re.compile(canary.expect)
    except re.error as error:
        problems.append(f"canary.expect: found {canary.expect!r}, not a regular expression: {error}")
    lines = long_lines(canary, window)
    needed = lines * TOKENS_A_LINE + canary.max_tokens
    if window is not None and canary.long_lines and needed > window:
        problems.append(
            f"canary.long_lines: found {lines}, which take up to {needed} tokens with the answer; the window"
            f" has {window}. Fix: fewer lines, or 0 for none"
        )
    return problems


def supervision_problems(t: Supervision) -> list[str]:
    """Return which times contradict each other."""
    problems = []
    if t.lease_seconds < 3 * t.heartbeat_seconds:
        problems.append(
            f"supervision.lease_seconds: found {t.lease_seconds:g}, expected at least three heartbeats"
            f" ({3 * t.heartbeat_seconds:g}): one lost packet must not end a rank"
        )
    if t.peer_lost_seconds < t.lease_seconds:
        problems.append(
            f"supervision.peer_lost_seconds: found {t.peer_lost_seconds:g}, expected at least"
            f" lease_seconds ({t.lease_seconds:g})"
        )
    if t.start_busy_seconds < t.start_stall_seconds:
        problems.append(
            f"supervision.start_busy_seconds: found {t.start_busy_seconds:g}, expected at least"
            f" start_stall_seconds ({t.start_stall_seconds:g})"
        )
    return problems


LOAD_SILENCE_SECONDS = 600.0
"""TensorFold's ranks say nothing for so long while they look for each other, and weights load in silence."""

LONG_PREFILL_SECONDS = 1000.0
"""A prompt of 981,841 tokens was seen to take 967 s."""


LOAD_LEAVES_GIB = 4.5
SERVING_LEAVES_GIB = 4.7
"""What a healthy TensorFold at its defaults may leave of a Spark's memory, see Supervision."""


def _guard_warnings(t: Supervision) -> list[str]:
    found = []
    for key, value, leaves in (
        ("load_guard_gib", t.load_guard_gib, LOAD_LEAVES_GIB),
        ("steady_guard_gib", t.steady_guard_gib, SERVING_LEAVES_GIB),
    ):
        if value > leaves:
            found.append(f"supervision.{key}: {value:g}; a healthy TensorFold may leave {leaves:g} GiB")
        if not value:
            found.append(
                f"supervision.{key}: 0; a Spark whose memory runs out freezes, and nothing stops that"
            )
    return found


def supervision_warnings(t: Supervision) -> list[str]:
    """Return which times would end a healthy engine on a Spark, or leave its start unguarded."""
    found = []
    if t.start_stall_seconds < LOAD_SILENCE_SECONDS:
        found.append(
            f"supervision.start_stall_seconds: {t.start_stall_seconds:g}; an engine that loads may be silent"
            f" for {LOAD_SILENCE_SECONDS:g} s"
        )
    if t.still_seconds < LONG_PREFILL_SECONDS:
        found.append(
            f"supervision.still_seconds: {t.still_seconds:g}; a prompt of a million tokens moves no counter"
            f" for {LONG_PREFILL_SECONDS:g} s"
        )
    if t.stall_seconds < 60:
        found.append(
            f"supervision.stall_seconds: {t.stall_seconds:g}; a late peer is slow for longer without a fault"
        )
    if not t.min_free_gib:
        found.append(
            "supervision.min_free_gib: 0; nothing waits for memory that the last engine has not given back"
        )
    return found + _guard_warnings(t)
