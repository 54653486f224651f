"""Races and bad moments between lead and follower, each once seen to hang the pair or to miscount."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from glm53_service.artifacts.content import image_content
from glm53_service.engines.base import ContainerSpec, Launch
from glm53_service.fabric.rails import Fabric
from glm53_service.supervisor import dial, follow, members
from glm53_service.supervisor.cleanup import clean_up
from glm53_service.supervisor.decide import Action, decide
from glm53_service.supervisor.follow import Follower
from glm53_service.supervisor.lead import Lead
from glm53_service.supervisor.messages import (
    Beat,
    Go,
    Hello,
    Look,
    Message,
    PathName,
    Prepare,
    RankState,
    Report,
    Stop,
)
from glm53_service.supervisor.world import World
from tests.unit.doubles import FakeApi, FakeContainer, FakeDocker, make_settings
from tests.unit.pair import Cut, Pair, quick, run_pair

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


def old_container() -> FakeContainer:
    """Return a rank container of a supervisor that is gone."""
    labels = {"glm53.cluster": "unit", "glm53.epoch": "1"}
    spec = ContainerSpec(
        name="glm53-rank1",
        image="x",
        command=(),
        environment={},
        mounts=(),
        user="0:0",
        shm_bytes=1,
        stop_seconds=1,
        labels=labels,
        gpus=None,
        rdma=False,
    )
    return FakeContainer(spec, state="running")


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_folder_that_cannot_be_made_is_refused_and_mended(tmp_path: Path, where: str) -> None:
    """Prevents an endless 'preparing' on a full disk or a file in the way."""

    async def story(pair: Pair) -> None:
        (tmp_path / where).mkdir()
        (tmp_path / where / "cache").write_text("in the way")
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: "cannot be made" in pair.service["a"].status().last_end, "refused")
        (tmp_path / where / "cache").unlink()
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    run_pair(tmp_path, story)


@pytest.mark.parametrize("create_seconds", [0.0, 0.6])
def test_a_late_hello_does_not_undo_a_newer_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, create_seconds: float
) -> None:
    """Prevents a slow second network from hiding a rank that is there: a hang, or a fault that never was."""
    plain = follow.Follower._hello

    async def slow(self: follow.Follower, path: PathName) -> Hello:
        hello = await plain(self, path)
        if path is PathName.MANAGEMENT:
            await asyncio.sleep(0.3)
        return hello

    monkeypatch.setattr(follow.Follower, "_hello", slow)

    async def story(pair: Pair) -> None:
        pair.docker["a"].create_seconds = create_seconds
        await pair.both_serve()
        await asyncio.sleep(0.5)  # the late hello has arrived by then
        status = pair.service["a"].status()
        assert (status.ready, status.epoch, status.faults) == (True, 1, 0)

    run_pair(tmp_path, story)


def test_a_new_epoch_waits_for_the_end_of_the_old_rank(tmp_path: Path) -> None:
    """Prevents the end of epoch N from wiping the container of N+1, which then waits for ever."""

    async def story(pair: Pair) -> None:
        settings = make_settings(tmp_path / "model")
        content = image_content(await pair.docker["b"].image(settings.image))
        follower = Follower(pair.node("b"), ("ab" * 32,), "r1", pair.docker["b"], pair.world("b"))
        pair.docker["b"].create_seconds = 0.1
        for epoch in (100, 101, 102):
            launch = Launch(
                epoch=epoch,
                settings=settings,
                image_content=content,
                master="127.0.1.1",
                world=2,
                rails=(("127.0.1.1",), ("127.0.1.2",)),
            )
            follower._message(Look(epoch=epoch, rdma=False))
            follower._message(Prepare(launch=launch))
            await asyncio.sleep(0.15 if epoch == 100 else 0.0)
        await asyncio.sleep(0.6)
        assert (follower._rank.report.epoch, follower._rank.report.state) == (102, RankState.CREATED)
        assert [c.spec.labels["glm53.epoch"] for c in pair.docker["b"].containers.values()] == ["102"]

    run_pair(tmp_path, story)


def test_a_word_lost_with_a_dying_network_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents 'ready' with a dead rank: its exit was told once, over the network that just went."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        dialler = pair.service["b"]._dialler
        dialler._heard[PathName.MANAGEMENT] = dialler._world.clock() + 0.001
        Cut(pair, PathName.MANAGEMENT, monkeypatch)
        await pair.docker["b"].exit(pair.docker["b"].running()[0], 1)
        await pair.serving(2)

    run_pair(tmp_path, story)


def test_an_exit_over_a_dark_fabric_is_no_engine_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a pair that gives up after five pulled cables."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        Cut(pair, PathName.FABRIC, monkeypatch)
        await pair.until(lambda: not pair.service["a"].status().ready, "suspect")
        for container in pair.docker["b"].running():
            await pair.docker["b"].exit(container, 1)
        await pair.until(lambda: pair.running() == (0, 0), "both are gone")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_a_leftover_under_a_docker_that_comes_late_goes(tmp_path: Path) -> None:
    """Prevents a worker that is waited for for ever after a power cut, over a container nobody removes."""

    async def story(pair: Pair) -> None:
        pair.docker["b"].containers["old"] = old_container()
        pair.docker["b"].problem = "docker does not answer"
        pair.start("a")
        pair.start("b")
        await pair.until(
            lambda: "docker does not answer" in str(pair.service["b"].status().reasons), "it says so"
        )
        assert pair.service["a"].status().reasons == ("waiting for b (rank 1): not heard of yet",)
        pair.docker["b"].problem = ""
        await pair.serving(1)
        assert "old" not in pair.docker["b"].containers

    run_pair(tmp_path, story)


def test_one_odd_answer_of_ip_does_not_end_the_dialling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a follower that looks alive and never dials again."""
    answers = {"odd": 2}
    plain = Pair.world

    def world(self: Pair, name: str) -> World:
        made = plain(self, name)

        async def runner(argv: Sequence[str]) -> str:
            answers["odd"] -= 1
            return "" if answers["odd"] >= 0 else await made.runner(argv)

        return dataclasses.replace(made, runner=runner) if name == "b" else made

    monkeypatch.setattr(Pair, "world", world)

    async def story(pair: Pair) -> None:
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    run_pair(tmp_path, story)


def test_a_dead_background_task_ends_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a supervisor whose watchdog is happy while nothing dials any more."""

    async def broken(self: dial.Dialler, path: PathName, source: str, target: str) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(dial.Dialler, "_keep", broken)

    async def story(pair: Pair) -> None:
        pair.start("b")
        with pytest.raises(RuntimeError, match="made up"):
            await asyncio.wait_for(pair.tasks["b"], 5)

    run_pair(tmp_path, story)


@pytest.mark.parametrize("lost", [False, True])
def test_a_stray_rank_is_told_to_end(tmp_path: Path, lost: bool) -> None:
    """Prevents a rank whose `stop` was lost from holding the pair for ever: its lease is fine."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        told = pair.service["a"]._members.tell_all

        async def tell_all(message: Message, *, every_path: bool = False) -> None:
            if not (lost and isinstance(message, Stop)):
                await told(message, every_path=every_path)

        pair.service["a"]._members.tell_all = tell_all
        stray = pair.docker["b"].running()[0]
        await pair.docker["a"].exit(pair.docker["a"].running()[0], 0)
        await pair.until(lambda: stray not in pair.docker["b"].containers, "the follower's rank is gone")
        await pair.until(lambda: pair.service["a"].status().ready, "serving")

    run_pair(tmp_path, story)


def test_a_full_disk_does_not_keep_an_orphan_running(tmp_path: Path) -> None:
    """Prevents ExecStopPost from leaving a rank alone because its evidence could not be written."""
    docker = FakeDocker()
    docker.containers["old"] = old_container()
    (tmp_path / "evidence").write_text("no folder")
    asyncio.run(clean_up(docker, "unit", World(state=tmp_path), {"SERVICE_RESULT": "signal"}))
    assert docker.containers == {}


def test_the_hold_after_an_exit_begins_with_the_exit(tmp_path: Path) -> None:
    """Prevents a hold that is over before it began: the last look may be a whole tick old by then, and a
    docker restart under the other rank would count as an engine fault after all.
    """
    now = [10.0]
    pair = Pair(tmp_path, 29_541, 28_891, FakeApi(28_881, model="m", reply=""))
    world = dataclasses.replace(pair.world("a"), clock=lambda: now[0])
    lead = Lead(pair.node("a"), make_settings(tmp_path), ("ab" * 32,), "r1", FakeDocker(), world)
    assert lead._snapshot().exit_known_for == 0.0
    now[0] = 10.29
    lead._rank.report = Report(serial=1, state=RankState.EXITED, exit_code=1)
    assert lead._snapshot().exit_known_for == 0.0
    now[0] = 10.5
    assert lead._snapshot().exit_known_for == pytest.approx(0.21)
    lead._rank.report = Report(serial=2, state=RankState.RUNNING)
    assert lead._snapshot().exit_known_for == 0.0


@pytest.mark.parametrize("broken", ["wait", "lines"])
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_rank_that_nobody_watches_any_more_is_no_running_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, node: str
) -> None:
    """Prevents 'ready' over a dead rank: the task that waits for its end, or reads its lines, had failed in a
    way that nobody foresaw, and nobody was told.
    """

    async def story(pair: Pair) -> None:
        docker = pair.docker[node]
        wait, lines = docker.wait, docker.lines
        failing = {"wait": broken == "wait", "lines": broken == "lines"}

        async def fail(container: str, what: str) -> None:
            if failing[what] and "check" not in docker.containers[container].spec.name:
                await asyncio.sleep(0.5)
                raise RuntimeError("made up")

        async def failing_wait(container: str) -> int:
            await fail(container, "wait")
            return await wait(container)

        async def failing_lines(container: str) -> AsyncIterator[str]:
            await fail(container, "lines")
            async for line in lines(container):
                yield line

        monkeypatch.setattr(docker, "wait", failing_wait)
        monkeypatch.setattr(docker, "lines", failing_lines)
        pair.start("a")
        pair.start("b")
        said = "is out of sight: its supervisor's own work failed: RuntimeError('made up')"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        failing[broken] = False
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_no_epoch_begins_before_the_follower_says_that_it_hears_its_lead(tmp_path: Path) -> None:
    """Prevents five minutes of 'preparing': with one lost packet the fabric's welcome comes later than the
    launch over the other network, and the follower drops a launch of a lead that it does not hear.
    """
    pair = Pair(tmp_path, 29_541, 28_891, FakeApi(28_881, model="m", reply=""))
    settings = make_settings(tmp_path)
    lead = Lead(pair.node("a"), settings, ("ab" * 32,), "r1", FakeDocker(), pair.world("a"))
    link = lead._members._links["b"]
    path = members._Path(cast(Any, None), None, cast(Any, None), lead._world.clock())
    hello = Hello(
        node="b",
        instance="i",
        boot_id="1",
        release="r1",
        wall_time=lead._world.wall(),
        path=PathName.FABRIC,
        report=Report(),
    )
    said = "waiting for b (rank 1): it does not hear this node over the fabric yet"
    lead._members._admit(link, hello, path)
    lead._around.fabric = Fabric(rails=())
    assert decide(lead._snapshot(), settings.supervision).reasons == (said,)
    lead._members._hear(link, PathName.FABRIC, path, Beat(report=Report(), fabric_silence=0.01))
    assert decide(lead._snapshot(), settings.supervision).action is Action.BEGIN


@pytest.mark.parametrize("lost", [Look, Prepare, Go])
def test_a_launch_whose_first_word_is_lost_on_both_networks_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: type[Message]
) -> None:
    """Prevents five minutes of 'preparing' after both networks were dark for a moment."""
    plain, words = members._send, []

    async def send(path: Any, message: Message) -> None:
        if isinstance(message, lost):
            words.append(message)
            if len(words) <= 2:  # once a network
                return
        await plain(path, message)

    monkeypatch.setattr(members, "_send", send)

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        assert [step for step in pair.docker["b"].history if step != "remove"] == ["create 1", "start"]
        told = len(words)
        await asyncio.sleep(0.3)  # no word is due any more: what is seen is that none comes
        assert len(words) == told

    run_pair(tmp_path, story)


def test_a_lease_that_ends_before_the_container_is_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents five minutes of 'preparing' on a fabric that fails one way only: the lead hears the follower,
    which has dropped the launch and has no container whose end it could tell of.
    """
    plain, deaf = members._send, [False]

    async def send(to: Any, message: Message) -> None:
        link = pairs[0].service["a"]._members._links["b"]
        if not (deaf[0] and link.paths.get(PathName.FABRIC) is to):
            await plain(to, message)

    monkeypatch.setattr(members, "_send", send)
    monkeypatch.setattr(dial, "CONNECT_SECONDS", 0.3)  # as in earnest: well below peer_lost_seconds
    pairs: list[Pair] = []

    async def story(pair: Pair) -> None:
        pairs.append(pair)
        pair.docker["b"].create_seconds = 3.0
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: pair.service["b"]._launch is not None, "the launch is here")
        deaf[0] = True
        said = "b (rank 1): the fabric is silent for "
        await pair.until(lambda: pair.service["a"].status().last_end.startswith(said), said)
        deaf[0], pair.docker["b"].create_seconds = False, 0.0
        await pair.until(lambda: pair.service["a"].status().ready, "serving")
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)
