"""What to start with after a start failed: pure, and never more often than the engine's own limit."""

from __future__ import annotations

import msgspec

from glm53_service.drafter import Choice, DrafterKind, fall_back
from glm53_service.engines.base import Attempt, Engine, Launch


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The next start: the same launch with this attempt and this drafter. `reason` is to be said aloud."""

    attempt: Attempt
    drafter: Choice
    reason: str


def recover(engine: Engine, launch: Launch, fault: str) -> Recovery | None:
    """Return the start that may succeed where `launch` failed with `fault`, or None.

    `fault` is any text with the engine's own lines: the reports of all ranks, better their log tails. Only
    for a start that failed: what failed while serving is started anew as it was.
    """
    choice = launch.choice
    if launch.attempt.number >= engine.attempts:
        return None
    if choice.kind is DrafterKind.DFLASH2 and engine.drafter_fault(fault):
        return _without_dflash2(launch, fault)
    attempt = engine.next_attempt(fault, launch.attempt, launch.settings)
    if attempt is None:
        return None
    return Recovery(attempt=attempt, drafter=choice, reason=f"start {attempt.number}: {attempt.changes[-1]}")


def _without_dflash2(launch: Launch, fault: str) -> Recovery | None:
    settings = launch.settings
    parallel = settings.tensorfold.parallel
    given = None if settings.engine == "tensorfold" and parallel == "auto" else launch.choice.parallel
    said = [line.strip() for line in fault.splitlines() if "Error" in line or "Exception" in line]
    line = said[-1][:200] if said else "its start failed"
    fallen = fall_back(settings.drafter, engine=settings.engine, parallel=given, fault=line)
    if not isinstance(fallen, Choice):
        return None
    number = launch.attempt.number + 1
    attempt = msgspec.structs.replace(
        launch.attempt, number=number, changes=(*launch.attempt.changes, fallen.line())
    )
    return Recovery(attempt=attempt, drafter=fallen, reason=f"start {number}: {fallen.line()}")
