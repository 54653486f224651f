#!/usr/bin/python
"""Ansible module: can this node reach its peers, at full packet size and by ssh? One verdict an address."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_reach
short_description: Probe peers by full-size ping and by ssh
options:
  targets:
    description: "node, address, and for a rail netdev and mtu; with ssh true also an ssh login as user."
    type: list
    elements: dict
    required: true
  key: {description: "Private key for the logins.", type: path, default: ""}
  known_hosts: {description: "known_hosts for the logins.", type: path, default: ""}
  budget_seconds: {description: "How long a peer may take to answer.", type: int, default: 15}
"""

HEADERS = 28
"""Bytes of an IPv4 and an ICMP header, which the MTU counts and ping's size does not."""


def succeeds(argv: list[str], timeout: float = 10) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and the last line it wrote."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:g} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit {done.returncode}"


def ping(target: dict[str, Any], size: int) -> bool:
    """Say whether the peer answers an unfragmented ping of `size` bytes through the rail's own device."""
    argv = [
        "ping",
        "-n",
        "-q",
        "-c",
        "2",
        "-i",
        "0.2",
        "-W",
        "1",
        "-M",
        "do",
        "-s",
        str(size),
        "-I",
        target["netdev"],
        target["address"],
    ]
    return succeeds(argv)[0]


def ssh_argv(target: dict[str, Any], key: str, known_hosts: str) -> list[str]:
    """Return the login that copying will use: our key, our known_hosts, no question asked."""
    return [
        "ssh",
        "-F",
        "/dev/null",
        "-i",
        key,
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=5",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        f"UserKnownHostsFile={known_hosts}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-p",
        str(target.get("port", 22)),
        f"{target['user']}@{target['address']}",
        "true",
    ]


def look(netdev: str) -> list[dict[str, Any]]:
    """Return what `ip -j address` says of one device, empty when there is none."""
    argv = ["ip", "-j", "-4", "address", "show", "dev", netdev]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]") if done.returncode == 0 else []
    return [entry for entry in found if entry]


def silence(target: dict[str, Any], place: str, shown: list[dict[str, Any]]) -> str:
    """Return why a rail is silent: no carrier, no address here, or a peer that does not answer."""
    netdev, address = target["netdev"], ipaddress.IPv4Address(target["address"])
    own = [
        ipaddress.IPv4Interface(f"{a['local']}/{a['prefixlen']}")
        for entry in shown
        for a in entry.get("addr_info", [])
    ]
    if not any("LOWER_UP" in entry.get("flags", []) for entry in shown):
        return (
            f"{place}: {netdev} here has no carrier. Expected: a link. Fix: plug the cable in at both ends,"
            f" see that {target['node']} is on, and that glm53_fabric_rails names the cabled port"
            " (`ibdev2netdev`)"
        )
    if not any(address in interface.network for interface in own):
        return (
            f"{place}: {netdev} here has a carrier but no address in that network. Expected: the inventory's."
            f" Fix: run playbooks/fabric.yml, or set the address that `ip address show {netdev}` lacks"
        )
    return (
        f"{place} does not answer a ping through {netdev}, which has a carrier and an address. Expected: an"
        f" answer. Fix: on {target['node']}, `ip address`: {target['address']} must be on this rail, and"
        " cabled to this port"
    )


def problem_of(target: dict[str, Any], key: str, known_hosts: str) -> str:
    """Return why the target cannot be reached, empty when it can."""
    place = f"{target['node']} at {target['address']}"
    if target.get("netdev") and not ping(target, int(target["mtu"]) - HEADERS):
        if not ping(target, 56):
            return silence(target, place, look(target["netdev"]))
        return (
            f"{place} answers a small ping through {target['netdev']} but not one of {target['mtu']} bytes."
            f" Expected: both ends at MTU {target['mtu']}. Fix: compare `ip link` on both nodes, set"
            " glm53_fabric_mtu to what every device on the way carries"
        )
    if target.get("ssh"):
        works, said = succeeds(ssh_argv(target, key, known_hosts), timeout=15)
        if not works:
            return (
                f"ssh to {target['user']}@{place} failed: {said}. Expected: a login with {key}. Fix: look at"
                f" journalctl -u ssh on {target['node']}; AllowUsers and firewall rules there must let it in"
            )
    return ""


def settle(target: dict[str, Any], key: str, known_hosts: str, budget_seconds: float) -> str:
    """Return the target's problem once the budget is used up, empty as soon as it has none."""
    end = time.monotonic() + budget_seconds
    while problem := problem_of(target, key, known_hosts):
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    return problem


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "dict", "required": True},
            "key": {"type": "path", "default": "", "no_log": False},
            "known_hosts": {"type": "path", "default": ""},
            "budget_seconds": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    targets, rest = (
        module.params["targets"],
        [module.params[k] for k in ("key", "known_hosts", "budget_seconds")],
    )
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        said = list(pool.map(lambda target: settle(target, *rest), targets))
    by_address = {t["address"]: text for t, text in zip(targets, said, strict=True) if text}
    problems = list(by_address.values())
    module.exit_json(
        changed=False, problems=problems, by_address=by_address, reached=len(targets) - len(problems)
    )


if __name__ == "__main__":
    main()
