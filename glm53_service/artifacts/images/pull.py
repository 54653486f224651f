"""Pulls one image by digest: asked first, watched for silence, tried again, compared afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from glm53_service.artifacts.disk import SPARE_BYTES, alone, free_bytes
from glm53_service.artifacts.hub import Refused
from glm53_service.artifacts.images.credentials import Login
from glm53_service.artifacts.images.engine import Daemon, Platform
from glm53_service.artifacts.images.layers import Layers
from glm53_service.artifacts.images.reference import Reference, parse_reference
from glm53_service.artifacts.progress import duration, gigabytes
from glm53_service.errors import ArtifactError, UnavailableError

TRIES = 8
"""Failures in a row, without a byte in between, until a pull gives up; ASKS: a registry never reached."""

ASKS = 3
LONGEST_PAUSE_SECONDS = 60.0
SILENCE_SECONDS = 600.0
"""A pull in which nothing moves for so long has stalled; how long it takes in all is nobody's business. Long,
since unpacking many GB shows nothing in some stores, and since the overlay2 store forgets every layer of a
pull that is broken off (seen on docker 20.10). Docker itself tries a layer again, from where it stopped.
"""

UNPACKED = 2
"""A layer is on the disk twice in the end or on the way: as it came, and unpacked, which is never smaller."""

LOCKS = Path("/run/lock")


class EngineApi(Protocol):
    """What a pull asks of docker (engine.Engine)."""

    async def daemon(self) -> Daemon:
        """Return what docker says of itself."""

    async def image(self, name: str) -> dict[str, Any] | None:
        """Return the inspect of a local image."""

    async def platforms(self, reference: Reference, login: Login | None) -> list[Platform]:
        """Return what the registry's image is made for."""

    def pull(
        self, reference: Reference, platform: Platform, login: Login | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield docker's lines of one pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a pull needs besides docker. `size`: bytes that the registry's manifest lists, None: not known, or
    why not, in words. `show`: called after each line of a pull; `pause`: sleeps.
    """

    login: Callable[[Reference], Awaitable[Login | None]]
    size: Callable[[Reference, Platform, Login | None], Awaitable[int | str]]
    say: Callable[[str], None]
    show: Callable[[Layers, int | None], None]
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    free: Callable[[Path], int] = free_bytes
    locks: Path = LOCKS
    silence: float = SILENCE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run did: the image as docker has it, whether it was pulled, bytes that came, and how long."""

    inspect: Mapping[str, Any]
    pulled: bool
    bytes: int = 0
    seconds: float = 0.0


async def pull(text: str, engine: EngineApi, world: World, *, offline: bool = False) -> Outcome:
    """Return once the image `text` is in docker here, right for this machine. What is there is never pulled
    again, so nothing is ever replaced. Glm53Error says why it cannot be had.
    """
    daemon = await engine.daemon()
    there = await engine.image(text)
    if there is not None:
        check_platform(text, there, daemon.platform)
        return Outcome(inspect=there, pulled=False)
    reference = parse_reference(text)
    if offline:
        raise ArtifactError(
            f"no image {text} in docker here, and no registry is asked",
            hint="without --offline it is pulled; else bring it with `docker save` and `docker load`, which"
            " keep its id and not its digest: glm53_image is then that id",
        )
    with held(reference, world.locks):
        there = await engine.image(text)  # another run may have just ended
        if there is not None:
            check_platform(text, there, daemon.platform)
            return Outcome(inspect=there, pulled=False)
        return await _pull(reference, engine, world, daemon)


async def _pull(reference: Reference, engine: EngineApi, world: World, daemon: Daemon) -> Outcome:
    login = await world.login(reference)
    await _asked(reference, engine, world, daemon.platform, login)
    size = await world.size(reference, daemon.platform, login)
    if isinstance(size, int):
        check_room(reference, size, Path(daemon.root), world.free)
        world.say(f"{reference.text}: {gigabytes(size)} for {daemon.platform} from {reference.registry}")
    else:
        world.say(f"{reference.text}: how much it is, and whether there is room, is not known ({size})")
    began = world.clock()
    layers = await _transfer(reference, engine, world, daemon.platform, login, size)
    seconds = world.clock() - began
    found = await engine.image(reference.pulled)
    if found is None:
        raise UnavailableError(
            f"docker ended the pull of {reference.text} without the image",
            hint="`journalctl -u docker` says why; run this again",
        )
    check_platform(reference.text, found, daemon.platform)
    check_digest(reference, found)
    came = (
        size if isinstance(size, int) and layers.fresh else layers.bytes
    )  # docker is silent on quick layers
    return Outcome(inspect=found, pulled=True, bytes=came, seconds=seconds)


async def _asked(
    reference: Reference, engine: EngineApi, world: World, platform: Platform, login: Login | None
) -> None:
    """Raise ArtifactError before a byte of a layer is fetched unless the image is for this machine."""
    failures = 0
    while True:
        try:
            found = await engine.platforms(reference, login)
            break
        except Refused as refused:
            failures += 1
            await _again(refused, failures, ASKS, world)
    if found and platform not in found:
        raise wrong_platform(reference.text, ", ".join(sorted({str(p) for p in found})), platform)


async def _transfer(
    reference: Reference,
    engine: EngineApi,
    world: World,
    platform: Platform,
    login: Login | None,
    size: int | str,
) -> Layers:
    failures = 0
    while True:
        layers, moved = Layers(), 0
        try:
            async with contextlib.aclosing(engine.pull(reference, platform, login)) as lines:
                await _watched(lines, layers, world, size if isinstance(size, int) else None)
            if await engine.image(reference.pulled) is not None:
                return layers
            raise Refused(broken(reference), again=True)
        except UnavailableError as error:
            refused = Refused(error, again=True)
        except Refused as error:
            refused = error
        moved = layers.bytes
        failures = 1 if moved else failures + 1
        await _again(refused, failures, TRIES, world)


def broken(reference: Reference) -> UnavailableError:
    """Return the error of a pull whose lines ended without the image."""
    return UnavailableError(
        f"docker broke the pull of {reference.text} off",
        hint="was docker restarted? `journalctl -u docker`; run this again",
    )


async def _watched(
    lines: AsyncGenerator[dict[str, Any], None], layers: Layers, world: World, size: int | None
) -> None:
    """Follow one pull; Refused when nothing has moved for the window: lines that repeat are silence too."""
    deadline = world.clock() + world.silence
    while True:
        left = deadline - world.clock()
        if left <= 0:
            raise Refused(stalled(layers, world.silence), again=True)
        try:
            async with asyncio.timeout(left):
                line = await anext(lines, None)
        except TimeoutError:
            raise Refused(stalled(layers, world.silence), again=True) from None
        if line is None:
            return
        if layers.take(line):
            deadline = world.clock() + world.silence
            world.show(layers, size)


def stalled(layers: Layers, silence: float) -> UnavailableError:
    """Return the error of a pull in which nothing moved for the window."""
    return UnavailableError(
        f"the pull has stalled: nothing moved for {duration(silence)}, last {layers.doing}",
        hint="`journalctl -u docker`, the network, the proxy; run this again. A disk that unpacks slower:"
        " --silence SECONDS",
    )


async def _again(refused: Refused, failures: int, tries: int, world: World) -> None:
    """Wait before the next try, or raise for good."""
    if not refused.again or failures >= tries:
        raise refused.error from None
    seconds = max(refused.wait_seconds, min(2.0**failures, LONGEST_PAUSE_SECONDS))
    seconds *= random.uniform(1.0, 1.3)  # spreads retries, nothing secret
    world.say(f"{refused.error.message}; again in {seconds:.0f} s")
    await world.pause(seconds)


def check_platform(text: str, inspect: Mapping[str, Any], platform: Platform) -> None:
    """Raise ArtifactError for an image in docker that this machine cannot run."""
    found = str(inspect.get("Architecture") or "")
    if found and found != platform.architecture:
        raise wrong_platform(text, f"{inspect.get('Os') or platform.os}/{found}", platform)


def wrong_platform(text: str, found: str, platform: Platform) -> ArtifactError:
    """Return the error of an image for other machines."""
    return ArtifactError(
        f"{text} is made for {found}; this machine is {platform}",
        hint=f"set glm53_image to the digest of an index that has {platform}, or of that platform's own"
        " image; a wrong one in docker goes by `docker image rm`",
    )


def check_digest(reference: Reference, inspect: Mapping[str, Any]) -> None:
    """Raise ArtifactError unless docker knows the image by the digest that was asked for."""
    names = [str(name) for name in inspect.get("RepoDigests") or []]
    if not any(name.endswith(f"@{reference.digest}") for name in names):
        raise ArtifactError(
            f"docker has {reference.text} as {', '.join(names) or 'no digest'}, expected {reference.digest}",
            hint="`docker image rm` what is there, and run this again; a registry mirror may be wrong",
        )


def check_room(reference: Reference, size: int, root: Path, free: Callable[[Path], int]) -> None:
    """Raise ArtifactError when the image surely finds no room."""
    needed = UNPACKED * size + SPARE_BYTES
    if (found := free(root)) < needed:
        raise ArtifactError(
            f"{root}: {gigabytes(found)} free for docker, but {reference.text} needs {gigabytes(needed)} at"
            f" least: {gigabytes(size)} as it comes, unpacked as much again or more",
            hint="`docker system df`, `glm53 prune`; or move docker's data-root to another disk",
        )


@contextlib.contextmanager
def held(reference: Reference, locks: Path) -> Iterator[None]:
    """Hold this image alone on this node while the block runs; BusyError names the process that has it.

    flock(2), so a killed holder holds nothing. Anybody may take the file, whoever made it.
    """
    path = locks / f"glm53-image-{reference.digest[7:19]}.lock"
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with alone(descriptor, f"another run pulls {reference.text} here"):
        yield
