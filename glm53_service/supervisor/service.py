"""What lead and follower share as services: signals, the watchdog, HTTP servers that never see a proxy."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from glm53_service.gate import gate_app
from glm53_service.notify import Notifier
from glm53_service.settings import Gate
from glm53_service.status import Status

LOOPBACK = "127.0.0.1"


class Background:
    """The tasks that a supervisor cannot do without: what ends one of them unforeseen ends the supervisor.

    systemd starts it anew then; a task that died unseen would leave a supervisor that looks alive and does
    nothing.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the caller."""
        self._tasks.add(asyncio.create_task(work))

    def check(self) -> None:
        """Raise what ended a task, if any was ended by an exception."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def cancel(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def serve(app: web.Application, sockets: list[socket.socket]) -> web.AppRunner:
    """Serve `app` on bound sockets; the caller cleans the runner up."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    for bound in sockets:
        await web.SockSite(runner, bound).start()
    return runner


def gate_addresses(gate: Gate, management: str) -> list[str]:
    """Return where the gate listens."""
    return [LOOPBACK, management] if gate.bind == "management" else [LOOPBACK]


async def keep_alive(notifier: Notifier) -> None:
    """Ping systemd's watchdog for ever; that this task is scheduled proves that the loop turns."""
    while notifier.watchdog_seconds:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog_seconds)


async def start_gate(status: Callable[[], Status], sockets: list[socket.socket]) -> web.AppRunner:
    """Serve the gate on bound sockets."""
    return await serve(gate_app(status), sockets)
