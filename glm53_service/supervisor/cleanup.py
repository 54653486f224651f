"""After the supervisor is gone, however it went: no rank container of its cluster stays."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from glm53_service.docker import DockerApi
from glm53_service.errors import UnavailableError
from glm53_service.evidence import save_evidence
from glm53_service.story import event
from glm53_service.supervisor.world import World

log = logging.getLogger(__name__)


async def clean_up(docker: DockerApi, cluster: str, world: World, environment: Mapping[str, str]) -> None:
    """Remove this cluster's rank containers on this node, keeping evidence when the supervisor did not end
    well.

    systemd gives SERVICE_RESULT, EXIT_CODE and EXIT_STATUS to ExecStopPost (systemd.exec(5)). A docker that
    does not answer is no error here: the next supervisor removes leftovers before it says hello.
    """
    result = environment.get("SERVICE_RESULT", "success")
    try:
        for container, name in await docker.ours(cluster):
            if result != "success":
                await _keep_evidence(docker, container, f"supervisor {result} {name}", world, environment)
            await docker.remove(container)
            log.warning(
                event("removed a container that its supervisor left behind", container=name, result=result)
            )
    except UnavailableError as error:
        log.warning(event("leftover containers could not be removed", error=error.message))


async def _keep_evidence(
    docker: DockerApi, container: str, label: str, world: World, environment: Mapping[str, str]
) -> None:
    """Keep what explains the end; a full disk is no reason to leave the container running."""
    how = {key: environment.get(key, "") for key in ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS")}
    try:
        files = {
            "supervisor.json": json.dumps(how),
            "inspect.json": json.dumps(await docker.inspect(container)),
        }
        save_evidence(world.state / "evidence", label, files, wall=world.wall())
    except (OSError, UnavailableError) as error:
        log.warning(event("evidence could not be kept", error=error))
