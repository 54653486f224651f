"""A lead and a follower in one process, over real websockets on loopback, with docker and the engine as
doubles.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glm53_service.errors import GaveUpError
from glm53_service.node import Node, load_node
from glm53_service.notify import Notifier
from glm53_service.supervisor import dial, members
from glm53_service.supervisor.follow import Follower
from glm53_service.supervisor.lead import Lead
from glm53_service.supervisor.messages import PathName
from glm53_service.supervisor.world import World
from tests.unit.doubles import FakeApi, FakeDocker, free_port, make_settings

TOKEN = "ab" * 32
LINKS = json.dumps(
    [
        {
            "ifname": f"f{n}",
            "flags": ["LOWER_UP"],
            "mtu": 9000,
            "addr_info": [{"family": "inet", "local": f"127.0.1.{n}"}],
        }
        for n in (1, 2)
    ]
)


@dataclass
class Pair:
    """Two nodes and what runs on them."""

    folder: Path
    port: int
    gate: int
    api: FakeApi
    docker: dict[str, FakeDocker] = field(default_factory=lambda: {"a": FakeDocker(), "b": FakeDocker()})
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    service: dict[str, Any] = field(default_factory=dict)
    token: dict[str, str] = field(default_factory=lambda: {"a": TOKEN, "b": TOKEN})
    release: dict[str, str] = field(default_factory=lambda: {"a": "r1", "b": "r1"})
    changes: dict[str, Any] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        """Return node.yaml of `name`; every address is on loopback."""
        return load_node(
            f"""{{version: 1, cluster: unit, node: {name}, supervisor_port: {self.port}, nodes: [
            {{node: a, management: 127.0.0.1, fabric: [127.0.1.1]}},
            {{node: b, management: 127.0.0.2, fabric: [127.0.1.2]}}]}}""",
            "node.yaml",
        )

    def world(self, name: str) -> World:
        """Return the world of `name`: real clocks, its own state folder."""

        async def runner(_: Any) -> str:
            return LINKS

        return World(runner=runner, notifier=Notifier({}), state=self.folder / name)

    def start(self, name: str) -> None:
        """Start the supervisor of `name`."""
        tokens = (self.token[name],)
        if name == "a":
            settings = make_settings(
                self.folder / "model", api={"port": self.api.port}, gate={"port": self.gate}, **self.changes
            )
            made: Any = Lead(
                self.node("a"), settings, tokens, self.release["a"], self.docker["a"], self.world("a")
            )
        else:
            made = Follower(self.node("b"), tokens, self.release["b"], self.docker["b"], self.world("b"))
        self.service[name] = made
        self.tasks[name] = asyncio.create_task(made.run())

    async def stop(self, name: str) -> None:
        """Ask for a planned stop and wait for it."""
        self.service[name]._request_stop()
        await asyncio.wait_for(self.tasks[name], 10)

    async def kill(self, name: str) -> None:
        """End a supervisor as SIGKILL does: nothing is said, its containers stay."""
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once `condition` holds; 10 s is the budget, not a measure."""
        try:
            async with asyncio.timeout(10):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"never: {what}; lead: {self.service['a'].status() if 'a' in self.service else None}")

    async def serving(self, epoch: int) -> None:
        """Return once the pair serves in `epoch`."""
        await self.until(
            lambda: self.service["a"].status().ready and self.service["a"].status().epoch == epoch,
            f"serving in epoch {epoch}",
        )

    def running(self) -> tuple[int, int]:
        """Return how many rank containers run on a and on b."""
        return len(self.docker["a"].running()), len(self.docker["b"].running())

    def evidence(self, name: str) -> list[Path]:
        """Return the evidence folders of `name`."""
        folder = self.folder / name / "evidence"
        return sorted(folder.iterdir()) if folder.is_dir() else []


def run_pair(folder: Path, story: Callable[[Pair], Coroutine[Any, Any, None]], **changes: Any) -> None:
    """Run `story` against a fresh pair and take it down."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")

    async def play() -> None:
        api = FakeApi(free_port(), model="unit-model", reply="It is Paris.")
        pair = Pair(folder, free_port(), free_port(), api, changes=changes)
        pair.docker["a"].on_start, pair.docker["a"].on_exit = api.start, api.stop
        try:
            await story(pair)
        finally:
            for task in pair.tasks.values():
                task.cancel()
            await asyncio.gather(*pair.tasks.values(), return_exceptions=True)
            await api.stop(None)  # type: ignore[arg-type]

    asyncio.run(play())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits that only a person or a dead host would notice."""
    monkeypatch.setattr("glm53_service.supervisor.dial.REDIAL_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.dial.REJECTED_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.lead.IDLE_LOOK_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.decide.BACKOFF_SECONDS", (0.0, 0.1))
    monkeypatch.setattr("glm53_service.supervisor.decide.REFUSED_RETRY_SECONDS", 0.1)
    monkeypatch.setattr("glm53_service.supervisor.service.LOOPBACK", "127.0.0.3")


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
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
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
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
        await pair.stop("a")
        assert pair.docker["a"].history[-2:] == ["kill", "remove"]
        assert "stop" in pair.docker["a"].history
        await pair.until(lambda: pair.running() == (0, 0), "both ranks are gone")
        assert pair.evidence("a") == pair.evidence("b") == []
        assert pair.service["b"].status().state == "waiting"
        pair.start("a")
        await pair.serving(2)

    run_pair(tmp_path, story)


def test_the_workers_leave_ends_the_epoch_without_a_fault(tmp_path: Path) -> None:
    """Prevents `systemctl restart glm53-worker` from being counted against the engine."""

    async def story(pair: Pair) -> None:
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
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
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
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
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
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
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
        cut = {"on": True}
        plain, dial_plain = members._send, dial.Dialler._send

        async def lead_send(path: Any, message: Any) -> None:
            link = pair.service["a"]._members._links["b"]
            if not (cut["on"] and link.paths.get(PathName.FABRIC) is path):
                await plain(path, message)

        async def follower_send(self: Any, opened: Any, message: Any) -> None:
            if not (cut["on"] and self._open.get(PathName.FABRIC) is opened):
                await dial_plain(self, opened, message)

        monkeypatch.setattr(members, "_send", lead_send)
        monkeypatch.setattr(dial.Dialler, "_send", follower_send)
        await pair.until(lambda: not pair.service["a"].status().ready, "suspect")
        await pair.until(lambda: pair.running() == (0, 0), "no rank is left alone")
        assert pair.service["a"].status().faults == 0
        cut["on"] = False
        await pair.serving(2)

    run_pair(tmp_path, story)


def test_a_wrong_canary_answer_never_becomes_ready_and_gives_up(tmp_path: Path) -> None:
    """Prevents '!!!!' from passing as service, and an engine that fails for ever from looping for ever."""

    async def story(pair: Pair) -> None:
        pair.api.reply = "!!!!!!!!"
        pair.start("a")
        pair.start("b")
        with pytest.raises(GaveUpError, match=r"3 engine faults.*answered '!!!!!!!!', expected /Paris/"):
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


def test_docker_away_is_waited_for_by_name(tmp_path: Path) -> None:
    """Prevents a restart loop while dockerd is being upgraded."""

    async def story(pair: Pair) -> None:
        pair.start("a")
        pair.start("b")
        await pair.serving(1)
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
def test_a_peer_that_does_not_fit_is_named(tmp_path: Path, what: str, said: str) -> None:
    """Prevents a silent wait: the lead says which node does not fit, in what, and what to run."""

    async def story(pair: Pair) -> None:
        getattr(pair, what)["b"] = {"token": "cd" * 32, "release": "r0"}[what]
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: said in "".join(pair.service["a"].status().reasons), said)
        assert "b (rank 1)" in pair.service["a"].status().reasons[0]
        assert pair.docker["a"].history == pair.docker["b"].history == []

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
