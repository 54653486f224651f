#!/usr/bin/python
"""Ansible module: says whether a unit runs, and whether it runs what is installed now. Reads only."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_units
short_description: Read a unit's state and what changed since it started
options:
  unit: {description: "The unit.", type: str, required: true}
  files: {description: "What the unit reads when it starts.", type: list, elements: str, default: []}
"""

PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "NeedDaemonReload",
    "Result",
    "ExecMainStartTimestampMonotonic",
    "MainPID",
)


def parse(text: str) -> dict[str, str]:
    """Return the properties that `systemctl show` printed."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def newer_than(files: list[str], started: float) -> list[str]:
    """Return the `files` written after wall-clock time `started`; a link counts itself."""
    return [
        f for f in files if (Path(f).is_symlink() or Path(f).exists()) and Path(f).lstat().st_mtime > started
    ]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    argv = ["systemctl", "show", "--property=" + ",".join(PROPERTIES), module.params["unit"]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        module.fail_json(msg=f"{' '.join(argv)} failed: {done.stderr.strip()}")
    found = parse(done.stdout)
    alive = (
        found.get("ActiveState") in ("active", "activating", "reloading") and found.get("MainPID", "0") != "0"
    )
    start = int(found.get("ExecMainStartTimestampMonotonic") or 0) / 1e6
    started = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - start)
    module.exit_json(
        changed=False,
        installed=found.get("LoadState") == "loaded",
        active=found.get("ActiveState", "unknown"),
        sub=found.get("SubState", "unknown"),
        enabled=found.get("UnitFileState") == "enabled",
        result=found.get("Result", ""),
        need_reload=found.get("NeedDaemonReload") == "yes",
        alive=alive,
        stale=newer_than(module.params["files"], started) if alive else [],
    )


if __name__ == "__main__":
    main()
