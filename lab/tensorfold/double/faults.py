"""Faults that begin while a rank serves.

They come from TF_DOUBLE_FAULT (the moment the rank serves) or from the file `control` in TF_DOUBLE_DIR: one
fault a line, ended by a newline; the file is read within 0.1 s and removed, so the next start does not find
it. A control file that is there before a rank serves waits for it. Followers have no HTTP, so the file is the
one way for all ranks.

Fault              Rank  What happens
-------------------------------------------------------------------------------------
clear              any   every fault below that can end, ends
hang               0     the iteration under way, or the next one, never ends; /health stays 200, iteration_s
                         grows
silent             >0    the rank lives but answers rank 0 no more: rank 0 hangs at its next iteration
frozen             0     iterations go on, no request gets on: requests run, tokens do not move
out_of_step        0     the latch: every request fails with 500 until both ranks are started anew
skip_message       0     one message is lost: rank 1 ends with "expected message N, received M", rank 0 hangs
bangs              0     replies are `!!!!...`
empty              0     replies are empty
repeated           0     replies are one word again and again
slow_prefill[=S]   0     every prompt takes S seconds (900), times TIME_SCALE
full_pool[=N]      0     the pool has N tokens (2048): one request at a time, the others wait
leak[=RATE[:MAX]]  any   MB a second (64) are allocated and kept, at most MAX (512)
crash[=CODE]       any   exit at once with CODE (1), nothing printed but the line that says so
health_401         0     /health answers 401, as nothing of 0.6.0 does
health_reduced     0     /health answers {"status":"ok"} and no more
model_id=ID        0     /v1/models names ID
"""

import asyncio
import os
from dataclasses import dataclass, field

from .log import own
from .switches import Leak, Switches, leak

POLL_SECONDS = 0.1
LEAK_SECONDS = 0.1
MB = 1024**2


@dataclass
class Faults:
    """The faults that hold now. `changed` is set for a moment whenever one begins or ends."""

    switches: Switches
    hang: bool = False
    silent: bool = False
    frozen: bool = False
    out_of_step: bool = False
    skip_message: int = 0
    reply: str = ""
    slow_prefill: float | None = None
    full_pool: int | None = None
    health: str = ""
    model_id: str = ""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _told: bool = False
    _held: list[bytearray] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self) -> None:
        """Begin with the faults of the environment, then follow the control file for ever."""
        for line in filter(None, self.switches.fault.split(",")):
            await self.begin(line)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for line in self._control():
                await self.begin(line)

    def _control(self) -> list[str]:
        """Take the lines of the control file; none from one that is half written or cannot be removed."""
        path = self.switches.folder / "control"
        try:
            text = path.read_text()
            if not text.endswith("\n"):
                return []
            path.unlink()
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self._told:
                own(f"{error}: the control file must be readable and its folder writable for this rank")
            self._told = True
            return []
        return text.split()

    async def begin(self, line: str) -> None:
        """Begin one fault, `name` or `name=value`; one that is not in the table is named on stderr."""
        name, _, value = line.partition("=")
        try:
            known = self._begin(name, value)
        except ValueError as error:
            own(f"fault {line}: {error}")
            return
        own(f"fault: {line}" if known else f"no such fault: {line}")
        async with self.changed:
            self.changed.notify_all()
        if name == "crash" and known:
            os._exit(int(value or 1))

    async def hold_while(self, name: str) -> None:
        """Return once the fault `name` does not hold."""
        async with self.changed:
            await self.changed.wait_for(lambda: not getattr(self, name))

    def _begin(self, name: str, value: str) -> bool:
        match name:
            case "clear":
                self.hang = self.silent = self.frozen = False
                self.slow_prefill = self.full_pool = None
                self.reply = self.health = self.model_id = ""
            case "hang" | "silent" | "frozen" | "out_of_step":
                setattr(self, name, True)
            case "skip_message":
                self.skip_message = 1
            case "bangs" | "empty" | "repeated":
                self.reply = name
            case "health_401" | "health_reduced":
                self.health = name.removeprefix("health_")
            case "slow_prefill":
                self.slow_prefill = self.switches.scaled(float(value or 900))
            case "full_pool":
                self.full_pool = int(value or 2048)
            case "model_id":
                self.model_id = value
            case "leak":
                self.start_leak(leak(value or "64"))
            case "crash":
                int(value or 1)
            case _:
                return False
        return True

    def start_leak(self, wanted: Leak) -> None:
        """Allocate memory in the background, touched, so that it is really used."""
        self._keep(asyncio.get_running_loop().create_task(self._leak(wanted)))

    def start_crash(self) -> None:
        """Exit at the second that TF_DOUBLE_CRASH names."""
        if self.switches.crash is not None:
            self._keep(asyncio.get_running_loop().create_task(self._crash()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leak(self, wanted: Leak) -> None:
        step = max(1, int(wanted.rate * LEAK_SECONDS * MB))
        for _ in range(int(wanted.most * MB // step)):
            self._held.append(bytearray(b"\1") * step)
            await asyncio.sleep(LEAK_SECONDS)

    async def _crash(self) -> None:
        crash = self.switches.crash
        assert crash is not None
        await asyncio.sleep(crash.seconds)
        own(f"fault: crash={crash.code}")
        os._exit(crash.code)
