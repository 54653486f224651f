"""Folders of compiled kernels: which one belongs to a start, what a killed build left in it, which are old.

Kernels of another image, under the same name, must never be loaded; and those of other settings would only
be compiled anew into the same folder, until nobody knows what is still of use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "cache"
IMAGE_DIGITS = 12
SHAPE_DIGITS = 8

BUILD_LOCKS = "**/torch_extensions/**/lock"
"""torch's lock on the build of an extension is a file that is there: a killed build leaves it for ever. Other
compilers' locks (flock) end with their process.
"""


def cache_folder(state: Path, content: str, shape: Mapping[str, Any]) -> Path:
    """Return the folder for an image of `content` (`sha256:...`) at `shape`: what the engine compiles for.

    Equal images and shapes have the same folder on every node and at every start.
    """
    text = json.dumps(shape, sort_keys=True, default=str).encode()
    digest = hashlib.sha256(text).hexdigest()[:SHAPE_DIGITS]
    return state / FOLDER / f"{content.removeprefix('sha256:')[:IMAGE_DIGITS]}-{digest}"


def open_cache(folder: Path) -> list[Path]:
    """Make the folder, note that it is used now, and remove stale build locks, which are returned.

    For a node without a running rank: a lock found then has no owner. OSError when it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    locks = build_locks(folder)
    for lock in locks:
        lock.unlink(missing_ok=True)
    return locks


def build_locks(folder: Path) -> list[Path]:
    """Return the locks of kernel builds below `folder`."""
    return sorted(path for path in folder.glob(BUILD_LOCKS) if path.is_file())


def old_caches(used: Mapping[str, float]) -> list[str]:
    """Return the names of the folders that may go, the oldest first; `used` has each one's last use.

    Three stay: the last two, and the last one of another image, which going back to that image would need.
    """
    names = sorted(used, key=lambda name: used[name], reverse=True)
    others = [name for name in names if _image(name) != _image(names[0])]
    kept = {*names[:2], *others[:1]}
    return [name for name in reversed(names) if name not in kept]


def _image(name: str) -> str:
    return name.partition("-")[0]
