"""The firewall: its rules, loaded into a network namespace and read back, and what surrounds them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plays import render
from tests.unit.plugin_loader import CHECKOUT, load

filters = load("filter", "glm53_host")
facts = load("modules", "glm53_facts")
inventory = load("action", "glm53_inventory")
boot_unit = load("modules", "glm53_boot_unit")

PORTS = [9001, 9002, 9003, 9004, 9005]
VARIABLES = {
    "firewall_devices": ["x0", "x1"],
    "firewall_fabric_peers": ["10.1.0.2", "10.2.0.2"],
    "firewall_management_peers": ["10.9.0.2"],
    "firewall_supervisor_port": 9003,
    "firewall_ports": PORTS,
    "firewall_open": [
        {"port": 9001, "sources": ["10.9.0.0/25", "fd00:9::/64"]},
        {"port": 9002, "sources": []},
    ],
    "firewall_templates_dir": str(CHECKOUT / "templates"),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The table as the kernel lists it, after two loads."""
    if os.getuid() != 0:
        pytest.skip("a network namespace needs root")
    folder = tmp_path_factory.mktemp("firewall")
    render(folder, "firewall", "__firewall_files", VARIABLES)
    path = folder / "etc/glm53/firewall.nft"
    twice = f"nft -f {path} && nft -f {path} && nft -j list ruleset"
    listed = subprocess.run(
        ["unshare", "--net", "sh", "-c", twice], capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    return [entry for entry in json.loads(listed.stdout)["nftables"] if "metainfo" not in entry]


def chain(rules: Sequence[dict[str, Any]], name: str) -> list[list[dict[str, Any]]]:
    """The expressions of each rule of a chain, in order."""
    return [r["rule"]["expr"] for r in rules if "rule" in r and r["rule"]["chain"] == name]


def test_loading_twice_leaves_one_table(rules: list[dict[str, Any]]) -> None:
    """Defect: each load adds the rules again behind the old drop, so an opened port stays closed."""
    assert len([r for r in rules if "table" in r]) == 1
    assert [len(chain(rules, name)) for name in ("input", "fabric", "ports")] == [3, 2, 4]


def test_only_our_ports_and_devices_are_ever_dropped(rules: list[dict[str, Any]]) -> None:
    """Defect: a slip in the template drops ssh, on machines that nobody can walk to."""
    bases = [r["chain"] for r in rules if "chain" in r and "hook" in r["chain"]]
    assert [(c["name"], c["policy"], c["hook"]) for c in bases] == [("input", "accept", "input")]
    loopback, fabric, ports = chain(rules, "input")
    words = [next(iter(e)) for e in itertools.chain(loopback, fabric)]
    assert words == ["match", "accept", "match", "jump"]
    assert fabric[0]["match"]["left"] == {"meta": {"key": "iifname"}}
    assert sorted(fabric[0]["match"]["right"]["set"]) == ["x0", "x1"]
    assert ports[1]["match"]["left"] == {"payload": {"protocol": "th", "field": "dport"}}
    assert sorted(ports[1]["match"]["right"]["set"]) == PORTS
    assert [e for e in ports if "jump" in e] == [{"jump": {"target": "ports"}}]
    assert all("drop" not in e for e in itertools.chain(loopback, fabric, ports))


def accepted(rules: Sequence[dict[str, Any]], name: str) -> Iterator[tuple[Any, ...]]:
    """What a chain accepts: the right sides of its matches, as text."""
    for expressions in chain(rules, name)[:-1]:
        assert expressions[-1] == {"accept": None}
        yield tuple(json.dumps(e["match"]["right"], sort_keys=True) for e in expressions[:-1])


def test_what_is_let_in_is_what_was_asked_for(rules: list[dict[str, Any]]) -> None:
    """Defect: an opening for one port opens another, or IPv6 sources are lost."""
    assert list(accepted(rules, "fabric")) == [('{"set": ["10.1.0.2", "10.2.0.2"]}',)]
    prefix = '{"prefix": {"addr": "%s", "len": %d}}'
    assert list(accepted(rules, "ports")) == [
        ('"10.9.0.2"', "9003"),
        (prefix % ("10.9.0.0", 25), "9001"),
        (prefix % ("fd00:9::", 64), "9001"),
    ]
    for name in ("fabric", "ports"):
        assert "drop" in chain(rules, name)[-1][-1]


def test_every_port_of_ours_is_known() -> None:
    """Defect: an engine's rendezvous stays open after a change of it, or of the engine."""
    settings = {
        "api": {"port": "7001"},
        "gate": {"port": 7002},
        "vllm": {"rendezvous_port": 7004},
        "tensorfold": {},
    }
    assert filters.glm53_ports(settings, "7003") == [7001, 7002, 7003, 7004, 29551]


def test_ufws_commands_are_the_ones_still_missing() -> None:
    """Defect: our accept is believed to open what ufw drops; or the same commands are asked for for ever."""
    asked = (["x0"], ["10.1.0.2"], ["10.9.0.2"], 9003, [{"port": 9001, "sources": ["10.9.0.0/24"]}])
    shown = facts.ufw_facts(Path("/nowhere"), "")
    assert filters.glm53_ufw_commands(shown, *asked) == []
    on = {"active": True, "added": ["ufw allow in on x0 from 10.1.0.2"]}
    assert filters.glm53_ufw_commands(on, *asked) == [
        "sudo ufw allow from 10.9.0.2 to any port 9003 proto tcp",
        "sudo ufw allow from 10.9.0.0/24 to any port 9001 proto tcp",
    ]


def test_ufw_is_on_when_its_own_file_says_so(tmp_path: Path) -> None:
    """Defect: an installed ufw that is switched off is taken for an active one."""
    path = tmp_path / "etc/ufw/ufw.conf"
    path.parent.mkdir(parents=True)
    path.write_text("# ENABLED=yes\nENABLED=no\n")
    assert facts.ufw_facts(tmp_path, "(None)\n") == {"active": False, "added": []}
    path.write_text("ENABLED=yes\n")
    assert facts.ufw_facts(tmp_path, "Added user rules:\nufw allow 22/tcp\n") == {
        "active": True,
        "added": ["ufw allow 22/tcp"],
    }


def test_the_login_is_found_behind_sudo(tmp_path: Path) -> None:
    """Defect: sudo drops SSH_CONNECTION, so a login over the fabric is not noticed and then cut off."""
    for pid, parent, environ in ((30, 20, b"A=1\0"), (20, 10, b"SSH_CONNECTION=10.1.0.9 5 10.1.0.1 22\0B=2")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(environ)
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
    assert facts.ssh_facts(tmp_path, 30) == {"client": "10.1.0.9", "server": "10.1.0.1"}
    assert facts.ssh_facts(tmp_path, 10) == {"client": "", "server": ""}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"glm53_api_bind": "management"}, ["glm53_api_open_from is empty"]),
        ({"glm53_api_bind": "management", "glm53_firewall": "false"}, []),
        ({"glm53_api_bind": "management", "glm53_api_open_from": ["10.9.0.0/24"]}, []),
        ({"glm53_gate_bind": "management", "glm53_api_open_from": ["10.9.0.4"]}, ["glm53_gate_open_from is"]),
        ({"glm53_api_open_from": ["10.9.0.4/24", "fd00::/64", "here"]}, ["'10.9.0.4/24'", "'here'"]),
        ({"glm53_api_open_from": "10.9.0.4"}, ["expected a list"]),
    ],
)
def test_an_api_that_nobody_reaches_is_refused(variables: dict[str, Any], words: list[str]) -> None:
    """Defect: the API listens on the network, the firewall lets nobody in, and the run is green."""
    problems = inventory.opening_problems("n", variables)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def found(**changes: bool) -> Any:
    """A unit that is enabled and has done its work, but for `changes`."""
    state = {"enabled": True, "active": True, "stale": False, "applied": True, "busy": False}
    return boot_unit.Found(**{**state, **changes})


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, []),
        ({"enabled": False, "applied": False}, ["enable", "apply"]),
        ({"applied": False}, ["apply"]),
        ({"stale": True}, ["reload"]),
        ({"stale": True, "busy": True}, []),
        ({"stale": True, "applied": False}, ["reload", "apply"]),
        ({"stale": True, "applied": False, "busy": True}, ["direct"]),
        ({"applied": False, "busy": True}, ["apply"]),
    ],
)
def test_systemd_is_not_reloaded_under_a_running_container(
    changes: dict[str, bool], steps: list[str]
) -> None:
    """Defect: a daemon-reload takes the GPU from the ranks that serve."""
    assert boot_unit.decide(found(**changes), present=True, direct=True) == steps


def test_a_unit_that_is_not_wanted_is_taken_back() -> None:
    """Defect: the rules that were loaded directly stay when the unit goes."""
    assert boot_unit.decide(found(), present=False, direct=False) == ["disable", "stop", "undo"]
    gone = found(enabled=False, active=False, applied=False)
    assert boot_unit.decide(gone, present=False, direct=False) == []


def test_a_unit_that_did_nothing_is_a_failure() -> None:
    """Defect: exit code 0 of the unit is believed, though its rules are not there."""
    calls: list[list[str]] = []

    def runner(argv: Sequence[str]) -> tuple[int, str]:
        calls.append(list(argv))
        return (0, "another marker") if argv[0] == "probe" else (0, "ActiveState=active")

    params = {
        "unit": "u.service",
        "state": "present",
        "probe": ["probe"],
        "expect": "mine",
        "source": "",
        "direct": [],
        "undo": [],
    }
    problem = boot_unit.act(params, ["enable", "apply"], runner)
    assert "does not show its work" in problem
    assert ["systemctl", "--no-reload", "enable", "u.service"] in calls
