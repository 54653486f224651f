"""Pairs that looked healthy and were stuck, and pairs that looked stuck and worked: found, or left alone.

The bodies are those that TensorFold's /health gives. Long times are scaled only where a pair really runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm53_service.engines import engine_for
from glm53_service.engines.health import Stillness, stall
from glm53_service.settings import Supervision
from tests.unit.fixtures import settings_of, tensorfold_data
from tests.unit.pair import Pair, quick, run_pair
from tests.unit.test_pair_engines import tensorfold

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

ENGINE = engine_for(settings_of(tensorfold_data()))
LOOK_SECONDS = 20.0
HOUR = 3600.0

BODY: dict[str, Any] = {
    "ok": True,
    "backend": "tensorfold",
    "busy": True,
    "requests_running": 2,
    "requests_total": 40,
    "prompt_tokens_total": 9000,
    "completion_tokens_total": 184_467,
    "rounds_total": 700,
    "context_length": 1_048_576,
    "streams": {"decoding": 2, "prefilling": 0, "max": 4},
    "pool_tokens": 2_684_928,
    "pool_free_tokens": 1_000_000,
    "kept_prompts": 3,
    "iteration_s": 0.2,
}
SERIAL = {
    k: v for k, v in BODY.items() if k not in ("streams", "iteration_s", "pool_tokens", "pool_free_tokens")
}
IDLE = {**BODY, "busy": False, "requests_running": 0, "iteration_s": 0.0}


def found_after(body: Callable[[float], dict[str, Any]], waiting: int = 0) -> float | None:
    """Return after how many seconds of looking the engine is called stuck; None: not within an hour.

    `body` is /health at a second, `waiting` the requests that wait as /metrics tells it.
    """
    still, second = Stillness(), 0.0
    while second <= HOUR:
        metrics = f"tensorfold:requests_waiting {waiting}\n"
        health = ENGINE.read_health(200, json.dumps(body(second)), metrics)
        still = still.after(health, second)
        if stall(health, still.seconds(second), Supervision()):
            return second
        second += LOOK_SECONDS
    return None


def test_a_stalled_collective_is_found_by_its_iteration() -> None:
    """Prevents a pair that is busy for ever: the scheduler's iteration only grows, the tokens stand still."""
    assert found_after(lambda t: {**BODY, "iteration_s": t}) == 320.0


def test_a_stalled_serial_engine_is_found_by_its_counters_alone() -> None:
    """Prevents an engine without an iteration's time from being stuck unseen: 1 request, tokens frozen."""
    assert found_after(lambda t: {**SERIAL, "requests_running": 1}) == 1820.0


def test_a_prompt_of_a_million_tokens_is_left_alone() -> None:
    """Prevents the end of a prefill that moves nothing for 967 s, again and again."""
    assert found_after(lambda t: {**SERIAL, "prompt_tokens_total": int(t // 967)}) is None
    assert found_after(lambda t: {**BODY, "iteration_s": t % 12, "rounds_total": int(t // 967)}) is None


def test_a_full_pool_with_waiting_requests_is_left_alone() -> None:
    """Prevents a restart of a pair that has more work than room: four run, nine wait, a token a look."""
    busy = {**BODY, "requests_running": 13, "pool_free_tokens": 512}
    assert found_after(lambda t: {**busy, "completion_tokens_total": int(t)}, waiting=9) is None


def test_a_cap_on_kept_prompts_is_left_alone() -> None:
    """Prevents a restart of a pair that is slow because it keeps no more prompts: the pool is nearly free."""
    capped = {**BODY, "kept_prompts": 32, "pool_free_tokens": 2_600_000}
    assert found_after(lambda t: {**capped, "completion_tokens_total": int(t // 100)}) is None


def test_a_slow_gpu_is_left_alone() -> None:
    """Prevents a restart, which cures nothing, of a pair whose GPU is clamped to a tenth: tokens move."""
    slow = {**BODY, "iteration_s": 9.0}
    assert found_after(lambda t: {**slow, "completion_tokens_total": int(t // 60)}) is None


def test_an_idle_pair_shows_nothing_and_is_not_called_stuck() -> None:
    """Prevents a verdict over silence; what an idle pair hides is asked for, not guessed."""
    assert found_after(lambda t: IDLE) is None


STUCK = {
    "out of step": {"message": "the two ranks are out of step after an error; restart both"},
    "!!!!": "!!!!!!!!!!!!!!!!",
}
OFTEN = {"idle_seconds": 0.3, "timeout_seconds": 1.0, "long_lines": 0}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("out of step", "canary: idle check: HTTP 500: "),
        ("!!!!", "canary: idle check: answered one character over and over"),
        ("no answer", "canary: idle check: no answer within 1 s"),
    ],
)
@pytest.mark.parametrize("engine", ["tensorfold", "vllm"])
def test_what_no_field_shows_is_found_by_asking(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: str,
    case: str,
    said: str,
) -> None:
    """Prevents a latch, a collapsed model or a dead peer from waiting for the first user of the morning:
    /health is 200, not busy, and no iteration runs.
    """
    monkeypatch.setattr("glm53_service.supervisor.epoch.HEALTH_SECONDS", 0.1)
    monkeypatch.setattr("glm53_service.supervisor.idle.LOOK_SECONDS", 0.1)

    async def story(pair: Pair) -> None:
        pair.api.requests = 0
        await pair.both_serve()
        if case == "out of step":
            pair.api.completion, pair.api.chat_status = {"error": STUCK[case]}, 500
        elif case == "!!!!":
            pair.api.reply = str(STUCK[case])
        pair.api.hangs = case == "no answer"
        await pair.until(lambda: f"epoch 1 ends: {said}" in caplog.text, said)
        assert pair.service["a"].status().faults >= 1
        pair.api.hangs, pair.api.reply, pair.api.completion = False, "Paris", None
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    run = tensorfold if engine == "tensorfold" else run_pair
    run(tmp_path, story, canary=OFTEN, supervision={"faults_allowed": 50})


@pytest.mark.parametrize("engine", ["tensorfold", "vllm"])
def test_a_killed_worker_is_seen_although_the_api_is_well(tmp_path: Path, engine: str) -> None:
    """Prevents requests that hang for minutes behind a 200: rank 1 is killed (137), rank 0 says nothing."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        victim, other = pair.docker["b"].running()[0], pair.docker["a"].running()[0]
        await pair.docker["b"].exit(victim, 137)
        await pair.until(lambda: not pair.service["a"].status().ready, "not ready")
        await pair.until(lambda: other not in pair.docker["a"].running(), "rank 0 is ended too")
        assert "b (rank 1) exited with code 137" in pair.service["a"].status().last_end
        await pair.serving(2)

    run = tensorfold if engine == "tensorfold" else run_pair
    run(tmp_path, story)


def test_a_worker_is_well_by_its_process_and_its_lead_not_by_a_port(tmp_path: Path) -> None:
    """Prevents a worker that is unhealthy for ever, because it has no API that could answer, and one that is
    well although its lead is gone.
    """

    async def story(pair: Pair) -> None:
        pair.start("b")
        await pair.until(lambda: "waiting for a" in str(pair.service["b"].status().reasons), "it waits")
        assert not pair.service["b"].status().ready
        pair.start("a")
        await pair.serving(1)
        await pair.until(lambda: pair.service["b"].status().ready, "the worker is well")
        assert pair.service["b"].status().state == "running"
        assert len(pair.docker["b"].running()) == 1
        await pair.kill("a")
        await pair.until(lambda: not pair.service["b"].status().ready, "its lead is gone")

    run_pair(tmp_path, story)


def test_a_first_request_that_compiles_is_waited_for(tmp_path: Path) -> None:
    """Prevents both a pair that is ready and stalls its first user for 120 s, and one that is started anew
    for ever because its first answer takes so long (here 1 s, with a limit for an idle pair of 0.3).
    """

    async def story(pair: Pair) -> None:
        pair.api.hangs = True
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: bool(pair.api.asked), "the first question is asked")
        await asyncio.sleep(1.0)
        status = pair.service["a"].status()
        assert (status.state, status.ready, status.epoch) == ("checking", False, 1)
        pair.api.hangs = False
        await pair.serving(1)
        assert pair.service["a"].status().faults == 0

    tensorfold(tmp_path, story, canary={"timeout_seconds": 0.3, "first_seconds": 9.0, "idle_seconds": 0})


def test_no_first_answer_at_all_ends_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prevents a start that hangs in its first request for ever."""

    async def story(pair: Pair) -> None:
        pair.api.hangs = True
        pair.start("a")
        pair.start("b")
        said = "epoch 1 ends: canary: no answer within 0.4 s"
        await pair.until(lambda: said in caplog.text, said)
        pair.api.hangs = False
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    tensorfold(tmp_path, story, canary={"timeout_seconds": 0.2, "first_seconds": 0.4})
