"""The run lock: one run wins, the others hear who holds it; the dead hold nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugin_loader import load

module = load("modules", "glm53_lock")
action = load("action", "glm53_lock")

NOW = 10_000.0
OTHER = {"run_id": "b#2", "who": "bob", "host": "desk", "pid": 77, "playbook": "site.yml", "since": 9_000.0}


@pytest.mark.parametrize(
    ("holder", "state", "extra", "expected"),
    [
        (None, "present", {}, "acquired"),
        (OTHER | {"renewed": NOW - 10}, "present", {}, "held"),
        (OTHER | {"renewed": NOW - 601}, "present", {}, "taken_over"),
        (OTHER | {"renewed": NOW - 10}, "present", {"force": True}, "taken_over"),
        (OTHER | {"renewed": NOW - 10}, "present", {"dead_run": "b#2"}, "taken_over"),
        (OTHER | {"renewed": NOW - 10}, "present", {"dead_run": "c#3"}, "held"),
        (OTHER | {"run_id": "a#1", "renewed": NOW - 9_000}, "present", {}, "renewed"),
        (OTHER | {"renewed": NOW - 10}, "query", {}, "held"),
        (None, "query", {}, "free"),
        (OTHER | {"renewed": NOW - 10}, "absent", {}, "free"),
        (OTHER | {"run_id": "a#1"}, "absent", {}, "released"),
    ],
)
def test_who_gets_the_lock(holder: dict[str, Any], state: str, extra: dict[str, Any], expected: str) -> None:
    """Defect: a second run gets in beside a live one, or a dead one keeps everybody out."""
    assert module.decide(holder, state, "a#1", NOW, 600, **extra) == expected


def params(path: Path, state: str, run_id: str) -> dict[str, Any]:
    """Arguments of the module."""
    return {
        "path": str(path),
        "state": state,
        "run": {"run_id": run_id, "who": run_id},
        "ttl_minutes": 10,
        "force": False,
        "dead_run": "",
    }


def test_a_lock_is_kept_since_its_start_and_goes_with_its_release(tmp_path: Path) -> None:
    """Defect: a renewal moves `since`, and the other run is told a wrong time; or the file stays."""
    path = tmp_path / "lock"
    assert module.act(path, params(path, "present", "a"), False, 100.0)["outcome"] == "acquired"
    assert module.act(path, params(path, "present", "a"), False, 160.0)["outcome"] == "renewed"
    refused = module.act(path, params(path, "present", "b"), False, 170.0)
    assert (refused["outcome"], refused["age_seconds"], refused["holder"]["who"]) == ("held", 70, "a")
    assert refused["since_utc"] == "1970-01-01 00:01:40 UTC"
    assert json.loads(path.read_text())["renewed"] == 160.0
    assert module.act(path, params(path, "absent", "a"), False, 180.0)["outcome"] == "released"
    assert not path.exists()


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    """Defect: `--check` leaves a lock behind."""
    path = tmp_path / "lock"
    assert module.act(path, params(path, "present", "a"), True, 100.0)["outcome"] == "acquired"
    assert not path.exists()


def test_a_broken_lock_binds_nobody(tmp_path: Path) -> None:
    """Defect: a lock file cut off by a full disk locks the nodes for ever."""
    path = tmp_path / "lock"
    path.write_text('{"run_id": "b')
    assert module.act(path, params(path, "present", "a"), False, 100.0)["outcome"] == "acquired"


def test_a_process_that_is_gone_is_dead_and_this_one_is_not() -> None:
    """Defect: a live run on this control host is taken over, or a dead one is waited for."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = {"host_id": action.host_id(), "pid": child.pid, "started": action.process_started(child.pid)}
    assert action.holder_is_dead(holder) is False
    child.communicate(b"\n")
    assert action.holder_is_dead(holder) is True
    reused = {"host_id": action.host_id(), "pid": os.getpid(), "started": "1"}
    assert action.holder_is_dead(reused) is True


def test_a_holder_elsewhere_is_never_called_dead() -> None:
    """Defect: a pid of another machine is looked up on this one."""
    assert action.holder_is_dead({"host_id": "desk/1/2/3", "pid": 2**22 + 1, "started": "5"}) is False


def test_the_refusal_says_who_since_when_and_what_to_do() -> None:
    """Defect: the loser of two runs is told nothing it can act on."""
    result = {"holder": OTHER, "since_utc": "2026-01-02 03:04:05 UTC", "age_seconds": 3725}
    message = action.refusal(result, 90)
    for part in (
        "bob@desk",
        "pid 77",
        "site.yml",
        "2026-01-02 03:04:05 UTC",
        "1 h 2 min ago",
        "glm53_lock_break=true",
        "90 minutes",
    ):
        assert part in message
