"""A small Docker Engine API on a unix socket, for pulls: what it has, what a registry offers."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

DIGEST = "sha256:" + "5a" * 32
NAME = "registry.example:5000/glm/engine"
IMAGE = f"{NAME}@{DIGEST}"


def inspect(architecture: str = "arm64", digest: str = DIGEST) -> dict[str, Any]:
    """What docker says of the image once it is there."""
    return {
        "Id": "sha256:" + "1d" * 32,
        "RepoDigests": [f"{NAME}@{digest}"],
        "RepoTags": [],
        "Architecture": architecture,
        "Os": "linux",
        "Size": 5_000_000_000,
        "RootFS": {"Layers": ["sha256:1", "sha256:2"]},
        "Config": {"Cmd": ["/engine"]},
    }


Line = dict[str, Any] | Callable[["EngineServer"], None] | asyncio.Event
"""A line of a pull; or something done at that point; or something waited for."""


@dataclass
class EngineServer:
    """The engine's state and what was asked of it. `pulls`: the lines of each pull, in turn; `refusals`:
    answers to distribution requests, (status, words), before the platforms are told. The image arrives with a
    line that says `Status`.
    """

    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    platforms: list[dict[str, str]] = field(
        default_factory=lambda: [
            {"os": "linux", "architecture": "amd64"},
            {"os": "linux", "architecture": "arm64"},
        ]
    )
    refusals: list[tuple[int, str]] = field(default_factory=list)
    pulls: list[list[Line]] = field(default_factory=list)
    arrives: dict[str, Any] = field(default_factory=inspect)
    asked: list[str] = field(default_factory=list)
    logins: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0
    """Pulls whose listener went away."""

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41", "Os": "linux", "Arch": "arm64"})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"DockerRootDir": "/var/lib/docker"})

    async def image(self, request: web.Request) -> web.Response:
        found = self.images.get(request.match_info["name"])
        if found is None:
            return _said("No such image", 404)
        return web.json_response(found)

    async def distribution(self, request: web.Request) -> web.Response:
        self._note(request, f"distribution {request.match_info['name']}")
        if self.refusals:
            status, words = self.refusals.pop(0)
            return _said(words, status)
        return web.json_response({"Descriptor": {"size": 500}, "Platforms": self.platforms})

    async def create(self, request: web.Request) -> web.StreamResponse:
        self._note(request, f"pull {request.query['fromImage']} {request.query['platform']}")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            for line in self.pulls.pop(0):
                if isinstance(line, asyncio.Event):
                    await line.wait()
                elif callable(line):
                    line(self)
                else:
                    await response.write(json.dumps(line).encode() + b"\r\n")
                    if str(line.get("status", "")).startswith("Status:"):
                        self.images[request.query["fromImage"]] = self.arrives
        except asyncio.CancelledError:
            self.gone += 1
            raise
        return response

    def _note(self, request: web.Request, what: str) -> None:
        self.asked.append(what)
        word = request.headers.get("X-Registry-Auth", "")
        self.logins.append(json.loads(base64.urlsafe_b64decode(word)) if word else {})


@contextmanager
def engine_thread(server: EngineServer, socket: Path) -> Iterator[None]:
    """Serve from a thread of its own while the block runs."""

    async def served() -> None:
        async with engine_serving(server, socket):
            ready.set()
            await asyncio.to_thread(done.wait)

    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(served()))
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _said(words: str, status: int) -> web.Response:
    """Answer as docker does: its content type names no character set, and aiodocker looks for just that."""
    response = web.Response(body=json.dumps({"message": words}).encode(), status=status)
    response.headers["Content-Type"] = "application/json"
    return response


@asynccontextmanager
async def engine_serving(server: EngineServer, socket: Path) -> AsyncIterator[None]:
    """Serve on `socket` while the block runs."""
    app = web.Application()
    app.router.add_get("/version", server.version)
    app.router.add_get("/{v}/version", server.version)
    app.router.add_get("/{v}/info", server.info)
    app.router.add_get("/{v}/images/{name:.+}/json", server.image)
    app.router.add_get("/{v}/distribution/{name:.+}/json", server.distribution)
    app.router.add_post("/{v}/images/create", server.create)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield
    finally:
        await runner.cleanup()
