#!/usr/bin/python
"""Ansible module: make networkd use the fabric's netplan file, on the fabric devices alone."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_fabric_apply
short_description: Generate, reload, reconfigure the fabric devices, and wait for their addresses
description:
  - It does not use netplan apply, which restarts more than it must and touches the management link.
options:
  rails: {description: "netdev, address and mtu of each rail.", type: list, elements: dict, required: true}
  budget_seconds: {description: "How long the addresses may take.", type: int, default: 30}
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


def run(*argv: str) -> str:
    """Return a command's output; RuntimeError with its own words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(argv)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "rails": {"type": "list", "elements": "dict", "required": True},
            "budget_seconds": {"type": "int", "default": 30},
        },
    )
    rails = module.params["rails"]
    try:
        run("systemctl", "start", "systemd-networkd.service")
        run("netplan", "generate")
        run("networkctl", "reload")
        run("networkctl", "reconfigure", *(rail["netdev"] for rail in rails))
        end = time.monotonic() + module.params["budget_seconds"]
        while problems := missing(rails, json.loads(run("ip", "-j", "address", "show"))):
            if time.monotonic() > end:
                module.fail_json(
                    msg="Found after {} s: {}. Fix: look at networkctl status {} and journalctl -u"
                    " systemd-networkd".format(
                        module.params["budget_seconds"], "; ".join(problems), rails[0]["netdev"]
                    )
                )
            time.sleep(0.2)
    except RuntimeError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
