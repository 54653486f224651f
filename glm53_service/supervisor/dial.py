"""The follower's side of the connections: one dialled path a network, redialled for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from glm53_service.errors import AuthError, Glm53Error
from glm53_service.node import Node
from glm53_service.story import event
from glm53_service.supervisor import wire
from glm53_service.supervisor.members import ROUTE
from glm53_service.supervisor.messages import Beat, Bye, Hello, Message, PathName, Report, Welcome
from glm53_service.supervisor.service import Background
from glm53_service.supervisor.world import World
from glm53_service.system import read_memory

log = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0
REDIAL_SECONDS = 1.0
REJECTED_SECONDS = 10.0
NEVER = float("inf")
LONG_AGO = 1e6
"""What stands for NEVER on the wire: JSON has no infinity."""
BEFORE_WELCOME = Welcome(instance="", heartbeat_seconds=1.0, lease_seconds=4.0, peer_lost_seconds=8.0)


@dataclass(slots=True)
class _Open:
    ws: aiohttp.ClientWebSocketResponse
    sealer: wire.Sealer
    silent: asyncio.Event


class Dialler:
    """Keeps a connection to the lead over the fabric and over the management network.

    `beat` is the lead's last heartbeat. `hello` makes the first words of a path, `report` what every own
    heartbeat carries, `on_message` gets everything but heartbeats, `on_change` is called when a path opens
    or closes.
    """

    def __init__(
        self,
        node: Node,
        tokens: tuple[str, ...],
        world: World,
        *,
        hello: Callable[[PathName], Awaitable[Hello]],
        report: Callable[[], Report],
        on_message: Callable[[Message], None],
        on_change: Callable[[], None],
    ) -> None:
        self._node, self._tokens, self._world = node, tokens, world
        self._make_hello, self._on_message, self._on_change = hello, on_message, on_change
        self._report = report
        self._greeted = asyncio.Event()
        self._open: dict[PathName, _Open] = {}
        self._heard: dict[PathName, float] = {}
        self._background = Background()
        self._problems: dict[PathName, str] = {}
        self.times = BEFORE_WELCOME
        self.beat = Beat()
        self.lead_instance = ""

    @property
    def connected(self) -> bool:
        """Whether any path is open."""
        return bool(self._open)

    @property
    def problem(self) -> str:
        """Why there is no connection, network by network."""
        return "; ".join(f"{path}: {text}" for path, text in sorted(self._problems.items())) or "dialling"

    def _own_beat(self) -> Beat:
        return Beat(
            report=self._report(),
            fabric_silence=min(self.silence(PathName.FABRIC), LONG_AGO),
            memory=read_memory(self._world.root),
        )

    def silence(self, path: PathName) -> float:
        """Return the seconds since the lead last spoke on `path`; infinite before it ever did."""
        return self._world.clock() - self._heard.get(path, -NEVER)

    def start(self) -> None:
        """Begin to dial."""
        own, lead = self._node.me, self._node.lead
        for path, source, target in (
            (PathName.FABRIC, own.fabric[0], lead.fabric[0]),
            (PathName.MANAGEMENT, own.management, lead.management),
        ):
            self._background.spawn(self._keep(path, source, target))
        self._background.spawn(self._beat())

    def check(self) -> None:
        """Raise what ended a background task."""
        self._background.check()

    async def close(self) -> None:
        """Close every path."""
        await self._background.cancel()

    async def say(self, message: Message) -> None:
        """Send `message` over every path: one of them may be dying without anybody knowing yet."""
        for opened in list(self._open.values()):
            await self._send(opened, message)

    async def _beat(self) -> None:
        while True:
            for path, opened in list(self._open.items()):
                if self.silence(path) > self.times.peer_lost_seconds:
                    opened.silent.set()
                else:
                    await self._send(opened, self._own_beat())
            self._greeted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.times.heartbeat_seconds):
                    await self._greeted.wait()

    async def _send(self, opened: _Open, message: Message) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError, RuntimeError, aiohttp.ClientError):
            async with asyncio.timeout(1.0):
                await opened.ws.send_str(opened.sealer.seal(message))

    async def _keep(self, path: PathName, source: str, target: str) -> None:
        while True:
            wait = REDIAL_SECONDS
            try:
                await self._once(path, source, target)
                self._problem(path, "the lead closed the connection")
            except AuthError as error:
                self._problem(path, error.message)
                wait = REJECTED_SECONDS
            except Glm53Error as error:
                self._problem(path, error.message)
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                self._problem(path, f"{target} does not answer ({_why(error)})")
            await self._world.sleep(wait)

    def _problem(self, path: PathName, text: str) -> None:
        if self._problems.get(path) != text:
            self._problems[path] = text
            log.debug(event("not connected", path=path, problem=text))
            self._on_change()

    async def _once(self, path: PathName, source: str, target: str) -> None:
        """Dial, introduce this node, and listen until the connection ends."""
        connector = aiohttp.TCPConnector(local_addr=(source, 0), force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with asyncio.timeout(CONNECT_SECONDS):
                ws = await session.ws_connect(
                    f"http://{target}:{self._node.supervisor_port}{ROUTE}", max_msg_size=wire.MAX_FRAME_BYTES
                )
            try:
                opened = await self._greet(path, ws)
                self._problems.pop(path, None)
                self._open[path] = opened
                self._on_change()
                await self._until_silent(path, opened)
            finally:
                self._open.pop(path, None)
                self._on_change()
                await _close(ws)

    async def _greet(self, path: PathName, ws: aiohttp.ClientWebSocketResponse) -> _Open:
        hello = await self._make_hello(path)
        async with asyncio.timeout(CONNECT_SECONDS):
            first = wire.open_frame(self._node.cluster, self._node.node, self._tokens, wire.new_nonce())
            await ws.send_str(msgspec.json.encode(first).decode())
            answer = await self._text(ws)
            key = wire.accept(msgspec.json.decode(answer, type=wire.Challenge), first, self._tokens)
            opened = _Open(ws, wire.Sealer(key, lead=False), asyncio.Event())
            await ws.send_str(opened.sealer.seal(hello))
            welcome = opened.sealer.open(await self._text(ws))
        if not isinstance(welcome, Welcome):
            raise AuthError("expected the lead's welcome")
        if welcome.instance != self.lead_instance:
            log.info(event("connected to the lead", lead=self._node.lead.node, path=path))
        self.times, self.lead_instance = welcome, welcome.instance
        self._heard[path] = self._world.clock()
        self._greeted.set()
        return opened

    async def _until_silent(self, path: PathName, opened: _Open) -> None:
        """Listen until the connection ends or the lead was silent for too long: a dead cable closes
        nothing.
        """
        listen = asyncio.create_task(self._listen(path, opened))
        silent = asyncio.create_task(opened.silent.wait())
        try:
            await asyncio.wait((listen, silent), return_when=asyncio.FIRST_COMPLETED)
            if listen.done():
                listen.result()
        finally:
            listen.cancel()
            silent.cancel()
            await asyncio.gather(listen, silent, return_exceptions=True)

    async def _listen(self, path: PathName, opened: _Open) -> None:
        async for frame in opened.ws:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                return
            message = opened.sealer.open(frame.data)
            self._heard[path] = self._world.clock()
            if isinstance(message, Beat):
                self.beat = message
            else:
                self._on_message(message)
            if isinstance(message, Bye):
                self._on_change()

    async def _text(self, ws: aiohttp.ClientWebSocketResponse) -> str:
        frame = await ws.receive()
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise AuthError(f"the lead turned this node away: {frame.extra or 'connection closed'}")
        return str(frame.data)


def _why(error: Exception) -> str:
    """Return the few words of an error that a person needs: the system's own, where there are any."""
    inner = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(inner, OSError) and inner.errno:
        return os.strerror(inner.errno).lower()
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


async def _close(ws: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError):
        async with asyncio.timeout(0.5):
            await ws.close()
