"""The Docker Engine through its socket: only what a rank needs, and only our own labelled containers.

An attached docker CLI would cost 37 MiB a rank and forward SIGTERM to it; the socket costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import aiodocker
import aiohttp

from glm53_service.engines.base import LABEL, ContainerSpec
from glm53_service.errors import UnavailableError

SOCKET = "unix:///run/docker.sock"


class DockerApi(Protocol):
    """What the supervisor asks of docker. Every method raises UnavailableError with docker's own words."""

    async def ping(self) -> None:
        """Return when docker answers."""

    async def image(self, reference: str) -> dict[str, Any]:
        """Return `docker image inspect` of a local image."""

    async def create(self, spec: ContainerSpec) -> str:
        """Create (not start) the container and return its id."""

    async def start(self, container: str) -> None:
        """Start a created container."""

    async def wait(self, container: str) -> int:
        """Return the exit code once the container has ended."""

    async def stop(self, container: str, grace_seconds: int) -> None:
        """SIGTERM, then SIGKILL after the grace."""

    async def kill(self, container: str) -> None:
        """SIGKILL; no error when it is not running."""

    async def remove(self, container: str) -> None:
        """Remove it, running or not; no error when it is gone."""

    async def inspect(self, container: str) -> dict[str, Any]:
        """Return `docker inspect` of the container."""

    def lines(self, container: str) -> AsyncIterator[str]:
        """Yield the container's output line by line from its start until it ends."""

    async def ours(self, cluster: str) -> list[tuple[str, str]]:
        """Return (id, name) of every container labelled with this cluster."""


class Docker:
    """DockerApi on the real engine."""

    def __init__(self, client: aiodocker.Docker) -> None:
        self._client = client

    @classmethod
    def connect(cls) -> Docker:
        """Return a client of the local engine; nothing is asked of it yet."""
        return cls(aiodocker.Docker(url=SOCKET))

    async def close(self) -> None:
        """Give the connection back."""
        await self._client.close()

    async def ping(self) -> None:
        with _mapped("is it running?"):
            await self._client.version()

    async def image(self, reference: str) -> dict[str, Any]:
        with _mapped(f"image {reference}"):
            return dict(await self._client.images.inspect(reference))

    async def create(self, spec: ContainerSpec) -> str:
        with _mapped(f"create {spec.name}"):
            container = await self._client.containers.create(spec.api(), name=spec.name)
        return str(container.id)

    async def start(self, container: str) -> None:
        with _mapped("start"):
            await self._client.containers.container(container).start()

    async def wait(self, container: str) -> int:
        with _mapped("wait"):
            ended = await self._client.containers.container(container).wait()
        code = ended.get("StatusCode") if isinstance(ended, dict) else None
        if not isinstance(code, int) or code < 0 or (ended.get("Error") or {}).get("Message"):
            raise UnavailableError(f"docker: wait: no exit code in {ended!r}")
        return code

    async def stop(self, container: str, grace_seconds: int) -> None:
        with _mapped("stop"):
            await self._client.containers.container(container).stop(
                t=grace_seconds, timeout=grace_seconds + 30
            )

    async def kill(self, container: str) -> None:
        with _mapped("kill", ignore=(404, 409)):
            await self._client.containers.container(container).kill()

    async def remove(self, container: str) -> None:
        with _mapped("remove", ignore=(404,)):
            await self._client.containers.container(container).delete(force=True, v=True)

    async def inspect(self, container: str) -> dict[str, Any]:
        with _mapped("inspect"):
            return dict(await self._client.containers.container(container).show())

    async def lines(self, container: str) -> AsyncIterator[str]:
        rest = ""
        with _mapped("logs"):
            async for piece in self._client.containers.container(container).log(
                stdout=True, stderr=True, follow=True
            ):
                *whole, rest = (rest + piece).replace("\r", "\n").split("\n")
                for line in whole:
                    if line.strip():
                        yield line
        if rest.strip():
            yield rest

    async def ours(self, cluster: str) -> list[tuple[str, str]]:
        label = f'{{"label": ["{LABEL}.cluster={cluster}"]}}'
        with _mapped("list"):
            found = await self._client.containers.list(all=True, filters=label)
        return [(str(c.id), str(c._container.get("Names", ["?"])[0]).lstrip("/")) for c in found]


async def remove_ours(docker: DockerApi, cluster: str) -> list[str]:
    """Remove every rank container of this cluster on this node, running or not, and return their names."""
    found = await docker.ours(cluster)
    for container, _ in found:
        await docker.remove(container)
    return [name for _, name in found]


@contextlib.contextmanager
def _mapped(what: str, ignore: tuple[int, ...] = ()) -> Iterator[None]:
    try:
        yield
    except aiodocker.DockerError as error:
        if error.status not in ignore:
            raise UnavailableError(f"docker: {what}: {error.message}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnavailableError(
            f"docker does not answer on {SOCKET} ({what}): {error or type(error).__name__}"
        ) from None
