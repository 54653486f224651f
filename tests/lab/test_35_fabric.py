"""Rails, doctor, snapshot and measurements on two whole hosts: ping, Docker and Ansible are the real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.conftest import FORM_SECONDS, HEAD, UNIT, WORKER, Pair, play, until

RAIL0, RAIL1 = "enp1s0f0np0", "enP2p1s0f0np0"


@pytest.fixture
def whole_rails(pair: Pair) -> Iterator[None]:
    """Give the rails their MTU back, whatever a test did to them."""
    yield
    for host in (HEAD, WORKER):
        for netdev in (RAIL0, RAIL1):
            pair.sh(host, "ip", "link", "set", netdev, "mtu", "9000")


def rails(pair: Pair) -> list[int]:
    """Return how many rails each rank uses."""
    return [len(rank["rails"]) for rank in pair.status()["ranks"]]


def test_both_rails_are_found_and_answer(pair: Pair) -> None:
    """Prevents a probe that only works for root: the units ping as their own account."""
    assert rails(pair) == [2, 2]
    for host, index in ((HEAD, 3), (WORKER, 5)):
        shown = pair.sh(host, "glm53", "fabric")
        assert shown.count("full packets pass") == 2
        assert shown.count(f"gid_index={index}") == 2


def test_the_doctor_finds_no_error_on_the_lab(pair: Pair) -> None:
    """Prevents a doctor that calls a serving pair broken."""
    run = play(pair.lab, "playbooks/doctor.yml", budget_seconds=120)
    assert run.code == 0, run.output
    assert run.changed == 0
    assert "rails=2: 10.77.0.1 - 10.77.0.2, 10.77.1.1 - 10.77.1.2" in run.output


def test_a_snapshot_gives_the_answer_of_its_host(pair: Pair) -> None:
    """Prevents a tree that looks better, or worse, than the machine that it was taken of."""
    pair.sh(WORKER, "rm", "-rf", "/tmp/snap")
    pair.sh(WORKER, "glm53", "snapshot", "--out", "/tmp/snap")
    here = json.loads(pair.sh(WORKER, "glm53", "doctor", "--json", check=False))
    there = json.loads(pair.sh(WORKER, "glm53", "doctor", "--json", "--from", "/tmp/snap", check=False))
    # Memory and disks move between two looks; what is looked at does not.
    assert [(f["id"], f["level"]) for f in there["findings"]] == [
        (f["id"], f["level"]) for f in here["findings"]
    ]
    assert there["parity"] == here["parity"]
    token = pair.sh(WORKER, "cat", "/etc/glm53/token").split()[0]
    assert pair.sh(WORKER, "grep", "-rl", token, "/tmp/snap", check=False) == ""


def test_nothing_is_measured_while_the_pair_serves(pair: Pair) -> None:
    """Prevents a measurement that takes the link from a request."""
    done = pair.lab.exec(HEAD, ["glm53", "bandwidth", "--rail", "0"], check=False)
    assert done.returncode == 75
    assert "the pair is serving" in done.stderr


@pytest.mark.usefixtures("whole_rails")
def test_a_second_rail_with_another_mtu_is_left_out_on_both(pair: Pair) -> None:
    """Prevents a first all-gather that dies over a rail which a firmware update set back."""
    pair.sh(WORKER, "ip", "link", "set", RAIL1, "mtu", "1500")
    pair.sh(HEAD, "systemctl", "restart", UNIT[HEAD], timeout=FORM_SECONDS)
    assert rails(pair) == [1, 1]
    for rank in pair.status()["ranks"]:
        assert f"the MTUs differ: 1500 on {WORKER}'s {RAIL1}, 9000 on {HEAD}'s {RAIL1}" in str(
            rank["warnings"]
        )


@pytest.mark.usefixtures("whole_rails")
def test_a_first_rail_with_another_mtu_is_refused_until_it_is_mended(pair: Pair) -> None:
    """Prevents minutes of loading that end in a hang, and a pair that has to be started by hand again."""
    pair.sh(HEAD, "ip", "link", "set", RAIL0, "mtu", "1500")
    pair.sh(HEAD, "systemctl", "restart", "--no-block", UNIT[HEAD])
    until(lambda: "the MTUs differ" in str(pair.status().get("last_end")), "refused", 60)
    assert pair.containers(HEAD, running=True) == pair.containers(WORKER, running=True) == []
    pair.sh(HEAD, "ip", "link", "set", RAIL0, "mtu", "9000")
    until(lambda: pair.status().get("ready"), "serving again")
    assert rails(pair) == [2, 2]


def test_a_stopped_pair_is_measured_and_the_results_are_kept(pair: Pair) -> None:
    """Prevents a measurement whose two sides do not meet, and a slow rail that passes."""
    pair.sh(HEAD, "systemctl", "stop", UNIT[HEAD])
    pair.sh(HEAD, "sh", "-c", "echo 13.1 >/etc/glm53-lab-gbits")
    run = play(pair.lab, "playbooks/bandwidth.yml", budget_seconds=240)
    pair.sh(HEAD, "rm", "/etc/glm53-lab-gbits")
    assert run.code != 0
    assert "13.1 Gb/s, stale" in run.output
    worker = pair.sh(WORKER, "glm53", "bandwidth")
    assert worker.count("92.6 Gb/s, healthy") == 2
    assert "(gloo)" in pair.sh(HEAD, "glm53", "bandwidth", check=False)
    pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=FORM_SECONDS)
    assert pair.status()["ready"]
