"""vLLM's settings: the Spark recipe's, neutral ones on the CPU, and the table of what never works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from glm53_service.drafter import DrafterKind
from glm53_service.errors import ConfigError
from glm53_service.settings import dump, pair_problems, settings_from, warnings
from glm53_service.settings.vllm import Vllm, capture_sizes
from lab.inventory import group_variables
from tests.unit.fixtures import DRAFTER_DIR, LICENCE, settings_of, tensorfold_data, vllm_data
from tests.unit.plugin_loader import CHECKOUT

DFLASH2 = {"path": DRAFTER_DIR, "licence": LICENCE, "sha256": "ab" * 32}

PIN = "sha256:" + "0ab9" * 16


def problems(**changes: Any) -> tuple[str, ...]:
    """Return what is wrong with a Spark's vLLM after `changes`."""
    with pytest.raises(ConfigError) as caught:
        settings_of(vllm_data(**changes))
    return caught.value.problems


def test_a_spark_has_the_recipes_defaults() -> None:
    """Prevents a pair that starts without the quantisation, the cache or the parsers of its checkpoint."""
    v = settings_of(vllm_data()).vllm
    assert (v.quantization, v.kv_cache_dtype, v.tool_call_parser, v.reasoning_parser) == (
        "exl3",
        "fp8",
        "glm47",
        "glm45",
    )
    assert (v.max_model_len, v.max_num_seqs, v.max_num_batched_tokens, v.gpu_memory_utilization) == (
        900_000,
        4,
        1024,
        0.87,
    )
    assert (v.limit_mm_per_prompt, v.skip_mm_profiling, v.prefix_caching) == (
        {"image": 4, "video": 1},
        True,
        True,
    )
    assert (v.dflash_tokens, v.mtp_tokens, v.draft_tensor_parallel_size) == (7, 2, 1)


def test_the_cpu_has_neutral_defaults() -> None:
    """Prevents a lab whose small model is asked for EXL3 and for GLM's parsers."""
    v = settings_of(vllm_data(device="cpu", vllm={"kv_cache_memory": "64M"})).vllm
    assert (v.quantization, v.kv_cache_dtype, v.tool_call_parser, v.prefix_caching) == (
        None,
        "auto",
        None,
        None,
    )


def test_what_the_file_says_wins_over_the_recipe() -> None:
    """Prevents a default that comes back over an explicit value, also on a follower that gets all of them."""
    settings = settings_of(vllm_data(vllm={"tool_call_parser": None, "skip_mm_profiling": False}))
    assert (settings.vllm.tool_call_parser, settings.vllm.skip_mm_profiling) == (None, False)
    assert settings_from(dump(settings), "start message") == settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vllm": {"kv_cache_dtype": "nvfp4"}},
            "vllm.kv_cache_dtype: found 'nvfp4'; expected one of auto, fp8: a BF16 or NVFP4 cache has no",
        ),
        (
            {"vllm": {"kv_cache_dtype": "auto"}},
            "vllm.kv_cache_dtype: found 'auto', expected fp8: a BF16 or NVFP4 cache has no kernel",
        ),
        (
            {"vllm": {"extra_args": ["--kv-cache-dtype", "bfloat16"]}},
            "vllm.extra_args: --kv-cache-dtype: found 'bfloat16', expected fp8",
        ),
        (
            {"vllm": {"max_num_batched_tokens": 8192}},
            "vllm.max_num_batched_tokens: found 8192, expected less than 8192: with a long history",
        ),
        (
            {"vllm": {"extra_args": ["--max_num_batched_tokens=8K"]}},
            "vllm.max_num_batched_tokens: found 8192",
        ),
        (
            {"vllm": {"extra_args": ["--moe-backend", "marlin"]}},
            "vllm.extra_args: found the MoE backend 'marlin'",
        ),
        (
            {"vllm": {"extra_args": ['--kernel-config={"moe_backend": "marlin"}']}},
            "vllm.extra_args: found the MoE backend 'marlin'",
        ),
        (
            {"vllm": {"extra_args": ["--attention-backend", "TRITON_ATTN"]}},
            "vllm.extra_args: found the attention backend TRITON_ATTN",
        ),
        (
            {"vllm": {"extra_env": {"VLLM_ATTENTION_BACKEND": "triton_attn"}}},
            "vllm.extra_args: found the attention backend TRITON_ATTN",
        ),
        (
            {"image": f"ghcr.io/x/glm-5.3-flash-nvfp4@{PIN}"},
            f"image: found 'ghcr.io/x/glm-5.3-flash-nvfp4@{PIN}', an NVFP4 or",
        ),
        ({"image": f"x/vllm-ray@{PIN}"}, f"image: found 'x/vllm-ray@{PIN}', an NVFP4 or Ray image"),
        (
            {"vllm": {"extra_args": ["-tp", "4"]}},
            "vllm.extra_args: found -tp, which changes how the model is split",
        ),
        (
            {"vllm": {"extra_args": ["--nnodes=3"]}},
            "vllm.extra_args: found --nnodes, which changes how the model",
        ),
        (
            {"vllm": {"extra_args": ["--tensor_parallel_size", "1"]}},
            "vllm.extra_args: found --tensor-parallel-size",
        ),
        (
            {"vllm": {"extra_args": ["--pipeline-parallel-size=2"]}},
            "vllm.extra_args: found --pipeline-parallel-size",
        ),
        (
            {"vllm": {"extra_args": ['--speculative-config={"attention_backend": "X"}']}},
            "vllm.extra_args: found --speculative-config, which the drafter sets",
        ),
        (
            {"vllm": {"extra_args": ["--speculative-config.attention_backend", "X"]}},
            "vllm.extra_args: found --speculative-config.attention_backend, which the drafter sets",
        ),
        (
            {"vllm": {"extra_args": ["--config", "/x"]}},
            "vllm.extra_args: found --config, a second place for settings",
        ),
        ({"vllm": {"extra_args": ["--api-key", "K"]}}, "vllm.extra_args: found --api-key, a secret"),
        ({"vllm": {"extra_env": {"ABLIT": "1"}}}, "vllm.extra_env: found ABLIT, which vllm.ablation sets"),
        (
            {"vllm": {"extra_env": {"NCCL_IB_HCA": "x"}}},
            "vllm.extra_env: found NCCL_IB_HCA, which the supervisor",
        ),
        ({"vllm": {"extra_env": {"VLLM_API_KEY": "x"}}}, "vllm.extra_env: found VLLM_API_KEY; a secret"),
        (
            {"vllm": {"ablation": {"layers": "15-46"}}},
            "vllm.ablation.layers: found '15-46', expected first-last up to 45",
        ),
        ({"vllm": {"ablation": {"layers": "40-15"}}}, "vllm.ablation.layers: found '40-15'"),
        (
            {"vllm": {"draft_tensor_parallel_size": 3}},
            "vllm.draft_tensor_parallel_size: found 3; expected one of 1, 2",
        ),
        ({"vllm": {"max_model_len": "900k"}}, "vllm.max_model_len: found '900k'; expected int"),
        ({"vllm": {"speculative": {"method": "mtp"}}}, "vllm.speculative: replaced by drafter.request"),
        (
            {"drafter": {"request": "dflash2", "path": "/d"}},
            "drafter.licence: missing; DFlash2 is under CC BY-NC-ND",
        ),
    ],
)
def test_what_never_works_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    """Prevents the known dead ends of a Spark: minutes of loading for nothing, or a crash at 300k tokens."""
    (problem,) = problems(**changes)
    assert problem.startswith(said), problem


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 16_384},
        {"extra_args": ["--attention-backend", "TRITON_ATTN"]},
        {"extra_args": ["--moe-backend", "marlin"]},
        {"kv_cache_dtype": "auto"},
    ],
)
def test_a_sparks_limits_do_not_hit_the_cpu(changes: dict[str, Any]) -> None:
    """Prevents a lab on the CPU that is held to what a GB10 can do."""
    settings_of(vllm_data(device="cpu", image="x/nvfp4:1", vllm={"kv_cache_memory": "64M", **changes}))


@pytest.mark.parametrize(
    "image", ["ghcr.io/miaai-lab/glm:exl3", "x/y", "x/y:latest", "x/y@sha256:12", f"x/y@{PIN}0"]
)
def test_a_tag_is_no_image(image: str) -> None:
    """Prevents another image under the same tag: the tag of a published engine was pushed again in place."""
    with pytest.raises(ConfigError, match=r"image: found .*, expected it by digest"):
        settings_of(vllm_data(image=image))


@pytest.mark.parametrize("image", [f"x/array-engine@{PIN}", f"ghcr.io/miaai-lab/glm-exl3@{PIN}", PIN])
def test_an_image_is_not_refused_for_letters_in_its_name(image: str) -> None:
    """Prevents a refusal of an image whose name merely contains r, a and y."""
    assert settings_of(vllm_data(image=image)).image == image


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vllm": {"gpu_memory_utilization": 0.88}},
            "vllm.gpu_memory_utilization: 0.88; 0.88 came up once in four",
        ),
        ({"vllm": {"max_num_batched_tokens": 4096}}, "vllm.max_num_batched_tokens: 4096; above 2048"),
        (
            {"vllm": {"skip_mm_profiling": False}},
            "vllm.skip_mm_profiling: false; profiling with media of the largest",
        ),
        ({"vllm": {"enforce_eager": True}}, "vllm.enforce_eager: true; decoding without CUDA graphs"),
        (
            {"vllm": {"cudagraph_capture_sizes": [1, 2, 4, 6, 9]}},
            "vllm.cudagraph_capture_sizes: decode steps of 3, 12 tokens have no graph with drafter mtp",
        ),
        ({"tensorfold": {"parallel": 1}}, "tensorfold: set, but the engine is vllm: no effect"),
    ],
)
def test_what_is_known_to_hurt_is_warned_about(changes: dict[str, Any], said: str) -> None:
    """Prevents a setting that vLLM takes and that hurts hours later, unannounced."""
    (warning,) = warnings(settings_of(vllm_data(**changes)))
    assert warning.startswith(said), warning


def test_the_recipes_defaults_raise_no_warning() -> None:
    """Prevents warnings that everybody learns to ignore."""
    assert warnings(settings_of(vllm_data())) == ()
    assert warnings(settings_of(vllm_data(drafter=DFLASH2))) == ()


@pytest.mark.parametrize(
    ("changes", "kind", "sizes"),
    [
        ({}, DrafterKind.DFLASH2, (1, 2, 4, 8, 16, 24, 32)),
        ({}, DrafterKind.MTP, (1, 2, 3, 4, 6, 8, 9, 12)),
        ({}, DrafterKind.NONE, (1, 2, 3, 4)),
        ({"max_num_seqs": 2, "dflash_tokens": 3}, DrafterKind.DFLASH2, (1, 2, 4, 8)),
        ({"cudagraph_capture_sizes": (1, 8)}, DrafterKind.DFLASH2, (1, 8)),
    ],
)
def test_graphs_are_captured_for_each_decode_step(
    changes: dict[str, Any], kind: DrafterKind, sizes: tuple[int, ...]
) -> None:
    """Prevents decode steps that run without a CUDA graph because the drafter adds tokens to each."""
    assert capture_sizes(Vllm(**changes), kind) == sizes


@pytest.mark.parametrize(("nodes", "device", "refused"), [(2, "cuda", 0), (3, "cuda", 1), (4, "cpu", 0)])
def test_sparks_are_two(nodes: int, device: str, refused: int) -> None:
    """Prevents a node count that this checkpoint and these kernels are not split for."""
    for data in (vllm_data(device=device, vllm={"kv_cache_memory": "64M"}), tensorfold_data(device=device)):
        assert len(pair_problems(settings_of(data), nodes)) == refused


def test_the_labs_settings_are_valid_and_raise_no_warning() -> None:
    """Prevents a demo that the product's own checks refuse."""
    lab = group_variables(Path("/ssh"))
    data = vllm_data(device=lab["glm53_device"], image=lab["glm53_image"], vllm=lab["glm53_vllm"])
    assert warnings(settings_of(data)) == ()


def test_the_example_inventory_is_valid_and_raises_no_warning() -> None:
    """Prevents an example that the product's own checks refuse."""
    example = yaml.safe_load((CHECKOUT / "inventory/group_vars/all.yml").read_text())
    data = tensorfold_data(
        engine=example["glm53_engine"],
        image=example["glm53_image"].replace("sha256:CHANGE-ME", PIN),
        supervision=example["glm53_supervision"],
    )
    assert warnings(settings_of(data)) == ()
    assert settings_of(data).engine == "tensorfold"
