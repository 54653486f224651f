"""Supervisors as processes of this machine, on loopback: for what takes long, or needs many nodes.

Where there is a rank, its container is a process of the TensorFold double. What is not here: systemd, docker,
network devices, and two kernels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm53_service.docker import DockerApi
from glm53_service.engines.base import ContainerSpec
from glm53_service.errors import UnavailableError
from glm53_service.node import Node, load_node
from glm53_service.notify import Notifier
from glm53_service.settings import load_settings
from glm53_service.supervisor import service
from glm53_service.supervisor.follow import Follower
from glm53_service.supervisor.lead import Lead
from glm53_service.supervisor.world import World

TOKENS = ("ab" * 32,)
RELEASE = "here"
TICKS = os.sysconf("SC_CLK_TCK")


def node(name: str, names: Sequence[str], port: int) -> Node:
    """Return node.yaml of one of `names`; number i is 127.0.0.i, and 127.0.1.i on the fabric."""
    rows = "".join(
        f"{{node: {n}, management: 127.0.0.{i}, fabric: [127.0.1.{i}]}}," for i, n in enumerate(names, 1)
    )
    text = f"{{version: 1, cluster: unit, node: {name}, supervisor_port: {port}, nodes: [{rows}]}}"
    return load_node(text, "node.yaml")


async def links(argv: Sequence[str]) -> str:
    """Answer for `ip`, `systemctl` and `ping`."""
    if argv[0] == "systemctl":
        return "active\n"
    if argv[0] != "ip":
        return ""
    device = {"flags": ["LOWER_UP"], "mtu": 9000}
    rails = [
        {"family": "inet", "local": f"127.0.1.{number}", "prefixlen": 24, "ifname": f"f{number}"}
        for number in range(1, 5)
    ]
    return json.dumps([{**device, "ifname": rail["ifname"], "addr_info": [rail]} for rail in rails])


def gate_host(number: int) -> str:
    """Return where the gate of node `number` (from 1) listens: every follower's has the same port."""
    return f"127.0.3.{number}"


async def supervise(
    name: str, names: Sequence[str], port: int, folder: Path, settings: str, docker: DockerApi
) -> None:
    """Run one supervisor until SIGTERM; `settings` is the lead's settings.yaml."""
    number = names.index(name) + 1
    service.LOOPBACK = gate_host(number)
    world, me = World(runner=links, notifier=Notifier({}), state=folder / name), node(name, names, port)
    if number == 1:
        await Lead(me, load_settings(settings, "settings.yaml"), TOKENS, RELEASE, docker, world).run()
    else:
        await Follower(me, TOKENS, RELEASE, docker, world).run()


def ticks(pid: int) -> int:
    """Return a process's user and system time in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def pss_mib(pid: int) -> float:
    """Return a process's proportional set size."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


@dataclass
class Container:
    """A container that is a process; its lines wait for the one who follows them, and end with None."""

    spec: ContainerSpec
    process: asyncio.subprocess.Process | None = None
    state: str = "created"
    said: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    code: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ProcessDocker:
    """DockerApi whose containers are processes; `folder` has the double under its package's name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self.containers: dict[str, Container] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ping(self) -> None:
        """Answer."""

    async def image(self, reference: str) -> dict[str, Any]:
        """Return an image that every node has."""
        return {"Id": f"sha256:{reference}", "RootFS": {"Layers": ["sha256:1"]}, "Architecture": "amd64"}

    async def create(self, spec: ContainerSpec) -> str:
        """Make a container."""
        self._made += 1
        name = f"c{self._made}"
        self.containers[name] = Container(spec)
        return name

    async def start(self, container: str) -> None:
        """Start its process, with the cache where the mount says."""
        found = self.containers[container]
        python = [sys.executable, "-m", "tensorfold", *found.spec.command[1:]]
        if found.spec.entrypoint:
            python = [sys.executable, *found.spec.entrypoint[1:], *found.spec.command]
        environment = {**found.spec.environment, "PATH": os.environ["PATH"], "PYTHONPATH": str(self._folder)}
        for mount in found.spec.mounts:
            if mount.target == "/cache":
                environment["TF_DOUBLE_DIR"] = f"{mount.source}/tf-double"
                environment["TORCH_EXTENSIONS_DIR"] = f"{mount.source}/torch_extensions"
        found.process = await asyncio.create_subprocess_exec(
            *python,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=self._folder,
        )
        found.state = "running"
        task = asyncio.create_task(self._read(found, found.process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, container: Container, process: asyncio.subprocess.Process) -> None:
        stream = process.stdout
        while stream and (line := await stream.readline()):
            container.said.put_nowait(line.decode(errors="replace").rstrip())
        code = await process.wait()
        container.state = "exited"
        container.code.set_result(code if code >= 0 else 128 - code)
        container.said.put_nowait(None)

    async def wait(self, container: str) -> int:
        """Return its exit code."""
        return await asyncio.shield(self.containers[container].code)

    async def stop(self, container: str, grace_seconds: int) -> None:
        """SIGTERM, then SIGKILL after the grace."""
        self._signal(container, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.wait(container)
        await self.kill(container)

    async def kill(self, container: str) -> None:
        """SIGKILL, and wait for the end."""
        self._signal(container, signal.SIGKILL)
        if self.containers[container].process is not None:
            await self.wait(container)

    def _signal(self, container: str, number: int) -> None:
        process = self.containers[container].process
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def remove(self, container: str) -> None:
        """Remove it, running or not."""
        if container in self.containers:
            await self.kill(container)
            self.containers.pop(container, None)

    async def inspect(self, container: str) -> dict[str, Any]:
        """Return its state."""
        found = self.containers.get(container)
        if found is None:
            raise UnavailableError(f"no such container: {container}")
        return {"State": {"Status": found.state, "Pid": found.process.pid if found.process else 0}}

    async def lines(self, container: str) -> AsyncIterator[str]:
        """Yield its output."""
        while (line := await self.containers[container].said.get()) is not None:
            yield line

    async def ours(self, cluster: str) -> list[tuple[str, str]]:
        """Return those of a cluster."""
        return [
            (name, c.spec.name)
            for name, c in self.containers.items()
            if c.spec.labels["glm53.cluster"] == cluster
        ]
