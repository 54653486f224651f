"""TensorFold as ranks: `tensorfold serve --tp 2`, rank 0 with the API, the others without any port.

What the supervisor must know of it (0.6.0 with the recipe's patches): the port opens only after the load, and
/health is 200 from then on, whatever happens; a rank that left cannot come back; an idle rank 0 does not
notice that the other died. SIGTERM ends a serving rank 0 in seconds and cuts its requests; a loading rank
and every other rank ignore it.
"""

from __future__ import annotations

from typing import Any

from glm53_service.config import Origin, Value
from glm53_service.drafter import Choice, DrafterKind
from glm53_service.engines import tensorfold_log
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
from glm53_service.engines.health import Health, mapping, metric, refused, whole
from glm53_service.exits import exit_text
from glm53_service.fabric.environment import rank_environment
from glm53_service.settings import Settings
from glm53_service.settings.tensorfold import Tensorfold, reserve, rows, window
from glm53_service.system import GIB, Memory

CACHE = "/cache"
LOOPBACK = "127.0.0.1"
STACK_BYTES = 64 * 1024**2
CHANNELS = "4"
EXIT_SECONDS = 10
WEIGHTS_GIB = 80.0
"""Each node's share of the weights; the window and the pool come on top, and the engine fits those itself."""

RECIPE = {
    "TENSORFOLD_NO_UPDATE_CHECK": "1",
    "TENSORFOLD_NUCLEUS_UNION": "1",
    "TF_GLM_CACHE_ENTRIES": "32",
    "TF_GLM_COPY_DRAFTS": "1",
    "TF_GLM_COPY_MAX": "15",
    "TF_GLM_COPY_REPLY_MATCH": "16",
    "TF_GLM_DFLASH_POLICY": "fnc7:0.3",
    "TF_GLM_EXL3_LOADS": "nc",
    "TF_GLM_FILL_BUDGET_MS": "200",
    "TF_GLM_FILL_DRAFTS": "1",
    "TF_GLM_KDA_CHUNKED": "1",
    "TF_GLM_L2PF": "1",
    "TF_GLM_MTP": "auto",
    "TF_GLM_MULTI_PREFILL": "1",
    "TF_GLM_STREAM_SMOOTH": "1",
    "TF_GLM_STREAM_SMOOTH_MS": "400",
    "TF_GLM_WIDE_GRAPHS": "16",
    "TF_ROCE_WAIT_S": "300",
}
"""The recipe's switches, the same on every rank; `extra_env` wins over them."""

SHAPE = ("kv", "dense", "comm", "extra_args", "extra_env")
"""Settings that kernels may depend on; window, media and ports are none of them."""

PARSE = (
    "import sys; from tensorfold.cli import build_parser; build_parser().parse_args(sys.argv[1:]);"
    " print('arguments are right')"
)


class TensorfoldEngine:
    """The TensorFold adapter."""

    name = "tensorfold"
    followers_first = True
    drains = False
    attempts = tensorfold_log.ATTEMPTS

    # A start

    def container(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return the container of the rank at `place`, without an init: only the supervisor ends a rank."""
        settings, cuda = launch.settings, launch.settings.device == "cuda"
        return ContainerSpec(
            name=f"{LABEL}-rank{place.rank}",
            image=image_id,
            command=("tensorfold", *self._arguments(launch, place)),
            environment=self._environment(launch, place),
            mounts=(*self._models(launch), Mount(source=place.cache, target=CACHE, read_only=False)),
            user=f"{place.uid}:{place.gid}",
            shm_bytes=settings.tensorfold.shm_gib * GIB,
            stop_seconds=self.stop_seconds(settings, place.rank, serving=True),
            labels=labels(launch, place),
            gpus=place.gpu_mode if cuda else None,
            rdma=cuda,
            stack_bytes=STACK_BYTES,
        )

    def argument_check(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return a container that only has the image's own parser read the rank's arguments."""
        return check_container(
            launch,
            place,
            image_id,
            program=PARSE,
            arguments=self._arguments(launch, place),
            environment={},
        )

    def read_argument_check(self, code: int, output: str) -> str:
        """Return why the parser refuses (it exits 2), or why the image has no such parser."""
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        said = lines[-1] if lines else "nothing"
        if code == 0:
            return ""
        if code == 2:
            return f"the image refuses the arguments: {said}"
        how = exit_text({"ExitCode": code})
        return f"the image's parser cannot be used, it {how}; it said: {said}. Is it a TensorFold image?"

    def kernel_shape(self, launch: Launch) -> dict[str, Any]:
        """Return ranks, device, precisions, the rows of a step, and what nobody here knows the meaning of."""
        choice, settings = launch.choice, launch.settings
        return {
            "ranks": launch.world,
            "device": settings.device,
            "drafter": choice.kind,
            "parallel": choice.parallel,
            **{name: getattr(settings.tensorfold, name) for name in SHAPE},
        }

    def listens(self, launch: Launch, place: Place) -> tuple[str, ...]:
        """Return the API's and the rendezvous' address on rank 0; the others bind nothing of their own."""
        if place.rank:
            return ()
        api = self.api_address(launch.settings, place.management)
        return (api, f"{launch.master}:{launch.settings.tensorfold.rendezvous_port}")

    def memory_problem(self, settings: Settings, memory: Memory) -> str:
        """Return why not even weights and reserve fit; the engine fits the window to the rest itself."""
        if settings.device != "cuda":
            return ""
        parallel = settings.tensorfold.parallel
        kept = reserve(settings.tensorfold, 1 if parallel == "auto" else parallel)
        need = WEIGHTS_GIB + kept
        free, available = memory.free / GIB, memory.available / GIB
        if min(free, available) >= need:
            return ""
        cached = f", {available - free:.1f} GiB more are page cache" if available - free > 1 else ""
        return (
            f"{free:.1f} GiB are free{cached}; the weights take {WEIGHTS_GIB:g} GiB, and {kept:g} GiB stay in"
            " reserve"
        )

    def next_attempt(self, fault: str, attempt: Attempt, settings: Settings) -> Attempt | None:
        """Return a refit, a repeat, a start without the split, or None."""
        return tensorfold_log.next_attempt(fault, attempt, settings)

    def drafter_fault(self, fault: str) -> bool:
        """Return whether the draft model is what failed."""
        return tensorfold_log.drafter_fault(fault)

    def advice(self, fault: str) -> str:
        """Return what a person can do about `fault`."""
        return tensorfold_log.advice(fault)

    def resolved(self, settings: Settings, choice: Choice, attempt: Attempt) -> tuple[Value, ...]:
        """Return drafter, requests at once, window and reserve as this start has them."""
        t, found = settings.tensorfold, []
        if settings.drafter.request != choice.kind:
            found.append(Value(key="drafter.request", value=str(choice.kind), origin=Origin.DRAFTER))
        if t.parallel != choice.parallel:
            found.append(Value(key="tensorfold.parallel", value=choice.parallel, origin=Origin.DRAFTER))
        if attempt.window is not None:
            found.append(Value(key="tensorfold.context", value=attempt.window, origin=Origin.REFIT))
        elif t.context == "auto":
            found.append(Value(key="tensorfold.context", value=window(t, choice.kind), origin=Origin.RULE))
        if t.memory_reserve_gib is None:
            kept = reserve(t, choice.parallel)
            found.append(Value(key="tensorfold.memory_reserve_gib", value=kept, origin=Origin.RULE))
        if t.split and not attempt.split:
            found.append(Value(key="tensorfold.split", value=False, origin=Origin.REFIT))
        return tuple(found)

    # While it runs

    def read_line(self, line: str) -> Line:
        """Return a milestone, an error, or a detail."""
        return tensorfold_log.read_line(line)

    def api_address(self, settings: Settings, management: str) -> str:
        """Return `host:port` of rank 0's API."""
        host = management if settings.api.bind == "management" else LOOPBACK
        return f"{host}:{settings.api.port}"

    def read_health(self, status: int, body: str, metrics: str) -> Health:
        """Return what /health says; requests that wait are in /metrics only."""
        if status != 200:
            return Health(up=False, problem=refused(status))
        said = mapping(body)
        if "busy" not in said:
            return Health(
                up=True,
                problem=f"rank 0's /health says no more than {body.strip()[:60]!r}: with keys on, or another"
                " program on the port, nobody sees whether it works. Fix: take the keys out of the image",
            )
        streams = said.get("streams") or {}
        moves = ("completion_tokens_total", "prompt_tokens_total", "rounds_total", "pool_free_tokens")
        return Health(
            up=True,
            running=whole(said.get("requests_running")),
            waiting=whole(metric(metrics, "tensorfold:requests_waiting")),
            done=whole(said.get("requests_total")),
            slots=int(streams.get("max", 1)),
            window=whole(said.get("context_length")),
            iteration_seconds=None if said.get("iteration_s") is None else float(said["iteration_s"]),
            tokens=whole(said.get("completion_tokens_total")),
            pool_tokens=whole(said.get("pool_tokens")),
            pool_free_tokens=whole(said.get("pool_free_tokens")),
            pulse=" ".join(str(said.get(name)) for name in moves),
        )

    def wrong_service(self, launch: Launch, health: Health) -> tuple[str, ...]:
        """Return whether it serves fewer requests at once, or a smaller window, than this start asked for."""
        found = []
        choice, asked = launch.choice, self._window(launch)
        if health.slots is not None and health.slots < choice.parallel:
            found.append(f"serves {health.slots} requests at once, {choice.parallel} were asked for")
        if asked and health.window is not None and health.window < asked:
            found.append(f"serves a window of {health.window} tokens, {asked} were asked for")
        return tuple(found)

    def canary_options(self, settings: Settings) -> dict[str, Any]:
        """Return no thinking: at its default effort the model can think a canary's whole budget away."""
        return {"chat_template_kwargs": {"enable_thinking": False}}

    def stop_seconds(self, settings: Settings, rank: int, *, serving: bool) -> int:
        """Return a few seconds for a serving rank 0, and none for a rank that ignores SIGTERM."""
        return EXIT_SECONDS if serving and rank == 0 else 0

    # The command line and the environment of one rank

    def _window(self, launch: Launch) -> int:
        refitted = launch.attempt.window
        return window(launch.settings.tensorfold, launch.choice.kind) if refitted is None else refitted

    def _models(self, launch: Launch) -> tuple[Mount, ...]:
        paths = [launch.settings.model.path]
        if launch.choice.kind is DrafterKind.DFLASH2:
            paths.append(launch.choice.path)
        return snapshot_mounts(paths)

    def _arguments(self, launch: Launch, place: Place) -> list[str]:
        settings, t, choice = launch.settings, launch.settings.tensorfold, launch.choice
        argv = ["serve", settings.model.path]
        argv += ["--tp", str(launch.world), "--rank", str(place.rank)]
        argv += ["--master", launch.master, "--master-port", str(t.rendezvous_port)]
        if place.rank == 0:
            host, port = self.api_address(settings, place.management).rsplit(":", 1)
            argv += ["--name", settings.model.name, "--host", host, "--port", port]
        argv += ["--drafter", choice.path if choice.kind is DrafterKind.DFLASH2 else "none"]
        argv += ["--no-drafts"] if choice.kind is DrafterKind.NONE else []
        # Without --context the engine serves 2,051 tokens.
        argv += ["--context", str(self._window(launch)), "--parallel", str(choice.parallel)]
        argv += ["--max-tokens", str(t.max_tokens)]
        argv.append("--thinking" if t.thinking else "--no-thinking")
        argv += ["--vision"] if t.vision else []
        argv += ["--vision-urls"] if t.vision_urls else []
        return argv + list(t.extra_args)

    def _environment(self, launch: Launch, place: Place) -> dict[str, str]:
        t = launch.settings.tensorfold
        return {
            "HOME": CACHE,
            "USER": LABEL,  # the account is not in the image's passwd: torch asks this variable first
            "XDG_CACHE_HOME": CACHE,
            "HF_HOME": f"{CACHE}/huggingface",  # the image's own is root's
            "TORCH_EXTENSIONS_DIR": f"{CACHE}/torch_extensions",
            "TRITON_CACHE_DIR": f"{CACHE}/triton",
            "HF_HUB_OFFLINE": "1",
            **RECIPE,
            **self._switches(t, launch),
            **self._link(place, rdma=launch.settings.device == "cuda"),
            **t.extra_env,
        }

    def _switches(self, t: Tensorfold, launch: Launch) -> dict[str, str]:
        parallel, media = launch.choice.parallel, t.media
        split = t.split and launch.attempt.split
        verify = rows(t, parallel)
        return {
            "TENSORFOLD_MEMORY_RESERVE_GIB": f"{reserve(t, parallel):g}",
            "TENSORFOLD_GLM_MAX_IMAGES": str(media.max_images),
            "TENSORFOLD_GLM_MAX_VIDEOS": str(media.max_videos),
            "TENSORFOLD_GLM_IMAGE_TOKENS": str(media.image_tokens),
            "TENSORFOLD_GLM_REQUEST_IMAGE_TOKENS": str(media.request_image_tokens),
            "TENSORFOLD_GLM_VIDEO_TOKENS": str(media.video_tokens),
            "TENSORFOLD_GLM_REQUEST_VIDEO_TOKENS": str(media.request_video_tokens),
            "TENSORFOLD_GLM_VIDEO_FRAMES": str(media.video_frames),
            "TF_GLM_KV": t.kv,
            "TF_GLM_DENSE": t.dense,
            "TF_GLM_COMM": t.comm,
            "TF_GLM_CACHE_GIB": f"{t.pool_gib:g}",
            "TF_GLM_SHARED_PREFIX": str(int(t.shared_prefix)),
            "TF_GLM_HC_SPLIT": str(int(split)),
            "TF_GLM_PREFILL_OVERLAP": "2" if split else "0",
            "TF_GLM_MULTI_WINDOW": str(verify),
            "TF_ROCE_MAX_KB": str(max(512, 16 * verify)),  # a round's gather takes 16 KiB a row
        }

    def _link(self, place: Place, *, rdma: bool) -> dict[str, str]:
        """NCCL's variables, and the RoCE transport's own: that reads a list of names, not NCCL's `=a,b`."""
        found = {
            name: value
            for name, value in rank_environment(place.fabric, rdma=rdma).items()
            if name.startswith("NCCL_")
        }
        if rdma:
            found |= {"NCCL_MIN_NCHANNELS": CHANNELS, "NCCL_MAX_NCHANNELS": CHANNELS}
            found["TF_ROCE_HCA"] = found["NCCL_IB_HCA"].removeprefix("=")
            found["TF_ROCE_GID_INDEX"] = found["NCCL_IB_GID_INDEX"]
        return found
