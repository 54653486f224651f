"""Ansible action: hold the nodes for this run, or say who does and what to do."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.action import ActionBase


def host_id() -> str:
    """Return what tells this control host, its boot and its pid namespace from every other."""
    parts = [socket.gethostname()]
    for source in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        path = Path(source)
        parts.append(path.read_text(encoding="utf-8").strip() if path.exists() else "-")
    namespace = Path("/proc/self/ns/pid")
    parts.append(str(namespace.readlink()) if namespace.is_symlink() else "-")
    return "/".join(parts)


def process_started(pid: int) -> str:
    """Return when process `pid` started, equal only for the same process; empty when gone."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        except OSError:
            return ""
        return "" if fields[0] in ("Z", "X") else fields[19]
    done = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def this_run(playbook: str) -> dict[str, Any]:
    """Return who runs: the ansible-playbook process that this worker was forked from."""
    pid = os.getppid()
    started = process_started(pid)
    return {
        "who": getpass.getuser(),
        "host": socket.gethostname(),
        "host_id": host_id(),
        "pid": pid,
        "started": started,
        "run_id": f"{host_id()}#{pid}#{started}",
        "playbook": playbook,
    }


def holder_is_dead(holder: dict[str, Any]) -> bool:
    """Say whether the holder ran here and its process is gone; False when that cannot be known."""
    if holder.get("host_id") != host_id():
        return _same_machine_before_boot(str(holder.get("host_id", "")))
    return process_started(int(holder.get("pid", 0))) != str(holder.get("started"))


def _same_machine_before_boot(other: str) -> bool:
    theirs, mine = other.split("/"), host_id().split("/")
    return (
        len(theirs) == len(mine)
        and theirs[:2] == mine[:2]
        and mine[1] not in ("-", "")
        and "-" not in (theirs[2], mine[2])
        and theirs[2] != mine[2]
    )


def age(seconds: float) -> str:
    """Return a duration for people."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def refusal(result: dict[str, Any], ttl_minutes: int) -> str:
    """Return the message for a run that found the lock held."""
    holder = result["holder"]
    return (
        f"Found: {holder.get('who')}@{holder.get('host')} (pid {holder.get('pid')}, {holder.get('playbook')})"
        f" works on these nodes since {result['since_utc']}, {age(result['age_seconds'])} ago.\n"
        "Expected: no other run.\n"
        "Fix: wait for that run to end and start this one again. If you are sure that it is dead: add"
        f" -e glm53_lock_break=true. A lock that nobody renews ends by itself after {ttl_minutes} minutes."
    )


class ActionModule(ActionBase):  # type: ignore[misc]
    """Runs the glm53_lock module with this run's identity."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Take, renew, release or query the lock; fail when another run that may be alive holds it."""
        super().run(tmp, task_vars)
        playbooks = ", ".join(Path(name).name for name in context.CLIARGS.get("args", ()))
        arguments = {**self._task.args, "run": this_run(playbooks)}
        result = self._execute(arguments, task_vars)
        if result.get("outcome") == "held" and holder_is_dead(result["holder"]):
            result = self._execute({**arguments, "dead_run": result["holder"]["run_id"]}, task_vars)
        if result.get("outcome") == "held":
            result.update(failed=True, msg=refusal(result, int(self._task.args.get("ttl_minutes", 120))))
        elif result.get("outcome") == "taken_over":
            holder = result["holder"]
            self._display.display(
                f"The run lock of {holder.get('who')}@{holder.get('host')} ({result['since_utc']}) was taken"
                " over: its run is dead, expired or was broken on request."
            )
        return result

    def _execute(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="glm53_lock", module_args=arguments, task_vars=task_vars
        )
        return result
