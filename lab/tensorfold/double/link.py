"""What runs between the ranks once they have met: one message and one acknowledgement an iteration.

Each rank listens on a port of the system's choosing at its own address on the link and dials every rank that
it talks to, so TCP must be open both ways, as NCCL's bootstrap needs it. Nothing here ever notices a dead
peer by itself, as NCCL does not: a closed connection and a silent one are the same, and wait for ever. Only
with TF_GLM_COMM=roce does an exchange fail, after TF_ROCE_WAIT_S.
"""

import asyncio
import json
from typing import Any

from .rendezvous import Rendezvous

REDIAL_SECONDS = 0.5


async def for_ever() -> None:
    """What a collective without its peer does."""
    await asyncio.Event().wait()


class Link:
    """The connections of one rank to the ranks that it exchanges messages with."""

    def __init__(self, rendezvous: Rendezvous, wait_seconds: float | None, wait_named: int) -> None:
        self._rendezvous = rendezvous
        self._wait = wait_seconds
        self._wait_named = wait_named
        self._in: dict[int, asyncio.StreamReader] = {}
        self._kept: list[asyncio.StreamWriter] = []  # a writer that nobody holds closes its connection
        self._out: dict[int, asyncio.StreamWriter] = {}
        self._arrived = asyncio.Event()
        self.sequence = 0

    @property
    def rank(self) -> int:
        return self._rendezvous.rank

    @property
    def peers(self) -> list[int]:
        """Rank 0 talks to all others, they to rank 0."""
        return list(range(1, self._rendezvous.ranks)) if self.rank == 0 else [0]

    async def connect(self) -> None:
        """Join the ranks whose addresses the store has; waits for ever for one that does not come.

        Nobody listens any more at an address that an earlier rank left in the store, so a rank that is
        started again alone waits here.
        """
        server = await asyncio.start_server(self._accept, self._rendezvous.address, 0)
        addresses = await self._rendezvous.gather("nccl", server.sockets[0].getsockname()[:2])
        for peer in self.peers:
            await self._dial(peer, *addresses[peer])
        while set(self._in) != set(self.peers):
            self._arrived.clear()
            await self._arrived.wait()
        server.close()

    async def _dial(self, peer: int, host: str, port: int) -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(REDIAL_SECONDS)
                continue
            self._out[peer] = writer
            self._send(peer, {"rank": self.rank})
            return

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if line := await reader.readline():
            self._in[json.loads(line)["rank"]] = reader
            self._kept.append(writer)
            self._arrived.set()

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        self._out[peer].write(json.dumps(message).encode() + b"\n")

    async def _receive(self, peer: int) -> dict[str, Any]:
        line = await self._in[peer].readline()
        if not line:
            await for_ever()
        return dict(json.loads(line))

    async def _bounded(self, peer: int) -> dict[str, Any]:
        """The peer's next message; raises RuntimeError when RoCE's wait is over first."""
        try:
            async with asyncio.timeout(self._wait):
                return await self._receive(peer)
        except TimeoutError:
            raise RuntimeError(
                f"RoCE all-gather failed (sequence {self.sequence}, peer {peer}, hca 0):"
                f" doorbell {self.sequence}, posted {self.sequence}, completed {self.sequence - 1};"
                f" wait limit {self._wait_named} s (TF_ROCE_WAIT_S)"
            ) from None

    async def exchange(self, skipped: int = 0) -> None:
        """Rank 0's iteration: tell every follower, wait for all. `skipped` messages are lost on the way."""
        self.sequence += 1 + skipped
        for peer in self.peers:
            self._send(peer, {"number": self.sequence})
        for peer in self.peers:
            await self._bounded(peer)

    def rest(self) -> None:
        """Rank 0 has nothing more to do for now: its followers wait without a limit."""
        for peer in self.peers:
            self._send(peer, {"idle": True})

    async def next_message(self, *, owed: bool) -> dict[str, Any]:
        """A follower's wait for rank 0; `owed` when rank 0 is in the middle of work."""
        return await (self._bounded(0) if owed else self._receive(0))

    def acknowledge(self) -> None:
        """A follower has done its part of the iteration."""
        self._send(0, {"done": self.sequence})
