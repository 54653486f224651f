"""What TensorFold says of itself while it serves, and how it is stopped."""

from __future__ import annotations

import json

import pytest

from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt
from glm53_service.engines.health import Health
from tests.unit.fixtures import launch_of, settings_of, tensorfold_data, with_dflash2

ENGINE = engine_for(settings_of(tensorfold_data()))
PLAIN = settings_of(tensorfold_data())


BODY = {
    "ok": True,
    "backend": "tensorfold",
    "busy": True,
    "requests_running": 3,
    "requests_total": 40,
    "prompt_tokens_total": 9000,
    "completion_tokens_total": 184_467,
    "rounds_total": 700,
    "context_length": 1_048_576,
    "streams": {"decoding": 2, "prefilling": 1, "max": 4},
    "pool_tokens": 2_684_928,
    "pool_free_tokens": 1_000_000,
    "iteration_s": 0.4,
}


def test_health_of_a_concurrent_engine() -> None:
    """Prevents a busy engine from being called idle, and a stuck one from being called busy."""
    health = ENGINE.read_health(200, json.dumps(BODY), "tensorfold:requests_waiting 2\n")
    assert health == Health(
        up=True,
        running=3,
        waiting=2,
        done=40,
        slots=4,
        window=1_048_576,
        iteration_seconds=0.4,
        tokens=184_467,
        pool_tokens=2_684_928,
        pool_free_tokens=1_000_000,
        pulse="184467 9000 700 1000000",
    )


def test_health_of_a_serial_engine_has_one_slot_and_no_iterations() -> None:
    """Prevents four requests from being believed where the image serves one."""
    body = {key: BODY[key] for key in BODY if key not in ("streams", "iteration_s", "pool_tokens")}
    health = ENGINE.read_health(200, json.dumps(body), "")
    assert (health.slots, health.iteration_seconds, health.pool_tokens, health.waiting) == (
        1,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("status", "body", "up", "said"),
    [
        (0, "", False, ""),
        (500, "", False, ""),
        (401, "", False, "rank 0 wants a key for /health (HTTP 401)"),
        (200, '{"status":"ok"}', True, 'rank 0\'s /health says no more than \'{"status":"ok"}\''),
        (200, "<html>", True, "rank 0's /health says no more than '<html>'"),
        (200, "[1]", True, "rank 0's /health says no more than '[1]'"),
    ],
)
def test_keys_are_a_wrong_setting_not_a_dead_server(status: int, body: str, up: bool, said: str) -> None:
    """Prevents a restart loop over an engine that works and only does not talk to the supervisor."""
    health = ENGINE.read_health(status, body, "")
    assert health.up == up
    assert health.problem.startswith(said)
    assert bool(health.problem) == bool(said)


@pytest.mark.parametrize(
    ("slots", "window", "said"),
    [
        (4, 1_048_576, ()),
        (2, 1_048_576, ("serves 2 requests at once, 4 were asked for",)),
        (4, 196_608, ("serves a window of 196608 tokens, 1048576 were asked for",)),
        (None, None, ()),
    ],
)
def test_slots_and_window_are_the_ones_asked_for(
    slots: int | None, window: int | None, said: tuple[str, ...]
) -> None:
    """Prevents a pair that is called ready with fewer requests at once than everybody counts on."""
    launch = launch_of(settings_of(with_dflash2()))
    assert ENGINE.wrong_service(launch, Health(up=True, slots=slots, window=window)) == said


def test_a_refitted_window_is_the_one_asked_for() -> None:
    """Prevents a refit that is then refused for being one, and a context of 0 that nothing can satisfy."""
    refitted = launch_of(settings_of(with_dflash2()), attempt=Attempt(number=2, window=393_216))
    assert ENGINE.wrong_service(refitted, Health(up=True, slots=4, window=393_216)) == ()
    largest = launch_of(settings_of(with_dflash2(tensorfold={"context": 0})))
    assert ENGINE.wrong_service(largest, Health(up=True, slots=4, window=55_555)) == ()


@pytest.mark.parametrize(
    ("rank", "serving", "seconds"), [(0, True, 10), (0, False, 0), (1, True, 0), (1, False, 0)]
)
def test_who_ignores_sigterm_is_killed_at_once(rank: int, serving: bool, seconds: int) -> None:
    """Prevents a stop of half a minute that ends in SIGKILL anyway."""
    assert ENGINE.stop_seconds(PLAIN, rank, serving=serving) == seconds


def test_a_canary_does_not_think() -> None:
    """Prevents an empty answer because the whole budget went into thinking."""
    assert ENGINE.canary_options(PLAIN) == {"chat_template_kwargs": {"enable_thinking": False}}
