#!/usr/bin/python
"""Ansible module: the files of model folders: sizes, times and, when asked, SHA-256. Reads only."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_manifest
short_description: List the files of model folders
options:
  folders:
    description:
      - "name; path, whose links are followed; needed: files that must be there and not empty;"
      - "hash: hash every file; names: hash these. A file whose hash a receipt knows is not read for it."
    type: list
    elements: dict
    required: true
  sha256: {description: "Hash every file of every folder.", type: bool, default: false}
  hash_limit_bytes: {description: "What sha256 leaves unhashed: larger folders.", type: int, default: 0}
  receipts: {description: "JSON files of the service: mark, sha256.", type: list, elements: str, default: []}
  reader: {description: "Account that must be able to read every file.", type: str, default: ""}
"""

LEFTOVER = re.compile(
    r"^(\.rsync-partial|\.cache|\..+\.([A-Za-z0-9]{6}|incomplete)|\.glm53-manifest\..*(unfinished|tmp).*)$"
)
"""What a copy or download that ended early leaves, and notes of the hub's tools: no part of a model."""

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


def receipts_known(paths: list[str]) -> dict[tuple[Any, ...], str]:
    """Return `{(folder, size, mtime in ns, inode): sha256}` of what the service has hashed on this node.

    The format is that of glm53_service.artifacts.draft; a file that says something else is left out.
    """
    known = {}
    for path in paths:
        try:
            receipt = json.loads(Path(path).read_text(encoding="utf-8"))
            known[tuple(receipt["mark"])] = str(receipt["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return known


def hashes(root: Path, names: list[str], known: dict[tuple[Any, ...], str]) -> dict[str, str]:
    """Return the SHA-256 of each file; one that did not change since its receipt is not read."""
    found = {}
    for name in names:
        stat = (root / name).stat()
        mark = (str(root), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        found[name] = known.get(mark) or sha256(root / name)
    return found


def place(root: Path) -> tuple[int, int]:
    """Return the file system on which `root` is or would be: its number, and the bytes free for a user."""
    while not root.exists() and root != root.parent:
        root = root.parent
    stat = os.statvfs(root)
    return root.stat().st_dev, stat.f_bavail * stat.f_frsize


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


def survey(folder: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return what `folder` holds."""
    root, reader, limit = Path(folder["path"]), params["reader"], params["hash_limit_bytes"]
    files, dangling = entries(root)
    total = sum(entry["size"] for entry in files.values())
    device, free = place(root)
    asked = params["sha256"] and (not limit or total <= limit)
    every = asked or folder.get("hash")
    names = [name for name in files if every or name in folder.get("names", [])]
    for name, digest in hashes(root, names, receipts_known(params["receipts"])).items():
        files[name]["sha256"] = digest  # type: ignore[assignment]
    check = bool(reader) and root.is_dir() and account_exists(reader)
    return {
        "name": folder["name"],
        "path": folder["path"],
        "exists": root.is_dir(),
        "files": files,
        "dangling": dangling,
        "lacking": [n for n in folder.get("needed", []) if not files.get(n, {}).get("size")],
        "bytes": total,
        "file_system": device,
        "free_bytes": free,
        "unreadable": unreadable(root, list(files), reader) if check else "",
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "dict", "required": True},
            "sha256": {"type": "bool", "default": False},
            "hash_limit_bytes": {"type": "int", "default": 0},
            "receipts": {"type": "list", "elements": "str", "default": []},
            "reader": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    found = [survey(folder, module.params) for folder in module.params["folders"]]
    module.exit_json(changed=False, folders=found)


if __name__ == "__main__":
    main()
