"""What breaks at night: ranks, supervisors, docker, hosts and cables, on the real vLLM."""

from __future__ import annotations

import time

import pytest

from tests.lab.conftest import HEAD, UNIT, WORKER, Pair, until

ALONE_SECONDS = 10.0
"""The promise: no rank runs alone for longer after a power cut or a pulled cable."""


def none_alone_within(pair: Pair, hosts: tuple[str, ...], seconds: float = ALONE_SECONDS) -> None:
    """Fail when a rank still runs on one of `hosts` after `seconds`."""
    until(lambda: not any(pair.containers(host) for host in hosts), "no rank runs alone", seconds)


@pytest.mark.parametrize("host", [HEAD, WORKER])
def test_a_killed_rank_ends_both_and_the_pair_serves_again(pair: Pair, host: str) -> None:
    """Prevents a rank that waits for a dead one for ever, and a crash without its log."""
    epoch = pair.epoch()
    before = {h: pair.sh(h, "docker", "ps", "-q", "--no-trunc").strip() for h in (HEAD, WORKER)}
    kept = pair.evidence(host)
    pair.sh(host, "docker", "kill", pair.containers(host)[0])
    status = pair.serving(after=epoch)
    for h in (HEAD, WORKER):
        assert before[h] not in pair.sh(h, "docker", "ps", "-aq", "--no-trunc")
        assert pair.unit(h, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    (folder,) = pair.evidence(host) - kept
    assert f"epoch-{epoch}-rank-{0 if host == HEAD else 1}" in folder
    files = pair.sh(host, "ls", f"/var/lib/glm53/evidence/{folder}").split()
    assert {"reason.txt", "inspect.json", "log-tail.txt", "meminfo.txt"} <= set(files)
    assert "exited with code 137" in status["last_end"]
    assert "Paris" in pair.ask()


@pytest.mark.parametrize("host", [HEAD, WORKER])
def test_a_killed_supervisor_leaves_no_orphan_into_the_next_epoch(pair: Pair, host: str) -> None:
    """Prevents a container that holds the GPU's memory while its successor starts."""
    epoch = pair.epoch()
    before = {h: pair.sh(h, "docker", "ps", "-q", "--no-trunc").strip() for h in (HEAD, WORKER)}
    pid = pair.unit(host, "MainPID")["MainPID"]
    pair.sh(host, "kill", "-9", pid)
    pair.serving(after=epoch)
    for h in (HEAD, WORKER):
        assert before[h] not in pair.sh(h, "docker", "ps", "-aq", "--no-trunc")
        assert len(pair.containers(h, running=False)) == 1
    assert pair.unit(host, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "1"}
    pair.sh(
        host, "systemctl", "restart", UNIT[host], timeout=180
    )  # NRestarts counts from 0 again for the next test


@pytest.mark.parametrize("host", [HEAD, WORKER])
def test_a_restarted_docker_ends_the_epoch_not_the_supervisor(pair: Pair, host: str) -> None:
    """Prevents an unattended upgrade of docker from taking the pair down for good."""
    epoch, faults = pair.epoch(), pair.status()["faults"]
    pair.sh(host, "systemctl", "reset-failed", "docker", check=False)
    pair.sh(host, "systemctl", "restart", "docker")
    assert pair.serving(after=epoch)["faults"] == faults
    assert pair.unit(host, "NRestarts") == {"NRestarts": "0"}


@pytest.mark.parametrize("host", [WORKER, HEAD])
def test_a_power_cut_of_one_host(pair: Pair, host: str) -> None:
    """Prevents a rank that runs on without its peer, and a pair that needs a hand after the power is back."""
    epoch = pair.epoch()
    other = WORKER if host == HEAD else HEAD
    pair.lab.power_cut(host)
    none_alone_within(pair, (other,))
    if other == HEAD:
        until(lambda: "spark-b" in str(pair.status()["reasons"]), "the head says for whom it waits", 10)
    pair.lab.power_on(host)
    pair.serving(after=epoch if host != HEAD else -1)
    assert "Paris" in pair.ask()


@pytest.mark.parametrize("first", [HEAD, WORKER])
def test_a_power_cut_of_both_and_back_in_either_order(pair: Pair, first: str) -> None:
    """Prevents a boot that waits for the other machine, and a pair that only forms in one order."""
    second = WORKER if first == HEAD else HEAD
    epoch = pair.epoch()
    for host in (HEAD, WORKER):
        pair.lab.power_cut(host)
    pair.lab.power_on(first)
    pair.lab.wait_ssh(first)
    until(
        lambda: (
            pair.sh(first, "systemctl", "is-active", "multi-user.target", check=False).strip() == "active"
        ),
        "the boot is not held up",
        60,
    )
    until(
        lambda: (
            "waiting for spark-"
            in pair.sh(first, "systemctl", "show", UNIT[first], "-p", "StatusText", check=False)
        ),
        "it says for whom it waits",
        60,
    )
    time.sleep(20)  # not a wait for a condition: the other machine really comes later
    assert pair.containers(first) == []
    pair.lab.power_on(second)
    pair.serving(after=epoch)
    assert "Paris" in pair.ask()


def test_a_pulled_cable_leaves_no_rank_alone_and_a_plugged_one_serves_again(pair: Pair) -> None:
    """Prevents a pair that hangs 'ready' over a dead fabric."""
    epoch, faults = pair.epoch(), pair.status()["faults"]
    pair.lab.unplug(WORKER)
    none_alone_within(pair, (HEAD, WORKER))
    assert not pair.status()["ready"]
    assert "spark-b" in str(pair.status()["reasons"])
    pair.lab.plug(WORKER)
    assert pair.serving(after=epoch)["faults"] == faults
    assert "Paris" in pair.ask()


def test_ten_flaps_in_a_row(pair: Pair) -> None:
    """Prevents a state that only a person gets out of after a loose plug."""
    for _ in range(10):
        pair.lab.unplug(WORKER)
        time.sleep(0.7)  # the flap itself
        pair.lab.plug(WORKER)
        time.sleep(0.7)
    until(lambda: pair.status()["ready"] and "Paris" in pair.ask(), "serving after the flaps", 180)
    assert pair.unit(HEAD, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    assert pair.unit(WORKER, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_the_management_network_may_go_while_serving(pair: Pair) -> None:
    """Prevents an outage because somebody rebooted the office switch."""
    epoch = pair.epoch()
    pair.lab.unplug(WORKER, management=True)
    time.sleep(12)  # longer than every limit of the supervisors
    try:
        status = pair.status()
        assert (status["ready"], status["epoch"]) == (True, epoch)
    finally:
        pair.lab.plug(WORKER, management=True)
    pair.lab.wait_ssh(WORKER)


def test_a_clean_reboot_of_the_head(pair: Pair) -> None:
    """Prevents a reboot for an update that needs a hand afterwards."""
    epoch = pair.epoch()
    pair.lab.reboot(HEAD)
    pair.lab.wait_ssh(HEAD)
    pair.serving(after=epoch)
    assert "Paris" in pair.ask()
