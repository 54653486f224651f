"""Shows how far a long copy is: files, bytes, rate, time left; for a person, a log, or a program."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

WINDOW_SECONDS = 20.0
"""The rate shown is that of so many last seconds."""

TTY_SECONDS = 0.5
LINE_SECONDS = 5.0


class Progress:
    """Counts from any thread; shows at most every `TTY_SECONDS` on a terminal, every `LINE_SECONDS` else.

    `as_json`: one object a line on `out`, keys `event files files_total bytes bytes_total bytes_per_second
    seconds_left`. Bytes that were there before the start are in `bytes`, not in the rate.
    """

    def __init__(
        self,
        what: str,
        files_total: int,
        bytes_total: int,
        *,
        clock: Callable[[], float],
        there: int = 0,
        files_there: int = 0,
        as_json: bool = False,
        out: TextIO | None = None,
    ) -> None:
        self._what, self._clock = what, clock
        self._files, self._files_total = files_there, files_total
        self._bytes, self._bytes_total = there, bytes_total
        self._json = as_json
        self._out = out or (sys.stdout if as_json else sys.stderr)
        self._tty = not as_json and self._out.isatty()
        self._lock = threading.Lock()
        self._began = self._shown = clock()
        self._moved = 0
        self._samples: deque[tuple[float, int]] = deque([(self._began, 0)])

    def count(self, size: int) -> None:
        """Add bytes; fewer than none when a transfer begins anew."""
        with self._lock:
            self._bytes += size
            self._moved += size
            if self._clock() - self._shown >= (TTY_SECONDS if self._tty else LINE_SECONDS):
                self._show("progress")

    def file_done(self) -> None:
        """Add a file."""
        with self._lock:
            self._files += 1

    def say(self, text: str) -> None:
        """Show one message beside the counts."""
        with self._lock:
            if self._json:
                print(json.dumps({"event": "message", "text": text}), file=self._out, flush=True)
            else:
                print(f"{self._clear()}{text}", file=self._out, flush=True)

    def end(self) -> None:
        """Show the last line, with the average rate."""
        with self._lock:
            self._samples = deque([(self._began, 0)])
            self._show("done")
            if self._tty:
                print(file=self._out)

    def _show(self, event: str) -> None:
        now = self._shown = self._clock()
        self._samples.append((now, self._moved))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = max(self._moved - before, 0) / (now - since) if now > since else 0.0
        left = max(self._bytes_total - self._bytes, 0)
        seconds = round(left / rate) if rate else None
        data = {
            "event": event,
            "what": self._what,
            "files": self._files,
            "files_total": self._files_total,
            "bytes": self._bytes,
            "bytes_total": self._bytes_total,
            "bytes_per_second": round(rate),
            "seconds_left": seconds,
        }
        text = json.dumps(data) if self._json else f"{self._clear()}{words(data)}"
        print(text, end="" if self._tty else "\n", file=self._out, flush=True)

    def _clear(self) -> str:
        return "\r\033[K" if self._tty else ""


def words(data: Mapping[str, Any]) -> str:
    """Return one event of a progress, as --json has it, for a person; it counts files, or layers."""
    unit = "layers" if "layers" in data else "files"
    of = f" of {gigabytes(data['bytes_total'])}" if data["bytes_total"] is not None else ""
    text = (
        f"{data['what']}: {data[unit]} of {data[f'{unit}_total']} {unit}, {gigabytes(data['bytes'])}{of},"
        f" {data['bytes_per_second'] / 1e6:.0f} MB/s"
    )
    if data["event"] == "done":
        return text
    seconds = data["seconds_left"]
    return text + (
        f", {duration(seconds)} left" if seconds is not None else f", {data.get('doing') or 'waiting'}"
    )


def gigabytes(size: float) -> str:
    """Return a size as a person reads it, in powers of ten as disks are sold."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """Return `2 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
