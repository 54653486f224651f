"""The rails' configuration: when a change is given back, by what, and what is said of a silent rail."""

from __future__ import annotations

import configparser
import ipaddress
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plays import render
from tests.unit.plugin_loader import CHECKOUT, load

apply = load("modules", "glm53_fabric_apply")
guard = load("modules", "glm53_fabric_guard")
reach = load("modules", "glm53_reach")
filters = load("filter", "glm53_host")
facts = load("modules", "glm53_facts")
inventory = load("action", "glm53_inventory")

SHARED = [{"netdev": "x0", "address": "10.1.0.1/24"}, {"netdev": "x1", "address": "10.1.0.3/24"}]
FOUND = {"netplan": [], "networkmanager": ["x1"], "netdevs": {}}


def seen(lost_from: float, lost_until: float, until: float) -> list[str]:
    """What each look, twice a second, decides about an address silent in between; the change is at 100 s."""
    words: list[str] = []
    last = now = 100.0
    while now <= until and (not words or words[-1] == "wait"):
        now += 0.5
        if not lost_from <= now < lost_until:
            last = now
        words.append(apply.judge({"10.9.0.9": last}, 100.0, now)[0])
    return words


def test_a_management_link_that_is_silent_for_a_second_is_no_loss() -> None:
    """Defect: a change costs the management link a second, and is given back for it."""
    words = seen(100.5, 101.5, 130)
    assert words[-1] == "keep"
    assert len(words) == 10  # five seconds at two looks a second: not judged before


def test_a_management_link_that_stays_silent_is_a_loss() -> None:
    """Defect: ten seconds without the management link are waited out."""
    words = seen(100.5, 110.5, 130)
    assert words[-1] == "revert"
    assert len(words) == 16


def test_late_silence_holds_the_verdict_back() -> None:
    """Defect: the link is lost in the sixth second, after the change was called good in the fifth."""
    assert seen(104.0, 107.0, 130)[-1] == "keep"
    assert len(seen(104.0, 107.0, 130)) > 12
    assert seen(104.0, 999.0, 130)[-1] == "revert"


def test_each_renderer_is_told_of_its_own_devices_only() -> None:
    """Defect: `netplan apply`, or a reload that reconfigures the management link too."""
    rails = [
        {"netdev": "x0", "renderer": "networkd"},
        {"netdev": "x1", "renderer": "NetworkManager"},
    ]
    found = apply.commands(rails)
    assert ["networkctl", "reconfigure", "x0"] in found
    assert [c for c in found if "up" in c] == [
        ["nmcli", "--wait", "20", "connection", "up", "netplan-x1", "ifname", "x1"]
    ]
    assert apply.commands(rails[:1])[-1] == ["networkctl", "reconfigure", "x0"]
    assert [c for c in apply.commands(rails, ["x1"]) if "up" in c] == []
    with pytest.raises(RuntimeError, match="ifupdown"):
        apply.commands([{"netdev": "x0", "renderer": "ifupdown"}])


def in_namespace(script: str, path: Path) -> str:
    """Run a shell script in a network namespace of its own, with the doubles in `path` found first."""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-eu"],
        input=script,
        capture_output=True,
        text=True,
        env={"PATH": f"{path}:{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def doubles(tmp_path: Path) -> Path:
    """Programs that only note how they were called; netplan fails while a file `broken` is there."""
    if os.getuid() != 0:
        pytest.skip("a network namespace needs root")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("netplan", "networkctl", "nmcli", "systemctl", "sleep"):
        extra = f'[ ! -e "{tmp_path}/broken" ] || exit 1\n' if name == "netplan" else ""
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{extra}')
        (folder / name).chmod(0o755)
    return folder


def test_the_revert_gives_files_addresses_and_mtu_back(tmp_path: Path, doubles: Path) -> None:
    """Defect: the file is restored, but the device keeps the new address, and with it the wrong route."""
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    theirs.write_text("before\n")
    (tmp_path / "file-1").write_text("before\n")
    before = {"x0": {"mtu": 1400, "addresses": ["10.1.0.9/24"]}, "x1": {"mtu": 1500, "addresses": []}}
    script = tmp_path / "revert.sh"
    script.write_text(guard.revert_script(tmp_path, {str(ours): False, str(theirs): True}, before))
    ours.write_text("new\n")
    theirs.write_text("new\n")
    said = in_namespace(
        "ip link add x0 type veth peer name x1; ip link set x0 up; ip link set x1 up\n"
        "ip address add 10.78.0.200/25 dev x0; ip address add 10.2.0.1/24 dev x1; ip link set x0 mtu 9000\n"
        f"sh {script}; ip -4 -o address; ip -o link",
        doubles,
    )
    assert not ours.exists()
    assert theirs.read_text() == "before\n"
    assert (tmp_path / "reverted").read_text() == "done\n"
    assert "10.1.0.9/24" in said
    assert "10.78.0.200" not in said
    assert "10.2.0.1" not in said
    assert "x0@x1: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1400" in said
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "networkctl reconfigure x0 x1" in calls
    assert "systemctl reload glm53-firewall.service" in calls


def test_a_revert_that_fails_says_what_is_left(tmp_path: Path, doubles: Path) -> None:
    """Defect: a revert that could not do its work is taken for one that did."""
    (tmp_path / "broken").touch()
    script = tmp_path / "revert.sh"
    script.write_text(guard.revert_script(tmp_path, {"/nowhere/at/all": True}, {}))
    in_namespace(f"sh {script}", doubles)
    left = (tmp_path / "reverted").read_text().strip()
    assert left == "/nowhere/at/all netplan"
    assert "failed for /nowhere/at/all netplan" in guard.verdict(left, "reverted")


@pytest.mark.parametrize(
    ("marker", "state", "words"),
    [
        (None, "confirmed", ""),
        ("done", "reverted", ""),
        ("done", "confirmed", "ran out"),
        (None, "reverted", "did not run"),
    ],
)
def test_a_confirmation_that_comes_too_late_is_a_failure(marker: str | None, state: str, words: str) -> None:
    """Defect: the timer has given everything back, and the run is green."""
    said = guard.verdict(marker, state)
    assert words in said
    assert bool(said) == bool(words)


def test_only_ipv4_of_the_rails_is_kept() -> None:
    """Defect: the management link's addresses are taken into the backup, and set again by a revert."""
    entry = {
        "ifname": "x0",
        "mtu": 1500,
        "addr_info": [
            {"family": "inet", "local": "10.1.0.1", "prefixlen": 24},
            {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
        ],
    }
    shown = [entry, {**entry, "ifname": "m0"}]
    assert guard.live(shown, ["x0", "x9"]) == {"x0": {"mtu": 1500, "addresses": ["10.1.0.1/24"]}}


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ([], "has no carrier"),
        ([{"flags": ["UP"], "addr_info": [{"local": "10.1.0.1", "prefixlen": 24}]}], "has no carrier"),
        ([{"flags": ["UP", "LOWER_UP"], "addr_info": []}], "a carrier but no address"),
        (
            [{"flags": ["UP", "LOWER_UP"], "addr_info": [{"local": "10.3.0.1", "prefixlen": 24}]}],
            "a carrier but no address",
        ),
        (
            [{"flags": ["UP", "LOWER_UP"], "addr_info": [{"local": "10.1.0.1", "prefixlen": 24}]}],
            "does not answer",
        ),
    ],
)
def test_a_silent_rail_has_one_of_three_reasons(shown: list[dict[str, Any]], words: str) -> None:
    """Defect: no cable, no address and a dead peer are one message."""
    target = {"node": "n", "netdev": "x0", "address": "10.1.0.2"}
    assert words in reach.silence(target, "n at 10.1.0.2", shown)


def test_who_manages_a_device_goes_on_managing_it() -> None:
    """Defect: networkd and NetworkManager both configure a rail; one set by hand counts as the latter's."""
    shown = "m0:connected (externally)\nx0:unmanaged\nx1:disconnected\nx2:unavailable\nx3:connecting (auth)\n"
    managed = facts.networkmanager_devices(shown)
    assert managed == ["x1", "x2", "x3"]
    rails = [{"netdev": "x0", "address": "10.1.0.1/24"}, {"netdev": "x1", "address": "10.2.0.1/24"}]
    found = filters.glm53_rendered_rails(rails, managed, "4000")
    assert [(r["renderer"], r["mtu"]) for r in found] == [("networkd", 4000), ("NetworkManager", 4000)]


def test_rails_in_one_subnet_answer_each_for_itself() -> None:
    """Defect: with both twins in one subnet one port answers ARP for the other."""
    apart = [{"netdev": "x0", "address": "10.1.0.1/24"}, {"netdev": "x1", "address": "10.2.0.1/24"}]
    assert filters.glm53_rail_sysctls(apart) == {}
    found = filters.glm53_rail_sysctls(SHARED)
    assert found["net/ipv4/conf/x1/arp_ignore"] == "1"
    assert found["net/ipv4/conf/x0/arp_announce"] == "2"
    assert found["net/ipv4/conf/x0/rp_filter"] == "2"
    assert len(found) == 6


def test_only_a_peer_that_answered_before_can_be_lost() -> None:
    """Defect: a first run with the cable out removes its own configuration: plugging it in does not help."""
    problems = {"10.1.0.2": "silent", "10.2.0.2": "silent too"}
    targets = [{"address": "10.1.0.2", "before": ["10.5.0.2"]}, {"address": "10.2.0.2", "before": []}]
    assert filters.glm53_lost(problems, targets, []) == []
    assert filters.glm53_lost(problems, targets, ["10.2.0.2", "10.9.0.2"]) == ["silent too"]
    assert filters.glm53_lost(problems, targets, ["10.5.0.2"]) == ["silent"]
    assert filters.glm53_lost({}, targets, ["10.5.0.2"]) == []


@pytest.mark.parametrize(
    ("address", "overlaps"), [("10.9.0.130/25", True), ("10.1.0.1/24", False), ("10.0.0.1/8", True)]
)
def test_a_rail_in_the_management_network_is_refused(address: str, overlaps: bool) -> None:
    """Defect: a rail's network covers the management addresses: the node is gone with its first packet."""
    assert ipaddress.ip_interface(address)
    rails = {"n": [{"netdev": "x0", "address": address}]}
    problems = inventory.overlap_problems(rails, {"n": "10.9.0.1", "w": "10.9.0.200"})
    assert bool(problems) == overlaps
    assert all("glm53_fabric_rails[0]" in problem and "10.9.0." in problem for problem in problems)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files for one rail with networkd and one with NetworkManager, both in one subnet."""
    if os.getuid() != 0:
        pytest.skip("the files belong to root")
    folder = tmp_path_factory.mktemp("fabric")
    variables = {
        "fabric_rails": [
            {"netdev": "x0", "address": "10.1.0.1/24"},
            {"netdev": "x1", "address": "10.1.0.3/24"},
        ],
        "fabric_found": FOUND,
        "fabric_mtu": 4000,
        "fabric_templates_dir": str(CHECKOUT / "templates"),
    }
    # netplan is not on every control host; the lab's hosts have it.
    plain = "(__fabric_files | map('combine', {'kind': 'text'}) | list)"
    render(folder, "fabric", plain, variables)
    return folder


def test_networkmanager_keeps_a_rail_without_carrier(files: Path) -> None:
    """Defect: the peer is off at boot, NetworkManager leaves the rail alone, and the rank waits for ever."""
    parser = configparser.ConfigParser()
    parser.read(files / "etc/NetworkManager/conf.d/60-glm53-fabric.conf")
    assert dict(parser["device-glm53-fabric"]) == {
        "match-device": "interface-name:x1",
        "ignore-carrier": "yes",
    }
    ethernets = yaml.safe_load((files / "etc/netplan/60-glm53-fabric.yaml").read_text())["network"][
        "ethernets"
    ]
    assert {name: e["renderer"] for name, e in ethernets.items()} == {
        "x0": "networkd",
        "x1": "NetworkManager",
    }
    assert {name: e.get("ignore-carrier") for name, e in ethernets.items()} == {"x0": True, "x1": None}
    assert ethernets["x1"]["networkmanager"] == {"passthrough": {"ipv6.method": "disabled"}}


def test_the_kernel_is_told_of_a_shared_subnet_at_each_boot(files: Path) -> None:
    """Defect: the switches are set once and gone after a boot."""
    lines = (files / "etc/sysctl.d/60-glm53-fabric.conf").read_text().splitlines()
    found = dict(line.split(" = ") for line in lines if line and not line.startswith("#"))
    assert found == filters.glm53_rail_sysctls(SHARED)
