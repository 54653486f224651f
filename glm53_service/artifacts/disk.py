"""What a folder allows before the first byte goes there: room, permission, and nobody else at it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import os
import pwd
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from glm53_service.artifacts.progress import gigabytes
from glm53_service.errors import ArtifactError, BusyError

SPARE_BYTES = 1 << 30
"""What must stay free on a filesystem beyond the copy."""

FULL = (errno.ENOSPC, errno.EDQUOT)

Free = Callable[[Path], int]


def free_bytes(folder: Path) -> int:
    """Return what an unprivileged account may still write on the filesystem of `folder`."""
    status = os.statvfs(nearest(folder))
    return status.f_bavail * status.f_frsize


def nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_room(needs: Mapping[Path, int], *, free: Free = free_bytes, spare: int = SPARE_BYTES) -> None:
    """Raise ArtifactError unless every filesystem has room for what `needs` says of its folders, in bytes.

    What is there already is not in `needs`: a full disk with everything on it is right.
    """
    filesystems: dict[int, tuple[Path, int]] = {}
    for folder, size in needs.items():
        where = nearest(folder)
        device = where.stat().st_dev
        first, before = filesystems.get(device, (where, 0))
        filesystems[device] = (first, before + size)
    for folder, size in filesystems.values():
        if size and (found := free(folder)) < size + spare:
            raise ArtifactError(
                f"{folder}: {gigabytes(found)} free, but {gigabytes(size)} are missing and"
                f" {gigabytes(spare)} must stay free",
                hint=f"free {gigabytes(size + spare - found)} there (`glm53 prune` lists what can go), or put"
                " the snapshot on another disk",
            )


def trouble(error: OSError, folder: Path, *, missing: str = "") -> ArtifactError:
    """Return in words what the system refused while something was written in `folder`.

    `missing` is what there was no room for.
    """
    if error.errno in FULL:
        return ArtifactError(
            f"{folder}: the disk is full ({error.strerror})" + (f"; {missing} missing" if missing else ""),
            hint="make room there and run this again; it goes on where it stopped",
        )
    hints = {
        errno.EROFS: "mount it writable, or set a path elsewhere",
        errno.EEXIST: "a file, or a link to nowhere, is where a folder has to be: move it away",
        errno.ENOTDIR: "a file, or a link to nowhere, is where a folder has to be: move it away",
        errno.ELOOP: "a link is where a file of ours has to be: move it away",
    }
    return ArtifactError(
        f"{error.filename or folder}: {error.strerror or error}", hint=hints.get(error.errno or 0, "")
    )


def check_writable(folder: Path) -> None:
    """Raise ArtifactError, with the owner and the command that mends it, unless this account may write."""
    where = nearest(folder)
    if os.access(where, os.W_OK | os.X_OK):
        return
    status, me = where.stat(), getpass.getuser()
    readonly = os.statvfs(where).f_flag & os.ST_RDONLY
    owner = _name(status.st_uid)
    raise ArtifactError(
        f"{where} belongs to {owner}, mode {status.st_mode & 0o7777:o}: {me} cannot write there"
        + (" (the filesystem is mounted read-only)" if readonly else ""),
        hint="mount it writable, or set a path elsewhere"
        if readonly
        else f"sudo chown -R {me}: {where if where == folder else folder}"
        if where == folder
        else f"sudo install -d -o {me} {folder}",
    )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder` alone while the block runs; BusyError names the process that has it.

    flock(2) on the folder itself: no file is left, and a killed holder holds nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with alone(descriptor, f"{folder} is being filled by another run"):
        yield


@contextlib.contextmanager
def alone(descriptor: int, busy: str) -> Iterator[None]:
    """Hold the lock on an open file or folder, and close it afterwards; BusyError says `busy`, and by which
    process.
    """
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{busy}{holder(descriptor)}",
                hint="wait until it ends; it can be stopped and run again, nothing is lost",
            ) from None
        yield
    finally:
        os.close(descriptor)


def holder(descriptor: int, locks: Path = Path("/proc/locks")) -> str:
    """Return ` (process N)` of whoever holds the lock on this file; empty when the kernel does not tell."""
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError):
        for line in locks.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[5].rpartition(":")[2] == str(inode) and "->" not in fields:
                return f" (process {fields[4]})"
    return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
