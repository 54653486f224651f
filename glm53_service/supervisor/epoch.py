"""One epoch on the lead: the work that brings all ranks up, and what that work found out.

An epoch is all ranks or none. Its tasks only gather facts into its fields; what follows from them is decided
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from glm53_service.artifacts.content import image_content
from glm53_service.artifacts.draft import has_mtp_head, read_draft_files
from glm53_service.canary import STRANGE_ANSWERS, Api
from glm53_service.docker import DockerApi
from glm53_service.drafter import Choice, Refusal
from glm53_service.engines.base import Attempt, Engine, Launch
from glm53_service.engines.health import Health, Stillness, stall
from glm53_service.errors import Glm53Error, UnavailableError
from glm53_service.fabric.pairing import Agreement, Seen, agree
from glm53_service.fabric.probe import survey
from glm53_service.fabric.rails import Fabric
from glm53_service.node import Node
from glm53_service.settings import Settings, choose_drafter, long_lines
from glm53_service.story import event
from glm53_service.supervisor.decide import Cause
from glm53_service.supervisor.idle import Quiet, ask
from glm53_service.supervisor.members import Members
from glm53_service.supervisor.messages import Go, Look, Prepare, RankState, Report, Stop
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.world import World

log = logging.getLogger(__name__)

API_POLL_SECONDS = 0.25
LOOK_POLL_SECONDS = 0.05
HEALTH_SECONDS = 2.0
"""How often a serving rank 0 is looked at: a stall is seen within its limit and this."""

API_MISSES_ALLOWED = 3
FIRST = Attempt()


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
        drafter: Choice | None = None,
        attempt: Attempt = FIRST,
    ) -> None:
        self.number, self.instances, self.began = number, instances, world.clock()
        self._node, self._settings, self._engine = node, settings, engine
        self._rank, self._members, self._docker = rank, members, docker
        self._world, self._wake = world, wake
        self._tasks: set[asyncio.Task[None]] = set()
        self._drafter, self._attempt = drafter, attempt
        self.launch: Launch | None = None
        self.prepare_problem = self.api_problem = self.canary_problem = self.crash = self.answer = ""
        self.stopped = self.ended = self._asking = False
        self.answered_at = 0.0
        self.api_up = self.canary_right = False
        self.running_requests: int | None = None
        self._word: Look | Prepare | Go | None = None

    def prepare(self) -> None:
        """Have every node find its rails, agree on them, and make its container."""
        self._spawn(self._prepare())

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
        self._word = None
        await self.cancel()
        if drain_seconds and await self._idle():
            drain_seconds = 0
        self.stopped = not drain_seconds
        stop = Stop(epoch=self.number, reason=reason, fault=cause is Cause.FAULT)
        grace = self._engine.stop_seconds(self._settings, 0, serving=True) if drain_seconds else 0
        end = self._rank.end(reason, fault=cause is Cause.FAULT, grace_seconds=grace)
        if drain_seconds:
            if not self._engine.drains:
                await self._finish_requests(drain_seconds)
            await end
            self.stopped = True
            await self._members.tell_all(stop, every_path=True)
        else:
            await asyncio.gather(self._members.tell_all(stop, every_path=True), end)
        self.ended = True
        self._wake()

    async def _finish_requests(self, seconds: float) -> None:
        """Wait until no request runs, for an engine that cuts them at SIGTERM."""
        deadline = self._world.clock() + seconds
        while self._world.clock() < deadline and not await self._idle():
            await self._world.sleep(API_POLL_SECONDS)

    async def _idle(self) -> bool:
        """Return whether the engine says that it has no request: there is nothing to drain then."""
        api = self._api()
        try:
            return (await self._health(api)).running == 0
        finally:
            await api.close()

    async def repeat(self) -> None:
        """Say the latest word again to each follower whose report does not show it: both networks may have
        been dark when it was said. A follower ignores a word that it has.
        """
        word = self._word
        for member in self._members.members(self.number, self.instances):
            if word and member.same_instance and not _shows(member.report, word, self.number):
                await self._members.tell(member.node, word)

    async def _tell(self, word: Look | Prepare | Go) -> None:
        self._word = word
        await self._members.tell_all(word, every_path=True)

    async def cancel(self) -> None:
        """Stop this epoch's own work, and return once nothing of it runs any more."""
        work = list(self._tasks)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    async def _prepare(self) -> None:
        try:
            inspect = await self._docker.image(self._settings.image)
            drafter = self._drafter or await self._choose_drafter()
            fabric, agreed = await self._agree()
            launch = Launch(
                epoch=self.number,
                settings=self._settings,
                image_content=image_content(inspect),
                master=agreed.rails[0][0],
                world=len(self._node.nodes),
                drafter=drafter,
                attempt=self._attempt,
                rails=agreed.rails,
                dropped=agreed.dropped,
            )
            self.launch = launch
            log.info(event(launch.choice.line()))
            await self._tell(Prepare(launch=launch))
            await self._rank.prepare(launch, self._engine, fabric, lambda: self._members.memories)
        except Glm53Error as error:
            self.prepare_problem = str(error)
            self._wake()

    async def _agree(self) -> tuple[Fabric, Agreement]:
        """Return this node's part of the rails that join all ranks, and the whole agreement.

        Every node looks and probes at the same time. One that finds nothing usable refuses, which ends this.
        """
        rdma, own = self._settings.device == "cuda", self._node.lead
        await self._tell(Look(epoch=self.number, rdma=rdma))
        found = await survey(
            own.fabric,
            self._node.peer_fabric,
            rdma=rdma,
            runner=self._world.runner,
            root=self._world.root,
            wishes=own.wishes,
        )
        while len(others := self._members.fabrics(self.number)) < len(self._node.followers):
            await self._world.sleep(LOOK_POLL_SECONDS)
        agreed = agree(
            [
                Seen(node=own.node, fabric=found),
                *(Seen(node=peer.node, fabric=others[peer.node]) for peer in self._node.followers),
            ]
        )
        if agreed.trouble:
            raise UnavailableError(agreed.trouble.text, hint=agreed.trouble.fix)
        return found.only(agreed.rails[0], agreed.dropped), agreed

    async def _go(self) -> None:
        try:
            if self._engine.followers_first:
                await self._tell(Go(epoch=self.number))
                await self._rank.start()
            else:
                await self._rank.start()
                await self._tell(Go(epoch=self.number))
        except Glm53Error as error:
            self.prepare_problem = str(error)
            self._wake()
            return
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
            health = await self._health(api)
            wrong = self._engine.wrong_service(self.launch, health) if self.launch else ()
            if health.problem or wrong:
                self.canary_problem = "; ".join(filter(None, (health.problem, *wrong)))
            else:
                await self._ask(api, health.window or self._settings.window)
        finally:
            await api.close()
        if not self.canary_problem:
            self.canary_right, self.answered_at = True, self._world.wall()
        self._wake()

    async def _ask(self, api: Api, window: int | None) -> None:
        """Ask the canary question, then again after a long text: a model can be right on short ones only."""
        options = self._engine.canary_options(self._settings)
        canary = self._settings.canary
        lines, seconds = long_lines(canary, window), max(canary.first_seconds, canary.timeout_seconds)
        self.answer, self.canary_problem = await api.canary(self._settings, options, seconds=seconds)
        if lines and not self.canary_problem:
            _, problem = await api.canary(self._settings, options, seconds=seconds, lines=lines)
            self.canary_problem = f"after a long text: {problem}" if problem else ""

    async def _watch(self) -> None:
        api, misses, still = self._api(), 0, Stillness()
        times = self._settings.supervision
        quiet = Quiet(asked=self._world.clock())
        try:
            while True:
                health, now = await self._health(api), self._world.clock()
                quiet = quiet.after(health, now)
                if quiet.due(self._settings.canary.idle_seconds, now) and not self._asking:
                    quiet = Quiet(asked=now)
                    self._asking = True
                    self._spawn(self._ask_idle())
                self.running_requests = health.running
                misses = 0 if health.up else misses + 1
                still = still.after(health, now)
                problem = health.problem or stall(health, still.seconds(now), times)
                if misses >= API_MISSES_ALLOWED:
                    problem = f"rank 0's /health gave no answer {misses} times in a row"
                if problem:
                    self.api_problem = problem
                    self._wake()
                await self._world.sleep(HEALTH_SECONDS if not misses else 1.0)
        finally:
            await api.close()

    async def _ask_idle(self) -> None:
        """Ask an idle pair: nothing else shows that its other rank is stuck. Only a lone question counts."""
        api = self._api()
        try:
            options = self._engine.canary_options(self._settings)
            verdict = await ask(api, self._settings, options, lambda: self._health(api))
        finally:
            await api.close()
            self._asking = False
        if verdict.unknown:
            log.info(event("an idle check shows nothing: another request came", said=verdict.problem))
        elif verdict.problem:
            self.canary_problem = f"idle check: {verdict.problem}"
            self._wake()
        else:
            self.answer, self.answered_at = verdict.answer, self._world.wall()
            log.debug(event("an idle check was right"))

    async def _health(self, api: Api) -> Health:
        status, body = await api.health()
        metrics = await api.metrics() if status == 200 else ""
        try:
            return self._engine.read_health(status, body, metrics)
        except STRANGE_ANSWERS as error:
            return Health(up=True, problem=f"rank 0's /health cannot be read ({error!r}): {body[:60]!r}")

    async def _choose_drafter(self) -> Choice:
        """Return what this start drafts with; the head's files are the measure for every other rank."""
        settings = self._settings
        files = None
        if settings.drafter.path and settings.drafter.request in ("auto", "dflash2"):
            folder = Path(settings.drafter.path)
            own = await asyncio.to_thread(
                read_draft_files, folder, self._world.state, node=self._node.node, rank=0
            )
            files = (own,)
        chosen = choose_drafter(settings, files=files, mtp_head=has_mtp_head(Path(settings.model.path)))
        if isinstance(chosen, Refusal):
            raise UnavailableError("; ".join(chosen.reasons))
        return chosen

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


def _shows(report: Report, word: Look | Prepare | Go, epoch: int) -> bool:
    """Return whether a follower's report is one that comes only after it has heard `word` of `epoch`."""
    if report.epoch != epoch:
        return False
    unheard = {Look: None, Prepare: RankState.ABSENT, Go: RankState.CREATED}[type(word)]
    return bool(report.refused) or report.state is not unheard
