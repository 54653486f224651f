"""Looks at the image on every node for the plan: docker here, the workers by ssh, the registry."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.artifacts.disk import SPARE_BYTES, free_bytes
from glm53_service.artifacts.images.credentials import docker_login
from glm53_service.artifacts.images.engine import Engine
from glm53_service.artifacts.images.plan import LOCAL_ONLY, ImagePlace, ImageStep, plan_image
from glm53_service.artifacts.images.reference import PULLABLE, parse_reference
from glm53_service.artifacts.images.size import manifest_size
from glm53_service.errors import CommandError, Glm53Error, UnavailableError
from glm53_service.run import run

ANSWER_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker: its name, the ssh command up to what is run there, and the path to it in words."""

    node: str
    ssh: Sequence[str]
    over: str


def image_steps(
    image: str,
    node: str,
    workers: Sequence[Worker],
    *,
    rates: Mapping[str, float],
    offline: bool,
    note: Callable[[str], None],
    socket: str = "",
) -> tuple[ImageStep, ...]:
    """Return the image's steps of the plan; what cannot be looked at is told to `note`, and fails nothing."""
    return asyncio.run(_steps(image, node, workers, rates, offline, note, socket))


async def _steps(
    image: str,
    node: str,
    workers: Sequence[Worker],
    rates: Mapping[str, float],
    offline: bool,
    note: Callable[[str], None],
    socket: str,
) -> tuple[ImageStep, ...]:
    engine = Engine.connect(socket)
    try:
        daemon, inspect = await engine.daemon(), await engine.image(image)
        registry = ""
        size: int | str = LOCAL_ONLY
        if PULLABLE.fullmatch(image):
            reference = parse_reference(image)
            registry = reference.registry
            if inspect is None:
                size = await _size(engine, image, offline)
    except Glm53Error as error:
        note(f"the image is not in the plan: {error.message}")
        return ()
    finally:
        await engine.close()
    head = ImagePlace(node=node, inspect=inspect, free=free_bytes(Path(daemon.root)))
    names = [image] + ([local_tag(image_content(inspect))] if inspect else [])
    there = []
    for worker in workers:
        try:
            found = await _there(worker, names)
        except UnavailableError as error:
            note(f"{worker.node}: what it has of the image is not known: {error.message}")
            continue
        there.append((ImagePlace(node=worker.node, inspect=found, free=None), worker.over))
    return plan_image(image, registry, size, head, there, rates=rates, spare=SPARE_BYTES)


async def _size(engine: Engine, image: str, offline: bool) -> int | str:
    if offline:
        return "no registry is asked"
    reference = parse_reference(image)
    login = await docker_login(reference, Path.home())
    daemon = await engine.daemon()
    return await manifest_size(engine, reference, daemon.platform, login)


async def _there(worker: Worker, names: Sequence[str]) -> dict[str, Any] | None:
    """Return what docker on the worker says of the first of `names` that it has."""
    argv = [*worker.ssh, "docker", "image", "inspect", *map(shlex.quote, names)]
    try:
        said = await run(argv, timeout_seconds=ANSWER_SECONDS)
    except CommandError as error:
        said = error.out  # docker prints those that it has, and fails for the others
        if not said.strip():
            raise
    try:
        found: list[dict[str, Any]] = json.loads(said)
    except ValueError:
        raise UnavailableError(f"`docker image inspect` there said {said[:80]!r}") from None
    return found[0] if found else None
