"""The world a supervisor lives in: clocks, files, other programs. A test gives it another one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from glm53_service.notify import Notifier
from glm53_service.run import Runner, run

STATE_DIRECTORY = Path("/var/lib/glm53")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`clock` is monotonic seconds, `wall` Unix seconds, `state` the folder that survives, `root` the file
    root.
    """

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    runner: Runner = run
    notifier: Notifier = field(default_factory=Notifier)
    root: Path = Path("/")
    state: Path = field(default_factory=lambda: Path(os.environ.get("STATE_DIRECTORY", str(STATE_DIRECTORY))))
