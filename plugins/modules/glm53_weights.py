#!/usr/bin/python
"""Ansible module: what a node has of the folders of weights, and the way to other nodes. Reads only."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_look import link, look

DOCUMENTATION = """
module: glm53_weights
short_description: Read names, sizes and manifests of folders of weights
description: No byte of the weights is read. It sees what `glm53 artifacts plan` sees (artifacts/look.py).
options:
  folders: {description: "Paths of the folders.", type: list, elements: str, required: true}
  reader: {description: "Account that must be able to read every file.", type: str, default: ""}
  rates: {description: "File with the rates of earlier copies.", type: path, default: ""}
  addresses: {description: "Addresses whose device is looked up.", type: list, elements: str, default: []}
"""


def remembered(path: str) -> dict[str, Any]:
    """Return the rates of earlier copies (glm53_service.artifacts.rates), empty without any."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def way(address: str) -> dict[str, Any]:
    """Return the device over which the kernel would reach `address`; empty without a route."""
    argv = ["ip", "-j", "route", "get", address]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    try:
        netdev = str(json.loads(done.stdout)[0]["dev"])
    except (ValueError, LookupError):
        return {}
    return {"netdev": netdev, **link(netdev)}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "str", "required": True},
            "reader": {"type": "str", "default": ""},
            "rates": {"type": "path", "default": ""},
            "addresses": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(
        changed=False,
        looks=[look(folder, module.params["reader"]) for folder in module.params["folders"]],
        rates=remembered(module.params["rates"]),
        ways={address: way(address) for address in module.params["addresses"]},
    )


if __name__ == "__main__":
    main()
