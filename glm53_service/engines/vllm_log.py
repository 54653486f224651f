"""What vLLM's lines mean: milestones, errors, what to change after a failed start, what to advise.

The texts are those of 0.32.
"""

from __future__ import annotations

import re

import msgspec

from glm53_service.engines.base import Attempt, Line, LineKind
from glm53_service.settings import Settings

PROGRESS = (
    (
        re.compile(r"vLLM API server version (\S+)|Initializing a V1 LLM engine \(v(\S+)\)"),
        "engine process is up",
    ),
    (re.compile(r"distributed_init_method=(\S+)"), "joining the other rank"),
    (re.compile(r"Starting to load model"), "loading the weights"),
    (
        re.compile(r"Loading (?:safetensors|weights).*?(\d+)% Completed \| (\d+/\d+)"),
        r"loading the weights: \1 % (\2)",
    ),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), r"weights loaded in \1 s"),
    (
        re.compile(r"GPU KV cache size: ([\d,]+) tokens|CPU KV cache size: ([\d,]+) tokens"),
        "KV pool is allocated",
    ),
    (re.compile(r"Capturing CUDA graphs?"), "capturing CUDA graphs"),
    (re.compile(r"Application startup complete"), "API is up"),
)
"""Milestones of a start, in order, from vLLM's own lines (read in 0.32)."""

FAULT = re.compile(r"^(?:\S+ )?(?:\(.*?\) )?(?:ERROR|CRITICAL)\b|^\w*(?:Error|Exception): ")

WAITING = re.compile(r"No available shared memory broadcast block found|Waiting for \d+ .*(?:core|worker)")
"""What vLLM says once a minute while it waits for a rank that may never come."""

ATTEMPTS = 2
WINDOW = re.compile(r"estimated maximum model length is (\d+)")
SMALLEST_WINDOW = 1024

ADVICE = (
    (
        re.compile(r"less than desired GPU memory utilization|Available memory .* is less than desired"),
        "memory is not free yet or another program holds it; or lower vllm.gpu_memory_utilization",
    ),
    (WINDOW, "lower vllm.max_model_len, or free memory on the node that has less"),
    (
        re.compile(r"Unknown quantization method"),
        "this image lacks the quantisation: for exl3 it must be the recipe's image, not stock vLLM",
    ),
    (re.compile(r"[Aa]ddress already in use"), "another program has the port: ss -ltnp"),
    (
        re.compile(r"NCCL error: unhandled system error|ibv_\w+.*(?:failed|Cannot allocate)"),
        "the fabric did not come up: compare each rank's rails in `glm53 status` with its GID table",
    ),
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|exceeds device memory budget"),
        "memory ran out: lower vllm.gpu_memory_utilization, or drop the page cache before the start",
    ),
    (re.compile(r"unrecognized arguments|invalid .*value"), "the image does not know an argument of vllm"),
)


def read_line(line: str) -> Line:
    """Return a milestone, an error, or a detail."""
    if WAITING.search(line):
        return Line(kind=LineKind.WAITING, text=line.strip()[:400])
    if FAULT.search(line):
        return Line(kind=LineKind.ERROR, text=line.strip()[:400])
    for pattern, text in PROGRESS:
        match = pattern.search(line)
        if match:
            return Line(kind=LineKind.PROGRESS, text=match.expand(text) if "\\" in text else text)
    return Line(kind=LineKind.DETAIL, text=line.strip()[:400])


def next_attempt(fault: str, attempt: Attempt, settings: Settings) -> Attempt | None:
    """Return one refit to the length that vLLM estimates, or None."""
    named = WINDOW.findall(fault)
    if not named or attempt.window is not None or attempt.number >= ATTEMPTS:
        return None
    fits = min(map(int, named))
    if not SMALLEST_WINDOW <= fits < settings.vllm.max_model_len:
        return None
    change = f"the window is {fits} tokens, the largest that vLLM estimates to fit now"
    return msgspec.structs.replace(
        attempt, number=attempt.number + 1, window=fits, changes=(*attempt.changes, change)
    )


def drafter_fault(fault: str) -> bool:
    """Return whether the draft model is what failed."""
    return bool(re.search(r"(?:Error|Exception)\b:?.*(?:DFlash|draft model)", fault, re.IGNORECASE))


def advice(fault: str) -> str:
    """Return what a person can do about `fault`; empty when it is not a known one."""
    return next((text for pattern, text in ADVICE if pattern.search(fault)), "")
