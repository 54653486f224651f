"""Asks the engine's image whether it takes the settings, while an older pair may still serve."""

from __future__ import annotations

import os

import msgspec

from glm53_service.artifacts.built import drift
from glm53_service.artifacts.content import image_content
from glm53_service.docker import DockerApi
from glm53_service.engines import engine_for
from glm53_service.engines.base import LABEL, Launch, Place
from glm53_service.errors import UnavailableError
from glm53_service.fabric.probe import probe
from glm53_service.node import Node
from glm53_service.settings import Settings
from glm53_service.supervisor.argument_check import check_arguments
from glm53_service.supervisor.world import World


async def ask_image(node: Node, settings: Settings, docker: DockerApi, world: World) -> str:
    """Return once the image's parser took rank 0's arguments as these settings make them; its own words are
    an UnavailableError.

    Nothing that runs is touched: the container is its own, and its label is not a rank's, so no supervisor
    takes it for a leftover. The start that follows does not ask again. What is returned says why it could not
    be asked: the rails, whose addresses are among the arguments, are not there yet. Empty: it was.
    """
    inspect = await docker.image(settings.image)
    labels = (inspect.get("Config") or {}).get("Labels")
    if settings.image_inputs and (reasons := drift(labels, settings.image_inputs)):
        raise UnavailableError(
            f"image {settings.image} was built of something else: {'; '.join(reasons)}",
            hint="run site.yml: it builds the image anew",
        )
    lead = node.lead
    fabric = await probe(
        lead.fabric,
        rdma=settings.device == "cuda",
        runner=world.runner,
        root=world.root,
        wishes=lead.wishes,
    )
    if fabric.trouble:
        return f"the image was not asked: {fabric.trouble}"
    launch = Launch(
        epoch=0,
        settings=settings,
        image_content=image_content(inspect),
        master=lead.fabric[0],
        world=len(node.nodes),
    )
    place = Place(
        rank=0,
        management=lead.management,
        fabric=fabric,
        uid=os.getuid(),
        gid=os.getgid(),
        cache="/nonexistent",
    )
    engine = engine_for(settings)
    spec = engine.argument_check(launch, place, str(inspect["Id"]))
    spec = msgspec.structs.replace(spec, labels={f"{LABEL}.check": settings.cluster})
    await check_arguments(docker, engine, spec, world.state)
    return ""
