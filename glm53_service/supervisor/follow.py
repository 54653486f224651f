"""The follower: dials its lead, makes the rank it is told to, and ends it the moment its lease on the
epoch is over.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

import msgspec

from glm53_service.docker import DockerApi
from glm53_service.engines import engine_for
from glm53_service.engines.base import Launch, Line, LineKind
from glm53_service.errors import Glm53Error, UnavailableError
from glm53_service.fabric.probe import survey
from glm53_service.fabric.rails import Fabric, rail_lines
from glm53_service.node import Node
from glm53_service.settings import Gate, Supervision
from glm53_service.status import Status
from glm53_service.story import ErrorLines, event
from glm53_service.supervisor.decide import follower_verdict
from glm53_service.supervisor.dial import Dialler
from glm53_service.supervisor.leftovers import remove_leftovers
from glm53_service.supervisor.messages import (
    Bye,
    Go,
    Hello,
    Look,
    Message,
    PathName,
    Prepare,
    Progress,
    RankState,
    State,
    Stop,
)
from glm53_service.supervisor.ports import listening_sockets
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.service import Background, gate_addresses, keep_alive, on_signals, start_gate
from glm53_service.supervisor.watch import Watch
from glm53_service.supervisor.world import World
from glm53_service.system import read_boot_id
from glm53_service.vitals import Sign, Vitals

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
PROGRESS_SECONDS = 2.0
LEAVE_SECONDS = 5.0


class Follower:
    """The supervisor beside a rank above 0. `run` returns when it was asked to stop."""

    def __init__(
        self, node: Node, tokens: tuple[str, ...], release: str, docker: DockerApi, world: World
    ) -> None:
        self._node, self._release, self._docker, self._world = node, release, docker, world
        self._instance = secrets.token_hex(8)
        self._boot_id = read_boot_id(world.root)
        self._wake = asyncio.Event()
        self._rank = Rank(
            world,
            docker,
            node.cluster,
            rank=node.rank,
            management=node.me.management,
            gpu_mode=node.gpu_mode,
            on_change=self._report,
            on_line=self._line,
        )
        self._dialler = Dialler(
            node,
            tokens,
            world,
            hello=self._hello,
            report=lambda: self._rank.report,
            on_message=self._message,
            on_change=self._wake.set,
        )
        self._watch = Watch(
            world,
            docker,
            self._rank,
            node=node.node,
            times=lambda: self._launch.settings.supervision if self._launch else Supervision(),
            loading=lambda: self._dialler.beat.loading,
            busy=lambda: self._dialler.beat.busy,
            on_look=self._tell_vitals,
        )
        self._lead_instance = ""
        self._launch: Launch | None = None
        self._steps: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._docker_problem = ""
        self._background = Background()
        self._stop_requested = False
        self._last_progress = 0.0
        self._errors = ErrorLines(node.rank)
        self._told_to_go = False
        self._looked = ("", 0)
        self._fabric: Fabric | None = None
        self._shown = ""
        self._last_end = ""
        self._since = world.wall()

    async def run(self) -> None:
        """Follow the lead until asked to stop."""
        on_signals(self._request_stop)
        gate = await start_gate(
            self.status, listening_sockets(gate_addresses(Gate(), self._node.me.management), Gate().port)
        )
        log.info(
            event(
                "follower is up",
                node=self._node.node,
                rank=self._node.rank,
                cluster=self._node.cluster,
                release=self._release,
                lead=self._node.lead.node,
            )
        )
        self._background.spawn(keep_alive(self._world.notifier))
        self._watch.start(self._background)
        self._world.notifier.ready()
        try:
            await self._begin_clean()
            self._dialler.start()
            while not self._stop_requested:
                self._dialler.check()
                self._background.check()
                await self._tick()
            await self._leave()
        finally:
            self._world.notifier.stopping()
            await self._dialler.close()
            await self._background.cancel()
            await gate.cleanup()

    async def _begin_clean(self) -> None:
        """Return once docker has said that nothing of this cluster is left here; until then no hello is
        said.
        """
        while not self._stop_requested:
            try:
                await remove_leftovers(self._docker, self._node.cluster, self._world)
            except UnavailableError as error:
                self._docker_problem = error.message
                self._show()
                await self._world.sleep(1.0)
            else:
                self._docker_problem = ""
                return

    async def _tick(self) -> None:
        verdict = self._verdict()
        if verdict and self._launch is not None:
            log.warning(event(f"the lease on epoch {self._launch.epoch} is over: {verdict}"))
            self._end(self._launch.epoch, verdict, fault=False, unasked=True)
        self._show()
        try:
            async with asyncio.timeout(TICK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _verdict(self) -> str:
        d = self._dialler
        return follower_verdict(
            connected=d.connected,
            fabric_silence=d.silence(PathName.FABRIC),
            management_silence=d.silence(PathName.MANAGEMENT),
            same_lead=d.lead_instance == self._lead_instance,
            lease_seconds=d.times.lease_seconds,
            peer_lost_seconds=d.times.peer_lost_seconds,
        )

    async def _leave(self) -> None:
        """Say goodbye, let the lead drain rank 0 first, then end the rank here in any case."""
        await self._dialler.say(Bye(reason="its supervisor was stopped"))
        if self._launch is not None:
            patience = self._launch.settings.supervision.stop_grace_seconds + LEAVE_SECONDS
            deadline = self._world.clock() + patience
            while (
                self._rank.report.state is not RankState.ABSENT
                and self._world.clock() < deadline
                and not self._verdict()
            ):
                await self._world.sleep(0.1)
        self._end(self._launch.epoch if self._launch else 0, "its supervisor was stopped", fault=False)
        try:
            async with asyncio.timeout(LEAVE_SECONDS), self._turn:
                await self._rank.end("its supervisor was stopped", fault=False)
        except TimeoutError:
            log.error(event("docker does not let the rank end; the next start of this unit removes it"))

    # Messages

    async def _hello(self, path: PathName) -> Hello:
        return Hello(
            node=self._node.node,
            instance=self._instance,
            boot_id=self._boot_id,
            release=self._release,
            wall_time=self._world.wall(),
            path=path,
            report=self._rank.report,
        )

    def _message(self, message: Message) -> None:
        match message:
            case Look():
                self._look(message)
            case Prepare():
                self._prepare(message.launch)
            case Go() if self._launch and message.epoch == self._launch.epoch and not self._told_to_go:
                self._told_to_go = True
                self._work(self._start(message.epoch), message.epoch)
            case Stop() if self._launch and message.epoch == self._launch.epoch:
                log.info(event(f"epoch {message.epoch} ends: {message.reason}"))
                self._end(message.epoch, message.reason, fault=message.fault)
            case Bye():
                log.info(event(f"the lead leaves: {message.reason}"))
            case _:
                return

    def _look(self, look: Look) -> None:
        """Find the rails for an epoch that may begin (every message comes twice: once is enough)."""
        asked = (self._dialler.lead_instance, look.epoch)
        if asked == self._looked:
            return
        if self._launch is not None:
            self._end(self._launch.epoch, f"epoch {look.epoch} replaces it", fault=False)
        self._looked, self._fabric = asked, None
        self._work(self._survey(look), look.epoch)

    async def _survey(self, look: Look) -> None:
        me, world = self._node.me, self._world
        async with self._turn:
            found = await survey(
                me.fabric,
                self._node.peer_fabric,
                rdma=look.rdma,
                runner=world.runner,
                root=world.root,
                wishes=me.wishes,
            )
            if found.problem:
                log.warning(event(f"epoch {look.epoch} is refused: {found.problem}"))
                self._rank.refuse(look.epoch, found.problem)
            else:
                self._fabric = found
                self._rank.found(look.epoch, found)

    def _prepare(self, launch: Launch) -> None:
        if self._launch is not None:
            if launch.epoch == self._launch.epoch and self._dialler.lead_instance == self._lead_instance:
                return
            self._end(self._launch.epoch, f"epoch {launch.epoch} replaces it", fault=False)
        self._launch, self._lead_instance = launch, self._dialler.lead_instance
        self._errors, self._told_to_go = ErrorLines(self._node.rank), False
        log.info(
            event(
                f"epoch {launch.epoch} begins",
                model=launch.settings.model.name,
                engine=launch.settings.engine,
            )
        )
        self._work(self._make(launch), launch.epoch)

    async def _make(self, launch: Launch) -> None:
        async with self._turn:
            try:
                fabric = self._agreed(launch)
                await self._rank.prepare(launch, engine_for(launch.settings), fabric)
            except Glm53Error as error:
                log.warning(event(f"epoch {launch.epoch} is refused: {error}"))
                self._rank.refuse(launch.epoch, str(error))

    def _agreed(self, launch: Launch) -> Fabric:
        """Return the rails of `launch`, of those that were found for it here a moment ago."""
        if self._fabric is None or self._looked[1] != launch.epoch:
            raise UnavailableError(f"epoch {launch.epoch} was prepared before its rails were looked for")
        return self._fabric.only(launch.rails[self._node.rank], launch.dropped)

    async def _start(self, epoch: int) -> None:
        async with self._turn:
            try:
                await self._rank.start()
            except Glm53Error as error:
                self._rank.refuse(epoch, str(error))
            else:
                rank, found = self._node.rank, self._rank.report.fabric
                log.info(
                    event(f"rank {rank} started", epoch=epoch, engine_log=f"journalctl -t glm53-rank{rank}")
                )
                for line in rail_lines(found) if found else ():
                    log.info(event(f"rank {rank}: {line}"))

    def _work(self, work: Coroutine[Any, Any, None], epoch: int) -> None:
        """Run a step of `epoch`; it is cancelled when the epoch ends. (Every message comes twice.)

        An unforeseen failure is a refusal: silence would leave the whole pair waiting.
        """
        task = asyncio.create_task(work)

        def done(_: asyncio.Task[None]) -> None:
            self._steps.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error(event("the epoch's own work failed", error=repr(error)), exc_info=error)
                self._rank.refuse(epoch, f"its supervisor's own work failed: {error!r}")

        self._steps.add(task)
        task.add_done_callback(done)

    def _end(self, epoch: int, reason: str, *, fault: bool, unasked: bool = False) -> None:
        """End the rank once; later calls for the same epoch find no launch any more.

        Steps take turns, first come first served, so the rank of the next epoch is made after this one is
        gone. An end that the lead did not ask for is told as a refusal: there may be no container yet whose
        end would tell.
        """
        if self._launch is None:
            return
        self._launch, self._last_end = None, reason
        for step in self._steps:
            step.cancel()
        self._background.spawn(self._end_rank(epoch, reason, fault=fault, unasked=unasked))

    async def _end_rank(self, epoch: int, reason: str, *, fault: bool, unasked: bool) -> None:
        async with self._turn:
            await self._rank.end(reason, fault=fault)
            if unasked:
                self._rank.refuse(epoch, reason)
        log.info(event(f"the rank of epoch {epoch} is gone"))

    # What is shown ------------------------------------------------------------------------

    def _report(self) -> None:
        self._background.spawn(self._dialler.say(State(report=self._rank.report)))
        self._wake.set()

    def _line(self, line: Line) -> None:
        if line.kind is LineKind.WAITING:
            return
        now = self._world.clock()
        if line.kind is LineKind.ERROR and self._launch is not None:
            self._errors.tell(log, line.text)
        if (
            line.kind is not LineKind.PROGRESS
            and not line.fatal
            and now - self._last_progress < PROGRESS_SECONDS
        ):
            return
        self._last_progress = now
        if self._launch is not None:
            text = line.text if line.kind is LineKind.PROGRESS or line.fatal else ""
            progress = Progress(epoch=self._launch.epoch, text=text, fatal=line.fatal)
            self._background.spawn(self._dialler.say(progress))

    def _tell_vitals(self, vitals: Vitals, sign: Sign) -> None:
        if self._launch is not None:
            look = Progress(epoch=self._launch.epoch, vitals=vitals, sign=sign)
            self._background.spawn(self._dialler.say(look))

    def status(self) -> Status:
        """Return what the gate and `glm53 status` show."""
        report, launch, lead = self._rank.report, self._launch, self._node.lead
        running = report.state is RankState.RUNNING
        silent = self._docker_problem or (
            self._verdict()
            if launch
            else (
                ""
                if self._dialler.connected
                else f"waiting for {lead.node} (rank 0): {self._dialler.problem}"
            )
        )
        state = "running" if running else "idle" if self._dialler.connected else "waiting"
        rank = report.shown(self._node.rank, self._node.node, release=self._release)
        return Status(
            role="follower",
            node=self._node.node,
            cluster=self._node.cluster,
            release=self._release,
            state=state,
            ready=running and not silent,
            epoch=launch.epoch if launch else 0,
            since=self._since,
            reasons=(silent,) if silent else (),
            model=launch.settings.model.name if launch else "",
            last_end=self._last_end,
            ranks=(msgspec.structs.replace(rank, vitals=self._watch.vitals if running else None),),
        )

    def _show(self) -> None:
        now = self.status()
        shown = f"{now.state}: {'; '.join(now.reasons)}" if now.reasons else now.state
        if shown != self._shown:
            self._shown, self._since = shown, self._world.wall()
            log.info(event(shown))
        self._world.notifier.status(now.line())

    def _request_stop(self) -> None:
        self._stop_requested = True
        self._wake.set()
