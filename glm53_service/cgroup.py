"""What a container has used, read straight from its cgroup: two small files instead of `docker stats`.

The root is a parameter, so a test can hold a tree.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The files of one container's cgroup; `io` and `cpu` lie in different trees in version 1."""

    version: int
    cpu: Path
    io: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Since the container started; None where the kernel keeps no such account.

    Bytes are those of the disk that moved most: with dm-crypt or LVM the kernel counts each layer.
    """

    cpu_seconds: float | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None


def find_cgroup(root: Path, pid: int) -> Cgroup | None:
    """Return the cgroup of the container whose first process is `pid`; None when it has none of its own."""
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    paths: dict[str, str] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path.strip("/")
    mount = root / "sys/fs/cgroup"
    one = mount / paths.get("", "")
    if paths.get("") and (one / "cpu.stat").is_file():
        return Cgroup(version=2, cpu=one / "cpu.stat", io=one / "io.stat")
    if not paths.get("cpuacct"):
        return None
    return Cgroup(
        version=1,
        cpu=mount / "cpuacct" / paths["cpuacct"] / "cpuacct.usage",
        io=mount / "blkio" / paths.get("blkio", "") / "blkio.throttle.io_service_bytes",
    )


def kill_container(root: Path, pid: int, container: str) -> bool:
    """SIGKILL the container whose first process is `pid`, without docker; return whether that was done.

    It runs under the supervisor's own account. The process is held while its cgroup is checked to be that
    container's: another one with its number is never hit. The kernel ends all others with the first.
    """
    try:
        held = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if container not in (root / "proc" / str(pid) / "cgroup").read_text(encoding="ascii"):
            return False
        signal.pidfd_send_signal(held, signal.SIGKILL)
    except (OSError, UnicodeDecodeError):
        return False
    finally:
        os.close(held)
    return True


def read_usage(cgroup: Cgroup) -> Usage:
    """Return what the container has used until now."""
    cpu, io = _text(cgroup.cpu), _text(cgroup.io)
    if cgroup.version == 2:
        micros = re.search(r"^usage_usec (\d+)$", cpu, re.MULTILINE)
        seconds = int(micros[1]) / 1e6 if micros else None
    else:
        seconds = int(cpu) / 1e9 if cpu.strip().isdigit() else None
    return Usage(
        cpu_seconds=seconds,
        read_bytes=_most(r"\brbytes=(\d+)|^\d+:\d+ Read (\d+)$", io),
        written_bytes=_most(r"\bwbytes=(\d+)|^\d+:\d+ Write (\d+)$", io),
    )


def _most(pattern: str, text: str) -> int | None:
    found = [int(two or one) for two, one in re.findall(pattern, text, re.MULTILINE)]
    return max(found) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
