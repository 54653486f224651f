"""The memory estimate of a start and the largest window that fits it.

The figures make the recipe's published start come out: 88.09 GiB on rank 0 and a pool of 2,684,928 tokens
with FP8 KV, q4 dense weights, vision, a window of 1,048,576 and 12.5 GiB of cache. Nothing is measured or
allocated.
"""

from dataclasses import dataclass

from .environment import Environment

GIB = 1024**3
KV_BYTES = {"fp8": 8202, "bf16": 16404}
"""Bytes of one token of the pool."""
WEIGHTS_GIB = {"q4": 65.78, "fp8": 71.4, "bf16": 82.6}
VISION_GIB = 1.80
MTP_GIB = 1.77
POOL_STEP = 64
DENSE_WINDOW = 2051
"""The window of a start without --context: index_topk + index_kpool - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One rank's budget, as it tells it to the others."""

    fixed_gib: float
    budget_gib: float
    token_bytes: int
    native: int
    requested: int | None
    forced_largest: int | None

    @property
    def largest(self) -> int:
        """The largest window that this rank can hold."""
        room = int((self.budget_gib - self.fixed_gib) * GIB / self.token_bytes)
        fits = max(0, min(room // POOL_STEP * POOL_STEP, self.native))
        return fits if self.forced_largest is None else min(self.forced_largest, self.native)

    def estimate_gib(self, window: int) -> float:
        """Memory of the whole rank with this window."""
        return self.fixed_gib + window * self.token_bytes / GIB


def plan_memory(
    environment: Environment,
    *,
    available_gib: float,
    native: int,
    requested: int | None,
    forced_largest: int | None,
    vision: bool,
    mtp: bool,
) -> Memory:
    """The budget of one rank; `vision` and `mtp` say whether those weights are loaded on it."""
    fixed = WEIGHTS_GIB[environment["TF_GLM_DENSE"]] + environment["TF_GLM_CACHE_GIB"]
    fixed += VISION_GIB * vision + MTP_GIB * mtp
    return Memory(
        fixed_gib=fixed,
        budget_gib=available_gib - environment["TENSORFOLD_MEMORY_RESERVE_GIB"],
        token_bytes=KV_BYTES[environment["TF_GLM_KV"]],
        native=native,
        requested=requested,
        forced_largest=forced_largest,
    )


def choose_window(requested: int | None, largest: int) -> int:
    """The window to serve; raises ValueError, naming the largest that fits, when the requested one does not.

    `largest` is the smallest of all ranks' largest windows. None means the dense window, 0 the largest.
    """
    window = {None: DENSE_WINDOW, 0: largest}.get(requested, requested)
    if window is None or window > largest or window < 1:
        raise ValueError(
            f"CUDA startup memory budget cannot fit requested context {window}; estimated largest fitting"
            f" prompt-plus-reply window: {largest} tokens across the ranks. Use --context {largest} or free"
            " memory; no model weights or KV caches have been loaded."
        )
    return window


def pool_size(environment: Environment, window: int) -> int:
    """Tokens of the shared pool: the window and what the cache holds beside it."""
    beside = environment["TF_GLM_CACHE_GIB"] * GIB / KV_BYTES[environment["TF_GLM_KV"]]
    return int(window + beside) // POOL_STEP * POOL_STEP
