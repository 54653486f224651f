"""Doubles with state: a docker engine whose rank 0 serves a small HTTP API, and files of a node."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from glm53_service.engines.base import ContainerSpec
from glm53_service.errors import UnavailableError
from glm53_service.settings import Settings, load_settings

LAYERS = ["sha256:1", "sha256:2"]


@dataclass
class FakeContainer:
    """One container: created, running or exited."""

    spec: ContainerSpec
    state: str = "created"
    code: int = 0
    pid: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_with: list[str] = field(default_factory=list)


class FakeDocker:
    """A docker engine in memory (DockerApi). `on_start` and `on_exit` let a test attach an API to rank 0."""

    def __init__(self, *, layers: list[str] | None = None) -> None:
        self.layers = layers or LAYERS
        self.containers: dict[str, FakeContainer] = {}
        self.history: list[str] = []
        self.problem = ""
        self.references: set[str] | None = None
        self.parser = (0, "exited")
        self.checks = 0
        self.said: list[str] = ["INFO engine says hello"]
        self.last_words: list[str] = []
        self.create_seconds = 0.0
        self.on_start: Callable[[FakeContainer], Awaitable[None]] | None = None
        self.on_exit: Callable[[FakeContainer], Awaitable[None]] | None = None
        self._made = 0

    def _check(self) -> None:
        if self.problem:
            raise UnavailableError(self.problem)

    async def ping(self) -> None:
        self._check()

    async def image(self, reference: str) -> dict[str, Any]:
        self._check()
        if self.references is not None and reference not in self.references:
            raise UnavailableError(f"no such image: {reference}")
        return {"Id": f"sha256:id-of-{reference}", "RootFS": {"Layers": self.layers}, "Architecture": "amd64"}

    async def create(self, spec: ContainerSpec) -> str:
        self._check()
        await asyncio.sleep(self.create_seconds)
        self._made += 1
        name = f"c{self._made}"
        self.containers[name] = FakeContainer(spec)
        if "check" in spec.name:
            self.checks += 1
        else:
            self.history.append(f"create {spec.labels['glm53.epoch']}")
        return name

    async def start(self, container: str) -> None:
        self._check()
        self.containers[container].state = "running"
        if "check" in self.containers[container].spec.name:  # the image's parser, which ends by itself
            self.containers[container].code, self.containers[container].state = self.parser
            self.containers[container].exited.set()
            return
        self.history.append("start")
        if self.on_start:
            await self.on_start(self.containers[container])

    async def wait(self, container: str) -> int:
        found = self.containers[container]
        await found.exited.wait()
        self._check()
        return found.code

    async def exit(self, container: str, code: int) -> None:
        """End a container, as a crash or a kill does."""
        found = self.containers[container]
        if found.state == "running":
            found.state, found.code = "exited", code
            found.exited.set()
            if self.on_exit:
                await self.on_exit(found)

    async def stop(self, container: str, grace_seconds: int) -> None:
        self._check()
        self.history.append("stop")
        await self.exit(container, 0)

    async def kill(self, container: str) -> None:
        self._check()
        self.history.append("kill")
        await self.exit(container, 137)

    async def remove(self, container: str) -> None:
        self._check()
        if container in self.containers:
            await self.exit(container, 137)
            if "check" not in self.containers[container].spec.name:
                self.history.append("remove")
            del self.containers[container]

    async def inspect(self, container: str) -> dict[str, Any]:
        self._check()
        if container not in self.containers:
            raise UnavailableError(f"no such container: {container}")
        found = self.containers[container]
        return {
            "State": {"Status": found.state, "ExitCode": found.code, "Pid": found.pid, **found.more},
            "Config": {"Labels": found.spec.labels},
        }

    async def lines(self, container: str) -> AsyncIterator[str]:
        for line in self.said:
            yield line
        await self.containers[container].exited.wait()
        await asyncio.sleep(0.05)  # docker tells of an end before it has sent the last lines
        for line in self.last_words:
            yield line

    async def ours(self, cluster: str) -> list[tuple[str, str]]:
        self._check()
        return [
            (name, c.spec.name)
            for name, c in self.containers.items()
            if c.spec.labels["glm53.cluster"] == cluster
        ]

    def running(self) -> list[str]:
        """Return the ids of running containers."""
        return [name for name, c in self.containers.items() if c.state == "running"]


class FakeApi:
    """Rank 0's API: /health, /v1/models, /metrics and a chat that gives `reply`, or the body `completion`."""

    def __init__(self, port: int, *, model: str, reply: str) -> None:
        self.port, self.model, self.reply = port, model, reply
        self.requests = 2
        self.health: dict[str, Any] | None = None
        self.health_status = 200
        self.long_reply = ""
        self.hangs = False
        self.models_seconds = 0.0
        self.completion: Any = None
        self.chat_status = 200
        self.asked: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self, _: FakeContainer) -> None:
        """Open the port."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self, _: FakeContainer) -> None:
        """Close the port."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(self.health or {}, status=self.health_status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {self.requests}.0\n')

    async def _models(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.models_seconds)
        return web.json_response({"data": [{"id": self.model}]})

    async def _chat(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        self.asked.append(prompt)
        while self.hangs:
            await asyncio.sleep(0.05)
        if self.completion is not None:
            return web.json_response(self.completion, status=self.chat_status)
        reply = self.long_reply if self.long_reply and "\n" in prompt else self.reply
        return web.json_response({"choices": [{"message": {"content": reply}}]})


def free_port() -> int:
    """Return a TCP port that nobody uses on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings_text(model_path: Path, **changes: Any) -> str:
    """Return settings.yaml whose values differ from the defaults."""
    import yaml

    data: dict[str, Any] = {
        "version": 1,
        "cluster": "unit",
        "engine": "vllm",
        "device": "cpu",
        "image": "unit/engine:7",
        "model": {"path": str(model_path), "name": "unit-model"},
        "api": {"port": 18888},
        "canary": {"prompt": "capital of France?", "expect": "Paris", "max_tokens": 11},
        "vllm": {"max_model_len": 4097, "kv_cache_memory": "64M", "rendezvous_port": 29777},
        "supervision": {
            "heartbeat_seconds": 0.05,
            "lease_seconds": 0.4,
            "peer_lost_seconds": 0.8,
            "stop_grace_seconds": 7,
            "faults_allowed": 3,
            "load_guard_gib": 0.25,
            "steady_guard_gib": 0.125,
        },
    }
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key in data else value
    return yaml.safe_dump(data)


def make_settings(model_path: Path, **changes: Any) -> Settings:
    """Return valid settings whose values differ from the defaults."""
    return load_settings(settings_text(model_path, **changes), "settings.yaml")
