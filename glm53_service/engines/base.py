"""The protocol between the supervisor and an engine, and the container that a rank is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from glm53_service.artifacts.layout import layout_of
from glm53_service.config import Value
from glm53_service.drafter import Choice, Refusal
from glm53_service.engines.health import Health
from glm53_service.errors import ConfigError
from glm53_service.fabric.rails import Fabric
from glm53_service.fabric.trouble import Trouble
from glm53_service.settings import Settings, choose_drafter
from glm53_service.system import GIB, Memory

LABEL = "glm53"
"""Prefix of the labels on our containers; nothing without `glm53.cluster` is ever touched."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """How this start differs from what the settings say, after earlier ones failed in a known way.

    `window` is the one that the engine named, None the asked one; `repeats` counts starts of a passing fault;
    `changes` says each difference and its reason.
    """

    number: int = 1
    window: int | None = None
    split: bool = True
    repeats: int = 0
    changes: tuple[str, ...] = ()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node needs to make its rank of one epoch; the head sends it, nobody else decides.

    `rails` has each rank's addresses of the rails that were agreed on, `dropped` why others are not among
    them.
    """

    epoch: int
    settings: Settings
    image_content: str
    master: str
    world: int
    drafter: Choice | None = None
    attempt: Attempt = Attempt()
    rails: tuple[tuple[str, ...], ...] = ()
    dropped: tuple[Trouble, ...] = ()

    @property
    def choice(self) -> Choice:
        """The drafter of this start; without one, what the settings alone lead to."""
        planned = self.drafter or choose_drafter(self.settings)
        if isinstance(planned, Refusal):
            raise ConfigError("settings", planned.reasons)
        return planned


class GpuMode(StrEnum):
    """How docker gives a container the GPUs: its own request (`--gpus`), CDI, or NVIDIA's runtime.

    Which one works depends on the node's container toolkit; site.yml tries them and writes node.yaml.
    """

    GPUS = "gpus"
    CDI = "cdi"
    RUNTIME = "runtime"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `docker run` that ask in this way; `environment` belongs to them."""
        return {
            GpuMode.GPUS: ("--gpus", "all"),
            GpuMode.CDI: ("--device", CDI_DEVICES),
            GpuMode.RUNTIME: ("--runtime", "nvidia"),
        }[self]

    @property
    def environment(self) -> dict[str, str]:
        """What the container's environment has to say as well; NVIDIA's runtime reads it there."""
        return {"NVIDIA_VISIBLE_DEVICES": "all"} if self is GpuMode.RUNTIME else {}


CDI_DEVICES = "nvidia.com/gpu=all"
"""Every GPU, by the name that `nvidia-ctk cdi generate` gives them all together."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: its rank, its node's fabric and management address, the service account, its
    cache folder.
    """

    rank: int
    management: str
    fabric: Fabric
    uid: int
    gid: int
    cache: str
    gpu_mode: GpuMode = GpuMode.GPUS


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One bind mount."""

    source: str
    target: str
    read_only: bool


def snapshot_mounts(paths: Iterable[str]) -> tuple[Mount, ...]:
    """Return what a container must see of these snapshots, at the same paths, read-only.

    A snapshot of a hub cache is links into the cache: the whole cache is mounted, or they lead nowhere.
    """
    roots = dict.fromkeys(str(layout_of(path).root) for path in paths)
    return tuple(Mount(source=root, target=root, read_only=True) for root in roots)


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's container, engine-neutral.

    `image` is a local content id: nothing is ever pulled at a start. `entrypoint` None is the image's own.
    Without `init` a rank is process 1, whose unhandled SIGTERM the kernel drops.
    """

    name: str
    image: str
    command: tuple[str, ...]
    environment: dict[str, str]
    mounts: tuple[Mount, ...]
    user: str
    shm_bytes: int
    stop_seconds: int
    labels: dict[str, str]
    gpus: GpuMode | None
    rdma: bool
    entrypoint: tuple[str, ...] | None = None
    init: bool = False
    stack_bytes: int | None = None
    network: str = "host"

    def api(self) -> dict[str, Any]:
        """Return the body of Docker Engine's `POST /containers/create`."""
        host: dict[str, Any] = {
            "NetworkMode": self.network,
            "IpcMode": "private",
            "ShmSize": self.shm_bytes,
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "journald", "Config": {"tag": self.name}},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Binds": [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts],
            "Init": self.init,
        }
        limits = [("memlock", -1)] if self.rdma else []
        limits += [("stack", self.stack_bytes)] if self.stack_bytes else []
        if limits:
            host["Ulimits"] = [{"Name": name, "Soft": value, "Hard": value} for name, value in limits]
        match self.gpus:
            case GpuMode.GPUS:
                host["DeviceRequests"] = [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
            case GpuMode.CDI:
                host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": [CDI_DEVICES]}]
            case GpuMode.RUNTIME:
                host["Runtime"] = "nvidia"
        if self.rdma:  # RDMA registers (pins) memory: without these the first queue pair fails
            host["CapAdd"] = ["IPC_LOCK"]
            host["Devices"] = [
                {
                    "PathOnHost": "/dev/infiniband",
                    "PathInContainer": "/dev/infiniband",
                    "CgroupPermissions": "rwm",
                }
            ]
        body = {} if self.entrypoint is None else {"Entrypoint": list(self.entrypoint)}
        return body | {
            "Image": self.image,
            "Cmd": list(self.command),
            "Env": [f"{key}={value}" for key, value in sorted(self._environment().items())],
            "User": self.user,
            "Labels": self.labels,
            "StopTimeout": self.stop_seconds,
            # An image's own check asks for a port: a rank without one would be "unhealthy" for ever, and a
            # program that restarts what is unhealthy would restart one rank alone.
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }

    def _environment(self) -> dict[str, str]:
        return {**self.environment, **(self.gpus.environment if self.gpus else {})}

    def shell(self) -> str:
        """Return the same container as a `docker run` line that can be pasted."""
        host = self.api()["HostConfig"]
        argv = [
            "docker",
            "run",
            "--name",
            self.name,
            "--pull=never",
            "--no-healthcheck",
            "--network",
            self.network,
            "--ipc",
            "private",
            "--shm-size",
            str(self.shm_bytes),
            "--user",
            self.user,
            "--cap-drop",
            "ALL",
            "--security-opt",
            "no-new-privileges",
            "--log-driver",
            "journald",
            "--log-opt",
            f"tag={self.name}",
            "--stop-timeout",
            str(self.stop_seconds),
        ]
        argv += self.gpus.arguments if self.gpus else ()
        if self.rdma:
            argv += ["--cap-add", "IPC_LOCK", "--device", "/dev/infiniband"]
        for limit in host.get("Ulimits", ()):
            argv += ["--ulimit", f"{limit['Name']}={limit['Soft']}"]
        argv += ["--init"] if self.init else []
        first, *rest = self.entrypoint or ("",)
        argv += ["--entrypoint", first] if first else []
        for bind in host["Binds"]:
            argv += ["-v", bind]
        for key, value in sorted(self._environment().items()):
            argv += ["-e", f"{key}={value}"]
        for key, value in sorted(self.labels.items()):
            argv += ["--label", f"{key}={value}"]
        return shlex.join([*argv, self.image, *rest, *self.command])


class LineKind(StrEnum):
    """What a line of a rank's log is worth.

    WAITING is no sign of life: the engine repeats it while it hangs.
    """

    WAITING = "waiting"
    DETAIL = "detail"
    PROGRESS = "progress"
    ERROR = "error"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One log line, judged; `text` is what the story shows of it.

    `fatal`: the ranks can serve no more, though no process ends.
    """

    kind: LineKind
    text: str
    fatal: bool = False


class Engine(Protocol):
    """An engine adapter. All methods are pure.

    `followers_first`: the other ranks' containers start before rank 0's. `drains`: rank 0 finishes its
    requests after SIGTERM; else they are cut, and who stops it waits for them first. `attempts`: starts in a
    row, the first included, before a failed start is a fault.
    """

    name: str
    followers_first: bool
    drains: bool
    attempts: int

    # A start

    def container(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return the container of the rank at `place`."""
        ...

    def argument_check(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return a container, without GPU and network, in which the image's parser reads the arguments."""
        ...

    def read_argument_check(self, code: int, output: str) -> str:
        """Return why the image refuses the arguments, from how that container ended; empty: it takes them."""
        ...

    def kernel_shape(self, launch: Launch) -> dict[str, Any]:
        """Return what this start's kernels are compiled and tuned for, other than the image."""
        ...

    def listens(self, launch: Launch, place: Place) -> tuple[str, ...]:
        """Return each `host:port` that the rank at `place` binds; a taken one fails only after the load."""
        ...

    def memory_problem(self, settings: Settings, memory: Memory) -> str:
        """Return why a rank cannot start in a node's `memory`; empty when it can, or when nobody knows."""
        ...

    def next_attempt(self, fault: str, attempt: Attempt, settings: Settings) -> Attempt | None:
        """Return what to start with after `attempt` failed; None when another start would fail alike.

        `fault` is any text that has the engine's own lines.
        """
        ...

    def drafter_fault(self, fault: str) -> bool:
        """Return whether the drafter is what failed."""
        ...

    def advice(self, fault: str) -> str:
        """Return what to do about a known fault, in words for a person; empty when it is not known."""
        ...

    def resolved(self, settings: Settings, choice: Choice, attempt: Attempt) -> tuple[Value, ...]:
        """Return the values that this start chose, by the keys of settings.yaml."""
        ...

    # While it runs

    def read_line(self, line: str) -> Line:
        """Return what `line` of a rank's log says."""
        ...

    def api_address(self, settings: Settings, management: str) -> str:
        """Return `host:port` at which rank 0 serves."""
        ...

    def read_health(self, status: int, body: str, metrics: str) -> Health:
        """Return what rank 0's /health (status 0: no answer) and /metrics say."""
        ...

    def wrong_service(self, launch: Launch, health: Health) -> tuple[str, ...]:
        """Return in what the running engine serves less than it was asked to."""
        ...

    def canary_options(self, settings: Settings) -> dict[str, Any]:
        """Return what a canary's request needs besides model and messages, to be short and repeatable."""
        ...

    def stop_seconds(self, settings: Settings, rank: int, *, serving: bool) -> int:
        """Return how long SIGTERM is given before SIGKILL; 0 is SIGKILL at once."""
        ...


def check_container(
    launch: Launch,
    place: Place,
    image_id: str,
    *,
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> ContainerSpec:
    """Return a container in which the Python text `program` reads a rank's arguments: no GPU, no network, no
    files of the node.
    """
    return ContainerSpec(
        name=f"{LABEL}-check{place.rank}",
        image=image_id,
        entrypoint=("python3", "-c", program),
        command=tuple(arguments),
        environment={"HOME": "/tmp", **environment},
        mounts=(),
        user=f"{place.uid}:{place.gid}",
        shm_bytes=GIB,
        stop_seconds=0,
        labels=labels(launch, place),
        gpus=None,
        rdma=False,
        network="none",
    )


def labels(launch: Launch, place: Place) -> dict[str, str]:
    """Return the labels by which a rank's container is found again."""
    return {
        f"{LABEL}.cluster": launch.settings.cluster,
        f"{LABEL}.epoch": str(launch.epoch),
        f"{LABEL}.rank": str(place.rank),
    }
