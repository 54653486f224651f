"""The host: its own name, its disks, the kernel's settings that nodes should share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, warning
from glm53_service.doctor.source import Source

GIB = 1024**3
SYSCTLS = ("vm/swappiness", "vm/min_free_kbytes", "vm/overcommit_memory", "kernel/numa_balancing")
PLACES = {"/": 5, "/var/lib/docker": 20, "/opt": 2, "/var/lib/glm53": 2}
"""Where a running pair writes, and the GiB that should be free: images, releases, evidence and kernel caches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`name` resolves to `addresses`; `free` has bytes by place of PLACES, `firmware` the DMI's words."""

    name: str
    addresses: tuple[str, ...]
    free: dict[str, int]
    sysctls: dict[str, str]
    firmware: str


async def read(source: Source) -> Host:
    """Gather."""
    name = source.read("proc/sys/kernel/hostname").strip()
    found = await source.run("getent", "ahosts", name) if name else None
    free = {}
    for place in PLACES:
        measured = await source.run("df", "--output=avail", "-B1", place)
        rows = measured.out.split()
        if rows and rows[-1].isdigit():
            free[place] = int(rows[-1])
    return Host(
        name=name,
        addresses=tuple(dict.fromkeys(line.split()[0] for line in found.out.splitlines())) if found else (),
        free=free,
        sysctls={key: value for key in SYSCTLS if (value := source.read(f"proc/sys/{key}").strip())},
        firmware=source.read("sys/class/dmi/id/bios_version").strip(),
    )


def check(host: Host) -> Iterator[Finding]:
    """Judge."""
    if host.name and not host.addresses:
        yield warning(
            "host.name",
            f"{host.name} resolves to nothing",
            "a node resolves its own name: libraries that ask for it wait, or bind to nothing",
            f"a line `127.0.1.1 {host.name}` in /etc/hosts",
        )
    else:
        yield good("host.name", f"{host.name}: {', '.join(host.addresses[:2])}")
    short = {place: free for place, free in host.free.items() if free < PLACES[place] * GIB}
    for place, free in short.items():
        yield warning(
            "host.disk",
            f"{free / GIB:.1f} GiB free at {place}",
            f"{PLACES[place]} GiB",
            "remove what you no longer need: old images (`docker image ls`), old snapshots of models",
        )
    if not short:
        room = ", ".join(f"{place} {free / GIB:.0f} GiB" for place, free in host.free.items())
        yield good("host.disk", room or "not measured")


NOUN = Noun(
    name="host",
    read=read,
    check=check,
    files=(
        "proc/sys/kernel/hostname",
        "sys/class/dmi/id/bios_version",
        *(f"proc/sys/{key}" for key in SYSCTLS),
    ),
    parity=lambda host: {
        "firmware": host.firmware,
        **{f"sysctl.{k.replace('/', '.')}": v for k, v in host.sysctls.items()},
    },
)
