"""What the ranks of the current epoch show of themselves, as the lead has it: lines, milestones, looks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from glm53_service.engines.base import Line, LineKind
from glm53_service.story import ErrorLines, event
from glm53_service.supervisor.messages import Progress
from glm53_service.vitals import Sign, Vitals

log = logging.getLogger(__name__)


class Signs:
    """Collects them. `progress` is the latest milestone, `vitals` the latest look at each node's rank.

    `tells`: whether milestones and errors are told now. `on_fatal` is called with the words of a rank that
    can serve no more, `on_news` when a milestone came.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        tells: Callable[[LineKind], bool],
        on_fatal: Callable[[str], None],
        on_news: Callable[[], None],
    ) -> None:
        self._clock, self._tells = clock, tells
        self._on_fatal, self._on_news = on_fatal, on_news
        self.begin()

    def begin(self) -> None:
        """Forget an earlier epoch."""
        self.progress = ""
        self.vitals: dict[str, Vitals] = {}
        self._errors = ErrorLines(0)
        self.restart()

    def restart(self) -> None:
        """Count from now: a phase begins."""
        self._moved_at = self._alive_at = self._clock()

    def quiet(self, now: float) -> float:
        """Return for how many seconds no rank has moved: no line, no bytes, no memory."""
        return now - self._moved_at

    def idle(self, now: float) -> float:
        """Return for how many seconds no rank has even used CPU time."""
        return now - self._alive_at

    def line(self, line: Line) -> None:
        """Take a line of rank 0."""
        if line.kind is LineKind.WAITING:
            return
        if line.fatal:
            self._on_fatal(f"rank 0: {line.text}")
        if line.kind is LineKind.ERROR and self._tells(LineKind.ERROR):
            self._errors.tell(log, f"rank 0: {line.text}")
        self._moved(f"rank 0: {line.text}" if line.kind is LineKind.PROGRESS else "")

    def heard(self, node: str, progress: Progress) -> None:
        """Take what a follower of the current epoch says of its rank."""
        if progress.vitals is not None:
            self.look(node, progress.vitals, progress.sign)
            return
        self._moved(f"{node}: {progress.text}" if progress.text and not progress.fatal else "")
        if progress.fatal:
            self._on_fatal(f"{node}: {progress.text}")

    def look(self, node: str, vitals: Vitals, sign: Sign) -> None:
        """Take a look at a running rank for what it shows."""
        self.vitals[node] = vitals
        if sign is Sign.MOVED:
            self._moved("")
        elif sign is Sign.BUSY:
            self._alive_at = self._clock()

    def _moved(self, text: str) -> None:
        """Note a sign of life of a rank; a milestone is told once."""
        self.restart()
        if text and text != self.progress and self._tells(LineKind.PROGRESS):
            log.info(event(text))
            self.progress = text
            self._on_news()
