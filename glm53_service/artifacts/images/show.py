"""Shows how far a pull is: layers in place, bytes, rate, time left; for a person, a log, or a program."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from typing import TextIO

from glm53_service.artifacts.images.layers import Layers
from glm53_service.artifacts.progress import LINE_SECONDS, TTY_SECONDS, WINDOW_SECONDS, words


class Show:
    """Lines as artifacts.progress has them; with `as_json` one object a line on `out`, keys `event layers
    layers_total bytes bytes_total bytes_per_second seconds_left doing`; what is not known is null.
    """

    def __init__(
        self, clock: Callable[[], float], *, as_json: bool = False, out: TextIO | None = None
    ) -> None:
        self._clock, self._json = clock, as_json
        self._out = out or (sys.stdout if as_json else sys.stderr)
        self._tty = not as_json and self._out.isatty()
        self._shown: float | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def say(self, text: str) -> None:
        """Show one message beside the counts."""
        if self._json:
            print(json.dumps({"event": "message", "text": text}), file=self._out, flush=True)
        else:
            print(f"{self._clear()}{text}", file=self._out, flush=True)

    def layers(self, layers: Layers, size: int | None) -> None:
        """Show the counts, when the last time is long enough ago; the first line comes at once."""
        now = self._clock()
        if self._shown is not None and now - self._shown < (TTY_SECONDS if self._tty else LINE_SECONDS):
            return
        self._shown = now
        if self._samples and layers.bytes < self._samples[-1][1]:
            self._samples.clear()  # another try has begun
        self._samples.append((now, layers.bytes))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        rate = (layers.bytes - before) / (now - since) if now > since else 0.0
        left = max(size - layers.bytes, 0) if size is not None else None
        seconds = round(left / rate) if rate and left is not None else None
        data = {
            "event": "progress",
            "what": "image",
            "layers": layers.done,
            "layers_total": layers.total,
            "bytes": layers.bytes,
            "bytes_total": size,
            "bytes_per_second": round(rate),
            "seconds_left": seconds,
            "doing": layers.doing,
        }
        text = json.dumps(data) if self._json else f"{self._clear()}{words(data)}"
        print(text, end="" if self._tty else "\n", file=self._out, flush=True)

    def _clear(self) -> str:
        return "\r\033[K" if self._tty else ""
