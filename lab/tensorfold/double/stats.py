"""Counters of /health and /metrics."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

EDGES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Histogram:
    """A Prometheus histogram in seconds."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.buckets[bisect_left(EDGES, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """Its lines of the exposition format."""
        lines, count = [f"# TYPE {name} histogram"], 0
        for edge, bucket in zip((*map(str, EDGES), "+Inf"), self.buckets, strict=True):
            count += bucket
            lines.append(f'{name}_bucket{{le="{edge}"}} {count}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {count}"]


@dataclass
class Stats:
    """Totals since the start.

    Only `completion_tokens` moves during a reply; all other totals of requests move when one ends.
    """

    running: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)

    def finish(self, ended: "Counted") -> None:
        """A request has ended: everything but its reply's tokens counts from now on."""
        self.requests += 1
        self.prompt_tokens += ended.prompt_tokens
        self.cached_tokens += ended.cached
        self.prefill_seconds += ended.prefill_seconds
        self.decode_seconds += ended.decode_seconds
        self.rounds += ended.rounds
        self.drafted += ended.drafted
        self.accepted += ended.accepted


class Counted(Protocol):
    """What a request that has ended adds to the totals."""

    prompt_tokens: int
    cached: int
    prefill_seconds: float
    decode_seconds: float
    rounds: int
    drafted: int
    accepted: int
