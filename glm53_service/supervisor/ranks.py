"""One rank's container on this node, from preparation to removal, with the evidence kept in between."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from glm53_service.artifacts.cache import give_back
from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.artifacts.draft import read_draft_files
from glm53_service.docker import DockerApi, remove_ours
from glm53_service.drafter import DrafterKind, check_files
from glm53_service.engines.base import ContainerSpec, Engine, Launch, Line, LineKind, Place
from glm53_service.errors import Glm53Error, UnavailableError
from glm53_service.evidence import save_evidence
from glm53_service.fabric.nccl import Network
from glm53_service.fabric.rails import Fabric
from glm53_service.files import read_json, write_durably
from glm53_service.story import event
from glm53_service.supervisor.messages import RankState, Report
from glm53_service.supervisor.ports import listening_sockets
from glm53_service.supervisor.world import World
from glm53_service.system import GIB, largest_processes, read_memory

log = logging.getLogger(__name__)

TAIL_LINES = 400
CONTENT_DIGITS = 12
MEMORY_POLL_SECONDS = 2.0
ARGUMENT_CHECK_SECONDS = 300.0
KNOWN_ARGUMENTS = 16
DOCKER_STATE = ("systemctl", "show", "--value", "-p", "ActiveState", "docker.service")
LAST_LINES_SECONDS = 0.3
"""A rank's exit is known before its last lines are read; they say why, and what to try next."""

BUILD_LOCKS = "torch_extensions/*/lock"
"""torch's lock on a kernel build: no rank runs while one is prepared, so a lock here is stale."""


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
        on_change: Callable[[], None],
        on_line: Callable[[Line], None],
    ) -> None:
        self._world = world
        self._docker = docker
        self._cluster = cluster
        self._rank = rank
        self._management = management
        self._on_change = on_change
        self._on_line = on_line
        self._container: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._last_error = ""
        self._network = Network()
        self._epoch = 0
        self.report = Report()

    def place(self, fabric: Fabric, content: str) -> Place:
        """Return where this rank runs; its cache folder is the image's own, since compiled kernels belong
        to it.
        """
        digits = content.removeprefix("sha256:")[:CONTENT_DIGITS]
        return Place(
            rank=self._rank,
            management=self._management,
            fabric=fabric,
            uid=os.getuid(),
            gid=os.getgid(),
            cache=str(self._world.state / "cache" / digits),
        )

    async def prepare(self, launch: Launch, engine: Engine, fabric: Fabric) -> None:
        """Create (not start) this rank's container for `launch`; Glm53Error says why it cannot be made
        here.
        """
        self._engine = engine
        self._epoch = launch.epoch
        await remove_ours(self._docker, self._cluster)
        image = await self._image(launch)
        self._check_model(Path(launch.settings.model.path))
        place = self.place(fabric, launch.image_content)
        self._check_drafter(launch)
        self._check_ports(engine.listens(launch, place))
        await self._wait_for_memory(launch, engine)
        try:
            Path(place.cache).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnavailableError(
                f"{place.cache} cannot be made: {error.strerror}",
                hint="it belongs to user glm53; is the disk full, or something of another owner in the way?",
            ) from None
        for lock in Path(place.cache).glob(BUILD_LOCKS):
            log.warning(event("removed a build lock that a killed build left", lock=lock))
            lock.unlink(missing_ok=True)
        if self._rank == 0:
            await self._check_arguments(engine, engine.argument_check(launch, place, image))
        spec = engine.container(launch, place, image)
        self._container = await self._docker.create(spec)
        self._tail.clear()
        self._last_error = ""
        self._network = Network()
        self._set(RankState.CREATED, command=spec.shell(), fabric=fabric)

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
        await self._docker.start(self._container)
        self._change(RankState.RUNNING)
        self._tasks = [
            asyncio.create_task(self._follow(self._container)),
            asyncio.create_task(self._await_exit(self._container)),
        ]

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
                        container, reason, fault=fault, grace_seconds=grace_seconds if running else 0
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
        if fault:
            await self._keep_evidence(container, reason)
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
                    "reason": self.report.reason,
                },
                indent=1,
            ),
        }
        try:
            files["inspect.json"] = json.dumps(await self._docker.inspect(container), indent=1)
            files["meminfo.txt"] = (self._world.root / "proc/meminfo").read_text(encoding="ascii")
        except (Glm53Error, OSError) as error:
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
                return str(inspect["Id"])
            found = (
                f"image {reference} differs from the head's: {content[:19]} here,"
                f" {launch.image_content[:19]} there"
            )
        raise UnavailableError(found, hint="run site.yml: it ships the head's image")

    def _check_model(self, path: Path) -> None:
        try:
            readable = (path / "config.json").read_bytes()
        except OSError as error:
            raise UnavailableError(
                f"{path}/config.json cannot be read by this service: {error.strerror}",
                hint="run site.yml: it ships the head's model directory",
            ) from None
        if not readable:
            raise UnavailableError(f"{path}/config.json is empty", hint="run site.yml again")

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

    async def _check_arguments(self, engine: Engine, spec: ContainerSpec) -> None:
        """Let the image's own parser read the arguments, once for each image and command line."""
        said = "\0".join((spec.image, *(spec.entrypoint or ()), *spec.command)).encode()
        key = hashlib.sha256(said).hexdigest()
        path = self._world.state / "arguments.json"
        known = list(read_json(path).get("accepted", []))
        if key in known:
            return
        container = await self._docker.create(spec)
        try:
            await self._docker.start(container)
            async with asyncio.timeout(ARGUMENT_CHECK_SECONDS):
                lines = [line async for line in self._docker.lines(container)]
                code = await self._docker.wait(container)
        except TimeoutError:
            raise UnavailableError(
                f"the image's parser gave no answer within {ARGUMENT_CHECK_SECONDS:g} s",
                hint="is it the engine's image? docker logs and the journal have what it said",
            ) from None
        finally:
            await self._docker.remove(container)
        problem = engine.read_argument_check(code, "\n".join(lines))
        if problem:
            raise UnavailableError(problem, hint="mend the engine settings in the inventory and run site.yml")
        write_durably(path, json.dumps({"accepted": [*known, key][-KNOWN_ARGUMENTS:]}))

    async def _wait_for_memory(self, launch: Launch, engine: Engine) -> None:
        need = launch.settings.supervision.min_free_gib
        deadline = self._world.clock() + launch.settings.supervision.min_free_wait_seconds
        while (free := read_memory(self._world.root).free / GIB) < need:
            # Page cache of the weights counts against CUDA, and nothing else would ever give it back.
            await asyncio.to_thread(give_back, Path(launch.settings.model.path))
            if self._world.clock() >= deadline:
                holders = ", ".join(largest_processes(self._world.root))
                raise UnavailableError(
                    f"MemFree is {free:.1f} GiB, {need:g} needed; the largest processes: {holders}",
                    hint="stop them, or drop the page cache, or lower supervision.min_free_gib",
                )
            await self._world.sleep(MEMORY_POLL_SECONDS)
        problem = engine.memory_problem(launch.settings, read_memory(self._world.root))
        if problem:
            holders = ", ".join(largest_processes(self._world.root))
            raise UnavailableError(f"{problem}; the largest processes: {holders}")

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
            # At once: a restart of docker is over in less time than the last lines are given.
            stopping = self.report.state is RankState.RUNNING and await self._docker_is_stopping()
            await asyncio.wait(self._tasks[:1], timeout=LAST_LINES_SECONDS)
            reason = self._last_error
            if stopping:
                code, reason = None, "docker is being stopped here, and its containers with it"
        except UnavailableError as error:
            code, reason = None, error.message
        if self.report.state is not RankState.ENDING:
            self._change(RankState.EXITED, code, reason)

    async def _docker_is_stopping(self) -> bool:
        """Return whether systemd is stopping docker: the containers end first, and that is no fault of the
        engine.
        """
        try:
            state = await self._world.runner(DOCKER_STATE)
        except UnavailableError:
            return False
        return state.strip() in ("deactivating", "inactive", "failed")

    def _change(self, state: RankState, exit_code: int | None = None, reason: str = "") -> None:
        """Report another state of the same container."""
        self._set(
            state,
            exit_code=exit_code,
            reason=reason,
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
            command=command,
            fabric=fabric,
            refused=refused,
        )
        self._on_change()
