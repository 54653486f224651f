"""vLLM as ranks: `vllm serve` with the multiprocess executor over `--nnodes`, rank 0 with the API, the others
headless.

What the supervisor must know of it, seen with vLLM 0.32 on CPU: rank 0's /health stays 200 while another rank
is dead; rank 0 exits 0 when its engine dies; another rank never exits when rank 0 dies. So no exit of a rank
is clean unless asked for, and ranks only ever end together.
"""

from __future__ import annotations

import json
import re

from glm53_service.engines.base import LABEL, ContainerSpec, Launch, Line, LineKind, Mount, Place
from glm53_service.fabric.environment import rank_environment
from glm53_service.settings import Settings
from glm53_service.system import GIB

CACHE = "/cache"
LOOPBACK = "127.0.0.1"

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


class VllmEngine:
    """The vLLM adapter."""

    name = "vllm"

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
                Mount(source=settings.model.path, target=settings.model.path, read_only=True),
                Mount(source=place.cache, target=CACHE, read_only=False),
            ),
            user=f"{place.uid}:{place.gid}",
            shm_bytes=settings.vllm.shm_gib * GIB,
            stop_seconds=int(settings.supervision.stop_grace_seconds),
            labels={
                f"{LABEL}.cluster": settings.cluster,
                f"{LABEL}.epoch": str(launch.epoch),
                f"{LABEL}.rank": str(place.rank),
            },
            gpus=cuda,
            rdma=cuda,
        )

    def read_line(self, line: str) -> Line:
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

    def api_address(self, settings: Settings, management: str) -> str:
        """Return `host:port` of rank 0's API."""
        host = management if settings.api.bind == "management" else LOOPBACK
        return f"{host}:{settings.api.port}"

    def running_requests(self, metrics: str) -> int | None:
        """Return vllm:num_requests_running plus waiting, summed over engines."""
        values = re.findall(
            r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([\d.e+]+)", metrics, re.MULTILINE
        )
        return int(sum(map(float, values))) if values else None

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
        argv += ["--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"]
        return argv + list(v.extra_args)

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
        argv += ["--speculative-config", json.dumps(v.speculative)] if v.speculative else []
        argv += ["--limit-mm-per-prompt", json.dumps(v.limit_mm_per_prompt)] if v.limit_mm_per_prompt else []
        argv += ["--skip-mm-profiling"] if v.skip_mm_profiling else []
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
            **settings.vllm.extra_env,
        }
