"""Lets the image's own parser read a rank's arguments, in a container of its own, before a load."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path

from glm53_service.docker import DockerApi
from glm53_service.engines.base import ContainerSpec, Engine
from glm53_service.errors import UnavailableError
from glm53_service.files import read_json, write_durably
from glm53_service.story import event

log = logging.getLogger(__name__)

ARGUMENT_CHECK_SECONDS = 300.0
KNOWN_ARGUMENTS = 16


async def check_arguments(docker: DockerApi, engine: Engine, spec: ContainerSpec, state: Path) -> None:
    """Return when the image's own parser took the arguments of `spec`; UnavailableError says what it said.

    It is asked once for each image and command line; `state` is the folder that remembers.
    """
    said = "\0".join((spec.image, *(spec.entrypoint or ()), *spec.command)).encode()
    key = hashlib.sha256(said).hexdigest()
    path = state / "arguments.json"
    known = list(read_json(path).get("accepted", []))
    if key in known:
        return
    container = await docker.create(spec)
    try:
        await docker.start(container)
        async with asyncio.timeout(ARGUMENT_CHECK_SECONDS):
            lines = [line async for line in docker.lines(container)]
            code = await docker.wait(container)
    except TimeoutError:
        raise UnavailableError(
            f"the image's parser gave no answer within {ARGUMENT_CHECK_SECONDS:g} s",
            hint="is it the engine's image? docker logs and the journal have what it said",
        ) from None
    finally:
        await docker.remove(container)
    problem = engine.read_argument_check(code, "\n".join(lines))
    if problem:
        raise UnavailableError(problem, hint="mend the engine settings in the inventory and run site.yml")
    try:
        write_durably(path, json.dumps({"accepted": [*known, key][-KNOWN_ARGUMENTS:]}))
    except OSError as error:  # it will be asked again, and that is all
        log.warning(event("what the image accepted cannot be remembered", path=path, error=error.strerror))
