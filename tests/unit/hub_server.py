"""A small hub on loopback for huggingface_hub's real client: lists, metadata, redirects, ranges, and faults.

What it answers follows the public hub: paged lists with git and LFS hashes, HEAD with the commit and the
linked ETag, a redirect of LFS files to another host (where the token must not go), X-Error-Code.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = 3


def sha256(data: bytes) -> str:
    """Return the LFS hash of `data`."""
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    """Return git's name of the blob `data`."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(kw_only=True)
class Repository:
    """What the hub has under one name, at COMMIT. Names ending in .safetensors are LFS files."""

    files: dict[str, bytes]
    gated: bool = False
    terms: bool = False


@dataclass
class HubServer:
    """The hub's state, and what was asked of it.

    `refuse`: file to statuses, one a request, before it is served. `drop`: file to byte counts after which
    the connection is cut, one a request. `wrong`: files whose next answer is of other bytes.
    """

    repositories: dict[str, Repository]
    token: str = "hf_unit_0123456789"
    refuse: dict[str, list[int]] = field(default_factory=dict)
    drop: dict[str, list[int]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    ignore_ranges: bool = False
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    url: str = ""
    store: str = ""
    hold: threading.Event | None = None

    def sent(self, name: str) -> list[str]:
        """Return the Range of each download of `name`, `` for a whole one."""
        return [ranged for method, path, ranged in self.asked if method == "GET" and path == name]

    def _denied(self, request: web.Request, name: str) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if given and given != f"Bearer {self.token}":
            return _error(401, "", "Invalid credentials in Authorization header")
        repository = self.repositories.get(name)
        if repository is None:
            return _error(404 if given else 401, "RepoNotFound", "Repository not found")
        if repository.gated and not given:
            return _error(401, "GatedRepo", "Access to model is restricted")
        if repository.gated and not repository.terms:
            return _error(403, "GatedRepo", "You are not in the authorized list")
        return None

    async def tree(self, request: web.Request) -> web.Response:
        name = request.match_info["owner"] + "/" + request.match_info["name"]
        if denied := self._denied(request, name):
            return denied
        if statuses := self.refuse.get("tree"):
            return web.Response(status=statuses.pop(0), headers={"Retry-After": "0"})
        if request.match_info["revision"] != COMMIT:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        items = [_item(path, data) for path, data in sorted(self.repositories[name].files.items())]
        start = int(request.query.get("cursor", "0"))
        headers = {}
        if start + PAGE < len(items):
            headers["Link"] = f'<{self.url}{request.path}?recursive=true&cursor={start + PAGE}>; rel="next"'
        return web.json_response(items[start : start + PAGE], headers=headers)

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["owner"] + "/" + request.match_info["name"]
        path = request.match_info["path"]
        if denied := self._denied(request, name):
            return denied
        data = self.repositories[name].files.get(path)
        if data is None:
            return _error(404, "EntryNotFound", "Entry not found")
        lfs = path.endswith(".safetensors")
        etag = sha256(data) if lfs else git_sha1(data)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        if lfs:
            headers |= {
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{self.store}/store/{name}/{path}",
            }
            return web.Response(status=302, headers=headers)
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(data))})
        return await self._send(request, path, data, headers)

    async def stored(self, request: web.Request) -> web.StreamResponse:
        if "Authorization" in request.headers:
            self.leaked.append(request.path)
        name = request.match_info["owner"] + "/" + request.match_info["name"]
        path = request.match_info["path"]
        return await self._send(request, path, self.repositories[name].files[path], {})

    async def _send(
        self, request: web.Request, path: str, data: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        ranged = request.headers.get("Range", "")
        self.asked.append((request.method, path, ranged))
        if statuses := self.refuse.get(path):
            return web.Response(status=statuses.pop(0), headers={"Retry-After": "0"})
        if self.wrong.get(path):
            self.wrong[path] -= 1
            data = bytes(len(data))
        start = 0
        if ranged and not self.ignore_ranges:
            start = int(ranged.removeprefix("bytes=").partition("-")[0])
        body = data[start:]
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=status, headers=headers | {"Content-Length": str(len(body))})
        await response.prepare(request)
        drops = self.drop.get(path)
        if drops:
            await response.write(body[: drops.pop(0)])
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.close()
            return response
        if self.hold is not None and path.endswith(".safetensors"):
            await response.write(body[:1700])
            while not self.hold.is_set():
                await asyncio.sleep(0.01)
            body = body[1700:]
        await response.write(body)
        return response

    def application(self) -> web.Application:
        """Return the hub as an application."""
        app = web.Application()
        app.router.add_get("/api/models/{owner}/{name}/tree/{revision}", self.tree)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{path:.+}", self.resolve)
        app.router.add_get("/store/{owner}/{name}/{path:.+}", self.stored)
        return app


def _item(path: str, data: bytes) -> dict[str, object]:
    item: dict[str, object] = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
    if path.endswith(".safetensors"):
        item["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return item


def _error(status: int, code: str, text: str) -> web.Response:
    headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
    return web.Response(status=status, headers=headers, text=json.dumps({"error": text}))


@contextmanager
def serving(hub: HubServer, address: str = "127.0.0.1", store: str = "localhost") -> Iterator[HubServer]:
    """Serve `hub` from a thread; its file store is another host by name, as in life."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        for kind in ("url", "store"):
            runner = web.AppRunner(hub.application(), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, address, 0)
            await site.start()
            port = runner.addresses[0][1]
            setattr(hub, kind, f"http://{address if kind == 'url' else store}:{port}")
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        for runner in runners:
            loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
