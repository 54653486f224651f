#!/usr/bin/python
"""Ansible module: a oneshot unit of ours is enabled and has done its work; no reload takes the GPU for it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_boot_unit
short_description: Ensure a oneshot unit is enabled and applied, or stopped and disabled
description:
  - A reload of systemd can take the GPU from running containers, so it is done only while none runs. Until
    then what the unit does is done directly.
options:
  unit: {description: "The unit, installed already.", type: str, required: true}
  state: {description: "What to do.", choices: [present, absent], type: str, default: present}
  probe: {description: "Command that shows what the unit does.", type: list, elements: str, default: []}
  expect: {description: "Text that the probe prints once it is done.", type: str, default: ""}
  source: {description: "File whose change makes the work of an active unit old.", type: str, default: ""}
  direct: {description: "Command that does the same as the unit.", type: list, elements: str, default: []}
  undo: {description: "Takes back what the probe still shows.", type: list, elements: str, default: []}
"""

Runner = Callable[[Sequence[str]], tuple[int, str]]
"""Runs a command; returns its exit code and what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is so now. `stale`: systemd knows an older version of the file. `busy`: a container runs."""

    enabled: bool
    active: bool
    stale: bool
    applied: bool
    busy: bool


def decide(found: Found, *, present: bool, direct: bool) -> list[str]:
    """Return the steps, in order: disable, stop, undo, enable, reload, apply, direct."""
    if not present:
        steps = ["disable"] if found.enabled else []
        steps += ["stop"] if found.active else []
        return steps + (["undo"] if found.applied else [])
    steps = [] if found.enabled else ["enable"]
    if found.applied and not (found.stale and not found.busy):
        return steps
    if found.stale and not found.busy:
        steps.append("reload")
    if found.applied:
        return steps
    return [*steps, "direct" if found.stale and found.busy and direct else "apply"]


def fresh(state: dict[str, str], source: str, uptime: float, now: float) -> bool:
    """Say whether the unit became active after `source` was written; both clocks in seconds."""
    if not source or not Path(source).exists():
        return True
    began = now - uptime + int(state.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    return Path(source).stat().st_mtime <= began


def run(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command with nothing to read; a missing one is exit code 127."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return 127, f"{argv[0]}: not found"
    return done.returncode, (done.stdout + done.stderr).strip()


def look(params: dict[str, Any], runner: Runner = run) -> Found:
    """Read the state of the unit; nothing is changed."""
    properties = "--property=ActiveState,NeedDaemonReload,ActiveEnterTimestampMonotonic"
    _, shown = runner(["systemctl", "show", properties, params["unit"]])
    state = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    active = state.get("ActiveState") == "active"
    done = active and fresh(state, params["source"], time.clock_gettime(time.CLOCK_MONOTONIC), time.time())
    code, said = runner(params["probe"]) if params["probe"] else (0 if done else 1, "")
    docker, containers = runner(["docker", "ps", "--quiet"])
    return Found(
        enabled=runner(["systemctl", "is-enabled", params["unit"]])[1].splitlines()[:1] == ["enabled"],
        active=active,
        stale=state.get("NeedDaemonReload") == "yes",
        applied=code == 0 and params["expect"] in said,
        busy=docker == 0 and bool(containers),
    )


def commands(params: dict[str, Any]) -> dict[str, list[str]]:
    """Return each step's command."""
    unit = params["unit"]
    return {
        "enable": ["systemctl", "--no-reload", "enable", unit],
        "disable": ["systemctl", "--no-reload", "disable", unit],
        "reload": ["systemctl", "daemon-reload"],
        "apply": ["systemctl", "reload-or-restart", unit],
        "stop": ["systemctl", "stop", unit],
        "direct": params["direct"],
        "undo": params["undo"],
    }


def act(params: dict[str, Any], steps: list[str], runner: Runner = run) -> str:
    """Take the steps; return what went wrong, empty when nothing did."""
    known = commands(params)
    for step in steps:
        if step == "undo" and not (params["undo"] and look(params, runner).applied):
            continue  # stopping the unit took it back
        code, said = runner(known[step])
        if code != 0:
            return (
                f"Found: `{' '.join(known[step])}` failed ({code}): {said}. Expected: it works. Fix: look at"
                f" `systemctl status {params['unit']}` and `journalctl -u {params['unit']}`"
            )
    checked = params["probe"] or "apply" in steps
    if params["state"] == "present" and checked and not look(params, runner).applied:
        return (
            f"Found: {params['unit']} ran, but `{' '.join(params['probe'])}` does not show its work."
            f" Expected: {params['expect'] or 'an active unit'}. Fix: see `journalctl -u {params['unit']}`"
        )
    return ""


def main() -> None:
    """Run the module."""
    words = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "probe": words,
            "expect": {"type": "str", "default": ""},
            "source": {"type": "str", "default": ""},
            "direct": words,
            "undo": words,
        },
        supports_check_mode=True,
    )
    present = module.params["state"] == "present"
    steps = decide(look(module.params), present=present, direct=bool(module.params["direct"]))
    if steps and not module.check_mode and (problem := act(module.params, steps)):
        module.fail_json(msg=problem)
    module.exit_json(changed=bool(steps), steps=steps)


if __name__ == "__main__":
    main()
