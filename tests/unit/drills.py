"""Ways to break a run: kill -9 before its k-th step, and a small disk of its own.

A step is whatever changes the disk: a file opened for writing, renamed, removed, made, cut. Python announces
each before it happens (audit events), so every place between two of them can be a place to die.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts import fetch

CHANGES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
    "os.utime",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

CUTTER = f"""
import os, sys
def _cut(event, args, left=[CUT]):
    if event in {CHANGES!r} or (event == "open" and (args[2] or 0) & {WRITING}):
        left[0] -= 1
        if not left[0]:
            os.kill(os.VICTIM(), 9)
sys.addaudithook(_cut)
"""
"""The same for a Python started with `-c`: before its step CUT it kills os.VICTIM (getpid, getppid)."""

CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_RDONLY, MS_REMOUNT, MS_BIND = 0x20000, 0x4000, 0x40000, 1, 32, 4096

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


def killed(cut: int, action: Callable[[], object]) -> bool:
    """Return whether `action`, in a process of its own, came to its step number `cut` and died there."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 1
        try:
            _die_before(cut)
            action()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9)
    return code == -9


def _die_before(cut: int) -> None:
    left = [cut]

    def step() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), 9)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and (args[2] or 0) & WRITING and args[0] != os.devnull):
            step()

    write = fetch.Sink.write

    def counted(self: fetch.Sink, data: Any) -> int:
        done = write(self, data)
        step()
        return done

    fetch.Sink.write = counted  # type: ignore[method-assign]
    sys.addaudithook(hook)


def cutter(cut: int, victim: str) -> str:
    """Return the lines that kill `victim` before step number `cut`."""
    return CUTTER.replace("CUT]", f"{cut}]").replace("VICTIM", victim)


def is_free(folder: Path) -> bool:
    """Return whether nobody holds the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def await_free(folder: Path) -> None:
    """Return once nobody holds the folder; a failure after 20 s."""
    end = time.monotonic() + 20
    while not is_free(folder):
        assert time.monotonic() < end, f"{folder} is still held"
        time.sleep(0.005)


def apart(action: Callable[[], None]) -> None:
    """Run `action` in a process whose mounts nobody else sees, and that are gone with it; its failure is
    ours.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _libc("unshare", CLONE_NEWNS)
            _libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - the other process raises it
            os.write(writing, traceback.format_exc().encode()[-60000:])
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text


def small_disk(folder: Path, size: int) -> Path:
    """Mount a disk of `size` bytes on `folder`; only within `apart`."""
    folder.mkdir(parents=True, exist_ok=True)
    _libc("mount", b"g5-drill", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())
    return folder


def read_only(folder: Path) -> Path:
    """Make `folder` a read-only mount of itself; only within `apart`."""
    _libc("mount", os.fsencode(folder), os.fsencode(folder), None, MS_BIND, None)
    _libc("mount", b"none", os.fsencode(folder), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)
    return folder


def _libc(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def fill(folder: Path, leave: int) -> Path:
    """Fill the disk of `folder` but for `leave` bytes, as another writer does; remove the file to make
    room.
    """
    status = os.statvfs(folder)
    path = folder / "another-writers-file"
    path.write_bytes(bytes(max(status.f_bavail * status.f_frsize - leave, 0)))
    return path
