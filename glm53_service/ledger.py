"""The count of epochs and of engine faults, kept across restarts of the supervisor and of the machine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from glm53_service.files import read_json, write_durably
from glm53_service.story import event

log = logging.getLogger(__name__)


class Ledger:
    """What lead and followers remember: the last epoch's number and when the engine failed (Unix seconds)."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path = path
        self._wall = wall
        data = read_json(path)
        self.epoch = int(data.get("epoch", 0))
        self._faults: list[float] = [] if data.get("gave_up") else [float(t) for t in data.get("faults", [])]
        self.last_fault = str(data.get("last_fault", ""))

    def next_epoch(self) -> int:
        """Return the number of a new epoch, higher than any before it on this head."""
        self.epoch += 1
        self._write()
        return self.epoch

    def record_fault(self, reason: str) -> None:
        """Count one engine fault, now."""
        self._faults.append(self._wall())
        self._faults = self._faults[-50:]
        self.last_fault = reason
        self._write()

    def faults_within(self, seconds: float) -> int:
        """Return how many engine faults the last `seconds` hold. A clock set back does not hide them."""
        now = self._wall()
        return sum(1 for t in self._faults if now - t <= seconds)

    def give_up(self) -> None:
        """Note that a person has to look; the next start begins with a clean count."""
        self._write(gave_up=True)

    def _write(self, *, gave_up: bool = False) -> None:
        try:
            self._save(gave_up=gave_up)
        except OSError as error:
            # A full disk must not end a pair that serves; the count goes on in memory.
            log.error(event("the ledger could not be written", path=self._path, error=error.strerror))

    def _save(self, *, gave_up: bool) -> None:
        write_durably(
            self._path,
            json.dumps(
                {
                    "epoch": self.epoch,
                    "faults": self._faults,
                    "last_fault": self.last_fault,
                    "gave_up": gave_up,
                }
            ),
        )
