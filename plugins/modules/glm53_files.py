#!/usr/bin/python
"""Ansible module: a node's folders and files in one task, validated together before any is written."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_files
short_description: Ensure a set of folders and whole files
description:
  - Compares all, validates what differs, and only then writes; each file by temporary file, fsync and rename.
  - "A file's kind decides its check: unit (systemd-analyze verify), netplan (netplan generate), nft (nft
    --check), perl (perl -c), text (none)."
options:
  folders: {description: "Folders: path, owner, group, mode.", type: list, elements: dict, default: []}
  files: {description: "path, content, owner, group, mode, kind.", type: list, elements: dict, default: []}
  absent: {description: "Files that must not be there.", type: list, elements: str, default: []}
"""


CHECKERS = {"nft": ["nft", "--check", "--file"], "perl": ["perl", "-c"]}
"""Commands that read a file of this kind without acting on it; its path comes last."""


class CheckFailed(Exception):
    """A checker refused a file; the message is its own."""


def account_id(name: str, group: bool) -> int | None:
    """Return the number of a user or group, None when it does not exist yet (check mode on a bare host)."""
    try:
        return grp.getgrnam(name).gr_gid if group else pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def attributes_differ(path: Path, wanted: dict[str, Any]) -> bool:
    """Say whether owner, group or mode of an existing `path` are not the wanted ones."""
    stat = path.lstat()
    return (
        stat.st_mode & 0o7777 != int(wanted["mode"], 8)
        or stat.st_uid != account_id(wanted["owner"], group=False)
        or stat.st_gid != account_id(wanted["group"], group=True)
    )


def current_text(path: Path) -> str | None:
    """Return a file's text, None when there is no regular file (a link is never followed)."""
    return path.read_text(encoding="utf-8") if path.is_file() and not path.is_symlink() else None


def check_units(units: list[dict[str, Any]]) -> None:
    """Raise CheckFailed when systemd finds fault with a unit; the name counts, so each keeps its own."""
    with tempfile.TemporaryDirectory(prefix="glm53-units-") as folder:
        paths = []
        for unit in units:
            path = Path(folder) / Path(unit["path"]).name
            path.write_text(unit["content"], encoding="utf-8")
            paths.append(str(path))
        _check(["systemd-analyze", "verify", "--recursive-errors=no", *paths])


def check_netplan(file: dict[str, Any]) -> None:
    """Raise CheckFailed when netplan cannot turn the file into a configuration of its own."""
    with tempfile.TemporaryDirectory(prefix="glm53-netplan-") as folder:
        path = Path(folder) / "etc/netplan" / Path(file["path"]).name
        path.parent.mkdir(parents=True)
        path.touch(mode=0o600)
        path.write_text(file["content"], encoding="utf-8")
        _check(["netplan", "generate", "--root-dir", folder])


def check_text(file: dict[str, Any], argv: list[str]) -> None:
    """Raise CheckFailed when `argv` with a copy of the file refuses it."""
    with tempfile.NamedTemporaryFile("w", prefix="glm53-", encoding="utf-8") as copy:
        copy.write(file["content"])
        copy.flush()
        _check([*argv, copy.name])


def _check(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise CheckFailed(f"{' '.join(argv)} says:\n{(done.stderr + done.stdout).strip()}")


def write(wanted: dict[str, Any]) -> None:
    """Replace one file atomically, durably, with its final owner and mode from the first byte."""
    path = Path(wanted["path"])
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(wanted["content"])
            handle.flush()
            os.fsync(handle.fileno())
        set_attributes(temporary, wanted)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def set_attributes(path: Path, wanted: dict[str, Any]) -> None:
    """Set owner, group and mode; KeyError when an account does not exist."""
    os.chown(path, pwd.getpwnam(wanted["owner"]).pw_uid, grp.getgrnam(wanted["group"]).gr_gid)
    path.chmod(int(wanted["mode"], 8))


def plan(params: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what must change: folders, contents, attributes alone, removals."""
    folders = [
        f for f in params["folders"] if not Path(f["path"]).is_dir() or attributes_differ(Path(f["path"]), f)
    ]
    contents = [f for f in params["files"] if current_text(Path(f["path"])) != f["content"]]
    attributes = [f for f in params["files"] if f not in contents and attributes_differ(Path(f["path"]), f)]
    absent = [{"path": path} for path in params["absent"] if Path(path).is_symlink() or Path(path).exists()]
    return {"folders": folders, "contents": contents, "attributes": attributes, "absent": absent}


def diffs(todo: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Return Ansible's before and after for each change."""
    shown = [
        {
            "before_header": f["path"],
            "after_header": f["path"],
            "before": current_text(Path(f["path"])) or "",
            "after": f["content"],
        }
        for f in todo["contents"]
    ]
    shown += [
        {"prepared": f"folder {f['path']} {f['owner']}:{f['group']} {f['mode']}\n"} for f in todo["folders"]
    ]
    shown += [
        {"prepared": f"file {f['path']} {f['owner']}:{f['group']} {f['mode']}\n"} for f in todo["attributes"]
    ]
    return shown + [{"prepared": f"remove {f['path']}\n"} for f in todo["absent"]]


def validate(contents: list[dict[str, Any]], files: list[dict[str, Any]]) -> None:
    """Check all that is about to be written. Units are checked with their unchanged fellows."""
    if any(f.get("kind") == "unit" for f in contents):
        check_units([f for f in files if f.get("kind") == "unit"])
    for file in contents:
        if file.get("kind") == "netplan":
            check_netplan(file)
        if argv := CHECKERS.get(file.get("kind", "")):
            check_text(file, argv)


def apply(todo: dict[str, list[dict[str, Any]]]) -> None:
    """Make the changes, folders first."""
    for folder in todo["folders"]:
        Path(folder["path"]).mkdir(parents=True, exist_ok=True)
        set_attributes(Path(folder["path"]), folder)
    for file in todo["contents"]:
        write(file)
    for file in todo["attributes"]:
        set_attributes(Path(file["path"]), file)
    for file in todo["absent"]:
        Path(file["path"]).unlink()


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "dict", "default": []},
            "files": {"type": "list", "elements": "dict", "default": []},
            "absent": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    todo = plan(module.params)
    paths = [item["path"] for items in todo.values() for item in items]
    result = {"changed": bool(paths), "changed_paths": paths, "diff": diffs(todo)}
    if not module.check_mode and paths:
        try:
            validate(todo["contents"], module.params["files"])
            apply(todo)
        except CheckFailed as error:
            module.fail_json(
                msg=f"Nothing was written: {error}\nFix the variable that the line comes from; the files"
                " come from this checkout's templates/.",
                **{**result, "changed": False},
            )
        except KeyError as error:
            module.fail_json(
                msg=f"Found no account {error}. Expected: it exists. Fix: run playbooks/host.yml first."
            )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
