"""Lists what old releases left on this node, with sizes, and removes it only when told to.

Of each kind the current one and the one before it are kept. Only what is certainly ours is ever listed:
images under our own tag or of the repository that is served, other revisions of the same repository,
snapshots with our manifest beside the one that is served, caches that the ranks' images made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from glm53_service.artifacts.built import BUILT_REPOSITORY
from glm53_service.artifacts.content import LOCAL_REPOSITORY
from glm53_service.artifacts.images.reference import familiar
from glm53_service.artifacts.kernels import FOLDER, old_caches
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import read_manifest
from glm53_service.errors import ArtifactError

GOING = ".glm53-going-"
"""What a folder is called from the moment on at which it is being removed."""

QUIET_SECONDS = 86400.0
"""What was written within so many seconds may be part of a download that runs."""


class Kind(StrEnum):
    """What an old thing is."""

    IMAGE = "image"
    SNAPSHOT = "snapshot"
    BLOB = "blob"
    UNFINISHED = "unfinished"
    CACHE = "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that could go. `used` is when it was last made or changed (Unix seconds)."""

    kind: Kind
    name: str
    bytes: int
    used: float

    def data(self) -> dict[str, Any]:
        """Return it for --json."""
        return {"kind": self.kind, "name": self.name, "bytes": self.bytes, "used": int(self.used)}


def old(items: Iterable[Item], current: str) -> list[Item]:
    """Return what may go: all but the current one and, of the others, the one that was used last.

    That one is what a rollback needs. What an earlier prune had begun to remove is none: it goes.
    """
    others = sorted((item for item in items if item.name != current), key=lambda item: item.used)
    whole = [item for item in others if not _is_going(item)]
    return [item for item in others if _is_going(item) or item in whole[:-1]]


def _is_going(item: Item) -> bool:
    return Path(item.name).name.startswith(GOING)


# Images


def images(inspected: Sequence[Mapping[str, Any]], reference: str) -> list[Item]:
    """Return the images that are ours: of `reference`'s repository, or under our own tags, and of no other.

    `inspected` is `docker image inspect` of all images. An image that also has a stranger's name is not ours.
    """
    repositories = {_repository(familiar(reference)), LOCAL_REPOSITORY, BUILT_REPOSITORY}
    found = []
    for image in inspected:
        names = [*(image.get("RepoTags") or []), *(image.get("RepoDigests") or [])]
        if names and {_repository(name) for name in names} <= repositories:
            found.append(
                Item(
                    kind=Kind.IMAGE,
                    name=str(image["Id"]),
                    bytes=int(image.get("Size") or 0),
                    used=_when(str(image.get("Created") or "")),
                )
            )
    return found


def _repository(reference: str) -> str:
    name = reference.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name


def _when(text: str) -> float:
    import datetime

    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return 0.0


# Files


def snapshots(layout: Layout) -> list[Item]:
    """Return the snapshots of the same repository beside the one in `layout`, itself included.

    In a cache: the repository's other revisions. Else: folders beside it that hold a manifest of ours for the
    same repository.
    """
    if layout.hub is not None:
        folders = sorted((layout.storage / "snapshots").glob("*"))
    else:
        mine, beside = _repository_of(layout.folder), sorted(layout.folder.parent.glob("*"))
        folders = [f for f in beside if f.name.startswith(GOING) or (mine and _repository_of(f) == mine)]
    return [_item(Kind.SNAPSHOT, folder) for folder in folders if folder.is_dir() and not folder.is_symlink()]


def blobs(layout: Layout, going: Iterable[str], now: float) -> list[Item]:
    """Return a cache's blobs that no snapshot leads to once `going` are gone; none while one is filled:
    its links come last.
    """
    if layout.hub is None or any(map(in_use, (layout.storage / "snapshots").glob("*"))):
        return []
    gone = set(going)
    used = {
        path.resolve()
        for folder in (layout.storage / "snapshots").glob("*")
        if str(folder) not in gone
        for path in folder.rglob("*")
        if path.is_symlink()
    }
    return [
        item
        for path in sorted((layout.storage / "blobs").glob("*"))
        if path.is_file() and not path.name.endswith(".incomplete") and path.resolve() not in used
        if (item := _item(Kind.BLOB, path)).used < now - QUIET_SECONDS
    ]


def unfinished(layout: Layout, now: float) -> list[Item]:
    """Return what downloads and copies that ended early have left; a run that goes on needs them no more
    after a day.
    """
    found = [] if in_use(layout.folder) else sorted(layout.folder.rglob(".*.incomplete"))
    if layout.hub is not None:
        found += sorted((layout.storage / "blobs").glob("*.incomplete"))
    return [
        item
        for path in found
        if not in_use(path) and (item := _item(Kind.UNFINISHED, path)).used < now - QUIET_SECONDS
    ]


def in_use(path: Path) -> bool:
    """Return whether a run fills this folder, or writes this file: clocks jump, a lock does not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def caches(state: Path) -> list[Item]:
    """Return the folders of compiled kernels that may go. One in use is of the latest, so it stays."""
    found = [_item(Kind.CACHE, path) for path in sorted((state / FOLDER).glob("*")) if path.is_dir()]
    going = [item for item in found if _is_going(item)]
    whole = {Path(item.name).name: item for item in found if item not in going}
    return going + [whole[name] for name in old_caches({name: item.used for name, item in whole.items()})]


def _repository_of(folder: Path) -> str:
    with contextlib.suppress(ArtifactError):
        manifest = read_manifest(folder) if folder.is_dir() else None
        return manifest.repository if manifest else ""
    return ""


def _item(kind: Kind, path: Path) -> Item:
    status = path.lstat()
    size, used = (0, status.st_mtime) if path.is_dir() else (status.st_size, status.st_mtime)
    for child in path.rglob("*") if path.is_dir() else ():
        with contextlib.suppress(OSError):
            status = child.lstat()
            size += status.st_size if child.is_file() and not child.is_symlink() else 0
            used = max(used, status.st_mtime)
    return Item(kind=kind, name=str(path), bytes=size, used=used)


def remove_files(item: Item) -> None:
    """Remove one thing that is a file or a folder; ArtifactError when it stays.

    A folder gets another name first: half of one is never taken for the snapshot to go back to.
    """
    path = Path(item.name)
    if in_use(path):
        raise ArtifactError(f"{path} is being filled by another run", hint="wait until it ends")
    try:
        if path.is_dir() and not path.is_symlink():
            going = path if _is_going(item) else path.with_name(f"{GOING}{path.name}")
            if going != path:
                path.rename(going)
            shutil.rmtree(going)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return  # another prune was faster
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be removed: {error.strerror}", hint="as root: sudo glm53 prune --yes"
        ) from None


def file_items(layouts: Sequence[Layout], now: float) -> list[Item]:
    """Return every file and folder of these snapshots' surroundings that may go."""
    found: list[Item] = []
    for layout in layouts:
        going = old(snapshots(layout), str(layout.folder))
        found += going + blobs(layout, [item.name for item in going], now) + unfinished(layout, now)
    return found
