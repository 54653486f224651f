"""One epoch on the lead: the work that brings all ranks up, and what that work found out.

An epoch is all ranks or none. Its tasks only gather facts into its fields; what follows from them is decided
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from glm53_service.artifacts.content import image_content
from glm53_service.canary import Api
from glm53_service.docker import DockerApi
from glm53_service.engines.base import Engine, Launch
from glm53_service.errors import Glm53Error
from glm53_service.fabric.rails import Fabric
from glm53_service.node import Node
from glm53_service.settings import Settings
from glm53_service.story import event
from glm53_service.supervisor.decide import Cause
from glm53_service.supervisor.members import Members
from glm53_service.supervisor.messages import Go, Prepare, Stop
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.world import World

log = logging.getLogger(__name__)

API_POLL_SECONDS = 0.25
METRICS_SECONDS = 10.0
API_MISSES_ALLOWED = 3


class Epoch:
    """Number `number`, for exactly the supervisor instances in `instances`; `wake` is called when a field
    changed.
    """

    def __init__(
        self,
        number: int,
        instances: dict[str, str],
        *,
        node: Node,
        settings: Settings,
        engine: Engine,
        rank: Rank,
        members: Members,
        docker: DockerApi,
        world: World,
        wake: Callable[[], None],
    ) -> None:
        self.number, self.instances, self.began = number, instances, world.clock()
        self._node, self._settings, self._engine = node, settings, engine
        self._rank, self._members, self._docker = rank, members, docker
        self._world, self._wake = world, wake
        self._tasks: set[asyncio.Task[None]] = set()
        self.prepare_problem = self.api_problem = self.canary_problem = self.crash = self.answer = ""
        self.stopped = self.ended = False
        self.api_up = self.canary_right = False
        self.running_requests: int | None = None

    def prepare(self, fabric: Fabric) -> None:
        """Have every node make its container."""
        self._spawn(self._prepare(fabric))

    def go(self) -> None:
        """Start rank 0, then the others, and wait for the API."""
        self._spawn(self._go())

    def check(self) -> None:
        """Ask the canary question."""
        self._spawn(self._check())

    def watch(self) -> None:
        """Keep an eye on the serving API."""
        self._spawn(self._watch())

    async def end(self, cause: Cause, reason: str, drain_seconds: int) -> None:
        """End every rank.

        With a drain, a serving rank 0 finishes its requests first, which needs the others.
        """
        await self.cancel()
        if drain_seconds and await self._idle():
            drain_seconds = 0
        self.stopped = not drain_seconds
        stop = Stop(epoch=self.number, reason=reason, fault=cause is Cause.FAULT)
        end = self._rank.end(reason, fault=cause is Cause.FAULT, grace_seconds=drain_seconds)
        if drain_seconds:
            await end
            self.stopped = True
            await self._members.tell_all(stop, every_path=True)
        else:
            await asyncio.gather(self._members.tell_all(stop, every_path=True), end)
        self.ended = True
        self._wake()

    async def _idle(self) -> bool:
        """Return whether the engine says that it has no request: there is nothing to drain then."""
        api = self._api()
        try:
            return self._engine.running_requests(await api.metrics()) == 0
        finally:
            await api.close()

    async def cancel(self) -> None:
        """Stop this epoch's own work, and return once nothing of it runs any more."""
        work = list(self._tasks)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    async def _prepare(self, fabric: Fabric) -> None:
        try:
            inspect = await self._docker.image(self._settings.image)
            launch = Launch(
                epoch=self.number,
                settings=self._settings,
                image_content=image_content(inspect),
                master=self._node.lead.fabric[0],
                world=len(self._node.nodes),
            )
            await self._members.tell_all(Prepare(launch=launch), every_path=True)
            await self._rank.prepare(launch, self._engine, fabric)
        except Glm53Error as error:
            self.prepare_problem = str(error)
            self._wake()

    async def _go(self) -> None:
        try:
            await self._rank.start()
        except Glm53Error as error:
            self.prepare_problem = str(error)
            self._wake()
            return
        await self._members.tell_all(Go(epoch=self.number), every_path=True)
        log.info(
            event("every rank was told to start", epoch=self.number, engine_log="journalctl -t glm53-rank0")
        )
        api = self._api()
        try:
            while not await api.up():
                await self._world.sleep(API_POLL_SECONDS)
        finally:
            await api.close()
        self.api_up = True
        self._wake()

    async def _check(self) -> None:
        api = self._api()
        try:
            self.answer, self.canary_problem = await api.canary(self._settings)
        finally:
            await api.close()
        self.canary_right = not self.canary_problem
        self._wake()

    async def _watch(self) -> None:
        api, misses = self._api(), 0
        try:
            while True:
                self.running_requests = self._engine.running_requests(await api.metrics())
                misses = 0 if await api.up() else misses + 1
                if misses >= API_MISSES_ALLOWED:
                    self.api_problem = f"rank 0's API gave no 200 on /health {misses} times in a row"
                    self._wake()
                await self._world.sleep(METRICS_SECONDS if not misses else 1.0)
        finally:
            await api.close()

    def _api(self) -> Api:
        return Api(self._engine.api_address(self._settings, self._node.lead.management))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Work that fails in an unforeseen way ends the epoch; silence would leave it waiting for ever."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(event("the epoch's own work failed", error=repr(error)), exc_info=error)
            self.crash = repr(error)
            self._wake()
