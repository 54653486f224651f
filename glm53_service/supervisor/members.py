"""The lead's side of the connections: who dialled, over which networks, and when each last spoke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import WSMsgType, web

from glm53_service.errors import AuthError
from glm53_service.fabric.rails import Fabric
from glm53_service.node import Node, Peer
from glm53_service.status import RankStatus
from glm53_service.story import event
from glm53_service.supervisor import wire
from glm53_service.supervisor.decide import HOST_WENT_DOWN, Member
from glm53_service.supervisor.messages import (
    PROTOCOL,
    Beat,
    Bye,
    Hello,
    Message,
    PathName,
    Progress,
    RankState,
    Report,
    State,
    Welcome,
)
from glm53_service.system import Memory

log = logging.getLogger(__name__)

ROUTE = "/v1/peer"
HANDSHAKE_SECONDS = 5.0
STRANGERS = 64
"""How many addresses that were turned away are remembered: a scan of the network must not grow the
supervisor.
"""
INSTANCES = 16
"""Of how many supervisors of a node the boot id is remembered: an epoch's is seldom more than one back."""

NEVER = float("inf")
HAS_CONTAINER = (RankState.CREATED, RankState.RUNNING, RankState.EXITED)
CLOCK_SKEW_SECONDS = 5.0


@dataclass(slots=True)
class _Path:
    ws: web.WebSocketResponse
    transport: asyncio.BaseTransport | None
    sealer: wire.Sealer
    heard: float

    def abort(self) -> None:
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()


@dataclass(slots=True)
class _Link:
    peer: Peer
    rank: int
    instance: str = ""
    hello: Hello | None = None
    paths: dict[PathName, _Path] = field(default_factory=dict)
    heard: dict[PathName, float] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    deaf: float = NEVER
    bye: str = ""
    rejected: str = ""
    memory: Memory | None = None
    boots: dict[str, str] = field(default_factory=dict)


class Members:
    """Accepts the followers of `node` and keeps what they say.

    `on_change` is called when a decision may differ.
    """

    def __init__(
        self,
        node: Node,
        tokens: tuple[str, ...],
        release: str,
        welcome: Welcome,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None],
        on_progress: Callable[[str, Progress], None],
    ) -> None:
        self._node = node
        self._tokens = tokens
        self._release = release
        self._welcome = welcome
        self._clock = clock
        self._wall = wall
        self._on_change = on_change
        self._on_progress = on_progress
        self._turned_away: dict[str, str] = {}
        self._links = {peer.node: _Link(peer, rank) for rank, peer in enumerate(node.nodes) if rank}

    @property
    def instances(self) -> dict[str, str]:
        """The supervisor instance of each follower; an epoch belongs to exactly these."""
        return {name: link.instance for name, link in self._links.items()}

    @property
    def memories(self) -> dict[str, Memory]:
        """The memory of each connected follower's node, as of its last heartbeat."""
        return {name: link.memory for name, link in self._links.items() if link.paths and link.memory}

    def members(self, epoch: int, epoch_instances: dict[str, str] | None) -> tuple[Member, ...]:
        """Return every follower in rank order, as the decision sees it."""
        return tuple(self._member(link, epoch, epoch_instances) for link in self._links.values())

    def rebooted(self, epoch_instances: dict[str, str]) -> list[str]:
        """Return in words whose host went down and came back since an epoch of these instances."""
        return [f"{m}: {HOST_WENT_DOWN}" for m in self.members(0, epoch_instances) if m.rebooted]

    def statuses(self) -> tuple[RankStatus, ...]:
        """Return every follower in rank order, as `glm53 status` shows it."""
        return tuple(_status(link) for link in self._links.values())

    def fabrics(self, epoch: int) -> dict[str, Fabric]:
        """Return what each follower found for `epoch`, of those that have said it."""
        reports = {name: link.report for name, link in self._links.items() if link.report.epoch == epoch}
        return {name: report.fabric for name, report in reports.items() if report.fabric is not None}

    def strays(self, epoch: int | None) -> list[tuple[str, int]]:
        """Return (node, epoch) of every follower whose container belongs to no epoch, or to another than
        `epoch`.
        """
        return [
            (name, link.report.epoch)
            for name, link in self._links.items()
            if link.paths and link.report.state in HAS_CONTAINER and link.report.epoch != epoch
        ]

    async def tell(self, node: str, message: Message) -> None:
        """Send `message` over the path that spoke last; a closed connection is seen by its absence, not
        here.
        """
        paths = sorted(self._links[node].paths.values(), key=lambda p: p.heard, reverse=True)
        if paths:
            await _send(paths[0], message)

    async def tell_all(self, message: Message, *, every_path: bool = False) -> None:
        """Send `message` to each follower; with `every_path` over each network, so that one dead link
        cannot hold it.
        """
        sends = (
            [_send(path, message) for link in self._links.values() for path in list(link.paths.values())]
            if every_path
            else [self.tell(name, message) for name in self._links]
        )
        await asyncio.gather(*sends)

    async def beat(self, beat: Beat) -> None:
        """Send `beat` over every path and close those that are silent for long: their TCP may live for
        ever.
        """
        for link in self._links.values():
            for name, path in list(link.paths.items()):
                if self._clock() - path.heard > 2 * self._welcome.peer_lost_seconds:
                    self._drop(link, name, path)
        await self.tell_all(beat, every_path=True)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one dialled connection until it ends."""
        ws = web.WebSocketResponse(max_msg_size=wire.MAX_FRAME_BYTES)
        await ws.prepare(request)
        try:
            link, name, path = await self._greet(ws, request.transport)
        except (AuthError, msgspec.DecodeError, TimeoutError, TypeError) as error:
            self._turn_away(request.remote or "unknown", str(error) or "no hello in time")
            await ws.close(code=4401, message=str(error).encode()[:120])
            return ws
        try:
            async for frame in ws:
                if frame.type is WSMsgType.TEXT:
                    self._hear(link, name, path, path.sealer.open(frame.data))
        except (AuthError, msgspec.DecodeError) as error:
            log.warning(event("a connection was closed", node=link.peer.node, path=name, error=error))
        finally:
            self._drop(link, name, path)
        return ws

    def _turn_away(self, address: str, reason: str) -> None:
        """Tell of a peer that does not fit: once, for it dials again for ever."""
        if self._turned_away.get(address) != reason:
            if len(self._turned_away) >= STRANGERS:
                self._turned_away.clear()
            self._turned_away[address] = reason
            log.warning(event("a peer was turned away", address=address, error=reason))

    async def _greet(
        self, ws: web.WebSocketResponse, transport: asyncio.BaseTransport | None
    ) -> tuple[_Link, PathName, _Path]:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            opened = msgspec.json.decode(await ws.receive_str(), type=wire.Open)
            link = self._links.get(opened.node)
            if link is None:
                raise AuthError(f"{opened.node!r} is not a follower here; they are {', '.join(self._links)}")
            if opened.protocol != PROTOCOL:
                link.rejected = f"it speaks protocol {opened.protocol}, this head {PROTOCOL}: run site.yml"
                self._on_change()
                raise AuthError(f"{opened.node} speaks protocol {opened.protocol}, this head {PROTOCOL}")
            try:
                challenge, key = wire.answer(opened, self._tokens, self._node.cluster)
            except AuthError as error:
                link.rejected = error.message
                self._on_change()
                raise
            await ws.send_str(msgspec.json.encode(challenge).decode())
            path = _Path(ws, transport, wire.Sealer(key, lead=True), self._clock())
            hello = path.sealer.open(await ws.receive_str())
        if not isinstance(hello, Hello) or hello.node != opened.node:
            raise AuthError(f"{opened.node}: expected its hello")
        self._admit(link, hello, path)
        await _send(path, self._welcome)
        return link, hello.path, path

    def _admit(self, link: _Link, hello: Hello, path: _Path) -> None:
        if link.instance and link.instance != hello.instance:
            log.info(event("a newer supervisor took over", node=hello.node))
            for name, old in list(link.paths.items()):
                self._drop(link, name, old)
        elif not link.paths:
            log.info(
                event(
                    "follower connected",
                    node=hello.node,
                    rank=link.rank,
                    path=hello.path,
                    release=hello.release,
                )
            )
        skew = hello.wall_time - self._wall()
        if abs(skew) > CLOCK_SKEW_SECONDS and not link.paths:
            log.warning(event("the clocks differ; the logs will too", node=hello.node, seconds=skew))
        if link.instance != hello.instance:
            link.report, link.deaf = Report(), NEVER
            if link.hello is not None and link.hello.boot_id != hello.boot_id:
                log.warning(event(f"{hello.node}: {HOST_WENT_DOWN}"))
            link.boots[hello.instance] = hello.boot_id
            if len(link.boots) > INSTANCES:
                del link.boots[next(iter(link.boots))]
        link.instance, link.hello = hello.instance, hello
        self._learn(link, hello.report)
        link.rejected = link.bye = ""
        before = link.paths.get(hello.path)
        link.paths[hello.path] = path
        if before is not None:
            before.abort()
        link.heard[hello.path] = path.heard
        self._on_change()

    def _hear(self, link: _Link, name: PathName, path: _Path, message: Message) -> None:
        if link.paths.get(name) is not path:
            return  # still buffered of a connection, or of a supervisor, that a newer one replaced
        path.heard = link.heard[name] = self._clock()
        match message:
            case State() | Beat(report=Report()):
                if isinstance(message, Beat):
                    link.deaf, link.memory = message.fabric_silence, message.memory
                if message.report is None or not self._learn(link, message.report):
                    return
            case Bye():
                link.bye = message.reason
            case Progress():
                self._on_progress(link.peer.node, message)
                return
            case _:
                return
        self._on_change()

    def _learn(self, link: _Link, report: Report) -> bool:
        """Take a report unless a newer one is known already; return whether it was news."""
        if report.serial <= link.report.serial:
            return False
        link.report = report
        return True

    def _drop(self, link: _Link, name: PathName, path: _Path) -> None:
        path.abort()
        if link.paths.get(name) is path:
            del link.paths[name]
            if not link.paths:
                log.info(event("follower is gone", node=link.peer.node, said=link.bye))
            self._on_change()

    def _member(self, link: _Link, epoch: int, epoch_instances: dict[str, str] | None) -> Member:
        now = self._clock()
        name = link.peer.node
        mismatch = link.rejected
        if not mismatch and link.hello and link.hello.release != self._release:
            mismatch = f"it runs release {link.hello.release}, this head {self._release}: run site.yml"
        boot_id = link.hello.boot_id if link.hello else ""
        epoch_boot = link.boots.get((epoch_instances or {}).get(name, ""), boot_id)
        return Member(
            node=name,
            rank=link.rank,
            connected=bool(link.paths),
            known=link.hello is not None,
            same_instance=epoch_instances is None or epoch_instances.get(name) == link.instance,
            fabric_silence=now - link.heard.get(PathName.FABRIC, -NEVER),
            management_silence=now - link.heard.get(PathName.MANAGEMENT, -NEVER),
            deaf=link.deaf,
            report=link.report,
            refused=link.report.refused if link.report.epoch == epoch else "",
            bye=link.bye,
            mismatch=mismatch,
            rebooted=epoch_boot != boot_id,
        )


def _status(link: _Link) -> RankStatus:
    release = link.hello.release if link.hello else ""
    return link.report.shown(link.rank, link.peer.node, release=release, connected=bool(link.paths))


async def _send(path: _Path, message: Message) -> None:
    if path.ws.closed:
        return
    try:
        async with asyncio.timeout(1.0):
            await path.ws.send_str(path.sealer.seal(message))
    except (ConnectionError, TimeoutError, RuntimeError):
        return  # its silence or its end is what counts, and both are watched
