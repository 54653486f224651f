#!/usr/bin/python
"""Ansible module: a model directory's files: sizes, times and, when asked, SHA-256. Reads only."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_manifest
short_description: List a model directory's files
options:
  path: {description: "The model directory; links in it are followed.", type: path, required: true}
  sha256: {description: "Hash every file.", type: bool, default: false}
  hash_limit_bytes: {description: "Do not hash when all files together are larger.", type: int, default: 0}
  reader: {description: "Account that must be able to read every file.", type: str, default: ""}
"""

LEFTOVER = re.compile(r"^(\.rsync-partial|\..+\.[A-Za-z0-9]{6})$")
"""What an interrupted rsync leaves behind: never part of a model."""

CHUNK = 1 << 20


def entries(root: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return `{relative path: {size, mtime}}` in whole bytes and seconds, and the links that lead nowhere."""
    files: dict[str, dict[str, int]] = {}
    dangling: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(f for f in folders if not LEFTOVER.match(f))
        for name in sorted(n for n in names if not LEFTOVER.match(n)):
            path = Path(folder) / name
            relative = str(path.relative_to(root))
            if not path.exists():
                dangling.append(relative)
                continue
            stat = path.stat()
            files[relative] = {"size": stat.st_size, "mtime": int(stat.st_mtime)}
    return files, dangling


def sha256(path: Path) -> str:
    """Return the file's SHA-256; its pages are given back, for page cache counts against the GPU's memory."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def unreadable(root: Path, names: list[str], account: str) -> str:
    """Return the first of root's own path or `names` that `account` cannot read, empty when it can read all.

    Tried by a child that is that account: links, folders and ACLs are the kernel's to judge.
    """
    user = pwd.getpwnam(account)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        found = ""
        try:
            os.setgroups(os.getgrouplist(account, user.pw_gid))
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            paths = [*reversed(root.parents), root]
            found = next((str(p) for p in paths if not os.access(p, os.X_OK)), "") or next(
                (str(root / n) for n in names if not os.access(root / n, os.R_OK)), ""
            )
        except OSError as error:
            found = f"{root} ({error})"
        finally:
            os.write(write_end, found.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(child, 0)
    return found


def account_exists(name: str) -> bool:
    """Say whether there is such an account."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "sha256": {"type": "bool", "default": False},
            "hash_limit_bytes": {"type": "int", "default": 0},
            "reader": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    root, reader = Path(module.params["path"]), module.params["reader"]
    files, dangling = entries(root)
    total = sum(entry["size"] for entry in files.values())
    result: dict[str, Any] = {
        "exists": root.is_dir(),
        "files": files,
        "dangling": dangling,
        "bytes": total,
        "hashed": False,
        "unreadable": "",
    }
    if reader and root.is_dir() and account_exists(reader):
        result["unreadable"] = unreadable(root, list(files), reader)
    limit = module.params["hash_limit_bytes"]
    if module.params["sha256"] and (not limit or total <= limit):
        result["hashed"] = True
        for name, entry in files.items():
            entry["sha256"] = sha256(root / name)  # type: ignore[assignment]
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
