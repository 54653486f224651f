"""Docker as one who pulls needs it: what is there, what a registry offers, and the pull line by line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import aiodocker
import aiohttp

from glm53_service.artifacts.images.credentials import Login
from glm53_service.artifacts.images.reference import Reference
from glm53_service.artifacts.images.refusals import refusal
from glm53_service.docker import SOCKET
from glm53_service.errors import UnavailableError

ASK_SECONDS = 120.0
"""Longest answer about an image: docker itself gives up on a registry that does not answer before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What a program is made for, in docker's words."""

    os: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """What docker says of itself: its own platform, and its folder."""

    platform: Platform
    root: str


class Engine:
    """The engine behind one socket. UnavailableError when it does not answer; Refused for a registry's no."""

    def __init__(self, client: aiodocker.Docker) -> None:
        self._client = client

    @classmethod
    def connect(cls, socket: str = "") -> Engine:
        """Return a client of the local engine, or of the one behind `socket`; nothing is asked of it yet."""
        return cls(aiodocker.Docker(url=socket or SOCKET))

    async def close(self) -> None:
        """Give the connection back."""
        await self._client.close()

    async def daemon(self) -> Daemon:
        """Return what docker says of itself."""
        with _reached():
            version, info = await self._client.version(), await self.info()
        platform = Platform(os=str(version.get("Os", "linux")), architecture=str(version.get("Arch", "")))
        return Daemon(platform=platform, root=str(info.get("DockerRootDir") or "/var/lib/docker"))

    async def info(self) -> dict[str, Any]:
        """Return docker's own /info: its proxy, its exceptions."""
        with _reached():
            return dict(await self._client.system.info())

    async def image(self, name: str) -> dict[str, Any] | None:
        """Return `docker image inspect` of a local image, None when there is none."""
        try:
            with _reached():
                return dict(await self._client.images.inspect(name))
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            raise UnavailableError(f"docker: image {name}: {error.message}") from None

    async def platforms(self, reference: Reference, login: Login | None) -> list[Platform]:
        """Ask the registry, by docker's own network and proxy, what the image is made for; no layer comes."""
        try:
            with _reached():
                async with asyncio.timeout(ASK_SECONDS):
                    found = await self._client._query_json(
                        f"distribution/{reference.pulled}/json", headers=_headers(reference, login)
                    )
        except aiodocker.DockerError as error:
            raise refusal(error.status, error.message, reference, has_login=login is not None) from None
        pairs = [(str(p.get("os")), str(p.get("architecture"))) for p in found.get("Platforms") or []]
        # Signatures and build notes in an index call themselves unknown/unknown.
        return [Platform(os=os, architecture=a) for os, a in pairs if "unknown" not in (os, a)]

    async def pull(
        self, reference: Reference, platform: Platform, login: Login | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield docker's lines of one pull until it ends; whoever stops listening ends it.

        A docker that goes away in the middle ends the lines without a word: look for the image afterwards.
        """
        words, status = "", 0
        try:
            with _reached():
                async with self._client._query(
                    "images/create",
                    "POST",
                    params={"fromImage": reference.pulled, "platform": str(platform)},
                    headers=_headers(reference, login),
                    timeout=None,
                ) as response:
                    async for raw in response.content:
                        line = json.loads(raw)
                        if "error" in line or "errorDetail" in line:
                            words = str((line.get("errorDetail") or {}).get("message") or line.get("error"))
                            break
                        yield line
        except aiodocker.DockerError as error:
            words, status = error.message, error.status
        except (aiohttp.ClientPayloadError, ValueError):
            return
        if words:
            raise refusal(status, words, reference, has_login=login is not None)


def _headers(reference: Reference, login: Login | None) -> dict[str, str | int | bool]:
    return {} if login is None else {"X-Registry-Auth": login.header(reference.key)}


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    """Let docker's own answers through; map what shows that it gave none."""
    try:
        yield
    except aiodocker.DockerError as error:
        if error.status != 900:  # aiodocker's number for a socket that nobody answers
            raise
        raise UnavailableError(
            f"docker does not answer on {SOCKET}: {error.message}",
            hint="`systemctl status docker`; an account that is not root must be in group docker",
        ) from None
    except aiohttp.ClientPayloadError:
        raise
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnavailableError(
            f"docker does not answer on {SOCKET}: {error or type(error).__name__}",
            hint="`systemctl status docker`",
        ) from None
