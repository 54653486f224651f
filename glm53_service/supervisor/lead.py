"""The lead: forms epochs with its followers, runs rank 0, and says ready only after a right answer.

`decide` makes every choice; this module gathers what it looks at and carries out what it says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from glm53_service.artifacts.content import image_content
from glm53_service.canary import Api
from glm53_service.docker import DockerApi
from glm53_service.engines import engine_for
from glm53_service.engines.base import Launch, Line, LineKind
from glm53_service.errors import GaveUpError, Glm53Error, UnavailableError
from glm53_service.fabric.probe import probe
from glm53_service.fabric.rails import Fabric
from glm53_service.ledger import Ledger
from glm53_service.node import Node
from glm53_service.settings import Settings
from glm53_service.status import RankStatus, Status
from glm53_service.story import event
from glm53_service.supervisor.decide import (
    Action,
    Cause,
    Decision,
    Phase,
    Snapshot,
    backoff_seconds,
    decide,
)
from glm53_service.supervisor.members import ROUTE, Members, listening_sockets
from glm53_service.supervisor.messages import Bye, Go, Prepare, Progress, Stop, Welcome
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.service import gate_addresses, keep_alive, on_signals, serve, start_gate
from glm53_service.supervisor.world import World

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
API_POLL_SECONDS = 0.25
IDLE_LOOK_SECONDS = 2.0
METRICS_SECONDS = 10.0
API_MISSES_ALLOWED = 3


class Lead:
    """The supervisor beside rank 0.

    `run` returns when it was asked to stop, and raises GaveUpError when it gives up.
    """

    def __init__(
        self,
        node: Node,
        settings: Settings,
        tokens: tuple[str, ...],
        release: str,
        docker: DockerApi,
        world: World,
    ) -> None:
        self._node, self._settings, self._release = node, settings, release
        self._docker, self._world = docker, world
        self._engine = engine_for(settings)
        self._wake = asyncio.Event()
        self._ledger = Ledger(world.state / "ledger.json", world.wall)
        times = settings.supervision
        self._members = Members(
            node,
            tokens,
            release,
            Welcome(
                instance=secrets.token_hex(8),
                heartbeat_seconds=times.heartbeat_seconds,
                lease_seconds=times.lease_seconds,
                peer_lost_seconds=times.peer_lost_seconds,
            ),
            clock=world.clock,
            wall=world.wall,
            on_change=self._wake.set,
            on_progress=self._follower_progress,
        )
        self._rank = Rank(
            world,
            docker,
            node.cluster,
            rank=0,
            management=node.lead.management,
            on_change=self._wake.set,
            on_line=self._line,
        )
        self._phase = Phase.IDLE
        self._phase_since = self._progress_at = world.clock()
        self._epoch = 0
        self._instances: dict[str, str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch_tasks: set[asyncio.Task[None]] = set()
        self._stop_requested = False
        self._docker_problem = self._prepare_problem = self._api_problem = self._canary_problem = ""
        self._fabric = Fabric(rails=(), problem="not looked at yet")
        self._looked_at = -IDLE_LOOK_SECONDS
        self._api_up = self._canary_right = self._was_ready = False
        self._resume_at = 0.0
        self._progress = self._answer = self._last_end = ""
        self._epochs_ended = 0
        self._running_requests: int | None = None
        self._state_since = world.wall()
        self._decision = Decision(action=Action.NONE, state="waiting")

    @property
    def endpoint(self) -> str:
        """The API's base URL."""
        host = self._node.lead.management if self._settings.api.bind == "management" else "127.0.0.1"
        return f"http://{host}:{self._settings.api.port}/v1"

    async def run(self) -> None:
        """Supervise until asked to stop."""
        on_signals(self._request_stop)
        app = web.Application()
        app.router.add_get(ROUTE, self._members.handle)
        own = self._node.lead
        peers = await serve(app, listening_sockets([*own.fabric, own.management], self._node.supervisor_port))
        gate = await start_gate(
            self.status,
            listening_sockets(gate_addresses(self._settings.gate, own.management), self._settings.gate.port),
        )
        log.info(
            event(
                "lead is up",
                node=own.node,
                cluster=self._node.cluster,
                release=self._release,
                engine=self._settings.engine,
                model=self._settings.model.name,
            )
        )
        self._spawn(keep_alive(self._world.notifier))
        self._spawn(self._beat())
        try:
            await self._loop()
        finally:
            self._world.notifier.stopping()
            for task in [*self._tasks, *self._epoch_tasks]:
                task.cancel()
            await asyncio.gather(*self._tasks, *self._epoch_tasks, return_exceptions=True)
            await gate.cleanup()
            await peers.cleanup()

    async def _loop(self) -> None:
        await self._rank.end("a leftover of an earlier supervisor", fault=False)
        while True:
            if self._phase is Phase.IDLE:
                await self._look_around()
            decision = decide(self._snapshot(), self._settings.supervision)
            self._publish(decision)
            if decision.action is Action.QUIT:
                await self._members.tell_all(Bye(reason="the lead was stopped"), every_path=True)
                return
            if decision.action is Action.GIVE_UP:
                self._ledger.give_up()
                raise GaveUpError(
                    f"gave up: {'; '.join(decision.reasons)}; the last one: {self._ledger.last_fault}",
                    hint=f"look into {self._world.state}/evidence, then systemctl restart glm53-head",
                )
            await self._act(decision)
            await self._sleep()

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    # What is known ------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        now = self._world.clock()
        return Snapshot(
            phase=self._phase,
            epoch=self._epoch,
            members=self._members.members(self._epoch, self._instances),
            local=self._rank.report,
            stop_requested=self._stop_requested,
            docker_problem=self._docker_problem,
            fabric_problem=self._fabric.problem,
            prepare_problem=self._prepare_problem,
            api_up=self._api_up,
            api_problem=self._api_problem,
            canary_right=self._canary_right,
            canary_problem=self._canary_problem,
            quiet=now - self._progress_at,
            ending_for=now - self._phase_since,
            faults=self._ledger.faults_within(self._settings.supervision.faults_window_seconds),
            resume_in=max(0.0, self._resume_at - now),
        )

    async def _look_around(self) -> None:
        """Refresh docker's and the fabric's state, at most every IDLE_LOOK_SECONDS; both can change at any
        time.
        """
        if self._world.clock() - self._looked_at < IDLE_LOOK_SECONDS:
            return
        try:
            await self._docker.ping()
            self._docker_problem = ""
        except UnavailableError as error:
            self._docker_problem = error.message
        self._fabric = await probe(
            self._node.lead.fabric,
            rdma=self._settings.device == "cuda",
            runner=self._world.runner,
            root=self._world.root,
        )
        self._looked_at = self._world.clock()

    def _request_stop(self) -> None:
        self._stop_requested = True
        self._wake.set()

    def _line(self, line: Line) -> None:
        self._moved(
            f"rank 0: {line.text}" if line.kind is not LineKind.DETAIL else "",
            error=line.kind is LineKind.ERROR,
        )

    def _follower_progress(self, node: str, progress: Progress) -> None:
        if progress.epoch == self._epoch:
            self._moved(f"{node}: {progress.text}" if progress.text else "", error=progress.error)

    def _moved(self, text: str, *, error: bool) -> None:
        self._progress_at = self._world.clock()
        if not text or text == self._progress:
            return
        if error:
            log.warning(event(text, epoch=self._epoch))
        elif self._phase is Phase.STARTING:
            log.info(event(text, epoch=self._epoch))
            self._progress = text
            self._wake.set()

    # What is done ------------------------------------------------------------------------

    async def _act(self, decision: Decision) -> None:
        match decision.action:
            case Action.BEGIN:
                self._begin()
            case Action.GO:
                self._enter(Phase.STARTING)
                self._spawn_epoch(self._go())
            case Action.CHECK:
                self._enter(Phase.CHECKING)
                log.info(event("all ranks are up; asking the canary question", epoch=self._epoch))
                self._spawn_epoch(self._check())
            case Action.SERVE:
                self._serve()
            case Action.END:
                self._end(decision.cause or Cause.FAULT, "; ".join(decision.reasons))
            case Action.SETTLE:
                self._enter(Phase.IDLE)
                self._looked_at = -IDLE_LOOK_SECONDS
                self._wake.set()
            case _:
                return

    def _begin(self) -> None:
        self._epoch = self._ledger.next_epoch()
        self._instances = self._members.instances
        self._members.new_epoch()
        self._prepare_problem = self._api_problem = self._canary_problem = self._progress = self._answer = ""
        self._api_up = self._canary_right = False
        self._running_requests = None
        self._enter(Phase.PREPARING)
        log.info(event(f"epoch {self._epoch} begins", ranks=len(self._node.nodes)))
        self._spawn_epoch(self._prepare())

    async def _prepare(self) -> None:
        try:
            inspect = await self._docker.image(self._settings.image)
            launch = Launch(
                epoch=self._epoch,
                settings=self._settings,
                image_content=image_content(inspect),
                master=self._node.lead.fabric[0],
                world=len(self._node.nodes),
            )
            await self._members.tell_all(Prepare(launch=launch))
            await self._rank.prepare(launch, self._engine, self._fabric)
        except Glm53Error as error:
            self._prepare_problem = str(error)
            self._wake.set()

    async def _go(self) -> None:
        for rank in self._ranks():
            for line in rank.rails:
                log.info(event(f"rank {rank.rank} on {rank.node} uses", rails=len(rank.rails)) + f" {line}")
            for warning in rank.warnings:
                log.warning(event(f"rank {rank.rank} on {rank.node}: {warning}"))
        try:
            await self._rank.start()
        except Glm53Error as error:
            self._prepare_problem = str(error)
            self._wake.set()
            return
        log.info(
            event(
                "rank 0 started, the others follow", epoch=self._epoch, engine_log="journalctl -t glm53-rank0"
            )
        )
        await self._members.tell_all(Go(epoch=self._epoch))
        api = self._api()
        try:
            while not await api.up():
                await self._world.sleep(API_POLL_SECONDS)
        finally:
            await api.close()
        self._api_up = True
        self._wake.set()

    async def _check(self) -> None:
        api = self._api()
        try:
            self._answer, self._canary_problem = await api.canary(self._settings)
        finally:
            await api.close()
        self._canary_right = not self._canary_problem
        self._wake.set()

    def _serve(self) -> None:
        took = self._world.clock() - self._epoch_began
        self._enter(Phase.SERVING)
        log.info(
            event(
                f"serving {self._settings.model.name}",
                endpoint=self.endpoint,
                epoch=self._epoch,
                canary=self._answer[:60].replace("\n", " "),
                seconds=took,
            )
        )
        self._spawn_epoch(self._watch_api())
        self._world.notifier.ready()
        self._wake.set()

    async def _watch_api(self) -> None:
        api, misses = self._api(), 0
        try:
            while True:
                self._running_requests = self._engine.running_requests(await api.metrics())
                misses = 0 if await api.up() else misses + 1
                if misses >= API_MISSES_ALLOWED:
                    self._api_problem = f"rank 0's API gave no 200 on /health {misses} times in a row"
                    self._wake.set()
                await self._world.sleep(METRICS_SECONDS if not misses else 1.0)
        finally:
            await api.close()

    def _end(self, cause: Cause, reason: str) -> None:
        served = self._phase is Phase.SERVING
        level = logging.INFO if cause is Cause.PLANNED else logging.WARNING
        log.log(level, event(f"epoch {self._epoch} ends: {reason}", cause=cause))
        if cause is Cause.FAULT:
            self._ledger.record_fault(reason)
        faults = self._ledger.faults_within(self._settings.supervision.faults_window_seconds)
        self._resume_at = self._world.clock() + backoff_seconds(cause, faults)
        self._last_end, self._epochs_ended = reason, self._epochs_ended + 1
        self._enter(Phase.ENDING)
        drain = int(self._settings.supervision.stop_grace_seconds) if served and cause is Cause.PLANNED else 0
        self._spawn(self._end_ranks(cause, reason, drain))

    async def _end_ranks(self, cause: Cause, reason: str, drain_seconds: int) -> None:
        work = list(self._epoch_tasks)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        stop = Stop(epoch=self._epoch, reason=reason, fault=cause is Cause.FAULT)
        end = self._rank.end(reason, fault=cause is Cause.FAULT, grace_seconds=drain_seconds)
        if drain_seconds:  # a serving rank 0 finishes its requests, which needs the others
            await end
            await self._members.tell_all(stop, every_path=True)
        else:
            await asyncio.gather(self._members.tell_all(stop, every_path=True), end)
        self._wake.set()

    # Housekeeping ------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase is Phase.PREPARING:
            self._epoch_began = self._world.clock()
        self._phase = phase
        self._phase_since = self._progress_at = self._world.clock()
        self._wake.set()

    def _api(self) -> Api:
        return Api(self.endpoint.removeprefix("http://").removesuffix("/v1"))

    async def _beat(self) -> None:
        while True:
            await self._members.beat()
            await self._world.sleep(self._settings.supervision.heartbeat_seconds)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn_epoch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._epoch_tasks.add(task)
        task.add_done_callback(self._epoch_tasks.discard)

    def _ranks(self) -> tuple[RankStatus, ...]:
        own, report = self._node.lead, self._rank.report
        fabric = report.fabric or self._fabric
        ranks = [
            RankStatus(
                rank=0,
                node=own.node,
                state=report.state,
                connected=True,
                release=self._release,
                rails=tuple(rail.line() for rail in fabric.rails),
                warnings=fabric.warnings,
                command=report.command,
            )
        ]
        for member in self._members.members(self._epoch, self._instances):
            found = member.report.fabric
            ranks.append(
                RankStatus(
                    rank=member.rank,
                    node=member.node,
                    state=member.report.state,
                    connected=member.connected,
                    release=self._members.release_of(member.node),
                    rails=tuple(self._members.fabric_line(member.node)),
                    warnings=found.warnings if found else (),
                    command=member.report.command,
                )
            )
        return tuple(ranks)

    def status(self) -> Status:
        """Return what the gate and `glm53 status` show."""
        d = self._decision
        return Status(
            role="lead",
            node=self._node.node,
            cluster=self._node.cluster,
            release=self._release,
            state=d.state,
            ready=d.ready,
            epoch=self._epoch,
            since=self._state_since,
            reasons=d.reasons,
            progress=self._progress,
            endpoint=self.endpoint,
            model=self._settings.model.name,
            answer=self._answer,
            faults=self._ledger.faults_within(self._settings.supervision.faults_window_seconds),
            epochs_ended=self._epochs_ended,
            last_end=self._last_end,
            running_requests=self._running_requests,
            ranks=self._ranks(),
        )

    def _publish(self, decision: Decision) -> None:
        changed = decision.state != self._decision.state
        if changed:
            self._state_since = self._world.wall()
        if decision.state in ("waiting", "backoff") and _without_figures(decision) != _without_figures(
            self._decision
        ):
            log.info(event(f"{decision.state}: {'; '.join(decision.reasons)}"))
        if decision.state == "serving" and decision.reasons and decision.ready != self._was_ready:
            log.warning(event(f"not ready: {'; '.join(decision.reasons)}"))
        self._was_ready = decision.ready
        self._decision = decision
        self._world.notifier.status(self.status().line())


def _without_figures(decision: Decision) -> tuple[str, tuple[str, ...]]:
    return decision.state, tuple("".join(c for c in reason if not c.isdigit()) for reason in decision.reasons)
