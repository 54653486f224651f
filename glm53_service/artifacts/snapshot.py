"""Compares a snapshot on disk with its manifest and names everything that is not right, with what to do."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from glm53_service.artifacts.hashing import git_sha1, hash_file, hash_files
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import NAME, Entry, Manifest

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100 << 20
"""safetensors' own limit of a header, in bytes."""


class Kind(StrEnum):
    """What may be wrong with a file. SHORT is an unfinished copy; OUTSIDE a link that a container cannot
    follow; NO_FILE a folder, pipe, socket or device.
    """

    MISSING = "missing"
    DANGLING = "dangling"
    SHORT = "short"
    SIZE = "size"
    CHANGED = "changed"
    UNREADABLE = "unreadable"
    OUTSIDE = "outside"
    NO_FILE = "no-file"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One file that is not right: what was found, and what was expected."""

    path: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"

    def data(self) -> dict[str, str]:
        """Return it for --json."""
        return {"path": self.path, "kind": self.kind, "text": self.text}


def check_entry(layout: Layout, entry: Entry) -> Problem | None:
    """Return what a look at the file's name, links and size shows; nothing of it is read."""
    path = layout.folder / entry.path
    try:
        status = path.stat()
    except FileNotFoundError:
        if problem := _outside(layout, entry, path.parent):
            return problem
        if path.is_symlink():
            target = path.readlink()
            return _problem(entry, Kind.DANGLING, f"a link to {target}, which is not there")
        return _problem(entry, Kind.MISSING, "not there")
    except OSError as error:
        return _problem(entry, Kind.UNREADABLE, f"cannot be looked at: {error.strerror}")
    if not stat.S_ISREG(status.st_mode):
        return _problem(entry, Kind.NO_FILE, f"is {_what(status.st_mode)}, expected a file: move it away")
    if status.st_size != entry.size:
        kind = Kind.SHORT if status.st_size < entry.size else Kind.SIZE
        text = f"{status.st_size} bytes, expected {entry.size}"
        return _outside(layout, entry, path.parent) or _problem(entry, kind, text)
    if not os.access(path, os.R_OK):
        return _problem(entry, Kind.UNREADABLE, f"cannot be read by this account ({_owner(path)})")
    return _outside(layout, entry, path)


def _outside(layout: Layout, entry: Entry, path: Path) -> Problem | None:
    """Return a problem when `path` leads out of what a container sees; nothing is written there either."""
    real = path.resolve()
    if real.is_relative_to(layout.root.resolve()):
        return None
    return _problem(
        entry,
        Kind.OUTSIDE,
        f"leads to {real}, outside {layout.root}: a container that mounts that folder cannot follow it",
    )


def _what(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def quick_check(layout: Layout, manifest: Manifest) -> list[Problem]:
    """Return what is wrong by names, links and sizes, and by the hash of small files.

    No byte of the weights is read: this is for every start.
    """
    found = [problem for entry in manifest.files if (problem := _quick(layout, entry))]
    return found + extra_weights(layout, manifest)


def _quick(layout: Layout, entry: Entry) -> Problem | None:
    problem = check_entry(layout, entry)
    if problem is not None or not entry.small:
        return problem
    return check_content(layout, entry)


def check_content(
    layout: Layout, entry: Entry, count: Callable[[int], None] = lambda _: None
) -> Problem | None:
    """Return what reading the whole file shows."""
    path = layout.folder / entry.path
    try:
        actual = hash_file(path, count) if entry.sha256 else git_sha1(path)
    except OSError as error:
        return _problem(entry, Kind.UNREADABLE, f"cannot be read: {error.strerror}")
    return _compare(entry, actual)


def full_check(
    layout: Layout,
    manifest: Manifest,
    count: Callable[[int], None],
    *,
    threads: int,
    done: Callable[[], None] = lambda: None,
) -> list[Problem]:
    """Return what is wrong after every byte was read; `count` gets bytes, from several threads, and `done` is
    called for each large file.
    """
    found = quick_check(layout, manifest)
    wrong = {problem.path for problem in found}
    entries = {
        layout.folder / e.path: e for e in manifest.files if e.path not in wrong and e.sha256 and not e.small
    }
    for path, result in hash_files(entries, count, threads=threads):
        entry = entries[path]
        done()
        if isinstance(result, OSError):
            found.append(_problem(entry, Kind.UNREADABLE, f"cannot be read: {result.strerror}"))
        elif problem := _compare(entry, result):
            found.append(problem)
    return found


def extra_weights(layout: Layout, manifest: Manifest) -> list[Problem]:
    """Return weight files beside the manifest's: an engine may load whatever it finds."""
    known = {entry.path for entry in manifest.files}
    return [
        Problem(
            path=path.name,
            kind=Kind.EXTRA,
            text=f"is not part of {manifest.origin}, and an engine may load it. Move it away"
            if not manifest.adopted
            else f"came after the manifest, and an engine may load it. Move it away, or remove {NAME}",
        )
        for path in sorted(layout.folder.glob("*.safetensors"))
        if path.name not in known and not path.name.startswith(".")
    ]


def shards_of(folder: Path) -> tuple[str, ...]:
    """Return the weight files that the snapshot's own index names; empty without one.

    ValueError when the index cannot be understood, OSError when it cannot be read.
    """
    index = folder / INDEX
    if not index.exists():
        return ()
    data = json.loads(index.read_text(encoding="utf-8"))
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{index} has no weight_map")
    return tuple(sorted(set(map(str, names.values()))))


def own_word(layout: Layout) -> list[Problem]:
    """Return what a snapshot without a manifest shows to be incomplete by its own index and headers.

    A safetensors file begins with the length of its header, which names where the last tensor ends: the
    right size is known without the hub. For a snapshot that somebody else put there, without a network.
    """
    try:
        names = shards_of(layout.folder) or tuple(sorted(p.name for p in layout.folder.glob("*.safetensors")))
    except (OSError, ValueError) as error:
        return [Problem(path=INDEX, kind=Kind.CHANGED, text=f"cannot be used: {error}")]
    found = [] if names else [Problem(path="*.safetensors", kind=Kind.MISSING, text="no weights there")]
    for name in ("config.json", *names):
        problem = _own_file(layout, name)
        if problem is not None:
            found.append(problem)
    return found


def _own_file(layout: Layout, name: str) -> Problem | None:
    path, size = layout.folder / name, 1
    if path.exists() and not path.is_file():
        return check_entry(layout, Entry(path=name, size=size))
    try:
        size = _declared_size(path) if path.suffix == ".safetensors" else max(path.stat().st_size, 1)
    except OSError:
        pass  # the next look names it
    except (ValueError, struct.error):
        return Problem(path=name, kind=Kind.SHORT, text="has no whole safetensors header")
    return check_entry(layout, Entry(path=name, size=size))


def _declared_size(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_LIMIT:
            raise ValueError("no safetensors header")
        header = json.loads(file.read(length))
    ends = [value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)


def summary(problems: Sequence[Problem], *, most: int = 5) -> str:
    """Return the first problems in one line each."""
    lines = [f"  - {problem}" for problem in problems[:most]]
    more = len(problems) - most
    return "\n".join([*lines, *([f"  - and {more} more"] if more > 0 else [])])


def _compare(entry: Entry, actual: str) -> Problem | None:
    expected = entry.sha256 or entry.git_sha1
    if actual == expected:
        return None
    return _problem(entry, Kind.CHANGED, f"its content has the hash {actual[:12]}, expected {expected[:12]}")


def _problem(entry: Entry, kind: Kind, text: str) -> Problem:
    return Problem(path=entry.path, kind=kind, text=text)


def _owner(path: Path) -> str:
    status = path.stat()
    return f"owner {status.st_uid}:{status.st_gid}, mode {status.st_mode & 0o777:o}"
