"""A rank other than 0 once it is loaded: no HTTP, no handler for SIGTERM, no end but by an error."""

import asyncio
import time
from typing import Any

from .faults import Faults
from .link import Link
from .log import say
from .plan import Plan
from .rendezvous import Rendezvous
from .watchdog import watch


class Follower:
    """Does its part of every iteration that rank 0 begins.

    Idle, it notices that rank 0 has gone (the store's connection ends). In the middle of rank 0's work it is
    in a collective, which waits for ever, or as long as TF_ROCE_WAIT_S with TF_GLM_COMM=roce.
    """

    def __init__(self, plan: Plan, rendezvous: Rendezvous, link: Link, faults: Faults) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._link = link
        self._faults = faults
        self._owed_since: float | None = None

    async def run(self, seconds: float) -> int:
        """Follow for ever; raises what ends it. `seconds` is how long the start took."""
        say(f"rank {self._plan.rank} ready in {seconds:.1f}s, following rank 0")
        faults = asyncio.create_task(self._faults.serve())
        lost = asyncio.create_task(self._rendezvous.lost())
        watched = asyncio.create_task(self._watch())
        message = asyncio.create_task(self._next())
        try:
            while True:
                waited_for = {message} if self._owed_since is not None else {message, lost}
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    await self._take(message.result())
                    message = asyncio.create_task(self._next())
                else:
                    lost.result()
        finally:
            for task in (faults, lost, watched, message):
                task.cancel()

    async def _watch(self) -> None:
        if self._plan.parallel > 1:
            await watch(self._age, self._plan.environment, self._plan.switches)

    def _age(self) -> float:
        return 0.0 if self._owed_since is None else time.monotonic() - self._owed_since

    def _next(self) -> Any:
        return self._link.next_message(owed=self._owed_since is not None)

    async def _take(self, message: dict[str, Any]) -> None:
        if message.get("idle"):
            self._owed_since = None
            return
        if self._faults.silent:
            await self._faults.hold_while("silent")
        expected, number = self._link.sequence + 1, message["number"]
        if number != expected:
            raise RuntimeError(
                f"rank {self._plan.rank}: expected rank 0's message {expected}, received number {number}:"
                " the ranks are out of step: restart both"
            )
        self._link.sequence = number
        self._owed_since = time.monotonic()
        self._link.acknowledge()
