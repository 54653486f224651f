"""Where the ranks meet: a store on rank 0's master port that every rank dials, in either start order.

Lines of JSON over TCP: {"set": key, "value": v}, or {"get": key}, which is answered once the key is set.
Values stay for the life of rank 0, so a rank that is started again alone reads those of the set that it does
not belong to.
"""

import asyncio
import contextlib
import json
from collections import defaultdict
from typing import Any

from .switches import Switches

MEET_SECONDS = 600.0
REDIAL_SECONDS = 0.1
LEAVE_SECONDS = 5.0


class Store:
    """The server side, on rank 0. It listens on every interface: whether TensorFold's does is unknown."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._set: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> None:
        """Listen; raises RuntimeError when the port is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, "0.0.0.0", port)
        except OSError as error:
            raise RuntimeError(
                f"The server socket has failed to listen on any local network address. port: {port},"
                f" message: {error.strerror}"
            ) from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the end of the program, which asyncio would log
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if "set" in message:
                self._values[message["set"]] = message["value"]
                self._set[message["set"]].set()
                continue
            await self._set[message["get"]].wait()
            writer.write(json.dumps(self._values[message["get"]]).encode() + b"\n")
        writer.close()


class Rendezvous:
    """One rank's connection to the store."""

    def __init__(self, rank: int, ranks: int, switches: Switches) -> None:
        self.rank = rank
        self.ranks = ranks
        self._limit = switches.scaled(MEET_SECONDS)

    async def connect(self, master: str, port: int) -> None:
        """Dial the store until it answers; raises RuntimeError after 600 s."""
        deadline = asyncio.get_running_loop().time() + self._limit
        while True:
            try:
                self._reader, self._writer = await asyncio.open_connection(master, port)
                return
            except OSError:
                if asyncio.get_running_loop().time() > deadline:
                    raise RuntimeError(
                        f"The client socket has timed out after {MEET_SECONDS * 1000:.0f}ms while trying to"
                        f" connect to ({master}, {port})."
                    ) from None
                await asyncio.sleep(REDIAL_SECONDS)

    @property
    def address(self) -> str:
        """This rank's own address on the way to the master."""
        return str(self._writer.get_extra_info("sockname")[0])

    def put(self, key: str, value: Any) -> None:
        """Set a key; it is never waited for."""
        self._writer.write(json.dumps({"set": key, "value": value}).encode() + b"\n")

    async def get(self, key: str) -> Any:
        """Wait for a key; raises ConnectionError when rank 0 has gone."""
        self._writer.write(json.dumps({"get": key}).encode() + b"\n")
        return json.loads(await self._line())

    async def meet(self) -> None:
        """Wait for all ranks; raises RuntimeError after 600 s."""
        self.put(f"hello/{self.rank}", True)
        joined = 0
        try:
            async with asyncio.timeout(self._limit):
                for rank in range(self.ranks):
                    await self.get(f"hello/{rank}")
                    joined += 1
        except TimeoutError:
            raise RuntimeError(
                f"Timed out after {MEET_SECONDS:.0f} seconds waiting for clients."
                f" {joined}/{self.ranks} clients joined."
            ) from None

    async def gather(self, name: str, value: Any) -> list[Any]:
        """Everyone's value, in rank order.

        Rank 0 returns once the others have read them too (or 5 s later), since it may end on what it reads.
        """
        self.put(f"{name}/{self.rank}", value)
        values = [await self.get(f"{name}/{rank}") for rank in range(self.ranks)]
        self.put(f"{name}/read/{self.rank}", True)
        if self.rank == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    for rank in range(1, self.ranks):
                        await self.get(f"{name}/read/{rank}")
        return values

    async def lost(self) -> None:
        """Raise ConnectionError when the store's connection ends; an idle follower waits for that."""
        await self._line()

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            raise ConnectionError("the rendezvous store closed the connection: rank 0 has gone")
        return line
