"""The module that stops what is in the way and gives it back: remembered first, finished by the next run."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugin_loader import load

takeover = load("modules", "glm53_takeover")

ME = pwd.getpwuid(os.getuid()).pw_name
BOX, TIMER, SERVICE = (
    {"kind": "container", "name": "tf", "id": "c1", "scope": ""},
    {"kind": "unit", "name": "tf.timer", "id": "", "scope": ""},
    {"kind": "unit", "name": "tf.service", "id": "", "scope": "alice"},
)
FOUND = [TIMER, SERVICE, BOX]


class Broken(Exception):
    """The run ends here, as if the power went."""


class World:
    """A node with a container, a timer and a user's unit; acts are kept, and one of them may be the last."""

    def __init__(self, record: Path) -> None:
        self.record = record
        self.box: dict[str, Any] | None = {
            "state": "running",
            "policy": {"Name": "on-failure", "MaximumRetryCount": 3},
        }
        self.units: dict[str, dict[str, Any]] = {
            "tf.timer": {"active": True, "enabled": "enabled", "source": "tf.timer"},
            "tf.service": {"active": True, "enabled": "enabled", "source": "/home/alice/tf.service"},
        }
        self.acts: list[str] = []
        self.remembered: list[int] = []
        self.last = -1

    def container(self, id: str) -> dict[str, Any] | None:
        return json.loads(json.dumps(self.box)) if id == "c1" and self.box else None

    def unit(self, name: str, scope: str) -> dict[str, Any] | None:
        return dict(self.units[name]) if name in self.units else None

    def _act(self, text: str) -> None:
        if len(self.acts) == self.last:
            raise Broken
        self.remembered.append(len(entries(self.record)))
        self.acts.append(text)

    def policy(self, id: str, policy: Mapping[str, Any]) -> None:
        self._act(f"policy {policy['Name']}")
        assert self.box is not None
        self.box["policy"] = {"MaximumRetryCount": 0, **policy}

    def run(self, id: str, verb: str, seconds: int) -> None:
        self._act(f"{verb} {id}")
        assert self.box is not None
        self.box["state"] = {"stop": "exited", "start": "running"}[verb]

    def systemctl(self, scope: str, *words: str) -> None:
        self._act(" ".join((scope, *words)).strip())
        name = Path(words[-1]).name
        match words[0]:
            case "stop" | "start":
                self.units[name]["active"] = words[0] == "start"
            case "disable":
                self.units[name]["enabled"] = "disabled"
            case "enable":
                self.units[name]["enabled"] = "enabled"

    def state(self) -> tuple[Any, ...]:
        """All that an owner cares for."""
        return json.loads(json.dumps([self.box, self.units])), sorted(self.units)


def entries(path: Path) -> list[dict[str, Any]]:
    """What is remembered."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["taken"] if path.exists() else []
    return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A node."""
    return World(tmp_path / "state/taken-over.json")


def ask(
    world: World, found: list[dict[str, str]], state: str = "taken", *, check: bool = False
) -> dict[str, Any]:
    """Run the module."""
    params = {
        "record": str(world.record),
        "account": ME,
        "found": found,
        "state": state,
        "stop_seconds": 7,
    }
    result: dict[str, Any] = takeover.run(params, check, world, lambda: 1764444444.0)
    return result


def test_all_is_stopped_in_order_and_given_back_as_it_was(world: World) -> None:
    """Prevents an owner's service that comes back otherwise than it was, or not at all."""
    before = world.state()
    taken = ask(world, FOUND)
    assert world.acts == [
        "stop tf.timer",
        "disable --no-reload tf.timer",
        "alice stop tf.service",
        "alice disable --no-reload tf.service",
        "policy no",
        "stop c1",
    ]
    assert taken["changed"] is True
    assert taken["said"][0] == "stopped unit tf.timer"
    assert world.record.stat().st_mode & 0o777 == 0o600
    assert world.record.parent.stat().st_mode & 0o777 == 0o750
    world.acts.clear()
    back = ask(world, [], "returned")
    assert world.acts == [
        "policy on-failure",
        "start c1",
        "alice enable --no-reload /home/alice/tf.service",
        "alice start --no-block tf.service",
        "enable --no-reload tf.timer",
        "start --no-block tf.timer",
    ]
    assert back["changed"] is True
    assert world.state() == before
    assert not world.record.exists()
    assert ask(world, [], "returned") == {"changed": False, "said": []}


def test_each_is_remembered_before_it_is_touched(world: World) -> None:
    """Prevents a power cut after which nobody knows how it was."""
    ask(world, FOUND)
    assert world.remembered == [1, 1, 2, 2, 3, 3]


def test_a_second_run_changes_nothing(world: World) -> None:
    """Prevents a run that changes something for ever, or remembers our own stop as the owner's state."""
    ask(world, FOUND)
    text = world.record.read_text()
    assert ask(world, []) == {"changed": False, "said": []}
    assert ask(world, FOUND) == {"changed": False, "said": []}
    assert world.record.read_text() == text


@pytest.mark.parametrize("acts", range(6))
def test_a_run_that_broke_off_is_finished_and_still_given_back_whole(world: World, acts: int) -> None:
    """Prevents a unit that was stopped, and is neither disabled nor remembered rightly, after a broken run.

    What is found afterwards is empty: a stopped unit may no longer be in the way by itself.
    """
    before = world.state()
    world.last = acts
    with pytest.raises(Broken):
        ask(world, FOUND)
    world.last = -1
    ask(world, [])
    assert [takeover.differs(e, takeover.look(world, e)) for e in entries(world.record)] == [
        [] for _ in entries(world.record)
    ]
    ask(world, FOUND)
    assert world.box is not None
    assert (world.box["state"], world.box["policy"]["Name"]) == ("exited", "no")
    assert [u["enabled"] for u in world.units.values()] == ["disabled", "disabled"]
    assert all(entry["done"] for entry in entries(world.record))
    ask(world, [], "returned")
    assert world.state() == before


@pytest.mark.parametrize("acts", range(6))
def test_giving_back_that_broke_off_is_finished(world: World, acts: int) -> None:
    """Prevents a record that is gone before all that it names is back."""
    before = world.state()
    ask(world, FOUND)
    world.last = len(world.acts) + acts
    with pytest.raises(Broken):
        ask(world, [], "returned")
    world.last = -1
    ask(world, [], "returned")
    assert world.state() == before
    assert not world.record.exists()


def test_what_the_owner_started_again_keeps_its_first_state(world: World) -> None:
    """Prevents a second take-over that remembers the restart policy no, which was ours."""
    before = world.state()
    ask(world, FOUND)
    assert world.box is not None
    world.box["state"] = "running"
    assert ask(world, [BOX])["said"] == ["stopped container tf"]
    assert len(entries(world.record)) == 3
    ask(world, [], "returned")
    assert world.state() == before


def test_a_container_that_its_unit_removed_is_not_remembered(world: World) -> None:
    """Prevents a promise that cannot be kept, for the container of ExecStart=docker run --rm."""
    world.box = None
    ask(world, FOUND)
    assert [entry["name"] for entry in entries(world.record)] == ["tf.timer", "tf.service"]


def test_what_is_gone_is_said_and_does_not_hinder_the_rest(world: World) -> None:
    """Prevents an uninstall that fails for ever because the owner removed the old container."""
    ask(world, FOUND)
    world.box = None
    del world.units["tf.timer"]
    said = ask(world, [], "returned")["said"]
    assert "container tf is gone: nothing to give back" in said
    assert "unit tf.timer is gone: nothing to give back" in said
    assert world.units["tf.service"] == {
        "active": True,
        "enabled": "enabled",
        "source": "/home/alice/tf.service",
    }
    assert not world.record.exists()


def test_check_mode_says_what_a_run_would_do_and_does_nothing(world: World) -> None:
    """Prevents a dry run that stops something, or that is silent about it."""
    check = ask(world, [BOX, TIMER], check=True)
    assert check["said"] == [
        "would take the restart policy of container tf",
        "would stop container tf",
        "would stop unit tf.timer",
        "would disable unit tf.timer",
    ]
    assert (world.acts, world.record.exists(), check["changed"]) == ([], False, True)
    ask(world, [BOX])
    world.acts.clear()
    back = ask(world, [], "returned", check=True)
    assert back["said"] == [
        "would give its restart policy to container tf",
        "would start container tf",
    ]
    assert (world.acts, back["changed"], len(entries(world.record))) == ([], True, 1)


@pytest.mark.parametrize("spoil", ["mode", "link", "text", "version"])
def test_a_record_that_is_not_roots_own_is_refused(world: World, spoil: str) -> None:
    """Prevents root from starting what another account wrote into the record."""
    ask(world, [BOX])
    path = world.record
    match spoil:
        case "mode":
            path.chmod(0o640)
        case "link":
            path.rename(path.with_name("other"))
            path.symlink_to(path.with_name("other"))
        case "text":
            path.write_text("{")
        case "version":
            path.write_text('{"version": 9, "taken": []}')
    with pytest.raises(takeover.TakeoverError, match=r"Expected: .*"):
        ask(world, [], "returned")
    assert world.acts == ["policy no", "stop c1"]
