"""vLLM's settings: the Spark recipe's on CUDA, neutral ones on the CPU, and what must never be set."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from glm53_service.drafter import DrafterKind
from glm53_service.settings.arguments import argument_problems, environment_problems, flags, last
from glm53_service.settings.common import Count, Port

SIZE = r"^[1-9][0-9]*[KMG]$"
LAST_LAYER = 45
"""The checkpoint has layers 0 to 44; 45 is its MTP block."""


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """The published image's ABLIT switches, off unless this is set; None leaves a switch to the image."""

    direction: Annotated[str, Meta(pattern=r"^\S+$")] | None = None
    layers: Annotated[str, Meta(pattern=r"^\d+-\d+$")] = "15-45"
    alpha: Annotated[float, Meta(gt=0)] = 3.0
    include_mtp: bool | None = None


class Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `vllm serve`; lengths in tokens, sizes as 128M or 2G. `extra_args` come last and win.

    The drafter is chosen under `drafter`; here is how far it drafts. None of `cudagraph_capture_sizes` means
    those that fit the drafter. On CUDA, keys that are left out have the values of CUDA_DEFAULTS.
    """

    max_model_len: Count = 900_000
    max_num_seqs: Count = 4
    max_num_batched_tokens: Count = 1024
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.87
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(description="a BF16 or NVFP4 cache has no kernel for this model on a GB10"),
    ] = "auto"
    kv_cache_memory: Annotated[str, Meta(pattern=SIZE)] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[Count, ...] | None = None
    quantization: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    prefix_caching: bool | None = None
    dflash_tokens: Annotated[int, Meta(ge=1, le=15)] = 7
    mtp_tokens: Annotated[int, Meta(ge=1, le=15)] = 2
    draft_tensor_parallel_size: Literal[1, 2] = 1
    limit_mm_per_prompt: dict[str, Annotated[int, Meta(ge=0)]] | None = None
    skip_mm_profiling: bool = False
    ablation: Ablation | None = None
    rendezvous_port: Port = 29521
    distributed_timeout_seconds: Annotated[int, Meta(ge=30)] = 600
    execute_timeout_seconds: Annotated[int, Meta(ge=30)] = 300
    shm_gib: Annotated[int, Meta(ge=1, le=64)] = 10
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


CUDA_DEFAULTS: dict[str, Any] = {
    "quantization": "exl3",
    "kv_cache_dtype": "fp8",
    "tool_call_parser": "glm47",
    "reasoning_parser": "glm45",
    "prefix_caching": True,
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "skip_mm_profiling": True,
    "execute_timeout_seconds": 1800,
}
"""The recipe's values, for a Spark only: the CPU has neither the quantisation nor the model.

1,800 s, since a kernel that is compiled while serving holds a step for more than vLLM's own 300.
"""

RENAMED = {
    "speculative": "replaced by drafter.request (auto, dflash2, mtp, none), vllm.dflash_tokens and"
    " vllm.mtp_tokens; take it out",
}


def draft_tokens(v: Vllm, kind: DrafterKind) -> int:
    """Return how many tokens a step drafts."""
    return {DrafterKind.DFLASH2: v.dflash_tokens, DrafterKind.MTP: v.mtp_tokens, DrafterKind.NONE: 0}[kind]


def capture_sizes(v: Vllm, kind: DrafterKind) -> tuple[int, ...]:
    """Return the token counts that CUDA graphs are captured for: a decode step of n requests has n times one
    more than the drafted tokens, and one that is not captured runs without a graph.
    """
    if v.cudagraph_capture_sizes is not None:
        return v.cudagraph_capture_sizes
    step = 1 + draft_tokens(v, kind)
    largest = step * v.max_num_seqs
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n <= largest}
    return tuple(sorted(powers | set(step_sizes(v, kind))))


def step_sizes(v: Vllm, kind: DrafterKind) -> tuple[int, ...]:
    """Return the sizes of decode steps with 1 to `max_num_seqs` requests."""
    step = 1 + draft_tokens(v, kind)
    return tuple(step * requests for requests in range(1, v.max_num_seqs + 1))


SETS = "which the supervisor sets for each rank itself; take it out"
SPLITS = "which changes how the model is split; this recipe is two nodes with tensor parallel 2. Take it out"
DRAFTS = "which the drafter sets; use drafter.request, vllm.dflash_tokens or vllm.mtp_tokens"
SHOWS = "a secret that `ps` and `docker inspect` show; take it out"

OWNED_ARGUMENTS = {
    **dict.fromkeys(
        (
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--headless",
            "--distributed-executor-backend",
            "--host",
            "--port",
            "--uds",
            "--served-model-name",
            "--model",
        ),
        SETS,
    ),
    **dict.fromkeys(
        (
            "--tensor-parallel-size",
            "-tp",
            "--nnodes",
            "--pipeline-parallel-size",
            "-pp",
            "--data-parallel-size",
            "-dp",
        ),
        SPLITS,
    ),
    **dict.fromkeys(("--speculative-config", "-sc"), DRAFTS),
    **dict.fromkeys(("--api-key", "--hf-token"), SHOWS),
    "--config": "a second place for settings; write them here",
}
"""Flags that the supervisor sets from what it knows of the pair; a second value would split the ranks."""

OWNED_VARIABLES = {
    "VLLM_HOST_IP": SETS,
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "which vllm.execute_timeout_seconds sets; use that",
    **{
        name: "which vllm.ablation sets; use that"
        for name in ("ABLIT", "ABLIT_DIRECTION", "ABLIT_LAYERS", "ABLIT_ALPHA", "ABLIT_INCLUDE_MTP")
    },
}

BATCHED_LIMIT = 8192
KV_MEMORY_HINT = (
    "vllm.kv_cache_memory: missing; on the CPU vLLM otherwise claims a share of all memory"
    " and refuses to start. Fix: set it, for example 128M"
)


def vllm_problems(v: Vllm, *, device: str, image: str) -> list[str]:
    """Return which of these settings vLLM would refuse, or that are known to fail on a Spark."""
    problems = argument_problems("vllm.extra_args", v.extra_args, OWNED_ARGUMENTS)
    problems += environment_problems("vllm.extra_env", v.extra_env, OWNED_VARIABLES)
    if v.ablation:
        low, high = map(int, v.ablation.layers.split("-"))
        if not low <= high <= LAST_LAYER:
            problems.append(
                f"vllm.ablation.layers: found {v.ablation.layers!r}, expected first-last up to {LAST_LAYER}"
            )
    if device == "cpu":
        return problems + ([KV_MEMORY_HINT] if v.kv_cache_memory is None else [])
    return problems + _never(v, image)


def _never(v: Vllm, image: str) -> list[str]:
    """What has been tried on Sparks and fails, each with the reason."""
    problems = []
    everything = " ".join([*v.extra_args, *(f"{key}={value}" for key, value in v.extra_env.items())])
    exl3 = last(v.extra_args, ("--quantization", "-q"), v.quantization or "") == "exl3"
    cache = last(v.extra_args, ("--kv-cache-dtype",), v.kv_cache_dtype)
    if exl3 and not cache.startswith("fp8"):
        where = "vllm.kv_cache_dtype" if cache == v.kv_cache_dtype else "vllm.extra_args: --kv-cache-dtype"
        problems.append(
            f"{where}: found {cache!r}, expected fp8: a BF16 or NVFP4 cache has no kernel for this model on a"
            " GB10. Fix: take it out"
        )
    batched = _tokens(last(v.extra_args, ("--max-num-batched-tokens",), str(v.max_num_batched_tokens)))
    if batched >= BATCHED_LIMIT:
        problems.append(
            f"vllm.max_num_batched_tokens: found {batched}, expected less than {BATCHED_LIMIT}: with a long"
            " history it oversubscribes the GB10's indexer, and the engine dies. Fix: 1024"
        )
    if re.search(r"moe[-_]backend\W+marlin", everything, re.IGNORECASE):
        problems.append(
            "vllm.extra_args: found the MoE backend 'marlin', which cannot run EXL3 experts. Fix: take it out"
        )
    if re.search(r"TRITON_ATTN", everything, re.IGNORECASE):
        problems.append(
            "vllm.extra_args: found the attention backend TRITON_ATTN, which makes the drafter's block"
            " causal. Fix: take it out; unset, the drafter gets FLASH_ATTN"
        )
    if re.search(r"nvfp4|(^|[-_/:.])ray([-_/:.@]|$)", image, re.IGNORECASE):
        problems.append(
            f"image: found {image!r}, an NVFP4 or Ray image; this recipe is EXL3 with the multiprocess"
            " executor"
        )
    return problems


def vllm_warnings(v: Vllm, kind: DrafterKind) -> list[str]:
    """Return what is allowed on a Spark and known to hurt."""
    found = []
    if v.gpu_memory_utilization > 0.87:
        found.append(
            f"vllm.gpu_memory_utilization: {v.gpu_memory_utilization:g}; 0.88 came up once in four starts on"
            " one pair, and memory that runs out freezes the machine"
        )
    if 2048 < v.max_num_batched_tokens < BATCHED_LIMIT:
        found.append(
            f"vllm.max_num_batched_tokens: {v.max_num_batched_tokens}; above 2048 prefill was measured slower"
        )
    if not v.skip_mm_profiling and "--skip-mm-profiling" not in dict(flags(v.extra_args)):
        found.append(
            "vllm.skip_mm_profiling: false; profiling with media of the largest size has run the memory out"
        )
    if v.enforce_eager:
        found.append("vllm.enforce_eager: true; decoding without CUDA graphs is slower")
    missing = [size for size in step_sizes(v, kind) if size not in capture_sizes(v, kind)]
    if missing and not v.enforce_eager:
        found.append(
            "vllm.cudagraph_capture_sizes: decode steps of"
            f" {', '.join(map(str, missing))} tokens have no graph with drafter {kind}"
        )
    return found


def _tokens(text: str) -> int:
    """Return vLLM's reading of a count: 8k is 8000, 8K is 8192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    if not match:
        return 0
    return int(float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]])
