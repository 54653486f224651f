"""Asks a pair that nobody asks: the only thing that shows an idle engine whose other rank is stuck.

An answer counts only while the question was the only request. With another one beside it, a late or a strange
answer may be that request's doing, and the engine's own counters watch over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from glm53_service.canary import Api
from glm53_service.engines.health import Health
from glm53_service.settings import Settings

QUIET_SECONDS = 10.0
"""Idle for so long before a question: nobody is in the middle of a conversation's turns."""

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Since when no request has run, and when the last question was asked; seconds of any monotonic clock."""

    asked: float
    since: float | None = None

    def after(self, health: Health, now: float) -> Quiet:
        """Return the quiet after a reading at `now`; an engine that does not count its requests is never."""
        idle = health.up and not health.problem and health.running == 0
        since = (self.since if self.since is not None else now) if idle else None
        return Quiet(asked=self.asked, since=since)

    def due(self, every: float, now: float) -> bool:
        """Return whether a question is due; `every` in seconds, 0 is never."""
        if not every or self.since is None:
            return False
        return now - self.asked >= every and now - self.since >= min(QUIET_SECONDS, every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a question showed; `unknown`: another request came meanwhile, so it shows nothing."""

    answer: str
    problem: str
    unknown: bool


async def ask(
    api: Api, settings: Settings, options: dict[str, Any], read: Callable[[], Awaitable[Health]]
) -> Verdict:
    """Ask the canary question and watch, through `read`, whether it stays alone."""
    before = await read()
    question = asyncio.create_task(api.canary(settings, options, seconds=settings.canary.timeout_seconds))
    try:
        alone = before.running == 0
        while not question.done():
            await asyncio.wait({question}, timeout=LOOK_SECONDS)
            alone &= only_ours(before, await read(), ours=1)
        answer, problem = question.result()
        return Verdict(answer=answer, problem=problem, unknown=bool(problem) and not alone)
    finally:
        question.cancel()


def only_ours(before: Health, now: Health, *, ours: int) -> bool:
    """Return whether no more than `ours` requests have run since `before`; a silent engine hides nobody."""
    if not now.up:
        return True
    done = 0 if now.done is None or before.done is None else now.done - before.done
    return done + max(now.running or 0, now.waiting or 0) <= ours
