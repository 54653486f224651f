"""What a supervisor shows of itself: one object for the gate, `glm53 status`, STATUS= and the metrics."""

from __future__ import annotations

from typing import Any

import msgspec

from glm53_service.config import Value
from glm53_service.vitals import Vitals


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the lead sees it.

    `rails` are readable lines; `command` is the container as a docker run line; `vitals` are those of a
    running rank.
    """

    rank: int
    node: str
    state: str
    connected: bool
    release: str = ""
    rails: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str = ""
    vitals: Vitals | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state now. `since` in Unix seconds; `ready` is what /ready answers,
    `answered_at` when the canary was last right (0: not in this epoch), `chosen` what a start chose."""

    role: str
    node: str
    cluster: str
    release: str
    state: str
    ready: bool
    epoch: int
    since: float
    reasons: tuple[str, ...] = ()
    progress: str = ""
    endpoint: str = ""
    model: str = ""
    answer: str = ""
    answered_at: float = 0.0
    faults: int = 0
    epochs_ended: int = 0
    last_end: str = ""
    running_requests: int | None = None
    chosen: tuple[Value, ...] = ()
    ranks: tuple[RankStatus, ...] = ()

    def line(self) -> str:
        """Return the one line that `systemctl status` shows."""
        parts = [f"{self.state}, epoch {self.epoch}" if self.epoch else self.state]
        if self.state == "serving":
            parts.append(f"{self.model} at {self.endpoint}")
        elif self.state in ("starting", "checking", "running"):
            looks = (f"rank {r.rank}: {r.vitals.line()}" for r in self.ranks if r.vitals)
            parts += filter(None, ("; ".join(filter(None, (self.progress, *looks))),))
        warned = [f"warning: rank {r.rank}: {w}" for r in self.ranks if r.vitals for w in r.vitals.warnings]
        beside = "; ".join((*self.reasons, *warned))
        return ": ".join(parts) + (f" ({beside})" if beside else "")

    def builtins(self) -> dict[str, Any]:
        """Return the status as plain data."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data
