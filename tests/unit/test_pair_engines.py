"""What lead and follower do differently for an engine: order, argument check, ways out of a failed start,
stalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.served import noted_image
from glm53_service.engines.tensorfold_log import NCCL_MEMORY
from tests.unit.doubles import FakeContainer
from tests.unit.fixtures import value
from tests.unit.pair import Pair, quick, run_pair

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

HEALTH: dict[str, Any] = {
    "ok": True,
    "busy": False,
    "requests_running": 0,
    "context_length": 1048576,
    "iteration_s": 0.0,
    "completion_tokens_total": 5,
}
TENSORFOLD: dict[str, Any] = {"engine": "tensorfold", "vllm": {}, "tensorfold": {"memory_reserve_gib": 2}}


def tensorfold(tmp_path: Path, story: Any, **changes: Any) -> None:
    """Run `story` against a pair on TensorFold, with its own health."""

    async def with_health(pair: Pair) -> None:
        pair.api.health = {**HEALTH}
        await story(pair)

    run_pair(tmp_path, with_health, **{**TENSORFOLD, **changes})


def test_tensorfolds_followers_start_first(tmp_path: Path) -> None:
    """Prevents a rank 0 that gives up on a rank 1 that is started after it."""
    order: list[str] = []

    async def story(pair: Pair) -> None:
        start = pair.docker["a"].on_start

        async def first(container: FakeContainer) -> None:
            order.append("a")
            assert start is not None
            await start(container)

        async def second(_: FakeContainer) -> None:
            order.append("b")

        pair.docker["a"].on_start, pair.docker["b"].on_start = first, second
        await pair.both_serve()
        assert sorted(order) == ["a", "b"]
        chosen = {v.key: v.value for v in pair.service["a"].status().chosen}
        assert chosen["drafter.request"] == "mtp"

    tensorfold(tmp_path, story)


def test_arguments_that_the_image_refuses_start_nothing(tmp_path: Path) -> None:
    """Prevents an engine that dies of a typing error after its predecessor was stopped and its memory
    waited for.
    """

    async def story(pair: Pair) -> None:
        pair.docker["a"].parser = (2, "exited")
        pair.docker["a"].said = [
            "usage: tensorfold serve",
            "tensorfold serve: error: unrecognized arguments: --nope",
        ]
        pair.start("a")
        pair.start("b")
        await pair.until(
            lambda: "unrecognized arguments: --nope" in pair.service["a"].status().last_end, "refused"
        )
        assert "start" not in pair.docker["a"].history + pair.docker["b"].history
        assert pair.service["a"].status().faults == 0

    tensorfold(tmp_path, story)


def test_the_image_is_asked_once_for_each_command_line(tmp_path: Path) -> None:
    """Prevents ten seconds more at every start."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        await pair.docker["b"].exit(pair.docker["b"].running()[0], 1)
        await pair.serving(2)
        await pair.stop("a")
        pair.start("a")
        await pair.serving(3)
        assert pair.docker["a"].checks == 1

    tensorfold(tmp_path, story)


def test_a_window_that_does_not_fit_is_refitted_once_and_said(tmp_path: Path) -> None:
    """Prevents a default that does not boot on this kit: the engine names the window that fits."""

    async def story(pair: Pair) -> None:
        open_api, seen = pair.docker["a"].on_start, []

        async def start(container: FakeContainer) -> None:
            seen.append(value(container.spec.command, "--context"))
            if len(seen) > 1:
                pair.api.health = {**HEALTH, "context_length": 393216}
                assert open_api is not None
                await open_api(container)
                return
            pair.docker["a"].said = [
                "tensorfold: no; largest fitting prompt-plus-reply window: 393216 tokens across the ranks"
            ]
            container.code, container.state = 1, "exited"
            container.exited.set()

        pair.docker["a"].on_start = start
        await pair.both_serve(2)
        assert seen == ["1048576", "393216"]
        status = pair.service["a"].status()
        assert status.faults == 0
        assert any(v.value == 393216 for v in status.chosen)

    tensorfold(tmp_path, story)


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_start_is_tried_again_for_what_a_ranks_last_line_says(tmp_path: Path, node: str) -> None:
    """Prevents a passing fault from counting, because the exit is known before the line that names it."""

    async def story(pair: Pair) -> None:
        open_api, starts = pair.docker["a"].on_start, {"a": 0, "b": 0}
        assert open_api is not None

        def starter(name: str) -> Callable[[FakeContainer], Awaitable[None]]:
            async def start(container: FakeContainer) -> None:
                starts[name] += 1
                first = starts[name] == 1
                pair.docker[name].last_words = [f"RuntimeError: {NCCL_MEMORY}"] if first else []
                if first and name == node:
                    container.code, container.state = 1, "exited"
                    container.exited.set()
                elif name == "a" and not (first and node == "b"):
                    await open_api(container)

            return start

        for name in ("a", "b"):
            pair.docker[name].on_start = starter(name)
        await pair.both_serve(2)
        assert pair.service["a"].status().faults == 0

    tensorfold(tmp_path, story)


def test_a_build_lock_of_a_killed_build_goes(tmp_path: Path) -> None:
    """Prevents a start that waits for ever on a kernel build that nobody does any more."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        (cache,) = (tmp_path / "b/cache").iterdir()
        for node in "ab":
            made = pair.docker[node].containers[pair.docker[node].running()[0]].spec.image
            assert noted_image(tmp_path / node / "image.json") == made, (
                "whoever looks later needs no settings"
            )
        locks = [
            cache / "torch_extensions/kernels/lock",
            cache / "torch_extensions/py312_cu130/kernels/lock",
            cache / "vllm/torch_extensions/x/lock",
        ]
        other = cache / "triton/lock"
        for lock in (*locks, other):
            lock.parent.mkdir(parents=True)
            lock.write_text("")
        await pair.docker["b"].exit(pair.docker["b"].running()[0], 137)
        await pair.serving(2)
        assert not [lock for lock in locks if lock.exists()]
        assert other.exists(), "not torch's: its owner looks after it"

    tensorfold(tmp_path, story)


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ({"requests_running": 2}, "no counter of the engine has moved"),
        ({"iteration_s": 99.0}, "has been in one iteration for 99 s"),
    ],
)
def test_a_stuck_engine_is_ended_although_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: dict[str, Any], said: str
) -> None:
    """Prevents a pair that is 'healthy' for hours while no token comes out."""
    monkeypatch.setattr("glm53_service.supervisor.epoch.HEALTH_SECONDS", 0.1)

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        await asyncio.sleep(0.5)
        assert pair.service["a"].status().epoch == 1  # idle and quiet is not stuck
        pair.api.health = {**HEALTH, **health}
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        pair.api.health = {**HEALTH}
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults >= 1

    tensorfold(tmp_path, story, supervision={"stall_seconds": 5.0, "still_seconds": 1.0})


def test_an_engine_that_works_slowly_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a long prefill from being killed: its counters move, however slowly."""
    monkeypatch.setattr("glm53_service.supervisor.epoch.HEALTH_SECONDS", 0.1)

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        for tokens in range(10, 20):
            pair.api.health = {**HEALTH, "requests_running": 3, "completion_tokens_total": tokens}
            await asyncio.sleep(0.3)
        status = pair.service["a"].status()
        assert (status.ready, status.epoch) == (True, 1)

    tensorfold(tmp_path, story, supervision={"stall_seconds": 5.0, "still_seconds": 1.0})


@pytest.mark.parametrize(
    ("health", "status", "said"),
    [
        ({**HEALTH, "context_length": 4096}, 200, "serves a window of 4096 tokens, 1048576 were asked for"),
        ({"status": "ok"}, 200, "rank 0's /health says no more than"),
        ({}, 401, "rank 0 wants a key for /health (HTTP 401)"),
        ({**HEALTH, "streams": ["decoding"]}, 200, "rank 0's /health cannot be read (AttributeError"),
        ({**HEALTH, "iteration_s": "a while"}, 200, "rank 0's /health cannot be read (ValueError"),
    ],
)
def test_less_than_was_asked_for_is_not_ready(
    tmp_path: Path, health: dict[str, Any], status: int, said: str
) -> None:
    """Prevents a service of another shape than the one in the inventory, and a 401 or an engine that reports
    in another way from looking like a dead server, or like a fault of the supervisor's own.
    """

    async def story(pair: Pair) -> None:
        pair.api.health, pair.api.health_status = health, status
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        assert not pair.service["a"].status().ready

    tensorfold(tmp_path, story)


def test_a_line_that_says_broken_ends_the_epoch(tmp_path: Path) -> None:
    """Prevents ranks that are out of step from answering every request with an error while /health is
    well.
    """

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        rank = pair.service["a"]._rank
        rank._on_line(rank._engine.read_line("RuntimeError: GLM ranks are out of step; restart every rank"))
        await pair.until(lambda: "out of step" in pair.service["a"].status().last_end, "ended")
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    tensorfold(tmp_path, story)


def test_a_drafter_that_differs_on_a_worker_is_refused(tmp_path: Path) -> None:
    """Prevents half the acceptance rate from weights of another revision under the same name."""
    from glm53_service.artifacts.draft import read_draft_files

    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"one")
    one = read_draft_files(folder, tmp_path / "state", node="a", rank=0)
    (folder / "model.safetensors").write_bytes(b"two!")
    two = read_draft_files(folder, tmp_path / "state", node="a", rank=0)
    assert one.sha256 != two.sha256
    assert two == read_draft_files(folder, tmp_path / "state", node="a", rank=0)
    (folder / "config.json").unlink()
    assert (
        "config.json: No such file" in read_draft_files(folder, tmp_path / "state", node="a", rank=0).problem
    )


def test_a_model_that_collapses_on_long_prompts_is_not_ready(tmp_path: Path) -> None:
    """Prevents "!!!!" on every real prompt behind a short question that is answered well."""

    async def story(pair: Pair) -> None:
        pair.api.long_reply = "!!!!!!!!"
        pair.start("a")
        pair.start("b")
        said = "canary: after a long text: answered one character over and over"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        pair.api.long_reply = ""
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.api.asked[-2:] == [
            "capital of France?",
            "Shelf 1 holds 39 blue lamps and 55 wool coats.\n"
            "Shelf 2 holds 76 oak boards and 11 iron nails.\n\ncapital of France?",
        ]

    tensorfold(tmp_path, story, canary={"long_lines": 2})


IDLE = {"idle_seconds": 0.4, "timeout_seconds": 1.0, "long_lines": 0}


def test_an_idle_pair_is_asked_and_a_stuck_one_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a pair whose other rank hangs from looking well until the first user of the morning waits."""
    monkeypatch.setattr("glm53_service.supervisor.epoch.HEALTH_SECONDS", 0.1)
    monkeypatch.setattr("glm53_service.supervisor.idle.LOOK_SECONDS", 0.1)

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        first = pair.service["a"].status().answered_at
        await pair.until(lambda: pair.service["a"].status().answered_at > first, "asked again")
        pair.api.hangs = True
        said = "canary: idle check: no answer within 1 s"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        pair.api.hangs = False
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    tensorfold(tmp_path, story, canary=IDLE)


def test_an_idle_question_beside_a_request_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a user's long prefill, begun while the question ran, from ending the pair."""
    monkeypatch.setattr("glm53_service.supervisor.epoch.HEALTH_SECONDS", 0.1)
    monkeypatch.setattr("glm53_service.supervisor.idle.LOOK_SECONDS", 0.1)

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        asked = len(pair.api.asked)
        pair.api.hangs = True
        await pair.until(lambda: len(pair.api.asked) > asked, "asked")
        pair.api.health = {**HEALTH, "requests_running": 2}
        await asyncio.sleep(1.5)
        status = pair.service["a"].status()
        assert (status.ready, status.epoch, status.faults) == (True, 1, 0)
        pair.api.hangs = False

    tensorfold(tmp_path, story, canary=IDLE)
