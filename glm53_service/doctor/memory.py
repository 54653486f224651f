"""Memory, and who holds it: CUDA and page cache share it, and running out freezes the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.settings import Supervision, read_settings

KIB_A_GIB = 1024 * 1024
ALERT_GIB = 6.0
"""MemAvailable of a serving node: owners saw 4.7 to 5.6 GiB at a full window, and hard hangs below."""

HOLDER_GIB = 0.5
DESKTOP = ("gnome-shell", "Xorg", "Xwayland", "gdm-x-session", "kwin_wayland", "plasmashell")
PROCESSES = ("ps", "-eo", "pid=,rss=,comm=", "--sort=-rss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Sizes in GiB. `holders` are (name, pid, GiB), largest first; `needed_gib` is what a start waits for."""

    total_gib: float
    free_gib: float
    available_gib: float
    holders: tuple[tuple[str, int, float], ...]
    needed_gib: float
    serving: bool


async def read(source: Source) -> Memory:
    """Gather."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+)", source.read("proc/meminfo"), re.MULTILINE))
    listed = await source.run(*PROCESSES)
    rows = [line.split(maxsplit=2) for line in listed.out.splitlines()[:40]]
    holders = tuple(
        (row[2], int(row[0]), int(row[1]) / KIB_A_GIB) for row in rows if len(row) == 3 and row[1].isdigit()
    )
    ranks = await source.run("docker", "ps", "--quiet", "--filter", "label=glm53.rank")
    try:
        needed = read_settings(source.etc).supervision.min_free_gib
    except ConfigError:
        needed = Supervision().min_free_gib
    return Memory(
        total_gib=int(kib.get("MemTotal", 0)) / KIB_A_GIB,
        free_gib=int(kib.get("MemFree", 0)) / KIB_A_GIB,
        available_gib=int(kib.get("MemAvailable", 0)) / KIB_A_GIB,
        holders=holders,
        needed_gib=float(needed),
        serving=bool(ranks.out.strip()),
    )


def check(memory: Memory) -> Iterator[Finding]:
    """Judge."""
    largest = ", ".join(f"{name} (pid {pid}) {size:.1f} GiB" for name, pid, size in memory.holders[:4])
    measured = f"MemFree {memory.free_gib:.1f} GiB, MemAvailable {memory.available_gib:.1f} GiB"
    if memory.serving:
        if memory.available_gib < ALERT_GIB:
            yield warning(
                "memory.low",
                f"{measured}; {largest}",
                f"MemAvailable of {ALERT_GIB:g} GiB and more while serving",
                "raise the engine's memory reserve, or lower its window or parallel requests",
            )
        else:
            yield good("memory.low", measured)
    elif memory.free_gib < memory.needed_gib:
        cache = memory.available_gib >= memory.needed_gib
        yield warning(
            "memory.free",
            f"{measured}; largest: {largest}",
            f"MemFree of {memory.needed_gib:g} GiB at a start (supervision.min_free_gib)",
            "it is page cache: a start gives the model's back; `sysctl vm.drop_caches=1` gives back all"
            if cache
            else "end the largest processes; after a stop it takes minutes until all is free",
        )
    else:
        yield good("memory.free", measured)
    desktop = [f"{name} {size:.1f} GiB" for name, _, size in memory.holders if _is_desktop(name, size)]
    if desktop:
        yield info(
            "memory.desktop",
            ", ".join(desktop),
            "no desktop on a node that serves: it needs the memory",
            "glm53_headless: true and playbooks/host.yml (or set-default multi-user.target), then reboot",
        )


def _is_desktop(name: str, size: float) -> bool:
    return size >= HOLDER_GIB and any(name.startswith(part[:15]) for part in DESKTOP)


NOUN = Noun(
    name="memory",
    read=read,
    check=check,
    files=("proc/meminfo",),
    parity=lambda memory: {"memory.total_gib": f"{memory.total_gib:.0f}"},
)
