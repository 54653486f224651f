"""The canary: which answers are right, which are garbage, and how long an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from glm53_service.canary import Api, degenerate
from glm53_service.settings import Settings
from tests.unit.doubles import FakeApi, FakeContainer, free_port, make_settings
from tests.unit.fixtures import settings_of, tensorfold_data

PLAIN = settings_of(tensorfold_data(model={"path": "/srv/models/glm", "name": "unit-model"}))


def asked(
    reply: str,
    *,
    settings: Settings = PLAIN,
    seconds: float = 5.0,
    change: Callable[[FakeApi], None] | None = None,
) -> tuple[str, str]:
    """Return (answer, problem) of one question to an API that gives `reply`."""

    async def play() -> tuple[str, str]:
        double = FakeApi(free_port(), model="unit-model", reply=reply)
        if change:
            change(double)
        nobody = cast(FakeContainer, None)
        await double.start(nobody)
        api = Api(f"127.0.0.1:{double.port}")
        try:
            return await api.canary(settings, {}, seconds=seconds)
        finally:
            await api.close()
            await double.stop(nobody)

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("4", ""),
        ("2+2=4.", ""),
        ("!!!!!!!!", "answered one character over and over: '!!!!!!!!'"),
        ("!!", "answered one character over and over: '!!'"),
        ("the the the", "answered one word over and over: 'the the the'"),
        ("", "answered nothing"),
        (" \n", "answered nothing"),
        ("5", "answered '5', expected /"),
        ("4" + "!" * 60, "answered '!' over and over"),
        ("4. " + "The answer is 4. " * 20, "answered '4. The answer is ' over and over"),
        ("4\n" + "ha ha, " * 30, "answered 'ha ha, ' over and over"),
    ],
)
def test_garbage_is_no_answer_to_the_default_question(reply: str, said: str) -> None:
    """Prevents a collapsed model from passing by length, as too short to judge, or behind a right word."""
    problem = asked(reply)[1]
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


@pytest.mark.parametrize(
    "answer",
    ["4\n" + "-" * 70, "| 2+2 |\n" + "| --- " * 14, "no no no, it is 4", "1 000 000 000 000", "====" * 20],
)
def test_language_and_drawn_lines_are_no_garbage(answer: str) -> None:
    """Prevents a healthy model from being restarted for a rule under a heading."""
    assert degenerate(answer) in ("", f"answered one character over and over: {answer[:40]!r}")
    assert not degenerate("4" + answer)


def test_the_list_of_models_has_the_questions_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents 'no answer within 120 s' three seconds after the question, from an engine that is busy."""
    monkeypatch.setattr("glm53_service.canary.PROBE_SECONDS", 0.05)

    def slow(api: FakeApi) -> None:
        api.models_seconds = 0.4

    assert asked("4", change=slow) == ("4", "")
    assert asked("4", seconds=0.2, change=slow) == ("", "no answer within 0.2 s")


@pytest.mark.parametrize(
    "completion", [{"choices": [{"message": None}]}, {"choices": []}, {"choices": None}, {}, [], "4"]
)
def test_an_answer_of_another_shape_is_the_apis_problem(completion: Any) -> None:
    """Prevents 'the supervisor's own work failed' over an engine that answers in its own way."""

    def odd(api: FakeApi) -> None:
        api.completion = completion

    assert asked("", change=odd)[1].startswith("the API failed: ")


def test_a_start_waits_longer_than_an_idle_check() -> None:
    """Prevents the end of an engine whose first request takes two minutes, while it compiles."""
    canary = PLAIN.canary
    assert (canary.timeout_seconds, canary.first_seconds) == (120.0, 600.0)
    mine = make_settings(Path("/m"), canary={"timeout_seconds": 7, "first_seconds": 70}).canary
    assert (mine.timeout_seconds, mine.first_seconds) == (7.0, 70.0)
