"""How far a pull is, from docker's own lines: layers done, bytes, and whether anything moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

THERE = "Already exists"
ARRIVED = (THERE, "Verifying Checksum", "Download complete", "Extracting", "Pull complete")
"""Words of a layer whose bytes are all here; the containerd store says no more than that they are."""

BEGUN = ("Pulling fs layer", "Waiting", "Downloading", "Retrying", *ARRIVED)


@dataclass(slots=True)
class Layers:
    """The layers that docker has named so far. `bytes` are compressed ones, as they come over the network."""

    _done: dict[str, str] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _have: dict[str, int] = field(default_factory=dict)
    _last: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def take(self, line: Mapping[str, Any]) -> bool:
        """Take one line in; return whether it says anything new: a store that repeats itself is silent."""
        layer, status = str(line.get("id") or ""), str(line.get("status") or "")
        detail = line.get("progressDetail") or {}
        current, total = detail.get("current"), detail.get("total")
        news = self._last.get(layer) != (status, current)
        self._last[layer] = (status, current)
        if not status.startswith(BEGUN):
            return news
        self._done[layer] = status
        if status == "Downloading" and isinstance(current, int):
            self._have[layer] = current
            if isinstance(total, int) and total > 0:
                self._sizes[layer] = total
        elif status.startswith(ARRIVED):
            self._have[layer] = self._sizes.get(layer, self._have.get(layer, 0))
        elif status.startswith("Retrying"):
            self._have[layer] = 0
        return news

    @property
    def total(self) -> int:
        """Layers that docker has named."""
        return len(self._done)

    @property
    def done(self) -> int:
        """Layers that are all here."""
        return sum(status.startswith(ARRIVED) for status in self._done.values())

    @property
    def fresh(self) -> bool:
        """Whether every layer came over the network."""
        return THERE not in self._done.values()

    @property
    def bytes(self) -> int:
        """Bytes that have come in this pull."""
        return sum(self._have.values())

    @property
    def doing(self) -> str:
        """The last word about a layer that is not in place, for the message about a stall."""
        in_place = (THERE, "Pull complete")
        open_ = [f"{status} ({layer})" for layer, status in self._done.items() if status not in in_place]
        return open_[0] if open_ else "waiting for the registry"
