"""What a rank and its node show while the engine is silent, and which of it is a sign of life."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from glm53_service.cgroup import Usage
from glm53_service.system import GIB

MOVED_BYTES = 16 * 1024**2
"""Read or written since the last sign. Loading reads 164 GiB; a rank that hangs writes a log line or two."""

TAKEN_BYTES = 256 * 1024**2
"""MemAvailable below its lowest so far. Only new lows count, so what other programs take and give back cannot
keep a dead start alive: there are no more than a few hundred such steps in a Spark.
"""

BUSY_CORES = 0.3
"""An idle rank that polls its sockets uses a few hundredths of a core; one that works or spins, one."""


class Sign(StrEnum):
    """What a look at a rank showed.

    MOVED: bytes were read or written, or memory was taken; nothing that hangs does that. BUSY: only CPU time
    grew, which a compiler does and a wait that spins in NCCL as well.
    """

    NONE = "none"
    BUSY = "busy"
    MOVED = "moved"


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a rank and its node; None where the kernel does not say.

    `available_gib` is the node's MemAvailable, `read_gib` what the container has read from disk since it
    started, `cpu_cores` how many cores it used since the look before.
    """

    available_gib: float
    read_gib: float | None = None
    cpu_cores: float | None = None
    warnings: tuple[str, ...] = ()

    def line(self) -> str:
        """Return it for a person: `43.2 GiB read, CPU busy (1.9 cores), 31.0 GiB available`."""
        parts = [] if self.read_gib is None else [f"{self.read_gib:.1f} GiB read"]
        if self.cpu_cores is not None:
            busy = self.cpu_cores >= BUSY_CORES
            parts.append(f"CPU busy ({self.cpu_cores:.1f} cores)" if busy else "CPU idle")
        return ", ".join([*parts, f"{self.available_gib:.1f} GiB available"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What earlier looks at one container showed, carried from look to look.

    `io` and `low` are where the last movement was counted, `cpu` and `at` those of the last look.
    """

    at: float
    cpu: float | None
    io: int
    low: int

    @classmethod
    def first(cls, at: float, usage: Usage, available: int) -> Signs:
        """Return the first look, at `at` (seconds, monotonic), with `available` bytes on the node."""
        return cls(at=at, cpu=usage.cpu_seconds, io=_moved(usage), low=available)

    def after(self, at: float, usage: Usage, available: int) -> tuple[Signs, Sign]:
        """Return what is carried on after another look, and what that look showed."""
        io, low, sign = self.io, self.low, Sign.NONE
        if (self.cores(at, usage) or 0.0) >= BUSY_CORES:
            sign = Sign.BUSY
        if _moved(usage) - io >= MOVED_BYTES:
            io, sign = _moved(usage), Sign.MOVED
        if low - available >= TAKEN_BYTES:
            low, sign = available, Sign.MOVED
        return Signs(at=at, cpu=usage.cpu_seconds, io=io, low=low), sign

    def cores(self, at: float, usage: Usage) -> float | None:
        """Return how many cores the container used since the last look."""
        if usage.cpu_seconds is None or self.cpu is None or at <= self.at:
            return None
        return max(0.0, (usage.cpu_seconds - self.cpu) / (at - self.at))


def look(signs: Signs, at: float, usage: Usage, available: int, warnings: tuple[str, ...]) -> Vitals:
    """Return the look at `at` as it is shown."""
    cores, read = signs.cores(at, usage), usage.read_bytes
    return Vitals(
        available_gib=round(available / GIB, 1),
        read_gib=None if read is None else round(read / GIB, 1),
        cpu_cores=None if cores is None else round(cores, 1),
        warnings=warnings,
    )


def _moved(usage: Usage) -> int:
    return (usage.read_bytes or 0) + (usage.written_bytes or 0)
