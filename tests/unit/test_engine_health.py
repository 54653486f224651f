"""When a running engine is stuck, whatever engine it is, and how a container's end is read."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.engines.health import Health, Stillness, stall
from glm53_service.exits import exit_text
from glm53_service.settings import Supervision

TIMES = Supervision(stall_seconds=40, still_seconds=900)


def health(pulse: str, **more: Any) -> Health:
    """Return a reading with two running requests."""
    return Health(**{"up": True, "running": 2, "pulse": pulse, **more})


def test_frozen_counters_while_requests_run_are_a_stall() -> None:
    """Prevents a livelock that answers 200 for ever: two scrapes a minute apart, 184467 tokens both."""
    still = Stillness().after(health("184467"), now=100.0).after(health("184467"), now=160.0)
    assert still.seconds(160.0) == 60.0
    assert stall(health("184467"), still.seconds(160.0), TIMES) == ""
    later = still.after(health("184467"), now=1001.0)
    assert stall(health("184467"), later.seconds(1001.0), TIMES) == (
        "2 requests run, and no counter of the engine has moved for 901 s (supervision.still_seconds: 900)"
    )


def test_movement_or_idleness_starts_the_count_anew() -> None:
    """Prevents a verdict over an engine that was idle, or that worked in between."""
    still = Stillness().after(health("1"), now=0.0).after(health("2"), now=800.0)
    assert still.seconds(850.0) == 50.0
    idle = still.after(health("2", running=0), now=900.0)
    assert idle.seconds(5000.0) == 0.0
    assert idle.after(health("2"), now=5000.0).seconds(5001.0) == 1.0


def test_new_requests_are_no_movement() -> None:
    """Prevents a hung engine that looks alive because clients keep coming."""
    still = Stillness()
    for number in range(10):
        still = still.after(health("7", running=2 + number), now=100.0 * number)
    assert still.seconds(1000.0) == 1000.0


def test_a_growing_iteration_is_a_stall() -> None:
    """Prevents a stalled collective from going unseen until the counters' much longer limit."""
    assert stall(health("1", iteration_seconds=39.0), 0.0, TIMES) == ""
    assert stall(health("1", iteration_seconds=41.0), 0.0, TIMES) == (
        "rank 0's scheduler has been in one iteration for 41 s (supervision.stall_seconds: 40)"
    )


def test_a_long_prefill_is_no_stall() -> None:
    """Prevents a restart in the middle of a prompt of a million tokens, which took 967 s."""
    times = Supervision()
    assert stall(health("1", iteration_seconds=3.0), 967.0, times) == ""
    assert stall(health("1"), 967.0, times) == ""


def test_an_engine_that_does_not_say_is_not_called_stuck() -> None:
    """Prevents an unknown from being a fault: without a count of requests nothing is known to wait."""
    assert stall(Health(up=True), 5000.0, TIMES) == ""


@pytest.mark.parametrize(
    ("state", "host_restarted", "said"),
    [
        ({"ExitCode": 255, "OOMKilled": False}, True, "the host went down under it (exit 255)"),
        ({"ExitCode": 255, "OOMKilled": False}, False, "ended with exit code 255"),
        (
            {"ExitCode": 137, "OOMKilled": False},
            False,
            "was killed (SIGKILL): by the kernel for want of memory, or",
        ),
        ({"ExitCode": 137, "OOMKilled": True}, False, "was killed by the kernel for want of memory (OOM)"),
        ({"ExitCode": 0}, False, "ended with 0, which is no success"),
        (
            {"ExitCode": 127, "Error": "exec: tensorfold: not found"},
            False,
            "could not run: exec: tensorfold: not",
        ),
        ({}, False, "ended with exit code -1"),
    ],
)
def test_how_a_container_ended(state: dict[str, Any], host_restarted: bool, said: str) -> None:
    """Prevents 255 without a word where the host went down, and 0 from being taken for a success."""
    assert exit_text(state, host_restarted=host_restarted).startswith(said)
