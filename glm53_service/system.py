"""Reads what this machine says of itself: boot id, memory.

The root is a parameter, so a test can hold a tree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Sizes in bytes, from /proc/meminfo. CUDA can take `free` at once; `available` counts page cache too."""

    free: int
    available: int
    total: int = 0


def read_memory(root: Path = Path("/")) -> Memory:
    """Return the machine's memory now."""
    text = (root / "proc/meminfo").read_text(encoding="ascii")
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}
    return Memory(
        free=kib["MemFree"] * 1024,
        available=kib["MemAvailable"] * 1024,
        total=kib.get("MemTotal", 0) * 1024,
    )


def read_boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's id of this boot: a peer that shows another one was down in between."""
    return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def largest_processes(root: Path = Path("/"), count: int = 3) -> tuple[str, ...]:
    """Return the `count` processes with the most resident memory as `name (pid N, X.X GiB)`."""
    found: list[tuple[int, str, str]] = []
    for status in (root / "proc").glob("[0-9]*/status"):
        try:
            text = status.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        resident = re.search(r"^VmRSS:\s+(\d+)", text, re.MULTILINE)
        name = re.search(r"^Name:\s+(.+)", text, re.MULTILINE)
        if resident and name:
            found.append((int(resident[1]) * 1024, name[1], status.parent.name))
    found.sort(reverse=True)
    return tuple(f"{name} (pid {pid}, {size / GIB:.1f} GiB)" for size, name, pid in found[:count])
