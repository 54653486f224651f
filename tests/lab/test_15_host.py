"""The hosts without the service: rails, firewall and tuning, changes that fail, and giving it all back."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.api import Lab
from lab.playbook import ROOT
from lab.run import run as command
from lab.settings import CABLES, FABRIC_MTU, MACHINE_ADDRESS
from tests.lab.conftest import HEAD, WORKER, Run, etc_of, play, until

RAILS = ("enp1s0f0np0", "enP2p1s0f0np0")
ASKED = {
    "glm53_clock_cap_mhz": 1900,
    "glm53_headless": True,
    "glm53_hold_versions": True,
    "glm53_unattended_exclude": True,
}
OURS = "/etc/netplan/60-glm53-fabric.yaml"

PERSISTENCED = """[Unit]
Description=A stand-in for nvidia-persistenced: the cap is forgotten when it ends
[Service]
ExecStart=/bin/sleep infinity
ExecStopPost=/bin/rm -f /run/glm53-lab-gpu-clocks
"""

CONNECT = """
import socket, sys
address, port, source = sys.argv[1:4]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family) as s:
    s.settimeout(1.5)
    if source:
        s.bind((source, 0))
    try:
        s.connect((address, int(port)))
    except TimeoutError:
        print("dropped")
    except OSError as error:
        print(error)
    else:
        print("open")
"""


def sh(lab: Lab, host: str, script: str, *, check: bool = True) -> str:
    """What a shell script printed, run as root on a host."""
    return lab.exec(host, ["sh", "-euc", script], check=check).stdout.strip()


def addresses(lab: Lab, host: str) -> dict[str, list[str]]:
    """Each device's IPv4 addresses with prefix length."""
    shown = json.loads(sh(lab, host, "ip -j address"))
    return {
        e["ifname"]: [f"{a['local']}/{a['prefixlen']}" for a in e["addr_info"] if a["family"] == "inet"]
        for e in shown
    }


def configure(lab: Lab, *arguments: str) -> list[Run]:
    """Run what makes the hosts ready, with everything asked for."""
    asked = ("-e", json.dumps(ASKED), *arguments)
    return [play(lab, f"playbooks/{name}.yml", *asked) for name in ("host", "fabric")]


@pytest.fixture(scope="module", autouse=True)
def given_back(lab: Lab, bare: dict[str, str]) -> Iterator[None]:
    """The hosts as they were for the tests after these, whatever one of these has left."""
    yield
    play(lab, "playbooks/uninstall.yml")
    for host in (HEAD, WORKER):
        sh(
            lab,
            host,
            "systemctl stop nvidia-persistenced; rm -f /run/systemd/system/nvidia-persistenced.service",
            check=False,
        )


@pytest.fixture(scope="module")
def configured(lab: Lab, bare: dict[str, str]) -> list[Run]:
    """Both hosts, made ready; with something that ends the clock cap like nvidia-persistenced."""
    for host in (HEAD, WORKER):
        path = "/run/systemd/system/nvidia-persistenced.service"
        sh(
            lab,
            host,
            f"mkdir -p /etc/needrestart/conf.d; printf %s {shlex.quote(PERSISTENCED)} >{path}",
        )
        sh(lab, host, "systemctl daemon-reload; systemctl start nvidia-persistenced")
    return configure(lab)


def test_bare_hosts_become_ready_and_the_second_run_changes_nothing(lab: Lab, configured: list[Run]) -> None:
    """Prevents a role that fights with itself, and a dry run of a finished host that cries wolf."""
    assert [run.code for run in configured] == [0, 0], "".join(run.output[-3000:] for run in configured)
    assert addresses(lab, WORKER)[RAILS[0]] == ["10.77.0.2/24"]
    assert addresses(lab, WORKER)[RAILS[1]] == ["10.77.1.2/24"]
    for arguments in ((), ("--check", "--diff")):
        again = configure(lab, *arguments)
        assert [(run.code, run.changed) for run in again] == [(0, 0), (0, 0)], (
            again[0].output + again[1].output
        )


def test_what_was_asked_for_is_so(lab: Lab, configured: list[Run]) -> None:
    """Prevents settings that are written somewhere, but not in effect."""
    for host in (HEAD, WORKER):
        assert (
            sh(lab, host, "systemctl is-enabled sleep.target suspend.target", check=False).split()
            == ["masked"] * 2
        )
        assert sh(lab, host, "dpkg-query -W -f='${db:Status-Want}' docker.io") == "hold"
        assert '"docker";' in sh(lab, host, "apt-config dump Unattended-Upgrade::Package-Blacklist")
        assert sh(
            lab,
            host,
            "perl -e 'do \"/etc/needrestart/conf.d/60-glm53.conf\"; print keys %{$nrconf{override_rc}}'",
        )
        for unit in ("glm53-firewall", "glm53-clock-cap"):
            shown = sh(
                lab,
                host,
                f"systemctl show {unit} -p ActiveState -p NRestarts --value; systemctl is-enabled {unit}",
            )
            assert sorted(shown.split()) == ["0", "active", "enabled"]


def test_the_clock_cap_outlives_a_restart_of_persistenced(lab: Lab, configured: list[Run]) -> None:
    """Prevents a cap that is gone after persistenced was restarted, by whomever."""
    assert sh(lab, HEAD, "cat /run/glm53-lab-gpu-clocks") == "0,1900"
    sh(lab, HEAD, "systemctl restart nvidia-persistenced")
    until(
        lambda: sh(lab, HEAD, "cat /run/glm53-lab-gpu-clocks", check=False) == "0,1900", "the cap again", 20
    )


@pytest.fixture
def listeners(lab: Lab, configured: list[Run]) -> Iterator[None]:
    """Something that answers on ports of ours, and on another, on every address of the head."""
    ports = (8888, 29540, 29551, 40001)
    for port in ports:
        argv = ["systemd-run", f"--unit=probe-{port}", "--quiet"]
        lab.exec(HEAD, [*argv, "python3", "-m", "http.server", str(port), "--bind", "::"])
    for host, address in ((HEAD, "fd00:78::1/64"), (WORKER, "fd00:78::2/64")):
        sh(lab, host, "sysctl -qw net.ipv6.conf.enP7s7.disable_ipv6=0")
        sh(lab, host, f"ip address add {address} dev enP7s7 nodad")
    sh(lab, WORKER, f"ip address add 10.77.0.99/24 dev {RAILS[0]}")
    until(lambda: all(f":{port} " in sh(lab, HEAD, "ss -ltn") for port in ports), "the listeners", 20)
    yield
    sh(lab, HEAD, "systemctl stop " + " ".join(f"probe-{port}" for port in ports))
    sh(lab, WORKER, f"ip address del 10.77.0.99/24 dev {RAILS[0]}; ip address del fd00:78::2/64 dev enP7s7")
    sh(lab, HEAD, "ip address del fd00:78::1/64 dev enP7s7")


@pytest.mark.usefixtures("listeners")
def test_what_a_peer_reaches(lab: Lab) -> None:
    """Prevents engines that cannot talk, and ports that others reach: each is tried by a real connection."""
    expected = {
        ("10.77.0.1", 40001, ""): "open",
        ("10.77.1.1", 29551, ""): "open",
        ("10.77.0.1", 40001, "10.77.0.99"): "dropped",
        ("10.77.0.1", 22, "10.77.0.99"): "dropped",
        ("10.78.0.1", 29540, ""): "open",
        ("10.78.0.1", 8888, ""): "dropped",
        ("10.78.0.1", 29551, ""): "dropped",
        ("10.78.0.1", 40001, ""): "open",
        ("10.78.0.1", 22, ""): "open",
        ("fd00:78::1", 29551, ""): "dropped",
        ("fd00:78::1", 40001, ""): "open",
    }
    found = {
        asked: lab.exec(WORKER, ["python3", "-c", CONNECT, *map(str, asked)]).stdout.strip()
        for asked in expected
    }
    assert found == expected


@pytest.mark.usefixtures("listeners")
def test_what_the_management_network_reaches(lab: Lab) -> None:
    """Prevents a supervisor that anyone may talk to, and an API that whom it was opened for cannot reach."""
    expected = {8888: "open", 29540: "dropped", 29551: "dropped", 22: "open", 40001: "open"}
    found = {}
    for port in expected:
        try:
            socket.create_connection((lab.hosts[0].management, port), timeout=1.5).close()
            found[port] = "open"
        except TimeoutError:
            found[port] = "dropped"
    assert found == expected


def test_the_rules_come_back(lab: Lab, configured: list[Run]) -> None:
    """Prevents ports that are open since nftables.service was restarted: it flushes every table."""
    sh(lab, HEAD, "systemctl restart nftables")
    until(
        lambda: "not opened" in sh(lab, HEAD, "nft list table inet glm53", check=False), "our table again", 20
    )
    sh(lab, HEAD, "systemctl stop nftables; nft delete table inet glm53", check=False)
    run = play(lab, "playbooks/fabric.yml", "-e", json.dumps(ASKED))
    assert (run.code, run.changed) == (0, 1), run.output[-3000:]
    assert "not opened" in sh(lab, HEAD, "nft list table inet glm53")


def fabric_play(
    tmp_path: Path, rails: dict[str, str], *, parts: tuple[str, ...], **variables: object
) -> Path:
    """A playbook with the role alone, for what the inventory check would refuse; `parts` follow its first."""
    values = {
        "fabric_rails": [{"netdev": netdev, "address": address} for netdev, address in rails.items()],
        "fabric_mtu": 9000,
        "fabric_found": "{{ __glm53_found }}",
        "fabric_templates_dir": "{{ glm53_templates_dir }}",
        "fabric_watch": ["{{ __glm53_found.ssh.client }}"],
        "fabric_head": "{{ inventory_hostname }}",
        **variables,
    }
    facts = {"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/facts.yml")}
    roles = [{"name": "fabric", "tasks_from": part} for part in ("main.yml", *parts)]
    play = {
        "hosts": "workers",
        "gather_facts": False,
        "become": True,
        "vars": values,
        "pre_tasks": [facts],
        "roles": ["glm53"],
        "tasks": [{"ansible.builtin.import_role": role} for role in roles],
    }
    path = tmp_path / "fabric_play.yml"
    path.write_text(json.dumps([play]))
    return path


def test_a_change_that_costs_the_management_link_is_given_back(
    lab: Lab, configured: list[Run], tmp_path: Path
) -> None:
    """Prevents a node that nobody reaches any more, because a rail took its management network's route."""
    before = sh(lab, WORKER, f"sha256sum {OURS}")
    # The half of the management network in which this machine is: the answers to it leave by the rail.
    rails = {RAILS[0]: "10.78.0.200/25", RAILS[1]: "10.77.1.2/24"}
    run = play(lab, str(fabric_play(tmp_path, rails, parts=("change.yml",))))
    assert run.code != 0
    assert f"{MACHINE_ADDRESS} has been silent" in " ".join(run.output.split())
    assert sh(lab, WORKER, f"sha256sum {OURS}") == before
    assert addresses(lab, WORKER)[RAILS[0]] == ["10.77.0.2/24"]
    assert lab.machine(WORKER).ssh_answers()


def test_a_change_that_nobody_confirms_is_given_back(lab: Lab, configured: list[Run], tmp_path: Path) -> None:
    """Prevents a configuration that stays though the run was cut off before it knew that the peers answer."""
    rails = {RAILS[0]: "10.79.0.2/24", RAILS[1]: "10.77.1.2/24"}
    text = fabric_play(tmp_path, rails, parts=("configure.yml",), fabric_revert_seconds=12)
    run = play(lab, str(text))
    assert run.code == 0, run.output[-3000:]
    assert addresses(lab, WORKER)[RAILS[0]] == ["10.79.0.2/24"]
    until(lambda: addresses(lab, WORKER)[RAILS[0]] == ["10.77.0.2/24"], "the old address", 30)
    assert "10.79" not in sh(lab, WORKER, f"cat {OURS}")


def test_a_change_that_costs_a_peer_is_given_back_on_both_nodes(lab: Lab, configured: list[Run]) -> None:
    """Prevents a pair without a fabric since somebody mixed up the ports of one node; its firewall too."""
    number = "{{ groups['all'].index(inventory_hostname) + 1 }}"
    rails = [
        {
            "netdev": f"{{{{ {list(RAILS)}[(groups['all'].index(inventory_hostname) + {rail}) % 2] }}}}",
            "address": f"10.77.{7 + rail}.{number}/24",
        }
        for rail in (0, 1)
    ]
    done = play(lab, "playbooks/fabric.yml", "-e", json.dumps({"glm53_fabric_rails": rails}))
    assert done.code != 0
    assert "The change has cost a peer" in done.output
    assert "10.77.7.2 does not answer a ping" in " ".join(done.output.split())
    for host, last in ((HEAD, 1), (WORKER, 2)):
        assert addresses(lab, host)[RAILS[0]] == [f"10.77.0.{last}/24"]
        assert "10.77.7" not in sh(lab, host, f"cat {OURS} /etc/glm53/firewall.nft")
    argv = ["python3", "-c", CONNECT, "10.77.1.1", "22", ""]
    assert lab.exec(WORKER, argv).stdout.strip() == "open"


def test_another_file_is_adopted_or_stops_the_run(lab: Lab, configured: list[Run]) -> None:
    """Prevents a second set of addresses beside the one that NVIDIA's playbook has written."""
    theirs = "/etc/netplan/40-cx7.yaml"
    text = "network:\n  version: 2\n  ethernets:\n    enp1s0f0np0: {dhcp4: false, addresses: [%s]}\n"
    sh(lab, WORKER, f"printf %s {shlex.quote(text % '192.168.100.11/24')} >{theirs}; chmod 600 {theirs}")
    run = play(lab, "playbooks/fabric.yml")
    said = " ".join(run.output.split())
    assert run.code != 0
    assert f"{theirs} (ethernets) gives enp1s0f0np0 192.168.100.11/24, the inventory 10.77.0.2/24" in said
    sh(lab, WORKER, f"printf %s {shlex.quote(text % '10.77.0.2/24')} >{theirs}")
    sh(lab, WORKER, f"sed -i 's/dhcp4/mtu: 9000, dhcp4/' {theirs}")
    run = play(lab, "playbooks/fabric.yml")
    assert run.code == 0, run.output[-3000:]
    assert "enp1s0f0np0" not in sh(lab, WORKER, f"cat {OURS}")
    assert addresses(lab, WORKER)[RAILS[0]] == ["10.77.0.2/24"]
    sh(lab, WORKER, f"rm {theirs}")


@pytest.fixture
def one_segment(lab: Lab) -> Iterator[None]:
    """Both rails on one wire, like the two functions of a ConnectX-7 port; the lab has a bridge for each."""
    namespace = ["ip", "-n", CABLES]
    mtu = ["mtu", str(FABRIC_MTU)]
    command([*namespace, "link", "add", "join0", *mtu, "type", "veth", "peer", "name", "join1", *mtu])
    for number in (0, 1):
        command([*namespace, "link", "set", f"join{number}", "up", "master", f"rail{number}"])
    yield
    command([*namespace, "link", "del", "join0"])


@pytest.mark.usefixtures("one_segment")
def test_rails_in_one_subnet(lab: Lab, configured: list[Run]) -> None:
    """Prevents a layout that NVIDIA's own script writes from working on one rail only."""
    address = "10.77.5.{{ groups['all'].index(inventory_hostname) + %d }}/24"
    rails = [{"netdev": netdev, "address": address % (1 + 10 * n)} for n, netdev in enumerate(RAILS)]
    for name in ("host", "fabric"):  # the host keys are pinned under the new addresses first
        done = play(lab, f"playbooks/{name}.yml", "-e", json.dumps({**ASKED, "glm53_fabric_rails": rails}))
        assert done.code == 0, done.output[-3000:]
    keys = [f"net.ipv4.conf.{RAILS[1]}.{key}" for key in ("arp_ignore", "arp_announce", "rp_filter")]
    assert sh(lab, WORKER, f"sysctl -n {' '.join(keys)}").split() == ["1", "2", "2"]
    neighbour = sh(lab, HEAD, f"ip neigh show 10.77.5.12 dev {RAILS[1]}")
    assert lab.hosts[1].mac(1) in neighbour  # the second port itself, not the first one for it
    for done in configure(lab):
        assert done.code == 0, done.output[-3000:]
    assert sh(lab, WORKER, f"sysctl -n {keys[0]}") == "0"


def test_networkmanager_keeps_the_rails_over_a_boot_without_a_peer(lab: Lab, configured: list[Run]) -> None:
    """Prevents addresses that are gone after a boot, or that wait for the other node."""
    play(lab, "playbooks/uninstall.yml")
    sh(lab, WORKER, "systemctl enable --quiet --now NetworkManager; nm-online -q -s -t 30 || true")
    until(
        lambda: "enp1s0f0np0:conn" in sh(lab, WORKER, "nmcli -t -f DEVICE,STATE device"), "NetworkManager", 30
    )
    runs = configure(lab)
    assert [run.code for run in runs] == [0, 0], "".join(run.output[-3000:] for run in runs)
    assert [run.changed for run in configure(lab)] == [0, 0]
    lab.power_off(HEAD)
    lab.reboot(WORKER)
    lab.wait_ssh(WORKER)
    until(lambda: addresses(lab, WORKER)[RAILS[0]] == ["10.77.0.2/24"], "the address without a carrier", 30)
    assert "fe80" not in sh(lab, WORKER, f"ip -6 address show dev {RAILS[0]}")
    lab.power_on(HEAD)
    lab.wait_ssh(HEAD)
    lab.wait_docker(WORKER)
    lab.wait_docker(HEAD)


def test_uninstall_gives_the_hosts_back_to_the_byte(
    lab: Lab, bare: dict[str, str], configured: list[Run]
) -> None:
    """Prevents leftovers of any kind below /etc, and switches that stay set."""
    run = play(lab, "playbooks/uninstall.yml")
    assert run.code == 0, run.output[-3000:]
    sh(lab, WORKER, "systemctl disable --quiet --now NetworkManager", check=False)
    for host in (HEAD, WORKER):
        sh(lab, host, "rmdir /etc/needrestart/conf.d /etc/needrestart", check=False)
        assert etc_of(lab, host).splitlines() == bare[host].splitlines()
        assert addresses(lab, host)[RAILS[0]] == []
        assert sh(lab, host, "dpkg-query -W -f='${db:Status-Want}' docker.io") == "install"
        assert "glm53" not in sh(lab, host, "nft list tables")
