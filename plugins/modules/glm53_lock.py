#!/usr/bin/python
"""Ansible module: the run lock on the head, a small JSON file that says who deploys and since when."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_lock
short_description: Take, renew, release or look at the run lock
description: Use it through its action plugin, which knows who runs and whether a holder is still alive.
options:
  path: {description: "The lock file, on a file system that a reboot empties.", type: path, required: true}
  state: {description: "What to do.", choices: [present, absent, query], required: true}
  run: {description: "who, host, host_id, pid, started, run_id, playbook.", type: dict, required: true}
  ttl_minutes: {description: "After so long without a renewal anybody may take it.", type: int, default: 120}
  force: {description: "Take it whoever holds it.", type: bool, default: false}
  dead_run: {description: "The run_id of a holder known to be dead.", type: str, default: ""}
"""


def decide(
    holder: dict[str, Any] | None,
    state: str,
    run_id: str,
    now: float,
    ttl_seconds: float,
    force: bool = False,
    dead_run: str = "",
) -> str:
    """Return what a request comes to: acquired, renewed, taken_over, released, free or held."""
    mine = holder is not None and holder.get("run_id") == run_id
    if state == "absent":
        return "released" if mine else "free"
    open_to_take = (
        holder is None
        or mine
        or force
        or holder.get("run_id") == dead_run
        or now - float(holder.get("renewed", 0)) > ttl_seconds
    )
    if not open_to_take:
        return "held"
    if state == "query":
        return "free"
    if mine:
        return "renewed"
    return "acquired" if holder is None else "taken_over"


def read_holder(text: str) -> dict[str, Any] | None:
    """Return the holder that a lock file names; None when it is empty or broken: that binds nobody."""
    try:
        holder = json.loads(text)
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and holder.get("run_id") else None


def open_locked(path: Path) -> TextIO:
    """Return the lock file, opened and locked against others; never one that was unlinked meanwhile."""
    while True:
        handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
        fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists() and os.fstat(handle.fileno()).st_ino == path.stat().st_ino:
            return handle
        handle.close()


def act(path: Path, params: dict[str, Any], check_mode: bool, now: float) -> dict[str, Any]:
    """Carry out a request and return outcome, holder and the holder's ages in seconds."""
    reads_only = check_mode or params["state"] == "query"
    rules = (
        params["state"],
        params["run"]["run_id"],
        now,
        params["ttl_minutes"] * 60,
        params["force"],
        params["dead_run"],
    )
    if reads_only:
        holder = read_holder(path.read_text(encoding="utf-8")) if path.exists() else None
        return _answer(decide(holder, *rules), holder, now)
    with open_locked(path) as handle:
        holder = read_holder(handle.read())
        outcome = decide(holder, *rules)
        if outcome in ("acquired", "renewed", "taken_over"):
            since = holder["since"] if outcome == "renewed" and holder else now
            _write(handle, {**params["run"], "since": since, "renewed": now})
        elif outcome == "released" or holder is None:
            path.unlink()
    return _answer(outcome, holder, now)


def _write(handle: TextIO, content: dict[str, Any]) -> None:
    handle.seek(0)
    handle.truncate()
    json.dump(content, handle)
    handle.flush()
    os.fsync(handle.fileno())


def _answer(outcome: str, holder: dict[str, Any] | None, now: float) -> dict[str, Any]:
    since = float(holder.get("since", now)) if holder else now
    return {
        "outcome": outcome,
        "holder": holder or {},
        "age_seconds": round(now - since),
        "since_utc": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since)),
    }


def main() -> None:
    """Run the module. A lock is bookkeeping: it never counts as a change."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent", "query"], "required": True},
            "run": {"type": "dict", "required": True},
            "ttl_minutes": {"type": "int", "default": 120},
            "force": {"type": "bool", "default": False},
            "dead_run": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    module.exit_json(
        changed=False, **act(Path(module.params["path"]), module.params, module.check_mode, time.time())
    )


if __name__ == "__main__":
    main()
