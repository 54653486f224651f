"""Logging for journald: one readable line an event, with its priority; the engine's own output has its own
identifier.

`journalctl -u glm53-head` is the story of the pair; `journalctl -t glm53-rank0` is all that the engine said.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""syslog priorities, which journald reads from a leading <N> (sd-daemon(3))."""


class _JournalFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        priority = PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines() or [""])


def set_up_logging(*, debug: bool) -> None:
    """Send log lines to stderr in journald's form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JournalFormatter("%(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def event(text: str, **facts: Any) -> str:
    """Return `text key=value ...`, values with spaces quoted."""
    shown = (f"{key}={_quoted(value)}" for key, value in facts.items() if value is not None and value != "")
    return " ".join([text, *shown])


class ErrorLines:
    """Lets the first `limit` error lines of a rank through to the story: an engine's traceback is a
    hundred of them.
    """

    def __init__(self, rank: int, limit: int = 3) -> None:
        self._rank = rank
        self._limit = limit
        self._seen = 0

    def tell(self, log: logging.Logger, text: str) -> None:
        """Log `text`, or once where the rest is, or nothing."""
        self._seen += 1
        if self._seen <= self._limit:
            log.warning("%s", text)
        elif self._seen == self._limit + 1:
            log.warning("more errors of rank %d: journalctl -t glm53-rank%d", self._rank, self._rank)


def _quoted(value: Any) -> str:
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text
