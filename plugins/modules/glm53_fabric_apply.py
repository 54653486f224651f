#!/usr/bin/python
"""Ansible module: make the rails' devices use the files that were written for them, and no other device."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_fabric_apply
short_description: Generate, reload, reconfigure the rails' devices, and wait for their addresses
description:
  - It does not use netplan apply, which restarts more than it must and touches the management link.
  - Whoever of `watch` is gone for long gives everything back at once (glm53_fabric_guard's script) and fails.
options:
  rails: {description: "netdev, address, mtu, renderer each.", type: list, elements: dict, required: true}
  adopted: {description: "Devices that another file defines.", type: list, elements: str, default: []}
  watch: {description: "Addresses that answered before the change.", type: list, elements: str, default: []}
  revert: {description: "The script that gives everything back.", type: path, default: ""}
  budget_seconds: {description: "How long the addresses may take.", type: int, default: 30}
"""

SETTLE_SECONDS = 5.0
"""How long the watched addresses are looked at before the change is called good."""

LOST_SECONDS = 8.0
"""How long one may be silent: applying a network configuration costs the management link a second at times,
and ten seconds of silence are a loss.
"""


def missing(rails: list[dict[str, Any]], addresses: list[dict[str, Any]]) -> list[str]:
    """Return, in words, what `ip -j address` does not show of `rails`."""
    seen = {entry["ifname"]: entry for entry in addresses if "ifname" in entry}
    problems = []
    for rail in rails:
        entry = seen.get(rail["netdev"], {})
        has = [
            f"{a['local']}/{a['prefixlen']}" for a in entry.get("addr_info", []) if a.get("family") == "inet"
        ]
        if rail["address"] not in has:
            problems.append(
                f"{rail['netdev']} has {', '.join(has) or 'no IPv4 address'}, expected {rail['address']}"
            )
        elif entry.get("mtu") != int(rail["mtu"]):
            problems.append(f"{rail['netdev']} has MTU {entry.get('mtu')}, expected {rail['mtu']}")
    return problems


def judge(last_seen: dict[str, float], began: float, now: float) -> tuple[str, list[str]]:
    """Return keep, wait or revert, and who is silent, from when each watched address last answered.

    Times are of one monotonic clock, in seconds; `began` is when the change was made.
    """
    silent = [address for address, when in last_seen.items() if now - when >= LOST_SECONDS]
    if silent:
        return "revert", silent
    late = [address for address, when in last_seen.items() if when < now - 1.0]
    return ("keep" if now - began >= SETTLE_SECONDS and not late else "wait"), late


def run(*argv: str) -> str:
    """Return a command's output; RuntimeError with its own words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(argv)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def commands(rails: Sequence[dict[str, Any]], adopted: Sequence[str] = ()) -> list[list[str]]:
    """Return the commands that put the written files into effect on the rails' devices alone."""
    of = {
        renderer: [str(r["netdev"]) for r in rails if r["renderer"] == renderer]
        for renderer in ("networkd", "NetworkManager")
    }
    if unknown := [r["renderer"] for r in rails if r["renderer"] not in of]:
        raise RuntimeError(f"renderer: found {unknown[0]!r}, expected networkd or NetworkManager")
    found = [["netplan", "generate"]]
    if of["networkd"]:
        found += [
            ["systemctl", "start", "systemd-networkd.service"],
            ["networkctl", "reload"],
            ["networkctl", "reconfigure", *of["networkd"]],
        ]
    if of["NetworkManager"]:
        found += [["nmcli", "general", "reload", "conf"], ["nmcli", "connection", "reload"]]
        found += [
            ["nmcli", "--wait", "20", "connection", "up", f"netplan-{netdev}", "ifname", netdev]
            for netdev in of["NetworkManager"]
            if netdev not in adopted  # another file's profile has a name that we do not know
        ]
    return found


def answers(address: str) -> bool:
    """Say whether one ping comes back within a second."""
    argv = ["ping", "-n", "-q", "-c", "1", "-W", "1", address]
    return subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode == 0


def watch(addresses: list[str]) -> list[str]:
    """Look at the addresses until it is clear what became of them; return who was lost."""
    began = time.monotonic()
    last_seen = dict.fromkeys(addresses, began)
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        while True:
            for address, works in zip(addresses, pool.map(answers, addresses), strict=True):
                if works:
                    last_seen[address] = time.monotonic()
            word, silent = judge(last_seen, began, time.monotonic())
            if word != "wait":
                return silent if word == "revert" else []
            time.sleep(0.4)


def settle(rails: list[dict[str, Any]], budget_seconds: float) -> list[str]:
    """Return what the rails lack once the budget is used up, nothing as soon as they have everything."""
    end = time.monotonic() + budget_seconds
    while problems := missing(rails, json.loads(run("ip", "-j", "address", "show"))):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return problems


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "rails": {"type": "list", "elements": "dict", "required": True},
            "adopted": {"type": "list", "elements": "str", "default": []},
            "watch": {"type": "list", "elements": "str", "default": []},
            "revert": {"type": "path", "default": ""},
            "budget_seconds": {"type": "int", "default": 30},
        },
    )
    rails, budget = module.params["rails"], module.params["budget_seconds"]
    said = ""
    try:
        for command in commands(rails, module.params["adopted"]):
            run(*command)
        if problems := settle(rails, budget):
            said = f"Found after {budget} s: {'; '.join(problems)}. Expected: the inventory's. Fix: look at"
            said += f" `networkctl status {rails[0]['netdev']}` or `nmcli device`, and their journal"
        elif lost := watch(module.params["watch"]):
            said = (
                f"Found: since the change {', '.join(lost)} has been silent for {LOST_SECONDS:g} s. Expected:"
                " no other link is touched. Fix: compare `ip route` with the rails' networks; they must not"
                " overlap one that this node reaches otherwise"
            )
    except RuntimeError as error:
        said = f"Found: {error}. Expected: it works. Fix: mend what it says; glm53_fabric_rails is the source"
    if said and module.params["revert"]:
        subprocess.run(["/bin/sh", module.params["revert"]], capture_output=True, timeout=120, check=False)
        said += ". The rails have their old configuration again"
    if said:
        module.fail_json(msg=said)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
