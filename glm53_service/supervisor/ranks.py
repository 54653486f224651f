"""One rank's container on this node, from preparation to removal, with the evidence kept in between."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.artifacts.draft import read_draft_files
from glm53_service.artifacts.kernels import cache_folder, open_cache
from glm53_service.artifacts.ready import check_model
from glm53_service.artifacts.served import note_image
from glm53_service.docker import DockerApi, remove_ours
from glm53_service.drafter import DrafterKind, check_files
from glm53_service.engines.base import Engine, GpuMode, Launch, Line, LineKind, Place
from glm53_service.errors import Glm53Error, UnavailableError
from glm53_service.evidence import save_evidence
from glm53_service.exits import exit_text
from glm53_service.fabric.nccl import Network
from glm53_service.fabric.rails import Fabric
from glm53_service.story import event
from glm53_service.supervisor.argument_check import check_arguments
from glm53_service.supervisor.leftovers import BOOT_LABEL
from glm53_service.supervisor.memory import wait_for_memory
from glm53_service.supervisor.messages import RankState, Report
from glm53_service.supervisor.ports import listening_sockets
from glm53_service.supervisor.world import World
from glm53_service.system import Memory, largest_processes, read_boot_id

log = logging.getLogger(__name__)

TAIL_LINES = 400
DOCKER_STATE = ("systemctl", "show", "-p", "ActiveState,ActiveEnterTimestampMonotonic", "docker.service")
LAST_LINES_SECONDS = 0.3
"""A rank's exit is known before its last lines are read; they say why, and what to try next."""


class Rank:
    """The rank of this node.

    `report` is what the pair knows of it; `on_change` is called whenever it changes.
    """

    def __init__(
        self,
        world: World,
        docker: DockerApi,
        cluster: str,
        *,
        rank: int,
        management: str,
        gpu_mode: GpuMode,
        on_change: Callable[[], None],
        on_line: Callable[[Line], None],
    ) -> None:
        self._world = world
        self._docker = docker
        self._cluster = cluster
        self._rank = rank
        self._management = management
        self._gpu_mode = gpu_mode
        self._on_change = on_change
        self._on_line = on_line
        self._container: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._last_error = self._docker_then = ""
        self._network = Network()
        self._guard_files: dict[str, str] = {}
        self._epoch = 0
        self.report = Report()

    def place(self, fabric: Fabric, launch: Launch, engine: Engine) -> Place:
        """Return where this rank runs; its cache folder belongs to the image and what it compiles for."""
        cache = cache_folder(self._world.state, launch.image_content, engine.kernel_shape(launch))
        return Place(
            rank=self._rank,
            management=self._management,
            fabric=fabric,
            uid=os.getuid(),
            gid=os.getgid(),
            cache=str(cache),
            gpu_mode=self._gpu_mode,
        )

    async def prepare(
        self,
        launch: Launch,
        engine: Engine,
        fabric: Fabric,
        others: Callable[[], Mapping[str, Memory]] = dict,
    ) -> None:
        """Create (not start) this rank's container for `launch`; Glm53Error says why it cannot be made
        here, or that one of the `others`, by name, lacks the memory for its own.
        """
        self._engine = engine
        self._epoch = launch.epoch
        await remove_ours(self._docker, self._cluster)
        image = await self._image(launch)
        await asyncio.to_thread(check_model, Path(launch.settings.model.path))
        place = self.place(fabric, launch, engine)
        self._check_drafter(launch)
        self._check_ports(engine.listens(launch, place))
        await wait_for_memory(self._world, launch.settings, engine, others)
        try:
            stale = await asyncio.to_thread(open_cache, Path(place.cache))
        except OSError as error:
            raise UnavailableError(
                f"{place.cache} cannot be made: {error.strerror}",
                hint="it belongs to user glm53; is the disk full, or something of another owner in the way?",
            ) from None
        for lock in stale:
            log.warning(event("removed a build lock that a killed build left", lock=lock))
        if self._rank == 0:
            check = engine.argument_check(launch, place, image)
            await check_arguments(self._docker, engine, check, self._world.state)
        spec = engine.container(launch, place, image)
        boot = {BOOT_LABEL: read_boot_id(self._world.root)}
        spec = msgspec.structs.replace(spec, labels={**spec.labels, **boot})
        self._container = await self._docker.create(spec)
        self._tail.clear()
        self._last_error, self._guard_files = "", {}
        self._network = Network()
        self._set(RankState.CREATED, command=spec.shell(), fabric=fabric)

    @property
    def running(self) -> str | None:
        """The container while it runs, its last requests included, unless the guard ended it."""
        runs = self.report.state in (RankState.RUNNING, RankState.ENDING)
        return self._container if runs and not self.report.guard else None

    async def stop_at_once(self, reason: str) -> None:
        """Kill the running rank to save the machine, then tell why; its container stays, with the evidence.

        The machine may freeze at any moment, so nothing is waited for before the kill.
        """
        container = self.running
        if container is None:
            return
        kill = asyncio.create_task(self._docker.kill(container))
        self._tasks.append(kill)
        await asyncio.sleep(0)
        holders = largest_processes(self._world.root)
        self._guard_files = {"guard.txt": "\n".join((reason, *holders)) + "\n", **self._meminfo("guard-")}
        self.report = msgspec.structs.replace(
            self.report,
            serial=self.report.serial + 1,
            guard=f"{reason}; the largest processes: {', '.join(holders)}",
        )
        log.error(event(f"the rank was killed: {self.report.guard}"))
        self._on_change()

    @property
    def tail(self) -> str:
        """The last lines that this rank said."""
        return "\n".join(self._tail)

    def found(self, epoch: int, fabric: Fabric) -> None:
        """Say which rails this node has for `epoch`, which has no container yet."""
        self._epoch = epoch
        self._set(RankState.ABSENT, fabric=fabric)

    def refuse(self, epoch: int, reason: str) -> None:
        """Say that this node cannot make its rank of `epoch`."""
        self._epoch = epoch
        self._set(RankState.ABSENT, refused=reason)

    async def start(self) -> None:
        """Start the prepared container and follow its output and its end."""
        if self._container is None:
            raise UnavailableError("no container is prepared")
        self._docker_then = await self._docker_state()
        await self._docker.start(self._container)
        self._change(RankState.RUNNING)
        self._tasks = [
            self._watched(self._follow(self._container)),
            self._watched(self._await_exit(self._container)),
        ]

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that a running rank cannot do without: one that nobody watches is out of sight."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._failed)
        return task

    def _failed(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error(event("watching the rank failed", error=repr(error)), exc_info=error)
        if self.report.state is RankState.RUNNING:
            self._change(RankState.EXITED, None, f"its supervisor's own work failed: {error!r}")

    async def end(self, reason: str, *, fault: bool, grace_seconds: int = 0) -> None:
        """End the container (with a drain when there is a grace), keep evidence of a fault, remove it.

        It returns only when docker says that nothing of the cluster is left here, however long docker is
        away: "absent" is what lets the next epoch begin.
        """
        container, running = self._container, self.report.state is RankState.RUNNING
        if container is not None:
            self._change(RankState.ENDING, self.report.exit_code, self.report.reason or reason)
        told = False
        while True:
            try:
                if container is not None:
                    await self._end_container(
                        container,
                        reason,
                        fault=fault,
                        grace_seconds=grace_seconds if running and not self.report.guard else 0,
                    )
                await remove_ours(self._docker, self._cluster)
                break
            except UnavailableError as error:
                if not told:
                    log.warning(event("docker does not let the rank end; trying on", error=error.message))
                told = True
                await self._world.sleep(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self._container = [], None
        self._set(RankState.ABSENT, refused=self.report.refused)

    async def _end_container(self, container: str, reason: str, *, fault: bool, grace_seconds: int) -> None:
        if grace_seconds:
            await self._docker.stop(container, grace_seconds)
        await self._docker.kill(container)
        if fault or self.report.guard:
            await self._keep_evidence(container, self.report.guard or reason)
        await self._docker.remove(container)

    async def _keep_evidence(self, container: str, reason: str) -> None:
        files = {
            "reason.txt": reason + "\n",
            "log-tail.txt": "\n".join(self._tail) + "\n",
            "report.json": json.dumps(
                {
                    "rank": self._rank,
                    "epoch": self.report.epoch,
                    "exit_code": self.report.exit_code,
                    "exit": self.report.how,
                    "reason": self.report.reason,
                },
                indent=1,
            ),
            **self._guard_files,
            **self._meminfo(),
        }
        try:
            files["inspect.json"] = json.dumps(await self._docker.inspect(container), indent=1)
        except Glm53Error as error:
            files["incomplete.txt"] = f"{error}\n"
        try:
            folder = save_evidence(
                self._world.state / "evidence",
                f"epoch {self.report.epoch} rank {self._rank}",
                files,
                wall=self._world.wall(),
            )
        except OSError as error:
            log.error(event("evidence could not be kept", error=error.strerror))
        else:
            log.info(event("evidence kept", folder=folder))

    def _meminfo(self, prefix: str = "") -> dict[str, str]:
        try:
            text = (self._world.root / "proc/meminfo").read_text(encoding="ascii")
        except OSError as error:
            text = f"cannot be read: {error}\n"
        return {f"{prefix}meminfo.txt": text}

    async def _image(self, launch: Launch) -> str:
        """Return the local id of the launch's image: by its reference, or as it was shipped from the head."""
        reference, found = launch.settings.image, ""
        for name in (reference, local_tag(launch.image_content)):
            try:
                inspect = await self._docker.image(name)
            except UnavailableError as error:
                found = found or f"image {reference} is not on this node ({error.message})"
                continue
            content = image_content(inspect)
            if content == launch.image_content:
                self._note(str(inspect["Id"]))
                return str(inspect["Id"])
            found = (
                f"image {reference} differs from the head's: {content[:19]} here,"
                f" {launch.image_content[:19]} there"
            )
        raise UnavailableError(found, hint="run site.yml: it ships the head's image")

    def _note(self, image: str) -> None:
        try:
            note_image(self._world.state, image)
        except OSError as error:
            raise UnavailableError(
                f"{self._world.state} cannot be written: {error.strerror}",
                hint="it belongs to user glm53; is the disk full?",
            ) from None

    def _check_drafter(self, launch: Launch) -> None:
        choice = launch.choice
        if choice.kind is DrafterKind.DFLASH2:
            found = read_draft_files(Path(choice.path), self._world.state, node="this node", rank=self._rank)
            problem = check_files(choice, found)
            if problem:
                raise UnavailableError(problem)

    def _check_ports(self, addresses: tuple[str, ...]) -> None:
        """Refuse a port that somebody has: the engine would only find out after minutes of loading."""
        for address in addresses:
            host, _, port = address.rpartition(":")
            for bound in listening_sockets([host], int(port)):
                bound.close()

    async def _follow(self, container: str) -> None:
        try:
            async for text in self._docker.lines(container):
                self._tail.append(text)
                self._read_network(text)
                line = self._engine.read_line(text)
                if line.kind is LineKind.ERROR:
                    self._last_error = line.text
                self._on_line(line)
        except UnavailableError as error:
            log.debug(event("the rank's output ended", error=error.message))

    def _read_network(self, text: str) -> None:
        """Notice that NCCL took TCP: it serves, at a fraction of the speed, and nothing else would say so."""
        trouble = self._network.read(text)
        fabric = self.report.fabric
        if trouble is not None and fabric is not None:
            log.warning(event(f"rank {self._rank}: {trouble}"))
            self._set_fabric(msgspec.structs.replace(fabric, warnings=(*fabric.warnings, trouble)))

    async def _await_exit(self, container: str) -> None:
        try:
            code: int | None = await self._docker.wait(container)
            stopping = self.report.state is RankState.RUNNING and await self._docker_was_stopped()
            await asyncio.wait(self._tasks[:1], timeout=LAST_LINES_SECONDS)
            reason = self._last_error
            if stopping:
                code, reason = None, "docker is being stopped here, and its containers with it"
        except UnavailableError as error:
            code, reason = None, error.message
        how = "" if code is None else await self._exit_text(container, code)
        if self.report.state is not RankState.ENDING:
            self._change(RankState.EXITED, code, reason, how=how)

    async def _exit_text(self, container: str, code: int) -> str:
        """Return how it ended, in words; docker's State says more than the code (OOMKilled, Error)."""
        try:
            async with asyncio.timeout(LAST_LINES_SECONDS):
                state = (await self._docker.inspect(container)).get("State", {})
        except (UnavailableError, TimeoutError):
            state = {}
        return exit_text({**state, "ExitCode": code})

    async def _docker_was_stopped(self) -> bool:
        """Return whether systemd stops docker, or has since the rank's start: its containers end with it, and
        that is no fault of the engine. An exit may be heard of only when docker is back.
        """
        now = await self._docker_state()
        return bool(now) and now != self._docker_then

    async def _docker_state(self) -> str:
        """Return docker's state and since when it is up, by systemd; empty when it cannot be asked."""
        try:
            return await self._world.runner(DOCKER_STATE)
        except UnavailableError:
            return ""

    def _change(
        self, state: RankState, exit_code: int | None = None, reason: str = "", *, how: str = ""
    ) -> None:
        """Report another state of the same container."""
        self._set(
            state,
            exit_code=exit_code,
            reason=reason,
            how=how or self.report.how,
            guard=self.report.guard,
            command=self.report.command,
            fabric=self.report.fabric,
        )

    def _set_fabric(self, fabric: Fabric) -> None:
        self.report = msgspec.structs.replace(self.report, serial=self.report.serial + 1, fabric=fabric)
        self._on_change()

    def _set(
        self,
        state: RankState,
        *,
        exit_code: int | None = None,
        reason: str = "",
        how: str = "",
        guard: str = "",
        command: str = "",
        fabric: Fabric | None = None,
        refused: str = "",
    ) -> None:
        self.report = Report(
            serial=self.report.serial + 1,
            epoch=self._epoch,
            state=state,
            exit_code=exit_code,
            reason=reason,
            how=how,
            guard=guard,
            command=command,
            fabric=fabric,
            refused=refused,
        )
        self._on_change()
