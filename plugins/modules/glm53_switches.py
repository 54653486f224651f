#!/usr/bin/python
"""Ansible module: single switches of the host, each recorded with what it was, to be given back."""

from __future__ import annotations

import grp
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_switches
short_description: Set switches of the host, and give back those that are no longer asked for
description:
  - "A switch is kind:name. mask:UNIT (masked), sysctl:PATH/BELOW/PROC/SYS, target:default (a unit),
    hold:PACKAGE (hold), member:GROUP:USER (yes)."
  - What was there before is kept in `record`. What had the wanted value already is not ours, and is never
    given back. What somebody has changed since is left as they want it.
options:
  switches: {description: "Wanted values.", type: dict, default: {}}
  record: {description: "Keeps what was before; removed with its last entry.", type: path, required: true}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to set, what the record says afterwards, and which switches somebody else has changed since."""

    to_set: dict[str, str]
    record: dict[str, dict[str, str]]
    left: list[str]


def plan(found: Mapping[str, str], wanted: Mapping[str, str], record: Mapping[str, dict[str, str]]) -> Plan:
    """Return what follows from the values now, those that are wanted, and what we have set before."""
    to_set, kept, left = {}, {}, []
    for key, value in wanted.items():
        ours = record.get(key)
        if found[key] != value:
            to_set[key] = value
        if ours or found[key] != value:
            kept[key] = {"before": ours["before"] if ours else found[key], "set": value}
    for key, ours in record.items():
        if key in wanted:
            continue
        if found[key] == ours["set"]:
            to_set[key] = ours["before"]
        else:
            left.append(f"{key} is {found[key]}, not the {ours['set']} that we had set: left so")
    return Plan(to_set=to_set, record=kept, left=left)


def run(*argv: str, stdin: str = "", check: bool = True) -> str:
    """Return a command's output; RuntimeError with its own words when it fails and `check` is true."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, input=stdin, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"`{' '.join(argv)}` failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


class Host:
    """Reads and sets switches on the machine whose files are below `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.kinds: dict[str, tuple[Callable[[str], str], Callable[[str, str], None]]] = {
            "mask": (self.masked, self.set_masked),
            "sysctl": (self.sysctl, self.set_sysctl),
            "target": (self.target, self.set_target),
            "hold": (self.held, self.set_held),
            "member": (self.member, self.set_member),
        }

    def get(self, key: str) -> str:
        """Return a switch's value; RuntimeError for an unknown kind."""
        kind, _, name = key.partition(":")
        if kind not in self.kinds:
            raise RuntimeError(f"switch {key}: found kind {kind!r}, expected one of {', '.join(self.kinds)}")
        return self.kinds[kind][0](name)

    def set(self, key: str, value: str) -> None:
        """Set a switch."""
        kind, _, name = key.partition(":")
        self.kinds[kind][1](name, value)

    def wanted(self, key: str, value: str, found: str) -> str:
        """Return a wanted value as `get` would show it: a target's link may lead there by either path."""
        if not key.startswith("target:"):
            return value
        return found if Path(found).name == value else f"/lib/systemd/system/{value}"

    def masked(self, unit: str) -> str:
        """Return `masked`, or empty."""
        path = self.root / "etc/systemd/system" / unit
        return "masked" if path.is_symlink() and str(path.readlink()) == "/dev/null" else ""

    def set_masked(self, unit: str, value: str) -> None:
        """Mask or unmask; systemd hears of it now unless a container runs, whose GPU a reload could take."""
        quiet = ["--no-reload"] if run("docker", "ps", "--quiet", check=False).strip() else []
        run("systemctl", *quiet, "mask" if value == "masked" else "unmask", unit)

    def sysctl(self, name: str) -> str:
        """Return the value as one line; empty when the kernel has no such name."""
        path = self.root / "proc/sys" / name
        return " ".join(path.read_text(encoding="utf-8").split()) if path.exists() else ""

    def set_sysctl(self, name: str, value: str) -> None:
        """Write the value; one that the kernel does not have (a device that is gone) is passed over."""
        path = self.root / "proc/sys" / name
        if path.exists():
            path.write_text(value + "\n", encoding="utf-8")

    def target(self, _: str) -> str:
        """Return where the default target's link leads; empty without one (the system's own)."""
        path = self.root / "etc/systemd/system/default.target"
        return str(path.readlink()) if path.is_symlink() else ""

    def set_target(self, _: str, value: str) -> None:
        """Point the link there; it is read at the next boot."""
        path = self.root / "etc/systemd/system/default.target"
        if not value:
            path.unlink(missing_ok=True)
            return
        part = path.with_name(".default.target.glm53")
        part.unlink(missing_ok=True)
        part.symlink_to(value)
        part.rename(path)

    def held(self, package: str) -> str:
        """Return the package's wanted state in dpkg: install or hold; empty when it is not known."""
        return run("dpkg-query", "--show", "--showformat=${db:Status-Want}", package, check=False).strip()

    def set_held(self, package: str, value: str) -> None:
        """Set the wanted state."""
        run("dpkg", "--set-selections", stdin=f"{package} {value or 'install'}\n")

    def member(self, name: str) -> str:
        """Return yes or no for GROUP:USER; no for a group that is not there."""
        group, _, user = name.partition(":")
        try:
            return "yes" if user in grp.getgrnam(group).gr_mem else "no"
        except KeyError:
            return "no"

    def set_member(self, name: str, value: str) -> None:
        """Add the user to the group, or take them out."""
        group, _, user = name.partition(":")
        if value == "yes":
            run("usermod", "--append", "--groups", group, user)
        else:
            run("gpasswd", "--delete", user, group)


def save(path: Path, record: dict[str, dict[str, str]]) -> None:
    """Write the record in one step; an empty one is removed."""
    if not record:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    part.rename(path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "switches": {"type": "dict", "default": {}},
            "record": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    wanted: dict[str, Any] = {key: str(value) for key, value in module.params["switches"].items()}
    path, host = Path(module.params["record"]), Host()
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = {key: host.get(key) for key in {**record, **wanted}}
        wanted = {key: host.wanted(key, value, found[key]) for key, value in wanted.items()}
        todo = plan(found, wanted, record)
        if not module.check_mode:
            save(path, {**record, **todo.record})  # before acting: a cut in between forgets nothing
            for key, value in todo.to_set.items():
                host.set(key, value)
            save(path, todo.record)
    except (RuntimeError, OSError, ValueError) as error:
        hint = f"Expected: the switch can be set. Fix: mend what it says; {path} knows what was"
        module.fail_json(msg=f"Found: {error}. {hint}")
    lines = [f"{key}: {found[key] or 'unset'} -> {value or 'unset'}\n" for key, value in todo.to_set.items()]
    module.exit_json(
        changed=bool(todo.to_set),
        left=todo.left,
        diff=[{"prepared": line} for line in lines],
        set=todo.to_set,
    )


if __name__ == "__main__":
    main()
