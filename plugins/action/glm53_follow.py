"""Ansible action: run a long verb of `glm53` on a node, and show how far it is while it runs.

The task says `async: SECONDS` (how long it may take) and `poll: 0`: the node works by itself, so a connection
that breaks ends nothing.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase

LINE_SECONDS = 30.0
"""How often a line is shown."""

LATE = "the time given to it (async) is spent; what it did stays, and the next run goes on from there"


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects that a verb printed with --json, one a line; half a line is left out."""
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            yield data


def line_of(event: dict[str, Any]) -> str:
    """Return an event for a person; empty for one that is not shown while it runs."""
    from glm53_service.artifacts.progress import words

    if event.get("event") in ("progress", "done"):
        return str(words(event))
    return str(event.get("text", "")) if event.get("event") == "message" else ""


class ActionModule(ActionBase):  # type: ignore[misc]
    """Starts `argv` in the background and polls over the connection that is open already."""

    TRANSFERS_FILES = False
    _supports_async = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the command did, its `events` beside; failed with its own words."""
        super().run(tmp, task_vars)
        if self._task.check_mode:
            return {"skipped": True, "msg": "not run in check mode"}
        if not self._task.async_val or self._task.poll:
            raise AnsibleActionFail("glm53_follow needs `async: SECONDS` and `poll: 0`")
        folder = self._make_tmp_path()
        said = self._connection._shell.join_path(folder, "said")
        argv = ["/bin/sh", "-c", 'exec "$@" > "$0"', said, *map(str, self._task.args["argv"])]
        job = self._execute_module(
            module_name="ansible.legacy.command",
            module_args={"argv": argv},
            task_vars=task_vars,
            wrap_async=True,
        )
        if job.get("failed") or "ansible_job_id" not in job:
            return {**job, "failed": True}
        ended = self._wait(job, said, str((task_vars or {}).get("inventory_hostname", "")))
        done = self._job(job, "status", task_vars) if ended else {"failed": True, "msg": LATE}
        found = list(events(self._read(said)))
        self._job(job, "cleanup", task_vars)
        self._remove_tmp_path(folder)
        return self._result(done, found)

    def _result(self, done: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
        keys = ("rc", "stderr", "start", "end", "delta", "cmd")
        result: dict[str, Any] = {key: done[key] for key in keys if key in done}
        result["events"] = [e for e in found if e.get("event") not in ("progress", "done")]
        if done.get("failed") or done.get("rc", 1):
            text = str(done.get("stderr") or done.get("msg") or "it ended without a word").strip()
            return {**result, "failed": True, "changed": False, "msg": text}
        return {**result, "changed": True}

    def _wait(self, job: dict[str, Any], said: str, host: str) -> bool:
        """Return whether the job ended in its time; a node that does not answer is asked again."""
        began = time.monotonic()
        shown, last, delay = began - LINE_SECONDS, "", 0.2
        while True:
            ended, found = self._look(str(job["results_file"]), said)
            lines = [line for event in found if (line := line_of(event))]
            now = time.monotonic()
            if lines and lines[-1] != last and now - shown >= LINE_SECONDS:
                shown, last = now, lines[-1]
                self._display.display(f"  {host} {last}")
            if ended or now - began > self._task.async_val:
                return ended
            time.sleep(delay)
            delay = min(delay * 1.5, 5.0)

    def _look(self, results: str, said: str) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the job has ended (its record no longer says `started`), and its last events."""
        command = f"cat {shlex.quote(results)}; echo; tail -n 3 {shlex.quote(said)}"
        try:
            out = str(self._low_level_execute_command(command).get("stdout", ""))
        except AnsibleConnectionFailure:
            return False, []
        found = list(events(out))
        records = [e for e in found if "event" not in e]
        return any("started" not in e for e in records), [e for e in found if "event" in e]

    def _read(self, path: str) -> str:
        return str(self._low_level_execute_command(f"cat {shlex.quote(path)}").get("stdout", ""))

    def _job(self, job: dict[str, Any], mode: str, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        # The job is asked for as a task of its own: the asking must not be put into the background too.
        asynchronous, self._task.async_val = self._task.async_val, 0
        try:
            found: dict[str, Any] = self._execute_module(
                module_name="ansible.legacy.async_status",
                module_args={
                    "jid": job["ansible_job_id"],
                    "mode": mode,
                    "_async_dir": self.get_shell_option("async_dir", default="~/.ansible_async"),
                },
                task_vars=task_vars,
            )
        finally:
            self._task.async_val = asynchronous
        return found
