"""What lies in a folder of weights on this node, by names and sizes; no byte of the weights is read.

Standard library alone, and a program of its own: `glm53 artifacts plan` sends it to a worker by ssh, and the
playbooks' module is made of it (plugins/module_utils links here), so both see a node with the same eyes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import sys
from pathlib import Path
from typing import Any

NAME = ".glm53-manifest.json"
INDEX = "model.safetensors.index.json"
LEFTOVER = re.compile(
    r"^(\.rsync-partial|\.cache|\..+\.([A-Za-z0-9]{6}|incomplete)|\.glm53-manifest\..*(json|tmp).*)$"
)
"""What a copy or download that ended early leaves, our records, and notes of the hub's tools: no part of a
model.
"""


def look(folder: str, reader: str = "") -> dict[str, Any]:
    """Return what `folder` holds.

    `files`: `{path: [size, mtime in ns]}`, links followed. `changed`: what changed on disk after the manifest
    was written; `hashes`: the SHA-256 of those that are small. `closed`: what the account `reader` cannot
    read, empty when it can read all.
    """
    root = Path(folder)
    files, dangling = entries(root)
    text, since = manifest(root)
    device, free = place(root)
    changed = [name for name, stat in files.items() if text and stat.st_ctime_ns > since]
    return {
        "folder": folder,
        "exists": root.is_dir(),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
        "dangling": dangling,
        "parts": parts(root),
        "shards": shards(root),
        "manifest": text,
        "changed": changed,
        "hashes": {name: sha256(root / name) for name in changed if small(name, files[name].st_size)},
        "file_system": device,
        "free": free,
        "closed": unreadable(root, list(files), reader) if reader and root.is_dir() and known(reader) else "",
    }


def entries(root: Path) -> tuple[dict[str, os.stat_result], list[str]]:
    """Return `{path inside root: its file's status}`, and the links that lead nowhere."""
    files: dict[str, os.stat_result] = {}
    dangling: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(f for f in folders if not LEFTOVER.match(f))
        for name in sorted(n for n in names if not LEFTOVER.match(n)):
            path = Path(folder) / name
            try:
                files[str(path.relative_to(root))] = path.stat()
            except OSError:
                dangling.append(str(path.relative_to(root)))
    return files, dangling


def small(name: str, size: int) -> bool:
    """Say whether a quick check may read the file (manifest.Entry.small)."""
    return size <= 64 << 20 and not name.endswith((".safetensors", ".bin", ".gguf", ".pt"))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a small file, empty when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def parts(root: Path) -> dict[str, int]:
    """Return the sizes of unfinished files: what they have need not come again."""
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob(".*.incomplete")}


def shards(root: Path) -> list[str]:
    """Return the weight files that the folder's own index names; empty without one that can be read."""
    try:
        return sorted(set(json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def manifest(root: Path) -> tuple[str, int]:
    """Return the manifest's text, empty without one, and when it was written (its change, in ns)."""
    try:
        path = root / NAME
        return path.read_text(encoding="utf-8"), path.stat().st_ctime_ns
    except (OSError, UnicodeDecodeError):
        return "", 0


def place(root: Path) -> tuple[int, int]:
    """Return the file system on which `root` is or would be: its number, and the bytes free for a user."""
    while not root.exists() and root != root.parent:
        root = root.parent
    stat = os.statvfs(root)
    return root.stat().st_dev, stat.f_bavail * stat.f_frsize


def known(account: str) -> bool:
    """Say whether there is such an account."""
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


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


def link(netdev: str, root: Path = Path("/")) -> dict[str, Any]:
    """Return what /sys says of a network device, for route.route_of()."""
    folder = root / f"sys/class/net/{netdev}"
    return {
        "rdma": any(root.glob(f"sys/class/infiniband/*/device/net/{netdev}")),
        "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
        "tunnel": (folder / "tun_flags").exists(),
        "type": number(folder / "type"),
        "speed": max(number(folder / "speed"), 0),
    }


def number(path: Path) -> int:
    """Return the number in a file of /sys; 0 for none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    print(json.dumps(look(json.loads(sys.stdin.buffer.readline())["folder"])))
