"""What the lead's node is like while no epoch is here: whether docker answers, and how the fabric is."""

from __future__ import annotations

from glm53_service.docker import DockerApi
from glm53_service.errors import UnavailableError
from glm53_service.fabric.probe import probe
from glm53_service.fabric.rails import Fabric
from glm53_service.fabric.trouble import Kind, Trouble
from glm53_service.node import Node
from glm53_service.supervisor.leftovers import remove_leftovers
from glm53_service.supervisor.world import World

LOOK_SECONDS = 2.0


class Surroundings:
    """`docker_problem` is empty when docker answers and nothing of this cluster is left in it; `fabric` is as
    it was found last.
    """

    def __init__(self, node: Node, docker: DockerApi, world: World, *, rdma: bool) -> None:
        self._node, self._docker, self._world, self._rdma = node, docker, world, rdma
        self._looked_at = -LOOK_SECONDS
        self.docker_problem = ""
        unseen = Trouble(kind=Kind.UNREADABLE, text="the fabric was not looked at yet")
        self.fabric = Fabric(rails=(), trouble=unseen)

    def forget(self) -> None:
        """Have the next `look` look again, however recent the last one is."""
        self._looked_at = -LOOK_SECONDS

    async def look(self) -> None:
        """Look again, at most every LOOK_SECONDS: both can change at any time.

        No epoch is here, so whatever container of this cluster docker has is a leftover.
        """
        if self._world.clock() - self._looked_at < LOOK_SECONDS:
            return
        try:
            await remove_leftovers(self._docker, self._node.cluster, self._world)
            self.docker_problem = ""
        except UnavailableError as error:
            self.docker_problem = error.message
        self.fabric = await probe(
            self._node.lead.fabric,
            rdma=self._rdma,
            runner=self._world.runner,
            root=self._world.root,
            wishes=self._node.lead.wishes,
        )
        self._looked_at = self._world.clock()
