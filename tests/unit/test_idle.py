"""When an idle pair is asked, and when the answer counts."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.engines.health import Health
from glm53_service.supervisor.idle import Quiet, only_ours

IDLE = Health(up=True, running=0)


def test_only_a_quiet_pair_is_asked() -> None:
    """Prevents a question in the middle of somebody's conversation, and one a minute all night."""
    quiet = Quiet(asked=0.0).after(IDLE, 300.0)
    assert not quiet.due(300.0, 309.0)
    assert quiet.due(300.0, 310.0)
    assert not quiet.after(Health(up=True, running=1), 305.0).due(300.0, 400.0)
    assert not Quiet(asked=200.0, since=0.0).due(300.0, 499.0)
    assert Quiet(asked=200.0, since=0.0).due(300.0, 500.0)
    assert not Quiet(asked=0.0, since=0.0).due(0, 9999.0)


@pytest.mark.parametrize(
    "health", [Health(up=False), Health(up=True, running=None), Health(up=True, running=0, problem="401")]
)
def test_an_engine_that_does_not_count_is_never_asked(health: Health) -> None:
    """Prevents a fault found by asking while nobody knows who else asks."""
    assert Quiet(asked=0.0, since=0.0).after(health, 50.0).since is None


@pytest.mark.parametrize(
    ("now", "alone"),
    [
        ({"running": 1, "done": 7}, True),
        ({"running": 0, "done": 8}, True),
        ({"running": 2, "done": 7}, False),
        ({"running": 1, "done": 8}, False),
        ({"running": 0, "done": 9}, False),
        ({"running": 1, "done": 7, "waiting": 2}, False),
        ({"running": 1, "done": None}, True),
        ({"up": False}, True),
    ],
)
def test_another_request_is_seen(now: dict[str, Any], alone: bool) -> None:
    """Prevents a verdict over an engine that was busy with a user's request, also one that came and went."""
    before = Health(up=True, running=0, done=7)
    assert only_ours(before, Health(**{"up": True, **now}), ours=1) == alone
