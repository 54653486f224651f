"""TensorFold's settings, with the recipe's defaults, and what the engine or a Spark cannot bear."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from glm53_service.drafter import DrafterKind
from glm53_service.settings.arguments import argument_problems, environment_problems
from glm53_service.settings.common import Count, Port

NATIVE_WINDOW = 1_048_576
"""The checkpoint's max_position_embeddings; the engine refuses more."""

RESERVE_GIB = 14.5
RESERVE_PER_REQUEST_GIB = 0.95
RESERVE_PER_ROW_GIB = 0.04
"""The recipe's reserve; its growth past 4 requests and past 32 rows of the verify window (measured there)."""

PEAK_GIB = 10.0
"""The server takes so much more than its own estimate at its peak, a prompt of a million tokens."""

MANY_REQUESTS = 4
ROWS, MANY_ROWS = 32, 64


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may bring: counts, and tokens each or in all. The ranges are the engine's."""

    max_images: Annotated[int, Meta(ge=1, le=256)] = 50
    max_videos: Annotated[int, Meta(ge=1, le=16)] = 4
    image_tokens: Annotated[int, Meta(ge=16, le=8000)] = 2048
    request_image_tokens: Annotated[int, Meta(ge=16, le=262_144)] = 16_384
    video_tokens: Annotated[int, Meta(ge=64, le=240_000)] = 16_384
    request_video_tokens: Annotated[int, Meta(ge=64, le=1_048_576)] = 32_768
    video_frames: Annotated[int, Meta(ge=2, le=2048)] = 128


class Tensorfold(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments and switches of `tensorfold serve`; `extra_args` come last and win.

    `parallel` auto follows the drafter: 4 with DFlash2, else 1. `context` is prompt plus reply in tokens:
    auto is what the recipe was measured with, 0 the largest that fits. `memory_reserve_gib` None grows with
    `parallel`.
    """

    parallel: Literal["auto"] | Annotated[int, Meta(ge=1, le=8)] = "auto"
    context: Literal["auto"] | Annotated[int, Meta(ge=0, le=NATIVE_WINDOW)] = "auto"
    max_tokens: Count = 32_768
    kv: Literal["fp8", "bf16"] = "fp8"
    dense: Literal["q4", "fp8", "bf16"] = "q4"
    vision: bool = True
    vision_urls: bool = False
    media: Media = Media()
    thinking: bool = True
    shared_prefix: bool = True
    split: bool = True
    memory_reserve_gib: Annotated[float, Meta(ge=2)] | None = None
    pool_gib: Annotated[float, Meta(ge=0)] = 12.5
    comm: Literal["roce", "nccl"] = "roce"
    rendezvous_port: Port = 29551
    shm_gib: Annotated[int, Meta(ge=1, le=64)] = 16
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


def window(t: Tensorfold, kind: DrafterKind) -> int:
    """Return the window to ask the engine for, in tokens; 0 lets the engine find the largest."""
    return largest_window(t, kind) if t.context == "auto" else t.context


def largest_window(t: Tensorfold, kind: DrafterKind) -> int:
    """Return the largest window that the recipe was measured with at this precision of cache and weights."""
    if t.kv == "fp8":
        return NATIVE_WINDOW
    if kind is not DrafterKind.DFLASH2:
        return 524_288
    return 163_840 if t.vision and t.dense != "q4" else 196_608


def rows(t: Tensorfold, parallel: int) -> int:
    """Return the rows of the verify window that all requests share in one round."""
    given = t.extra_env.get("TF_GLM_MULTI_WINDOW", "")
    if given.isdecimal():
        return int(given)
    return MANY_ROWS if parallel > MANY_REQUESTS else ROWS


def reserve_rule(t: Tensorfold, parallel: int) -> float:
    """Return the reserve in GiB that keeps as much free at `parallel` requests as the recipe keeps at 4."""
    growth = RESERVE_PER_REQUEST_GIB * max(0, parallel - MANY_REQUESTS)
    growth += RESERVE_PER_ROW_GIB * max(0, rows(t, parallel) - ROWS)
    return round(RESERVE_GIB + growth, 1)


def reserve(t: Tensorfold, parallel: int) -> float:
    """Return the reserve in GiB: the one that is set, else the rule."""
    return reserve_rule(t, parallel) if t.memory_reserve_gib is None else t.memory_reserve_gib


def _smallest_reserve(parallel: int) -> float:
    """Return what a Spark has been seen to need: the peak up to 4 requests, the growth past them as well."""
    if parallel <= MANY_REQUESTS:
        return PEAK_GIB
    return round(RESERVE_GIB + RESERVE_PER_REQUEST_GIB * (parallel - MANY_REQUESTS), 1)


SETS = "which the supervisor sets for each rank itself; take it out"
NO_MOUNT = "a disk tier, which needs a mount that this release does not make; take it out"

OWNED_ARGUMENTS = {
    **dict.fromkeys(("--tp", "--rank", "--master", "--master-port", "--host", "--port", "--name"), SETS),
    "--context": "which has a setting of its own; use tensorfold.context",
    "--parallel": "which has a setting of its own; use tensorfold.parallel",
    "--drafter": "which the drafter sets; use drafter.request and drafter.path",
    "--no-drafts": "which the drafter sets; use drafter.request: none",
    "--api-key": "a secret that `ps` and `docker inspect` show; take it out",
    "--api-key-file": "which leaves /health without what the supervisor looks at; take it out",
    "--spill-gib": NO_MOUNT,
    "--snapshot-dir": NO_MOUNT,
    "--prefill-fp8": "which the engine refuses for EXL3 checkpoints; take it out",
    "--kv-dtype": "which is another model's; use tensorfold.kv",
}

OWNED_VARIABLES = {
    "TF_GLM_KV": "which tensorfold.kv sets; use that",
    "TF_GLM_DENSE": "which tensorfold.dense sets; use that",
    "TF_GLM_COMM": "which tensorfold.comm sets; use that",
    "TF_GLM_SHARED_PREFIX": "which tensorfold.shared_prefix sets; use that",
    "TF_GLM_HC_SPLIT": "which tensorfold.split sets; use that",
    "TF_GLM_PREFILL_OVERLAP": "which tensorfold.split sets; use that",
    "TF_GLM_CACHE_GIB": "which tensorfold.pool_gib sets; use that",
    "TENSORFOLD_MEMORY_RESERVE_GIB": "which tensorfold.memory_reserve_gib sets; use that",
    "TENSORFOLD_GLM_MAX_IMAGES": "which tensorfold.media.max_images sets; use that",
    "TENSORFOLD_GLM_MAX_VIDEOS": "which tensorfold.media.max_videos sets; use that",
    "TENSORFOLD_GLM_IMAGE_TOKENS": "which tensorfold.media.image_tokens sets; use that",
    "TENSORFOLD_GLM_REQUEST_IMAGE_TOKENS": "which tensorfold.media.request_image_tokens sets; use that",
    "TENSORFOLD_GLM_VIDEO_TOKENS": "which tensorfold.media.video_tokens sets; use that",
    "TENSORFOLD_GLM_REQUEST_VIDEO_TOKENS": "which tensorfold.media.request_video_tokens sets; use that",
    "TENSORFOLD_GLM_VIDEO_FRAMES": "which tensorfold.media.video_frames sets; use that",
    "TF_ROCE_HCA": SETS,
    "TF_ROCE_GID_INDEX": SETS,
    "TF_GLM_KV_TIER": NO_MOUNT,
    "TF_GLM_KV_TIER_GIB": NO_MOUNT,
    "TF_GLM_DISPLAY_KV_MIB": "which needs /dev/dri in the container; take it out",
}

RANGES = {
    "TF_GLM_MULTI_WINDOW": (16, 64, 8),
    "TF_GLM_COPY_MAX": (1, 15, 1),
    "TF_ROCE_WAIT_S": (1, 3600, 1),
    "TF_ROCE_MAX_KB": (1, 65_536, 1),
    "TF_GLM_CACHE_ENTRIES": (1, 4096, 1),
    "TF_GLM_FILL_BUDGET_MS": (0, 60_000, 1),
}
"""Switches that the ranks read after minutes of loading: (low, high, step)."""


def tensorfold_problems(t: Tensorfold, kind: DrafterKind, parallel: int, *, device: str) -> list[str]:
    """Return what the engine would refuse, or what has run a Spark's memory out, with this drafter."""
    problems = argument_problems("tensorfold.extra_args", t.extra_args, OWNED_ARGUMENTS)
    problems += environment_problems("tensorfold.extra_env", t.extra_env, OWNED_VARIABLES)
    problems += _ranges(t)
    if kind is not DrafterKind.DFLASH2 and t.extra_env.get("TF_GLM_MTP") == "0":
        problems.append(
            f"tensorfold.extra_env: found TF_GLM_MTP='0' with drafter {kind}; the engine then has neither"
            " DFlash2 nor the MTP head, and refuses. Take it out"
        )
    if t.vision_urls and not t.vision:
        problems.append(
            "tensorfold.vision_urls: found true with tensorfold.vision false; nothing would read"
            " the pictures. Fix: vision: true, or vision_urls: false"
        )
    for one, all_of_them in (
        ("image_tokens", "request_image_tokens"),
        ("video_tokens", "request_video_tokens"),
    ):
        if getattr(t.media, one) > getattr(t.media, all_of_them):
            problems.append(
                f"tensorfold.media.{one}: found {getattr(t.media, one)}, more than {all_of_them}"
                f" ({getattr(t.media, all_of_them)}): a request could not bring a single one"
            )
    least = _smallest_reserve(parallel)
    if device == "cuda" and reserve(t, parallel) < least:
        problems.append(
            f"tensorfold.memory_reserve_gib: found {reserve(t, parallel):g}, expected at least {least:g} with"
            f" {parallel} requests at once: the server takes more than its own estimate, and memory that runs"
            " out freezes the machine. Fix: leave it out"
        )
    return problems


def _ranges(t: Tensorfold) -> list[str]:
    problems = []
    for name, (low, high, step) in RANGES.items():
        value = t.extra_env.get(name)
        if value is None:
            continue
        if not (value.isdecimal() and low <= int(value) <= high and int(value) % step == 0):
            steps = f" in steps of {step}" if step > 1 else ""
            problems.append(
                f"tensorfold.extra_env: found {name}={value!r}, expected a number {low} to {high}{steps}"
            )
    return problems


def tensorfold_warnings(t: Tensorfold, kind: DrafterKind, parallel: int, *, device: str) -> list[str]:
    """Return what is allowed and known to hurt, at the effective drafter and `parallel`."""
    found = []
    asked = window(t, kind)
    if asked == 0:
        found.append(
            "tensorfold.context: 0; the largest window that fits leaves nothing for kept conversations, so"
            " every turn reads its whole history again"
        )
    if asked > largest_window(t, kind):
        found.append(
            f"tensorfold.context: {asked}; with kv {t.kv} and drafter {kind}, {largest_window(t, kind)} was"
            " the largest that was seen to fit. The start would be refitted once to what the engine names"
        )
    if 0 < asked <= t.max_tokens:
        found.append(
            f"tensorfold.max_tokens: {t.max_tokens}, no less than the window ({asked}); a reply without a"
            " limit of its own is cut to what the prompt leaves"
        )
    if parallel > MANY_REQUESTS:
        found.append(
            f"tensorfold.parallel: {parallel}; the reserve grows to {reserve_rule(t, parallel):g} GiB and the"
            " shared pool shrinks (about 1.5 M tokens at 8, 2.1 to 2.7 M at 4)"
        )
    if device == "cuda" and reserve(t, parallel) < reserve_rule(t, parallel):
        found.append(
            f"tensorfold.memory_reserve_gib: {reserve(t, parallel):g}; the rule for {parallel} requests and"
            f" {rows(t, parallel)} rows is {reserve_rule(t, parallel):g}, and less leaves the head short at a"
            " prompt of a million tokens"
        )
    return found
