#!/usr/bin/python
"""Ansible module: can this node reach its peers, at full packet size and by ssh? One verdict an address."""

from __future__ import annotations

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


def problem_of(target: dict[str, Any], key: str, known_hosts: str) -> str:
    """Return why the target cannot be reached, empty when it can."""
    place = f"{target['node']} at {target['address']}"
    if target.get("netdev") and not ping(target, int(target["mtu"]) - HEADERS):
        if not ping(target, 56):
            return (
                f"{place} does not answer a ping through {target['netdev']}. Expected: an answer. Fix: check"
                f" the cable and, on {target['node']}, `ip address`: {target['address']} must be on this rail"
            )
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
        problems = [p for p in pool.map(lambda target: settle(target, *rest), targets) if p]
    module.exit_json(changed=False, problems=problems, reached=len(targets) - len(problems))


if __name__ == "__main__":
    main()
