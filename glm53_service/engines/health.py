"""What a running engine says of itself, engine-neutral, and when that means that it is stuck. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from glm53_service.settings import Supervision


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of rank 0. None: this engine does not say.

    `running` requests are inside the engine, queued ones too where it counts them; `done` is how many have
    ended since it started; `slots` is how many it
    serves at once, `window` the tokens of prompt and reply. `iteration_seconds` is how long its scheduler's
    current iteration has run. `pulse` changes whenever the engine works, and by nothing that a client does.
    `problem` says that it answers, but not to us: a wrong setting, not a dead server.
    """

    up: bool
    problem: str = ""
    running: int | None = None
    waiting: int | None = None
    done: int | None = None
    slots: int | None = None
    window: int | None = None
    iteration_seconds: float | None = None
    tokens: int | None = None
    pool_tokens: int | None = None
    pool_free_tokens: int | None = None
    pulse: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness:
    """Since when nothing moved although requests ran; carried from one reading to the next."""

    pulse: str = ""
    since: float | None = None

    def after(self, health: Health, now: float) -> Stillness:
        """Return the stillness after `health`, read at `now` (seconds, any monotonic clock)."""
        if not health.running or health.pulse != self.pulse:
            return Stillness(pulse=health.pulse, since=now if health.running else None)
        return self if self.since is not None else Stillness(pulse=self.pulse, since=now)

    def seconds(self, now: float) -> float:
        """Return for how long nothing has moved."""
        return 0.0 if self.since is None else now - self.since


def stall(health: Health, still_seconds: float, times: Supervision) -> str:
    """Return why the engine is stuck; empty while it may be working.

    A long prefill is not a stall: its iterations are short, and a counter that no prefill moves is given
    longer than the longest prefill.
    """
    if health.iteration_seconds is not None and health.iteration_seconds > times.stall_seconds:
        return (
            f"rank 0's scheduler has been in one iteration for {health.iteration_seconds:.0f} s"
            f" (supervision.stall_seconds: {times.stall_seconds:g})"
        )
    if health.running and still_seconds > times.still_seconds:
        return (
            f"{health.running} requests run, and no counter of the engine has moved for {still_seconds:.0f} s"
            f" (supervision.still_seconds: {times.still_seconds:g})"
        )
    return ""


def refused(status: int) -> str:
    """Return the problem behind a status that asks for a key; empty for any other."""
    if status not in (401, 403):
        return ""
    return (
        f"rank 0 wants a key for /health (HTTP {status}), and the supervisor has none. Fix: take the key out"
        " of the engine's arguments and image"
    )


def mapping(body: str) -> dict[str, Any]:
    """Return the JSON object in `body`; empty when there is none."""
    try:
        data = json.loads(body)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def metric(text: str, name: str) -> float | None:
    """Return the sum of all samples of `name` in Prometheus text; None when there is no such sample."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([-+\d.eE]+)", text, re.MULTILINE)
    return sum(map(float, values)) if values else None


def whole(value: float | None) -> int | None:
    """Return `value` as a whole number."""
    return None if value is None else int(value)
