"""Ansible action: wait until the pair serves, with one line a phase, and stop waiting once it cannot."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

STOPPED_SECONDS = 20
"""A unit that was only just started, or that systemd restarts, is stopped for less; longer, it is down."""


def line_of(status: dict[str, Any]) -> str:
    """Return a status for people: the state, and why."""
    reasons = "; ".join(str(reason) for reason in status.get("reasons") or [])
    return f"{status.get('state', 'unknown')}{': ' + reasons if reasons else ''}"


def phase_of(status: dict[str, Any]) -> str:
    """Return what makes a status a new phase: its words without the numbers that only count."""
    return "".join(c for c in line_of(status) if not c.isdigit())


def verdict(status: dict[str, Any], stopped: float, waited: float, budget: float) -> str:
    """Return serving, wait, dead (waiting is no use) or late (the budget is spent).

    `stopped`: for how many seconds the unit has been down without a break.
    """
    if status.get("ready") is True and status.get("state") == "serving":
        return "serving"
    if status.get("state") == "gave_up" or stopped > STOPPED_SECONDS:
        return "dead"
    return "late" if waited > budget else "wait"


class ActionModule(ActionBase):  # type: ignore[misc]
    """Polls `glm53 status --json` on the head over the connection that is open already."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the status once the pair serves; else fail with its reasons and the journal's end."""
        super().run(tmp, task_vars)
        host = str((task_vars or {}).get("inventory_hostname", ""))
        budget, delay = (
            float(self._task.args["budget_seconds"]),
            float(self._task.args.get("delay_seconds", 2)),
        )
        start, phase = time.monotonic(), ""
        up = start
        while True:
            status = self._status()
            now = time.monotonic()
            waited = now - start
            up = up if status.get("state") == "stopped" else now
            outcome = verdict(status, now - up, waited, budget)
            if outcome == "serving":
                return {"changed": False, "status": status, "waited_seconds": round(waited)}
            if outcome != "wait":
                return self._failure(status, outcome, waited)
            if phase_of(status) != phase:
                phase = phase_of(status)
                self._display.display(f"  {host} +{waited:.0f} s {line_of(status)}")
            time.sleep(delay)

    def _status(self) -> dict[str, Any]:
        try:
            done = self._low_level_execute_command(shlex.join(self._task.args["argv"]))
            status = json.loads(done.get("stdout") or "{}")
        except AnsibleConnectionFailure as error:
            return {"state": "unknown", "reasons": [f"the head does not answer: {error}"]}
        except ValueError:
            return {
                "state": "unknown",
                "reasons": [str(done.get("stderr") or done.get("stdout")).strip()[-200:]],
            }
        return status if isinstance(status, dict) else {}

    def _failure(self, status: dict[str, Any], outcome: str, waited: float) -> dict[str, Any]:
        unit = self._task.args["unit"]
        journal = self._low_level_execute_command(
            f"journalctl --no-pager -o cat -n 25 -u {shlex.quote(unit)}"
        )
        why = "it will not serve by waiting longer" if outcome == "dead" else "the time given is spent"
        return {
            "failed": True,
            "changed": False,
            "status": status,
            "msg": f"Found after {waited:.0f} s: {line_of(status)} ({why}). Expected: serving. Fix: mend the"
            f" reason above and run site.yml again; the story is in `journalctl -u {unit}`, its end is:\n"
            f"{journal.get('stdout', '').strip()}",
        }
