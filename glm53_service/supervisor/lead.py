"""The lead: forms epochs with its followers, runs rank 0, and says ready only after a right answer.

`decide` makes every choice; this module gathers what it looks at and carries out what it says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec
from aiohttp import web

from glm53_service.config import Value
from glm53_service.docker import DockerApi
from glm53_service.engines import engine_for
from glm53_service.engines.base import LineKind
from glm53_service.errors import GaveUpError
from glm53_service.ledger import Ledger
from glm53_service.node import Node
from glm53_service.recovery import Recovery, recover
from glm53_service.settings import Settings
from glm53_service.status import RankStatus, Status
from glm53_service.story import event
from glm53_service.supervisor.decide import (
    Action,
    Cause,
    Decision,
    Member,
    Phase,
    Snapshot,
    backoff_seconds,
    decide,
    exited_ranks,
)
from glm53_service.supervisor.epoch import FIRST, Epoch
from glm53_service.supervisor.members import ROUTE, Members
from glm53_service.supervisor.messages import Beat, Bye, Progress, Stop, Welcome
from glm53_service.supervisor.ports import listening_sockets
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.service import (
    Background,
    gate_addresses,
    keep_alive,
    on_signals,
    serve,
    start_gate,
)
from glm53_service.supervisor.signs import Signs
from glm53_service.supervisor.surroundings import Surroundings
from glm53_service.supervisor.watch import Watch
from glm53_service.supervisor.world import World

log = logging.getLogger(__name__)

TICK_SECONDS = 0.3


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
        welcome = Welcome(
            instance=secrets.token_hex(8),
            heartbeat_seconds=times.heartbeat_seconds,
            lease_seconds=times.lease_seconds,
            peer_lost_seconds=times.peer_lost_seconds,
        )
        self._members = Members(
            node,
            tokens,
            release,
            welcome,
            clock=world.clock,
            wall=world.wall,
            on_change=self._wake.set,
            on_progress=self._follower_progress,
        )
        self._signs = Signs(world.clock, tells=self._tells, on_fatal=self._fatal, on_news=self._wake.set)
        self._rank = Rank(
            world,
            docker,
            node.cluster,
            rank=0,
            management=node.lead.management,
            gpu_mode=node.gpu_mode,
            on_change=self._wake.set,
            on_line=self._signs.line,
        )
        self._watch = Watch(
            world,
            docker,
            self._rank,
            node=node.lead.node,
            times=lambda: settings.supervision,
            loading=lambda: self._phase is Phase.STARTING,
            busy=self._busy,
            on_look=lambda vitals, sign: self._signs.look(node.lead.node, vitals, sign),
        )
        self._phase = Phase.IDLE
        self._phase_since = world.clock()
        self._epoch: Epoch | None = None
        self._background = Background()
        self._stop_requested = False
        self._around = Surroundings(node, docker, world, rdma=settings.device == "cuda")
        self._resume_at = 0.0
        self._last_end = ""
        self._refused = False
        self._next: Recovery | None = None
        self._epochs_ended = 0
        self._exit_at: float | None = None
        self._state_since = world.wall()
        self._decision = Decision(action=Action.NONE, state="waiting")

    @property
    def endpoint(self) -> str:
        """The API's base URL."""
        return f"http://{self._engine.api_address(self._settings, self._node.lead.management)}/v1"

    async def run(self) -> None:
        """Supervise until asked to stop."""
        on_signals(self._request_stop)
        app = web.Application()
        app.router.add_get(ROUTE, self._members.handle)
        own = self._node.lead
        peers = await serve(app, listening_sockets([*own.fabric, own.management], self._node.supervisor_port))
        gate_at = gate_addresses(self._settings.gate, own.management)
        gate = await start_gate(self.status, listening_sockets(gate_at, self._settings.gate.port))
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
        self._background.spawn(keep_alive(self._world.notifier))
        self._background.spawn(self._beat())
        self._watch.start(self._background)
        try:
            await self._loop()
        finally:
            self._world.notifier.stopping()
            if self._epoch is not None:
                await self._epoch.cancel()
            await self._background.cancel()
            await gate.cleanup()
            await peers.cleanup()

    async def _loop(self) -> None:
        while True:
            self._background.check()
            if self._phase is Phase.IDLE:
                await self._around.look()
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
            self._act(decision)
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    # What is known

    def _snapshot(self) -> Snapshot:
        now, epoch = self._world.clock(), self._epoch
        members, number = self._current_members(), epoch.number if epoch else 0
        exited = exited_ranks((self._rank.report, *(m.report for m in members)), number)
        # Not since the last look without one: that may be a whole tick ago.
        self._exit_at = (self._exit_at if self._exit_at is not None else now) if exited else None
        return Snapshot(
            phase=self._phase,
            epoch=number,
            members=members,
            local=self._rank.report,
            stop_requested=self._stop_requested,
            docker_problem=self._around.docker_problem,
            fabric_problem=self._around.fabric.problem,
            prepare_problem=epoch.prepare_problem if epoch else "",
            api_up=bool(epoch and epoch.api_up),
            api_problem=epoch.api_problem if epoch else "",
            canary_right=bool(epoch and epoch.canary_right),
            canary_problem=epoch.canary_problem if epoch else "",
            crash=epoch.crash if epoch else "",
            quiet=self._signs.quiet(now),
            idle=self._signs.idle(now),
            phase_for=now - self._phase_since,
            ended=bool(epoch and epoch.ended),
            exit_known_for=0.0 if self._exit_at is None else now - self._exit_at,
            faults=self._faults(),
            resume_in=max(0.0, self._resume_at - now),
        )

    def _current_members(self) -> tuple[Member, ...]:
        if self._epoch is None or self._phase is Phase.IDLE:
            return self._members.members(0, None)
        return self._members.members(self._epoch.number, self._epoch.instances)

    def _faults(self) -> int:
        return self._ledger.faults_within(self._settings.supervision.faults_window_seconds)

    def _request_stop(self) -> None:
        self._stop_requested = True
        self._wake.set()

    def _tells(self, kind: LineKind) -> bool:
        """Return whether a milestone, or an error, is news now; what an ending rank says is none."""
        if kind is LineKind.PROGRESS:
            return self._phase is Phase.STARTING
        return self._phase is not Phase.ENDING

    def _follower_progress(self, node: str, progress: Progress) -> None:
        if self._epoch is not None and progress.epoch == self._epoch.number:
            self._signs.heard(node, progress)

    def _fatal(self, text: str) -> None:
        """A rank said that it can serve no more, though no process ended."""
        if self._epoch is not None and self._phase in (Phase.CHECKING, Phase.SERVING):
            self._epoch.api_problem = text
            self._wake.set()

    def _busy(self) -> bool:
        return bool(self._epoch and self._phase is Phase.SERVING and self._epoch.running_requests)

    # What is done

    def _act(self, decision: Decision) -> None:
        if decision.action is Action.BEGIN:
            self._begin()
            return
        epoch = self._epoch
        if epoch is None:
            return
        match decision.action:
            case Action.GO:
                self._enter(Phase.STARTING)
                self._tell_rails()
                epoch.go()
            case Action.CHECK:
                self._enter(Phase.CHECKING)
                log.info(event("all ranks are up; asking the canary question"))
                epoch.check()
            case Action.SERVE:
                self._serve(epoch)
            case Action.END:
                self._end(epoch, decision.cause or Cause.FAULT, "; ".join(decision.reasons))
            case Action.SETTLE:
                self._enter(Phase.IDLE)
                self._around.forget()
            case _:
                return

    def _begin(self) -> None:
        if self._epoch is not None:
            self._last_end = "; ".join(
                filter(None, (self._last_end, *self._members.rebooted(self._epoch.instances)))
            )
        self._epoch = Epoch(
            self._ledger.next_epoch(),
            self._members.instances,
            node=self._node,
            settings=self._settings,
            engine=self._engine,
            rank=self._rank,
            members=self._members,
            docker=self._docker,
            world=self._world,
            wake=self._wake.set,
            drafter=self._next.drafter if self._next else None,
            attempt=self._next.attempt if self._next else FIRST,
        )
        self._signs.begin()
        self._enter(Phase.PREPARING)
        log.log(
            logging.DEBUG if self._refused else logging.INFO,
            event(f"epoch {self._epoch.number} begins", ranks=len(self._node.nodes)),
        )
        self._epoch.prepare()

    def _tell_rails(self) -> None:
        for rank in self._ranks():
            for rail in rank.rails:
                log.info(event(f"rank {rank.rank} on {rank.node}:", rails=len(rank.rails)) + f" {rail}")
            for warning in rank.warnings:
                log.warning(event(f"rank {rank.rank} on {rank.node}: {warning}"))

    def _serve(self, epoch: Epoch) -> None:
        self._enter(Phase.SERVING)
        log.info(
            event(
                f"serving {self._settings.model.name}",
                endpoint=self.endpoint,
                epoch=epoch.number,
                canary=epoch.answer[:60].replace("\n", " "),
                seconds=self._world.clock() - epoch.began,
            )
        )
        self._next = None
        epoch.watch()
        self._world.notifier.ready()

    def _end(self, epoch: Epoch, cause: Cause, reason: str) -> None:
        served = self._phase is Phase.SERVING
        retried = self._retry(epoch, reason) if cause is Cause.FAULT else False
        level = logging.INFO if cause is Cause.PLANNED else logging.WARNING
        if cause is Cause.REFUSED and reason == self._last_end:
            level = logging.DEBUG  # asked again every few seconds, for hours perhaps: said once
        log.log(level, event(f"epoch {epoch.number} ends: {reason}", cause=cause))
        if cause is Cause.FAULT and not retried:
            advice = self._engine.advice(f"{reason}\n{self._rank.tail}")
            reason = f"{reason}. {advice}" if advice else reason
            self._ledger.record_fault(reason)
        wait = 0.0 if retried else backoff_seconds(cause, self._faults())
        self._resume_at = self._world.clock() + wait
        self._last_end, self._epochs_ended = reason, self._epochs_ended + 1
        self._refused = cause is Cause.REFUSED
        self._enter(Phase.ENDING)
        drain = int(self._settings.supervision.stop_grace_seconds) if served and cause is Cause.PLANNED else 0
        self._background.spawn(epoch.end(cause, reason, drain))

    def _retry(self, epoch: Epoch, reason: str) -> bool:
        """Take the engine's own way out of a start that failed, where it has one; it is no fault then."""
        self._next = None
        if self._phase is Phase.STARTING and epoch.launch is not None:
            self._next = recover(self._engine, epoch.launch, f"{reason}\n{self._rank.tail}")
        if self._next is not None:
            log.warning(event(self._next.reason))
        return self._next is not None

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._phase_since = self._world.clock()
        self._signs.restart()
        if phase in (Phase.STARTING, Phase.CHECKING):
            # At once: a ready engine leaves less memory than the followers let a loading one take.
            self._background.spawn(self._members.tell_all(self._own_beat(), every_path=True))
        self._wake.set()

    def _own_beat(self) -> Beat:
        return Beat(loading=self._phase is Phase.STARTING, busy=self._busy())

    async def _beat(self) -> None:
        while True:
            await self._members.beat(self._own_beat())
            epoch = self._epoch
            if epoch is not None:
                await epoch.repeat()
            current = None if epoch is None or epoch.stopped or self._phase is Phase.IDLE else epoch.number
            for node, stray in self._members.strays(current):
                reason = "this epoch is over"
                await self._members.tell(node, Stop(epoch=stray, reason=reason, fault=False))
            await self._world.sleep(self._settings.supervision.heartbeat_seconds)

    # What is shown

    def _ranks(self) -> tuple[RankStatus, ...]:
        first = self._rank.report.shown(
            0, self._node.lead.node, release=self._release, seen=self._around.fabric
        )
        return tuple(
            msgspec.structs.replace(
                r, vitals=self._signs.vitals.get(r.node) if r.state == "running" else None
            )
            for r in (first, *self._members.statuses())
        )

    def _chosen(self) -> tuple[Value, ...]:
        launch = self._epoch.launch if self._epoch else None
        return self._engine.resolved(launch.settings, launch.choice, launch.attempt) if launch else ()

    def status(self) -> Status:
        """Return what the gate and `glm53 status` show."""
        d, epoch = self._decision, self._epoch
        return Status(
            role="lead",
            node=self._node.node,
            cluster=self._node.cluster,
            release=self._release,
            state=d.state,
            ready=d.ready,
            epoch=epoch.number if epoch else 0,
            since=self._state_since,
            reasons=d.reasons,
            progress=self._signs.progress,
            endpoint=self.endpoint,
            model=self._settings.model.name,
            answer=epoch.answer if epoch else "",
            answered_at=epoch.answered_at if epoch else 0.0,
            faults=self._faults(),
            epochs_ended=self._epochs_ended,
            last_end=self._last_end,
            running_requests=epoch.running_requests if epoch else None,
            chosen=self._chosen(),
            ranks=self._ranks(),
        )

    def _publish(self, decision: Decision) -> None:
        before, self._decision = self._decision, decision
        if decision.state != before.state:
            self._state_since = self._world.wall()
        reasons = "; ".join(decision.reasons)
        if decision.state in ("waiting", "backoff") and _kind(decision) != _kind(before):
            log.info(event(f"{decision.state}: {reasons}"))
        if decision.state == "serving" and before.state == "serving" and decision.ready != before.ready:
            log.warning(event("ready again" if decision.ready else f"not ready: {reasons}"))
        self._world.notifier.status(self.status().line())


def _kind(decision: Decision) -> tuple[str, str]:
    """Return what a decision says without its running figures, so that a waiting second is no news."""
    return decision.state, "".join(c for c in "; ".join(decision.reasons) if not c.isdigit())
