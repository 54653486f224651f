"""The protocol between the supervisor and an engine, and the container that a rank is."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from glm53_service.fabric.rails import Fabric
from glm53_service.settings import Settings

LABEL = "glm53"
"""Prefix of the labels on our containers; nothing without `glm53.cluster` is ever touched."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node needs to make its rank of one epoch; the head sends it, nobody else decides."""

    epoch: int
    settings: Settings
    image_content: str
    master: str
    world: int


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


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """One bind mount."""

    source: str
    target: str
    read_only: bool


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's container, engine-neutral.

    `image` is a local content id: nothing is ever pulled at a start.
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
    gpus: bool
    rdma: bool

    def api(self) -> dict[str, Any]:
        """Return the body of Docker Engine's `POST /containers/create`."""
        host: dict[str, Any] = {
            "NetworkMode": "host",
            "IpcMode": "private",
            "ShmSize": self.shm_bytes,
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "journald", "Config": {"tag": self.name}},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Binds": [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in self.mounts],
        }
        if self.gpus:
            host["DeviceRequests"] = [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
        if self.rdma:  # RDMA registers (pins) memory: without these the first queue pair fails
            host["CapAdd"] = ["IPC_LOCK"]
            host["Ulimits"] = [{"Name": "memlock", "Soft": -1, "Hard": -1}]
            host["Devices"] = [
                {
                    "PathOnHost": "/dev/infiniband",
                    "PathInContainer": "/dev/infiniband",
                    "CgroupPermissions": "rwm",
                }
            ]
        return {
            "Image": self.image,
            "Cmd": list(self.command),
            "Env": [f"{key}={value}" for key, value in sorted(self.environment.items())],
            "User": self.user,
            "Labels": self.labels,
            "StopTimeout": self.stop_seconds,
            "HostConfig": host,
        }

    def shell(self) -> str:
        """Return the same container as a `docker run` line that can be pasted."""
        host = self.api()["HostConfig"]
        argv = [
            "docker",
            "run",
            "--name",
            self.name,
            "--pull=never",
            "--network",
            "host",
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
        if self.gpus:
            argv += ["--gpus", "all"]
        if self.rdma:
            argv += ["--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1", "--device", "/dev/infiniband"]
        for bind in host["Binds"]:
            argv += ["-v", bind]
        for key, value in sorted(self.environment.items()):
            argv += ["-e", f"{key}={value}"]
        for key, value in sorted(self.labels.items()):
            argv += ["--label", f"{key}={value}"]
        return shlex.join([*argv, self.image, *self.command])


class LineKind(StrEnum):
    """What a line of a rank's log is worth.

    WAITING is no sign of life: the engine repeats it while it hangs.
    """

    WAITING = "waiting"
    DETAIL = "detail"
    PROGRESS = "progress"
    ERROR = "error"


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One log line, judged; `text` is what the story shows of it."""

    kind: LineKind
    text: str


class Engine(Protocol):
    """An engine adapter. All methods are pure."""

    name: str

    def container(self, launch: Launch, place: Place, image_id: str) -> ContainerSpec:
        """Return the container of the rank at `place`."""
        ...

    def read_line(self, line: str) -> Line:
        """Return what `line` of a rank's log says."""
        ...

    def api_address(self, settings: Settings, management: str) -> str:
        """Return `host:port` at which rank 0 serves."""
        ...

    def running_requests(self, metrics: str) -> int | None:
        """Return how many requests the engine's Prometheus text says are running; None when it does not
        say.
        """
        ...
