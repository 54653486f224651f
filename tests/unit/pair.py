"""The harness of test_pair and test_pair_races: a lead and a follower in one process, over real websockets on
loopback, with docker and the engine as doubles.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glm53_service.errors import CommandError
from glm53_service.node import Node, load_node
from glm53_service.notify import Notifier
from glm53_service.supervisor import dial, members
from glm53_service.supervisor.follow import Follower
from glm53_service.supervisor.lead import Lead
from glm53_service.supervisor.messages import PathName
from glm53_service.supervisor.world import World
from tests.unit.doubles import FakeApi, FakeDocker, free_port, make_settings

TOKEN = "ab" * 32


def links_of(*addresses: str, mtu: int = 9000) -> str:
    """Return what `ip -j address show` says of a node with a device for each address."""
    return json.dumps(
        [
            {
                "ifname": f"f{address}",
                "flags": ["LOWER_UP"],
                "mtu": mtu,
                "addr_info": [{"family": "inet", "local": address, "prefixlen": 24}],
            }
            for address in addresses
        ]
    )


LINKS = links_of("127.0.1.1", "127.0.1.2")


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
    roots: dict[str, Path] = field(default_factory=dict)
    smi: dict[str, str] = field(default_factory=dict)
    docker_state: dict[str, str] = field(default_factory=lambda: {"a": "active\n", "b": "active\n"})
    links: dict[str, str] = field(default_factory=lambda: {"a": LINKS, "b": LINKS})
    fabric: dict[str, str] = field(default_factory=lambda: {"a": "127.0.1.1", "b": "127.0.1.2"})
    kernel_log: dict[str, str] = field(default_factory=lambda: {"a": "", "b": ""})
    dead: set[tuple[str, str]] = field(default_factory=set)
    pings: list[tuple[str, ...]] = field(default_factory=list)

    def node(self, name: str) -> Node:
        """Return node.yaml of `name`; every address is on loopback."""
        return load_node(
            f"""{{version: 1, cluster: unit, node: {name}, supervisor_port: {self.port}, nodes: [
            {{node: a, management: 127.0.0.1, fabric: [{self.fabric["a"]}]}},
            {{node: b, management: 127.0.0.2, fabric: [{self.fabric["b"]}]}}]}}""",
            "node.yaml",
        )

    def world(self, name: str) -> World:
        """Return the world of `name`: real clocks, its own state folder."""

        async def runner(argv: Any) -> str:
            if argv[0] == "nvidia-smi":
                return self.smi.get(name, "")
            if argv[0] == "ping":
                self.pings.append((name, *argv))
                if (name, argv[-1]) in self.dead:
                    raise CommandError("no answer", code=1)
            answers = {"systemctl": self.docker_state, "journalctl": self.kernel_log}
            return answers.get(argv[0], self.links)[name]

        root = self.roots.get(name, Path("/"))
        return World(runner=runner, notifier=Notifier({}), state=self.folder / name, root=root)

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

    async def both_serve(self, epoch: int = 1) -> None:
        """Start both supervisors, and return once they serve in `epoch`."""
        self.start("a")
        self.start("b")
        await self.serving(epoch)

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


class Cut:
    """Silences one network in both directions while `on`, as a dead cable does: nothing is closed."""

    def __init__(self, pair: Pair, path: PathName, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        plain, dial_plain = members._send, dial.Dialler._send

        async def lead_send(to: Any, message: Any) -> None:
            link = pair.service["a"]._members._links["b"]
            if not (self.on and link.paths.get(path) is to):
                await plain(to, message)

        async def follower_send(dialler: Any, to: Any, message: Any) -> None:
            if not (self.on and dialler._open.get(path) is to):
                await dial_plain(dialler, to, message)

        monkeypatch.setattr(members, "_send", lead_send)
        monkeypatch.setattr(dial.Dialler, "_send", follower_send)


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits that only a person or a dead host would notice."""
    monkeypatch.setattr("glm53_service.supervisor.dial.REDIAL_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.dial.REJECTED_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.surroundings.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("glm53_service.supervisor.decide.BACKOFF_SECONDS", (0.0, 0.1))
    monkeypatch.setattr("glm53_service.supervisor.decide.REFUSED_RETRY_SECONDS", 0.1)
    monkeypatch.setattr("glm53_service.supervisor.service.LOOPBACK", f"127.0.{os.getpid() % 250 + 2}.3")
