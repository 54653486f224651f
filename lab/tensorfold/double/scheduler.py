"""Rank 0's scheduler: lanes, the waiting queue, the shared pool, and iterations that need every rank."""

import asyncio
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from .faults import Faults
from .log import say
from .stats import Stats
from .switches import Switches

OUT_OF_STEP = "the two ranks are out of step after an error; restart both"
DRAFTS_A_ROUND = 7


class Exchange(Protocol):
    """What an iteration needs of the other ranks (link.Link; nothing of it with one rank)."""

    async def exchange(self, skipped: int = 0) -> None: ...

    def rest(self) -> None: ...


class State(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    FILLING = "filling"
    DECODING = "decoding"


@dataclass(eq=False, kw_only=True)
class Request:
    """One request: what it needs, what it will say piece by piece, and how far it is."""

    prompt: str
    prompt_tokens: int
    pieces: Sequence[str]
    reserve: int
    background: bool = False
    state: State = State.WAITING
    cached: int = 0
    filled: float = 0.0
    due: float = 0.0
    said: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    decoding: float = 0.0
    gone: bool = False
    out: asyncio.Queue[str | Exception | None] = field(default_factory=asyncio.Queue)

    async def replies(self) -> AsyncIterator[str]:
        """The reply's pieces as they come; raises what broke the request."""
        while (item := await self.out.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Scheduler:
    """All requests of rank 0. `lanes` of them run at once; the others wait, in order."""

    def __init__(
        self,
        *,
        lanes: int,
        pool_tokens: int,
        kept_most: int,
        drafts: bool,
        link: Exchange | None,
        faults: Faults,
        switches: Switches,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lanes = lanes
        self._pool_tokens = pool_tokens
        self._kept_most = kept_most
        self._drafts = drafts
        self._link = link
        self._faults = faults
        self._switches = switches
        self.stats = stats
        self._clock = clock
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._work = asyncio.Event()
        self._began: float | None = None
        self.waiting: list[Request] = []
        self.active: list[Request] = []

    # -- what /health and /metrics show --------------------------------------------------------------------

    @property
    def iteration_seconds(self) -> float:
        """How long the iteration under way has run; 0.0 between iterations."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def pool_tokens(self) -> int:
        """Size of the pool."""
        return self._pool_tokens if self._faults.full_pool is None else self._faults.full_pool

    @property
    def pool_free(self) -> int:
        """Tokens that neither a request nor a kept prompt holds."""
        held = sum(request.reserve for request in self.active) + sum(self._kept.values())
        return max(0, self.pool_tokens - held)

    @property
    def kept_prompts(self) -> int:
        return len(self._kept)

    def count(self, state: State) -> int:
        """Admitted requests in a state."""
        return sum(request.state is state for request in self.active)

    # -- requests ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; raises RuntimeError once the ranks are out of step."""
        self.stats.running += 1
        if self._faults.out_of_step:
            self.stats.running -= 1
            raise RuntimeError(OUT_OF_STEP)
        self.waiting.append(request)
        self._work.set()

    def end(self, request: Request) -> None:
        """Take a request away and count it; one that is in an iteration goes when that ends."""
        if request in self.active:
            request.gone = True
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self.stats.running -= 1
        self.stats.finish(request)

    # -- the loop ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Iterate while there is work, for ever; an iteration that fails latches the scheduler for good."""
        while True:
            self._admit()
            if not self.active:
                self._work.clear()
                if self._link:
                    self._link.rest()
                await self._work.wait()
                continue
            self._began = self._clock()
            try:
                await self._iterate()
            except RuntimeError as error:
                self._break(error)
            finally:
                self._began = None
            for request in [request for request in self.active if request.gone]:
                self.active.remove(request)
                self.end(request)

    def _break(self, error: Exception) -> None:
        text = f"request error: {type(error).__name__}: {error}"
        say(f"{text}\n{''.join(traceback.format_exception(error))}".rstrip())
        self._faults.out_of_step = True
        for request in [*self.active, *self.waiting]:
            request.out.put_nowait(RuntimeError(str(error)))
        self.active.clear()
        self.waiting.clear()

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.lanes:
            request = self.waiting[0]
            while self._kept and self.pool_free < request.reserve:
                self._kept.popitem(last=False)
            if self.active and self.pool_free < request.reserve:
                return
            self.waiting.pop(0)
            request.state, request.admitted = State.FILLING, self._clock()
            if self._faults.slow_prefill is None and hash(request.prompt) in self._kept:
                request.cached = request.prompt_tokens - 1
                request.filled = float(request.cached)
            self.active.append(request)

    async def _iterate(self) -> None:
        if self._faults.hang:
            await self._faults.hold_while("hang")
        skipped, self._faults.skip_message = self._faults.skip_message, 0
        if self._link:
            await self._link.exchange(skipped)
        if self._faults.out_of_step:
            raise RuntimeError("injected: an exchange between the ranks failed")
        seconds = self._switches.round_seconds
        await asyncio.sleep(seconds)
        if self._faults.frozen:
            return
        for request in list(self.active):
            if request.state is State.FILLING:
                self._fill(request, seconds)
            else:
                self._decode(request, seconds)

    def _fill(self, request: Request, seconds: float) -> None:
        slow = self._faults.slow_prefill
        rate = self._switches.prefill_rate if slow is None else request.prompt_tokens / max(slow, 0.001)
        request.filled += rate * seconds
        if request.filled >= request.prompt_tokens:
            request.state, request.decoding = State.DECODING, self._clock()
            request.prefill_seconds = self._clock() - request.admitted

    def _decode(self, request: Request, seconds: float) -> None:
        request.due += self._switches.decode_rate * seconds
        request.rounds += 1
        said = list(request.pieces[request.said : int(request.due)])
        for piece in said:
            request.out.put_nowait(piece)
        if said and not request.said:
            self.stats.first_token.observe(self._clock() - request.began)
        request.said += len(said)
        self.stats.completion_tokens += len(said)
        if self._drafts:
            request.drafted += DRAFTS_A_ROUND
            request.accepted += min(max(0, len(said) - 1), DRAFTS_A_ROUND)
        if request.said == len(request.pieces):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        now = self._clock()
        request.decode_seconds = now - request.decoding
        self.stats.latency.observe(now - request.began)
        self._kept[hash(request.prompt)] = request.prompt_tokens
        self._kept.move_to_end(hash(request.prompt))
        while len(self._kept) > self._kept_most:
            self._kept.popitem(last=False)
        self.active.remove(request)
        request.out.put_nowait(None)
