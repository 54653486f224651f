"""vLLM on Sparks: drafts, graphs, ablation, the image's self-check, memory, health."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt, ContainerSpec
from glm53_service.engines.health import Health
from glm53_service.system import GIB, Memory
from tests.unit.fixtures import DRAFTER_DIR, LICENCE, launch_of, place, settings_of, value, vllm_data

DFLASH2 = {"path": DRAFTER_DIR, "licence": LICENCE}
PLAIN = settings_of(vllm_data())
ENGINE = engine_for(PLAIN)


def spec(rank: int, attempt: Attempt | None = None, **changes: Any) -> ContainerSpec:
    """Return the container of `rank`."""
    launch = launch_of(settings_of(vllm_data(**changes)), attempt=attempt or Attempt())
    return ENGINE.container(launch, place(rank), "sha256:local")


def test_dflash2_is_built_as_data() -> None:
    """Prevents a drafter with the target's FP8 cache, or with an attention backend of its own."""
    made = spec(1, drafter=DFLASH2, vllm={"dflash_tokens": 5})
    assert json.loads(value(made.command, "--speculative-config")) == {
        "method": "dflash",
        "model": DRAFTER_DIR,
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
        "kv_cache_dtype": "auto",
    }
    assert (DRAFTER_DIR, DRAFTER_DIR, True) in [(m.source, m.target, m.read_only) for m in made.mounts]


def test_mtp_and_none() -> None:
    """Prevents drafts where none were asked for, and DFlash2's number of tokens with the MTP head."""
    made = spec(0, vllm={"mtp_tokens": 3})
    assert json.loads(value(made.command, "--speculative-config")) == {
        "method": "mtp",
        "num_speculative_tokens": 3,
    }
    assert "--speculative-config" not in spec(0, drafter={"request": "none"}).command


def test_graph_sizes_follow_the_drafter_and_eager_has_none() -> None:
    """Prevents decode steps without a graph, and graphs where the user asked for none."""
    command = spec(0, drafter=DFLASH2).command
    start = command.index("--cudagraph-capture-sizes") + 1
    assert command[start : start + 8] == (
        "1",
        "2",
        "4",
        "8",
        "16",
        "24",
        "32",
        "--disable-access-log-for-endpoints",
    )
    assert "--cudagraph-capture-sizes" not in spec(0, vllm={"enforce_eager": True}).command


def test_the_recipes_flags_reach_vllm() -> None:
    """Prevents a default that is stated, shown, and never passed on."""
    made = spec(1)
    flags = {
        "--quantization": "exl3",
        "--kv-cache-dtype": "fp8",
        "--max-num-batched-tokens": "1024",
        "--tool-call-parser": "glm47",
        "--reasoning-parser": "glm45",
        "--limit-mm-per-prompt": '{"image": 4, "video": 1}',
        "--gpu-memory-utilization": "0.87",
    }
    assert {flag: value(made.command, flag) for flag in flags} == flags
    assert {"--skip-mm-profiling", "--enable-prefix-caching", "--enable-auto-tool-choice"} <= set(
        made.command
    )
    assert made.environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "1800"
    off = spec(1, vllm={"prefix_caching": False})
    assert "--no-enable-prefix-caching" in off.command


def test_the_cpus_command_line_has_nothing_of_the_spark() -> None:
    """Prevents a lab whose engine is asked for what only a Spark has."""
    made = spec(0, device="cpu", vllm={"kv_cache_memory": "64M"})
    flags = {argument for argument in made.command if argument.startswith("--")}
    assert not flags & {
        "--quantization",
        "--speculative-config",
        "--cudagraph-capture-sizes",
        "--gpu-memory-utilization",
        "--limit-mm-per-prompt",
        "--enable-prefix-caching",
    }


def test_a_refit_is_the_last_word() -> None:
    """Prevents a refit that loses against the user's own flag and fails again."""
    changes = {"vllm": {"extra_args": ["--max-model-len", "900000"]}}
    assert spec(1, Attempt(number=2, window=4096), **changes).command[-2:] == ("--max-model-len", "4096")


def test_ablation_is_passed_through_only_when_asked_for() -> None:
    """Prevents edited weights that nobody asked for, and a switch that the image never sees."""
    assert not [name for name in spec(0).environment if name.startswith("ABLIT")]
    made = spec(1, vllm={"ablation": {"direction": "dealign", "alpha": 1.5, "include_mtp": False}})
    assert {name: text for name, text in made.environment.items() if name.startswith("ABLIT")} == {
        "ABLIT": "1",
        "ABLIT_DIRECTION": "dealign",
        "ABLIT_LAYERS": "15-45",
        "ABLIT_ALPHA": "1.5",
        "ABLIT_INCLUDE_MTP": "0",
    }
    bare = spec(1, vllm={"ablation": {}}).environment
    assert "ABLIT_DIRECTION" not in bare
    assert bare["ABLIT"] == "1"


def test_the_image_checks_itself_before_anything_is_stopped() -> None:
    """Prevents an image without the quantisation from being found out after the old pair was stopped."""
    launch = launch_of(PLAIN)
    made = ENGINE.argument_check(launch, place(1), "sha256:local")
    body = made.api()
    assert body["Entrypoint"][:2] == ["python3", "-c"]
    compile(body["Entrypoint"][2], "check", "exec")
    assert "QUANTIZATION_METHODS" in body["Entrypoint"][2]
    assert tuple(body["Cmd"]) == ENGINE.container(launch, place(1), "x").command
    assert (body["HostConfig"]["NetworkMode"], "DeviceRequests" in body["HostConfig"]) == ("none", False)


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (0, "INFO loaded plugins", ""),
        (
            2,
            "usage: vllm ...\nvllm: error: unrecognized arguments: --no-such-flag",
            "the image refuses the arguments: vllm: error: unrecognized arguments: --no-such-flag",
        ),
        (
            1,
            "vllm: error: Unknown quantization method: exl3",
            "the image refuses the arguments: vllm: error: Unknown quantization method: exl3",
        ),
        (
            1,
            "ModuleNotFoundError: No module named 'vllm'",
            "the image's parser cannot be used, it failed (exit 1); it said: ModuleNotFoundError:"
            " No module named 'vllm'. Is it a vLLM image?",
        ),
    ],
)
def test_what_the_self_check_says(code: int, output: str, said: str) -> None:
    """Prevents a check that passes because it could not be made."""
    assert ENGINE.read_argument_check(code, output) == said


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (
            102.0,
            "102.0 GiB are free, vllm.gpu_memory_utilization 0.87 of 121.7 GiB needs 105.9; what is free now"
            " allows 0.83",
        ),
        (110.0, ""),
    ],
)
def test_the_share_of_memory_is_held_against_what_is_free(free: float, said: str) -> None:
    """Prevents the shipped 0.87 on a node that has 102 of 121.69 GiB free: it cannot start there."""
    memory = Memory(free=int(free * GIB), available=int(115 * GIB), total=int(121.69 * GIB))
    assert ENGINE.memory_problem(PLAIN, memory) == said
    cpu = settings_of(vllm_data(device="cpu", vllm={"kv_cache_memory": "64M"}))
    assert ENGINE.memory_problem(cpu, memory) == ""


METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 184467.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 900.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 55.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def test_health_is_read_from_the_metrics() -> None:
    """Prevents a long prefill from looking frozen: it moves the share of the cache that is used."""
    health = ENGINE.read_health(200, "", METRICS)
    assert health == Health(up=True, running=3, waiting=1, tokens=184_467, pulse="184467.0 900.0 55.0 0.25")
    moved = ENGINE.read_health(200, "", METRICS.replace("} 0.25", "} 0.26"))
    assert moved.pulse != health.pulse
    assert ENGINE.read_health(503, "", METRICS) == Health(up=False)
    assert ENGINE.read_health(200, "", "").running is None


@pytest.mark.parametrize(
    ("rank", "serving", "seconds"), [(0, True, 7), (0, False, 0), (1, True, 0), (1, False, 0)]
)
def test_only_a_serving_rank_0_is_given_time(rank: int, serving: bool, seconds: int) -> None:
    """Prevents a stop that waits for a rank which never ends by itself."""
    assert ENGINE.stop_seconds(PLAIN, rank, serving=serving) == seconds


def test_a_canary_does_not_think_on_a_spark() -> None:
    """Prevents a canary whose budget goes into thinking, and an unknown switch for the CPU's small models."""
    assert ENGINE.canary_options(PLAIN) == {"chat_template_kwargs": {"enable_thinking": False}}
    cpu = settings_of(vllm_data(device="cpu", vllm={"kv_cache_memory": "64M"}))
    assert ENGINE.canary_options(cpu) == {}


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (
            "ValueError: Free memory on device cuda:0 (62/121 GiB) on startup is less than desired GPU memory"
            " utilization (0.87, 105 GiB)",
            "memory is not free yet",
        ),
        ("ValueError: Unknown quantization method: exl3. Must be one of", "not stock vLLM"),
        ("buffer_size (1268776960 B) exceeds device memory budget (793399296 B)", "drop the page cache"),
        ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)", "GID table"),
        ("nothing of note", ""),
    ],
)
def test_a_known_fault_comes_with_what_to_do(fault: str, part: str) -> None:
    """Prevents an engine's traceback as the only help there is."""
    said = ENGINE.advice(fault)
    assert part in said
    assert bool(said) == bool(part)
