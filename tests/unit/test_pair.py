"""A lead and a follower together: what ends an epoch, what follows, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.errors import GaveUpError
from glm53_service.supervisor.messages import PathName
from tests.unit.pair import Cut, Pair, quick, run_pair

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_serves_whatever_node_comes_first(tmp_path: Path, order: str) -> None:
    """Prevents a start that works in one boot order only."""

    async def story(pair: Pair) -> None:
        pair.start(order[0])
        if order == "ba":
            said = "fabric: 127.0.1.1 does not answer (connection refused); management: 127.0.0.1"
            await pair.until(lambda: said in str(pair.service["b"].status().reasons), said)
        else:
            await pair.until(
                lambda: pair.service["a"].status().reasons == ("waiting for b (rank 1): not heard of yet",),
                "the lead waits by name",
            )
        assert pair.running() == (0, 0)
        pair.start(order[1])
        await pair.serving(1)
        assert pair.running() == (1, 1)
        status = pair.service["a"].status()
        assert [r.state for r in status.ranks] == ["running", "running"]
        assert status.answer == "It is Paris."
        assert "address=127.0.1.2" in status.ranks[1].rails[0]

    run_pair(tmp_path, story)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_dead_rank_ends_both_and_the_pair_comes_back(tmp_path: Path, victim: str) -> None:
    """Prevents a rank that lives on alone, and a crash whose evidence is removed with its container."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        first = [*pair.docker["a"].containers, *pair.docker["b"].containers]
        await pair.docker[victim].exit(first[0 if victim == "a" else 1], 0)
        await pair.serving(2)
        assert first[0] not in pair.docker["a"].containers
        assert first[1] not in pair.docker["b"].containers
        report = json.loads((pair.evidence(victim)[0] / "report.json").read_text())
        assert (report["epoch"], report["exit_code"]) == (1, 0)
        assert pair.service["a"].status().faults == 1

    run_pair(tmp_path, story)


def test_a_planned_stop_drains_rank_0_first_and_is_no_fault(tmp_path: Path) -> None:
    """Prevents cut replies at `systemctl stop`, and a stop that counts as a crash."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        await pair.stop("a")
        assert pair.docker["a"].history[-2:] == ["kill", "remove"]
        assert "stop" in pair.docker["a"].history
        await pair.until(lambda: pair.running() == (0, 0), "both ranks are gone")
        assert pair.evidence("a") == pair.evidence("b") == []
        assert pair.service["b"].status().state == "waiting"
        pair.start("a")
        await pair.serving(2)

    run_pair(tmp_path, story)


def test_an_idle_pair_stops_at_once(tmp_path: Path) -> None:
    """Prevents a restart that waits seconds for a drain of nothing."""

    async def story(pair: Pair) -> None:
        pair.api.requests = 0
        await pair.both_serve()
        await pair.stop("a")
        assert "stop" not in pair.docker["a"].history
        assert pair.running() == (0, 0)

    run_pair(tmp_path, story)


def test_the_workers_leave_ends_the_epoch_without_a_fault(tmp_path: Path) -> None:
    """Prevents `systemctl restart glm53-worker` from being counted against the engine."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        await pair.stop("b")
        assert pair.running() == (0, 0)
        await pair.until(lambda: pair.service["a"].status().state == "waiting", "the lead waits")
        assert "its supervisor was stopped" in pair.service["a"].status().reasons[0]
        pair.start("b")
        await pair.serving(2)
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_a_killed_worker_supervisor_leaves_no_rank_into_the_next_epoch(tmp_path: Path) -> None:
    """Prevents an orphan container that holds the rank's memory and port while a new one starts."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        orphan = pair.docker["b"].running()[0]
        await pair.kill("b")
        await pair.until(lambda: pair.running() == (0, 1), "rank 0 is gone, the orphan is not")
        pair.start("b")
        await pair.serving(2)
        assert orphan not in pair.docker["b"].containers
        assert pair.running() == (1, 1)

    run_pair(tmp_path, story)


def test_a_killed_lead_ends_the_followers_rank_at_once(tmp_path: Path) -> None:
    """Prevents a rank that waits for a lead that was killed: vLLM's rank 1 never ends by itself."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        await pair.kill("a")
        await pair.until(lambda: pair.running() == (1, 0), "the follower's rank is gone")
        pair.start("a")
        await pair.serving(2)
        assert pair.running() == (1, 1)

    run_pair(tmp_path, story)


def test_a_silent_fabric_makes_suspect_then_ends_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a pair that stays 'ready' over a dead cable because the management network still answers."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        cut = Cut(pair, PathName.FABRIC, monkeypatch)
        await pair.until(lambda: not pair.service["a"].status().ready, "suspect")
        await pair.until(lambda: pair.running() == (0, 0), "no rank is left alone")
        assert pair.service["a"].status().faults == 0
        cut.on = False
        await pair.serving(2)

    run_pair(tmp_path, story)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("!!!!!!!!", "answered one character over and over"),
        ("Paris Paris Paris", "answered one word over and over"),
        ("", "answered nothing"),
        ("London", "answered 'London', expected /Paris/"),
    ],
)
def test_a_wrong_canary_answer_never_becomes_ready_and_gives_up(
    tmp_path: Path, reply: str, said: str
) -> None:
    """Prevents '!!!!' from passing as service, and an engine that fails for ever from looping for ever."""

    async def story(pair: Pair) -> None:
        pair.api.reply = reply
        pair.start("a")
        pair.start("b")
        with pytest.raises(GaveUpError, match=f"3 engine faults.*{said}"):
            await asyncio.wait_for(pair.tasks["a"], 10)
        await pair.until(lambda: pair.running() == (0, 0), "no rank is left")
        ready = pair.service["a"].status()
        assert not ready.ready
        pair.api.reply = "Paris"
        pair.start("a")
        await pair.serving(4)
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_an_image_that_differs_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Prevents ranks of two images, which fail in ways that look like a network fault."""

    async def story(pair: Pair) -> None:
        pair.docker["b"].layers = ["sha256:other"]
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: "differs from the head's" in pair.service["a"].status().last_end, "refused")
        assert "start" not in pair.docker["a"].history + pair.docker["b"].history
        assert pair.service["a"].status().faults == 0
        pair.docker["b"].layers = pair.docker["a"].layers
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    run_pair(tmp_path, story)


def test_an_image_that_came_under_its_content_tag_is_found(tmp_path: Path) -> None:
    """Prevents a worker that never finds what was shipped: a digest reference is lost by docker save and
    load.
    """

    async def story(pair: Pair) -> None:
        pair.docker["b"].references = set()
        pair.start("a")
        pair.start("b")
        said = "unit/engine:7 is not on this node"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        pair.docker["b"].references = {
            local_tag(image_content(await pair.docker["a"].image("unit/engine:7")))
        }
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        (container,) = pair.docker["b"].containers.values()
        assert container.spec.image.startswith("sha256:id-of-glm53/engine:")

    run_pair(tmp_path, story)


def test_docker_away_is_waited_for_by_name(tmp_path: Path) -> None:
    """Prevents a restart loop while dockerd is being upgraded."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        container = pair.docker["a"].running()[0]
        pair.docker["a"].problem = "docker does not answer"
        await pair.docker["a"].exit(container, 137)
        await pair.until(lambda: pair.running() == (0, 0), "the follower's rank is gone")
        pair.docker["a"].problem = ""
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


@pytest.mark.parametrize(
    ("what", "said"), [("token", "another token"), ("release", "runs release r0, this head r1")]
)
def test_a_peer_that_does_not_fit_is_named_once(
    tmp_path: Path, what: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a silent wait: the lead says which node does not fit, in what, and what to run."""

    async def story(pair: Pair) -> None:
        getattr(pair, what)["b"] = {"token": "cd" * 32, "release": "r0"}[what]
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: said in "".join(pair.service["a"].status().reasons), said)
        assert "b (rank 1)" in pair.service["a"].status().reasons[0]
        assert pair.docker["a"].history == pair.docker["b"].history == []
        await asyncio.sleep(0.5)  # ten more attempts
        assert sum("turned away" in message for message in caplog.messages) == (2 if what == "token" else 0)

    run_pair(tmp_path, story)


def test_a_missing_model_is_refused_with_the_path(tmp_path: Path) -> None:
    """Prevents a start that dies minutes later inside the engine because a directory is not there."""

    async def story(pair: Pair) -> None:
        shutil.rmtree(tmp_path / "model")
        pair.start("a")
        pair.start("b")
        await pair.until(
            lambda: "config.json cannot be read" in pair.service["a"].status().last_end, "refused"
        )
        assert str(tmp_path / "model") in pair.service["a"].status().last_end

    run_pair(tmp_path, story)


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_docker_that_is_being_stopped_is_no_engine_fault(tmp_path: Path, node: str) -> None:
    """Prevents an upgrade of docker from being counted against the engine: its containers end with a code."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        pair.docker_state[node] = "deactivating\n"
        await pair.docker[node].exit(pair.docker[node].running()[0], 137)
        await pair.until(lambda: "docker is being stopped" in pair.service["a"].status().last_end, "ended")
        pair.docker_state[node] = "active\n"
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_a_ranks_exit_that_is_heard_before_dockers_end_is_no_fault(tmp_path: Path) -> None:
    """Prevents a docker restart on the head from counting as an engine fault: a TensorFold rank 1 exits by
    itself as soon as rank 0 is gone, and its word may come first.
    """

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        pair.docker_state["a"] = "deactivating\n"
        await pair.docker["b"].exit(pair.docker["b"].running()[0], 1)
        await pair.until(lambda: not pair.service["a"].status().ready, "not ready")
        await pair.docker["a"].exit(pair.docker["a"].running()[0], 0)
        await pair.until(lambda: "docker is being stopped" in pair.service["a"].status().last_end, "ended")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_an_exit_that_is_heard_of_once_docker_is_back_is_no_fault(tmp_path: Path) -> None:
    """Prevents a quick restart of docker from counting: its word came after it was up again."""

    async def story(pair: Pair) -> None:
        pair.docker_state["a"] = "ActiveState=active\nActiveEnterTimestampMonotonic=77\n"
        await pair.both_serve()
        pair.docker_state["a"] = "ActiveState=active\nActiveEnterTimestampMonotonic=99\n"
        await pair.docker["a"].exit(pair.docker["a"].running()[0], 0)
        await pair.until(lambda: "docker is being stopped" in pair.service["a"].status().last_end, "ended")
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults == 0
        await pair.docker["a"].exit(pair.docker["a"].running()[0], 0)
        await pair.until(lambda: pair.service["a"].status().faults == 1, "an exit of its own")

    run_pair(tmp_path, story)
