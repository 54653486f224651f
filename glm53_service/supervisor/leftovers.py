"""Rank containers that an earlier supervisor, or an earlier boot of this machine, left here."""

from __future__ import annotations

import json
import logging

from glm53_service.docker import DockerApi
from glm53_service.engines.base import LABEL
from glm53_service.errors import UnavailableError
from glm53_service.evidence import save_evidence
from glm53_service.exits import exit_text
from glm53_service.story import event
from glm53_service.supervisor.world import World
from glm53_service.system import read_boot_id

log = logging.getLogger(__name__)

BOOT_LABEL = f"{LABEL}.boot"
"""The boot id under which a rank's container was made."""


async def remove_leftovers(docker: DockerApi, cluster: str, world: World) -> None:
    """Remove every rank container of this cluster on this node, and tell of each.

    One that had ended by itself, or under a machine that went down, leaves evidence first: nothing else says
    why the pair ended. UnavailableError when docker does not answer.
    """
    for container, name in await docker.ours(cluster):
        how = await _keep_how_it_ended(docker, container, world)
        await docker.remove(container)
        log.warning(event("removed a container of an earlier supervisor", container=name, how=how))


async def _keep_how_it_ended(docker: DockerApi, container: str, world: World) -> str:
    """Return how the container ended, with its evidence kept; empty for one that never ran, or still runs."""
    try:
        inspect = await docker.inspect(container)
    except UnavailableError:
        return ""  # it cannot be looked at; that it goes is what counts
    boot = (inspect.get("Config", {}).get("Labels") or {}).get(BOOT_LABEL)
    state = inspect.get("State", {})
    went_down = bool(boot) and boot != read_boot_id(world.root) and state.get("Status") != "created"
    if not went_down and state.get("Status") not in ("exited", "dead"):
        return ""
    how = exit_text(state, host_restarted=went_down)
    files = {"reason.txt": how + "\n", "inspect.json": json.dumps(inspect, indent=1)}
    label = "host went down" if went_down else "ended without its supervisor"
    try:
        save_evidence(world.state / "evidence", label, files, wall=world.wall())
    except OSError as error:
        log.error(event("evidence could not be kept", error=error.strerror))
    return how
