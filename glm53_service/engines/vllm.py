"""vLLM as ranks: `vllm serve` with the multiprocess executor over `--nnodes`, rank 0 with the API, the others
headless.

What the supervisor must know of it, seen with vLLM 0.32 on CPU: rank 0's /health stays 200 while another rank
is dead; rank 0 exits 0 when its engine dies; another rank never exits when rank 0 dies. So no exit of a rank
is clean unless asked for, and ranks only ever end together.
"""

from __future__ import annotations

import json
import math
from typing import Any

from glm53_service.config import Origin, Value
from glm53_service.drafter import Choice, DrafterKind
from glm53_service.engines import vllm_log
from glm53_service.engines.base import (
    LABEL,
    Attempt,
    ContainerSpec,
    Launch,
    Line,
    Mount,
    Place,
    check_container,
    labels,
    snapshot_mounts,
)
from glm53_service.engines.health import Health, metric, refused, whole
from glm53_service.exits import exit_text
from glm53_service.fabric.environment import rank_environment
from glm53_service.settings import Ablation, Settings
from glm53_service.settings.vllm import capture_sizes, draft_tokens
from glm53_service.system import GIB, Memory

CACHE = "/cache"
LOOPBACK = "127.0.0.1"

CHECK = """
import sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.plugins import load_general_plugins
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
load_general_plugins()
parser = FlexibleArgumentParser(prog="vllm")
known = {}
commands = parser.add_subparsers(dest="subparser")
for command in cmd_init():
    command.subparser_init(commands)
    known[command.name] = command
arguments = parser.parse_args()
known["serve"].validate(arguments)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
if arguments.quantization not in (None, *QUANTIZATION_METHODS):
    sys.exit(f"vllm: error: Unknown quantization method: {arguments.quantization}")
"""
"""Reads the arguments as `vllm serve` would, and looks for the quantisation in the image, which the parser
does not. Tried with vLLM 0.32; it takes the import of vLLM, 15 to 30 s.
"""


SHAPE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "dtype",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "quantization",
    "dflash_tokens",
    "mtp_tokens",
    "draft_tensor_parallel_size",
    "extra_args",
    "extra_env",
)
"""Settings that kernels may depend on; window, memory share, parsers and ports are none of them."""


class VllmEngine:
    """The vLLM adapter."""

    name = "vllm"
    followers_first = False
    drains = True
    attempts = vllm_log.ATTEMPTS

    def container(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return the container of the rank at `place`: host network, private IPC, the service's own
        account.
        """
        settings = launch.settings
        cuda = settings.device == "cuda"
        name = f"{LABEL}-rank{place.rank}"
        return ContainerSpec(
            name=name,
            image=image_id,
            command=tuple(self._arguments(launch, place)),
            environment=self._environment(settings, place),
            mounts=(
                *snapshot_mounts(self._models(launch)),
                Mount(source=place.cache, target=CACHE, read_only=False),
            ),
            user=f"{place.uid}:{place.gid}",
            shm_bytes=settings.vllm.shm_gib * GIB,
            stop_seconds=int(settings.supervision.stop_grace_seconds),
            labels=labels(launch, place),
            gpus=place.gpu_mode if cuda else None,
            rdma=cuda,
        )

    def argument_check(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return a container that has the image's own parser read the rank's arguments, on any device."""
        return check_container(
            launch,
            place,
            image_id,
            program=CHECK,
            arguments=self._arguments(launch, place),
            environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )

    def read_argument_check(self, code: int, output: str) -> str:
        """Return why vLLM refuses: its parser exits 2, the look for the quantisation 1."""
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        said = lines[-1] if lines else "nothing"
        if code == 0:
            return ""
        if code == 2 or "Unknown quantization method" in said:
            return f"the image refuses the arguments: {said}"
        how = exit_text({"ExitCode": code})
        return f"the image's parser cannot be used, it {how}; it said: {said}. Is it a vLLM image?"

    def kernel_shape(self, launch: Launch) -> dict[str, Any]:
        """Return ranks, device, precisions, batch sizes, and what nobody here knows the meaning of."""
        settings = launch.settings
        return {
            "ranks": launch.world,
            "device": settings.device,
            "drafter": launch.choice.kind,
            **{name: getattr(settings.vllm, name) for name in SHAPE},
        }

    def listens(self, launch: Launch, place: Place) -> tuple[str, ...]:
        """Return the API's and the rendezvous' address on rank 0."""
        if place.rank:
            return ()
        api = self.api_address(launch.settings, place.management)
        return (api, f"{launch.master}:{launch.settings.vllm.rendezvous_port}")

    def memory_problem(self, settings: Settings, memory: Memory) -> str:
        """Return why vLLM would refuse this node: it wants its share of all memory free at once."""
        if settings.device != "cuda" or not memory.total:
            return ""
        total, free = memory.total / GIB, min(memory.free, memory.available) / GIB
        share = settings.vllm.gpu_memory_utilization
        need = share * total
        if free >= need:
            return ""
        fits = math.floor(100 * free / total) / 100
        return (
            f"{free:.1f} GiB are free, vllm.gpu_memory_utilization {share:g} of {total:.1f} GiB needs"
            f" {need:.1f}; what is free now allows {fits:.2f}"
        )

    def next_attempt(self, fault: str, attempt: Attempt, settings: Settings) -> Attempt | None:
        """Return one refit to the length that vLLM estimates, or None."""
        return vllm_log.next_attempt(fault, attempt, settings)

    def drafter_fault(self, fault: str) -> bool:
        """Return whether the draft model is what failed."""
        return vllm_log.drafter_fault(fault)

    def advice(self, fault: str) -> str:
        """Return what a person can do about `fault`."""
        return vllm_log.advice(fault)

    def resolved(self, settings: Settings, choice: Choice, attempt: Attempt) -> tuple[Value, ...]:
        """Return drafter, window and graph sizes as this start has them."""
        v, found = settings.vllm, []
        if settings.drafter.request != choice.kind:
            found.append(Value(key="drafter.request", value=str(choice.kind), origin=Origin.DRAFTER))
        if attempt.window is not None:
            found.append(Value(key="vllm.max_model_len", value=attempt.window, origin=Origin.REFIT))
        if settings.device == "cuda" and not v.enforce_eager and v.cudagraph_capture_sizes is None:
            sizes = list(capture_sizes(v, choice.kind))
            found.append(Value(key="vllm.cudagraph_capture_sizes", value=sizes, origin=Origin.RULE))
        return tuple(found)

    # While it runs

    def read_line(self, line: str) -> Line:
        """Return a milestone, an error, or a detail."""
        return vllm_log.read_line(line)

    def api_address(self, settings: Settings, management: str) -> str:
        """Return `host:port` of rank 0's API."""
        host = management if settings.api.bind == "management" else LOOPBACK
        return f"{host}:{settings.api.port}"

    def read_health(self, status: int, body: str, metrics: str) -> Health:
        """Return what /metrics says; /health has no body, and a 503 of it is an engine that died.

        A prefill moves the share of the KV cache that is used, step by step.
        """
        if status != 200:
            return Health(up=False, problem=refused(status))
        moves = (
            "vllm:generation_tokens_total",
            "vllm:prompt_tokens_total",
            "vllm:iteration_tokens_total_count",
            "vllm:kv_cache_usage_perc",
        )
        running, waiting = (metric(metrics, f"vllm:num_requests_{state}") for state in ("running", "waiting"))
        return Health(
            up=True,
            running=None if running is None else int(running + (waiting or 0)),
            waiting=whole(waiting),
            done=whole(metric(metrics, "vllm:request_success_total")),
            tokens=whole(metric(metrics, "vllm:generation_tokens_total")),
            pulse=" ".join(str(metric(metrics, name)) for name in moves),
        )

    def wrong_service(self, launch: Launch, health: Health) -> tuple[str, ...]:
        """Return nothing: vLLM serves what it was told or does not start."""
        return ()

    def canary_options(self, settings: Settings) -> dict[str, Any]:
        """Return no thinking for GLM, which thinks by default; the CPU's small models know no such switch."""
        return {"chat_template_kwargs": {"enable_thinking": False}} if settings.device == "cuda" else {}

    def stop_seconds(self, settings: Settings, rank: int, *, serving: bool) -> int:
        """Return the grace of a serving rank 0, for its requests; the other ranks never end by themselves."""
        return int(settings.supervision.stop_grace_seconds) if serving and rank == 0 else 0

    # The command line and the environment of one rank

    def _models(self, launch: Launch) -> list[str]:
        choice = launch.choice
        return [launch.settings.model.path, *([choice.path] if choice.kind is DrafterKind.DFLASH2 else [])]

    def _arguments(self, launch: Launch, place: Place) -> list[str]:
        settings, v = launch.settings, launch.settings.vllm
        host, port = self.api_address(settings, place.management).rsplit(":", 1)
        argv = ["serve", settings.model.path, "--served-model-name", settings.model.name]
        argv += [
            "--tensor-parallel-size",
            str(launch.world),
            "--nnodes",
            str(launch.world),
            "--node-rank",
            str(place.rank),
            "--master-addr",
            launch.master,
            "--master-port",
            str(v.rendezvous_port),
            "--distributed-executor-backend",
            "mp",
            "--distributed-timeout-seconds",
            str(v.distributed_timeout_seconds),
        ]
        # --headless belongs to the other ranks only: rank 0 with it waits for a head that never comes.
        argv += (
            ["--headless"]
            if place.rank
            else ["--host", host, "--port", port, "--shutdown-timeout", str(self._drain_seconds(settings))]
        )
        argv += [
            "--max-model-len",
            str(v.max_model_len),
            "--max-num-seqs",
            str(v.max_num_seqs),
            "--max-num-batched-tokens",
            str(v.max_num_batched_tokens),
            "--kv-cache-dtype",
            v.kv_cache_dtype,
            "--dtype",
            v.dtype,
        ]
        argv += self._optional_arguments(settings)
        argv += self._draft_arguments(settings, launch.choice)
        argv += ["--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"]
        argv += v.extra_args
        # A refit is the last word, also over a user's own flag.
        return argv + (["--max-model-len", str(launch.attempt.window)] if launch.attempt.window else [])

    def _draft_arguments(self, settings: Settings, choice: Choice) -> list[str]:
        v, argv = settings.vllm, []
        if config := speculation(settings, choice):
            argv += ["--speculative-config", json.dumps(config)]
        if settings.device == "cuda" and not v.enforce_eager:
            argv += ["--cudagraph-capture-sizes", *map(str, capture_sizes(v, choice.kind))]
        return argv

    def _optional_arguments(self, settings: Settings) -> list[str]:
        v = settings.vllm
        argv: list[str] = []
        if v.kv_cache_memory:
            argv += ["--kv-cache-memory-bytes", v.kv_cache_memory]
        if settings.device == "cuda":
            argv += ["--gpu-memory-utilization", f"{v.gpu_memory_utilization:g}"]
        argv += ["--enforce-eager"] if v.enforce_eager else []
        argv += ["--quantization", v.quantization] if v.quantization else []
        if v.tool_call_parser:
            argv += ["--enable-auto-tool-choice", "--tool-call-parser", v.tool_call_parser]
        argv += ["--reasoning-parser", v.reasoning_parser] if v.reasoning_parser else []
        argv += ["--limit-mm-per-prompt", json.dumps(v.limit_mm_per_prompt)] if v.limit_mm_per_prompt else []
        argv += ["--skip-mm-profiling"] if v.skip_mm_profiling else []
        if v.prefix_caching is not None:
            argv.append("--enable-prefix-caching" if v.prefix_caching else "--no-enable-prefix-caching")
        return argv

    def _drain_seconds(self, settings: Settings) -> int:
        """vLLM's own drain must end before docker's SIGKILL, else open streams are cut without their end."""
        return max(1, int(settings.supervision.stop_grace_seconds) - 5)

    def _environment(self, settings: Settings, place: Place) -> dict[str, str]:
        return {
            "HOME": CACHE,
            "USER": LABEL,  # the account is not in the image's passwd: torch asks this variable first
            "XDG_CACHE_HOME": CACHE,
            "VLLM_CACHE_ROOT": f"{CACHE}/vllm",
            "TRITON_CACHE_DIR": f"{CACHE}/triton",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # nothing to save; the default waits 5 s
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(settings.vllm.execute_timeout_seconds),
            **rank_environment(place.fabric, rdma=settings.device == "cuda"),
            **(_ablation(settings.vllm.ablation) if settings.vllm.ablation else {}),
            **settings.vllm.extra_env,
        }


def speculation(settings: Settings, choice: Choice) -> dict[str, Any] | None:
    """Return vLLM's --speculative-config; None without drafts.

    The draft model's cache is not the target's FP8, and its attention backend stays unset: vLLM picks
    FLASH_ATTN, while TRITON_ATTN would make the draft block causal.
    """
    v = settings.vllm
    tokens = draft_tokens(v, choice.kind)
    if choice.kind is DrafterKind.DFLASH2:
        return {
            "method": "dflash",
            "model": choice.path,
            "num_speculative_tokens": tokens,
            "draft_tensor_parallel_size": v.draft_tensor_parallel_size,
            "kv_cache_dtype": "auto",
        }
    return {"method": "mtp", "num_speculative_tokens": tokens} if tokens else None


def _ablation(wish: Ablation) -> dict[str, str]:
    found = {"ABLIT": "1", "ABLIT_LAYERS": wish.layers, "ABLIT_ALPHA": f"{wish.alpha:g}"}
    if wish.direction is not None:
        found["ABLIT_DIRECTION"] = wish.direction
    if wish.include_mtp is not None:
        found["ABLIT_INCLUDE_MTP"] = str(int(wish.include_mtp))
    return found
