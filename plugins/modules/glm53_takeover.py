#!/usr/bin/python
"""Ansible module: stop what is in the pair's way, remember how it was, and give it back."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_docker import docker_call
from ansible.module_utils.glm53_systemd import show, systemctl

DOCUMENTATION = """
module: glm53_takeover
short_description: Stop containers and units of others, or give them back
description:
  - How each was is written, durably, before it is touched. A run that broke off is finished by the next one.
  - Nothing is removed; containers are stopped and keep their restart policy as no, units are disabled.
options:
  record: {description: "Where it is remembered, root 0600.", type: path, required: true}
  found: {description: "Findings of kind container and unit.", type: list, elements: dict, default: []}
  state: {description: "taken or returned.", type: str, choices: [taken, returned], default: taken}
  account: {description: "Owner of the record's folder where that must be made.", type: str, default: root}
  stop_seconds: {description: "What a container has to end by itself.", type: int, default: 60}
"""

VERSION = 1
ALIVE = ("running", "restarting")


class TakeoverError(Exception):
    """Says what was found, what was expected and what to do."""


class Hands(Protocol):
    """What acts on the node."""

    def container(self, id: str) -> dict[str, Any] | None:
        """Return state and restart policy, None when it is gone."""

    def policy(self, id: str, policy: Mapping[str, Any]) -> None:
        """Set the restart policy."""

    def run(self, id: str, verb: str, seconds: int) -> None:
        """Start or stop a container."""

    def unit(self, name: str, scope: str) -> dict[str, Any] | None:
        """Return whether the unit is active, how it is enabled and by what name, None when it is gone."""

    def systemctl(self, scope: str, *words: str) -> None:
        """Run systemctl."""


class Node:
    """The hands on a real node."""

    def container(self, id: str) -> dict[str, Any] | None:
        inspect = self._docker("GET", id, "/json", allowed=(200, 404))
        if inspect is None or "State" not in inspect:
            return None
        return {"state": inspect["State"]["Status"], "policy": inspect["HostConfig"]["RestartPolicy"]}

    def policy(self, id: str, policy: Mapping[str, Any]) -> None:
        self._docker("POST", id, "/update", {"RestartPolicy": dict(policy)})

    def run(self, id: str, verb: str, seconds: int) -> None:
        # 304: it is so already.
        self._docker("POST", id, f"/{verb}?t={seconds}", allowed=(204, 304), timeout=seconds + 60.0)

    def _docker(
        self,
        method: str,
        id: str,
        verb: str,
        body: Any = None,
        allowed: Sequence[int] = (200,),
        timeout: float = 60,
    ) -> Any:
        path = f"/containers/{urllib.parse.quote(id)}{verb}"
        status, answer = docker_call(method, path, body, timeout=timeout)
        if status not in allowed:
            raise TakeoverError(f"docker refused {method} {path}: {(answer or {}).get('message', status)}")
        return answer

    def unit(self, name: str, scope: str) -> dict[str, Any] | None:
        shown: dict[str, str] = next(iter(show(scope, [name])), {})
        if shown.get("LoadState") in (None, "not-found"):
            return None
        file = Path(shown.get("FragmentPath") or "/")
        return {
            "active": shown.get("ActiveState") in ("active", "activating", "reloading"),
            "enabled": shown.get("UnitFileState", ""),
            # Disabling a unit that is a link takes the link away: it is enabled again by the file itself.
            "source": str(file.resolve()) if file.is_symlink() else name,
        }

    def systemctl(self, scope: str, *words: str) -> None:
        try:
            done = systemctl(scope, *words)
        except subprocess.TimeoutExpired as error:
            raise TakeoverError(f"systemctl {' '.join(words)} took longer than {error.timeout} s") from None
        if done.returncode != 0:
            whose = f" as {scope}" if scope else ""
            raise TakeoverError(f"systemctl {' '.join(words)}{whose} failed: {done.stderr.strip()}")


class Record:
    """What was taken over on this node: a file that root alone reads and writes."""

    def __init__(self, path: Path, account: str) -> None:
        self.path = path
        self.account = account
        self.taken: list[dict[str, Any]] = self._read()

    def _read(self) -> list[dict[str, Any]]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TakeoverError(
                f"Found {self.path}: {error.strerror}. Expected: a file of root's own"
            ) from None
        with os.fdopen(descriptor, encoding="utf-8") as handle:
            found = os.fstat(handle.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise TakeoverError(
                    f"Found {self.path}: owner {found.st_uid}, mode {found.st_mode & 0o7777:04o}. Expected:"
                    " root's, 0600, for root acts on what it says. Fix: read it; if it is right,"
                    f" `sudo chown root:root {self.path}; sudo chmod 600 {self.path}`"
                )
            try:
                data = json.load(handle)
                if data["version"] != VERSION:
                    raise ValueError(f"version {data['version']}")
                taken: list[dict[str, Any]] = data["taken"]
            except (ValueError, KeyError, TypeError) as error:
                raise TakeoverError(
                    f"Found {self.path} that cannot be read ({error}). Expected: version {VERSION} of our own"
                    " writing. Fix: give back by hand what it names, then remove it"
                ) from None
        return taken

    def save(self) -> None:
        """Write it durably; without any entry it goes away."""
        folder = self.path.parent
        if not folder.exists():
            folder.mkdir(mode=0o750, parents=True)
            os.chown(folder, pwd.getpwnam(self.account).pw_uid, grp.getgrnam(self.account).gr_gid)
        if self.taken:
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                json.dump({"version": VERSION, "taken": self.taken}, handle, indent=1)
                handle.flush()
                os.fsync(handle.fileno())
            Path(name).rename(self.path)
        else:
            self.path.unlink(missing_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def entry(self, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what is remembered of a finding."""
        keys = ("kind", "name", "scope") if found["kind"] == "unit" else ("kind", "id")
        return next((e for e in self.taken if all(e[key] == found[key] for key in keys)), None)


def differs(entry: Mapping[str, Any], now: Mapping[str, Any] | None) -> list[str]:
    """Return what is still to do before `entry` is out of the way; `now` is how it is."""
    if now is None:
        return []
    if entry["kind"] == "container":
        todo = ["policy"] if now["policy"].get("Name") not in ("", "no", None) else []
        return todo + (["stop"] if now["state"] in ALIVE else [])
    todo = ["stop"] if now["active"] else []
    return todo + (["disable"] if now["enabled"].startswith("enabled") else [])


def look(hands: Hands, thing: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a container or a unit is now."""
    if thing["kind"] == "container":
        return hands.container(thing["id"])
    return hands.unit(thing["name"], thing["scope"])


def take(
    record: Record, found: Sequence[Mapping[str, Any]], hands: Hands, seconds: int, when: str
) -> list[str]:
    """Stop what was found, in its order, and return what was done; each is remembered before it is touched.

    How it was when it was first touched counts, however often it is taken. What an earlier run left half
    done is finished first.
    """
    said = []
    for thing in [*(e for e in record.taken if not e["done"]), *found]:
        now = look(hands, thing)
        entry = record.entry(thing)
        todo = differs(thing, now)
        if now is not None and (todo or entry is not None):
            if entry is None:
                keys = ("kind", "name", "id", "scope")
                entry = {**{key: thing[key] for key in keys}, "was": now, "when": when}
                record.taken.append(entry)
            entry["done"] = False
            record.save()
            for act in todo:
                _take(entry, act, hands, seconds)
            said += [f"{TAKEN[act]} {entry['kind']} {entry['name']}" for act in todo]
        if entry is not None and not entry["done"]:
            entry["done"] = True
            record.save()
    return said


TAKEN = {"policy": "took the restart policy of", "stop": "stopped", "disable": "disabled"}


def _take(entry: Mapping[str, Any], act: str, hands: Hands, seconds: int) -> None:
    if act == "policy":
        hands.policy(entry["id"], {"Name": "no"})
    elif entry["kind"] == "container":
        hands.run(entry["id"], "stop", seconds)
    elif act == "stop":
        hands.systemctl(entry["scope"], "stop", entry["name"])
    else:
        # No reload of systemd: that can take the GPU from containers that run.
        hands.systemctl(entry["scope"], "disable", "--no-reload", entry["name"])


def give_back(record: Record, hands: Hands) -> list[str]:
    """Make everything as it was, the last taken first, and return what was done; what is gone is left out."""
    said = []
    for entry in reversed(record.taken.copy()):
        now, was = look(hands, entry), entry["was"]
        if now is None:
            said.append(f"{entry['kind']} {entry['name']} is gone: nothing to give back")
        else:
            said += [_return(entry, was, act, hands) for act in returns(entry, was, now)]
        record.taken.remove(entry)
        record.save()
    return said


def returns(entry: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is to do before a thing is as it was."""
    if entry["kind"] == "container":
        todo = ["policy"] if was["policy"] != now["policy"] else []
        return todo + (["start"] if was["state"] in ALIVE and now["state"] not in ALIVE else [])
    todo = ["enable"] if was["enabled"].startswith("enabled") and was["enabled"] != now["enabled"] else []
    return todo + (["start"] if was["active"] and not now["active"] else [])


def _return(entry: Mapping[str, Any], was: Mapping[str, Any], act: str, hands: Hands) -> str:
    if act == "policy":
        hands.policy(entry["id"], was["policy"])
        return f"gave container {entry['name']} its restart policy {was['policy']['Name']}"
    if entry["kind"] == "container":
        hands.run(entry["id"], "start", 0)
        return f"started container {entry['name']}"
    if act == "enable":
        runtime = ("--runtime",) if was["enabled"] == "enabled-runtime" else ()
        hands.systemctl(entry["scope"], "enable", "--no-reload", *runtime, was["source"])
        return f"enabled unit {entry['name']}"
    # What it starts may load for minutes.
    hands.systemctl(entry["scope"], "start", "--no-block", entry["name"])
    return f"started unit {entry['name']}"


def plan(record: Record, found: Sequence[Mapping[str, Any]], hands: Hands, state: str) -> list[str]:
    """Return what a real run would do; less, where a unit stops its container itself."""
    if state == "returned":
        words = {"policy": "give its restart policy to"}
        things = [(entry, look(hands, entry)) for entry in reversed(record.taken)]
        todo = [(e, act) for e, now in things if now for act in returns(e, e["was"], now)]
    else:
        words = {"policy": "take the restart policy of"}
        undone = [e for e in record.taken if not e["done"]]
        todo = [(thing, act) for thing in [*undone, *found] for act in differs(thing, look(hands, thing))]
    return list(dict.fromkeys(f"would {words.get(act, act)} {t['kind']} {t['name']}" for t, act in todo))


def run(params: Mapping[str, Any], check: bool, hands: Hands, clock: Callable[[], float]) -> dict[str, Any]:
    """Do what the module was asked for; return its result."""
    record = Record(Path(params["record"]), params["account"])
    before = bool(record.taken)
    if check:
        said = plan(record, params["found"], hands, params["state"])
        return {"changed": bool(said) or (before and params["state"] == "returned"), "said": said}
    if params["state"] == "returned":
        said = give_back(record, hands)
        return {"changed": before, "said": said}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock()))
    said = take(record, params["found"], hands, params["stop_seconds"], when)
    return {"changed": bool(said), "said": said}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "record": {"type": "path", "required": True},
            "found": {"type": "list", "elements": "dict", "default": []},
            "state": {"type": "str", "choices": ["taken", "returned"], "default": "taken"},
            "account": {"type": "str", "default": "root"},
            "stop_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module.params, module.check_mode, Node(), time.time))
    except TakeoverError as error:
        module.fail_json(msg=f"{error}. What was done is in {module.params['record']}; run again to go on.")
    except OSError as error:
        module.fail_json(
            msg=f"docker or a file failed: {error}. What was done is in {module.params['record']}."
        )


if __name__ == "__main__":
    main()
