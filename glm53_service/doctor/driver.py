"""NVIDIA's driver: its branch, its kind, and whether the loaded module and the installed library fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from glm53_service.doctor.finding import Finding, Noun, error, good, warning
from glm53_service.doctor.source import Source
from glm53_service.gpu import QUERY

BRANCH = "580"
"""The branch that owners serve with; 590 hung in CUDA graphs (jayleaton, Reederey87)."""

VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)*)\b")
LIBRARY = re.compile(r"NVML library version: (\S+)")
PACKAGES = ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", "libnvidia-compute-*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """`module` is the version that is loaded, `library` the one of the installed user space; empty: none."""

    module: str
    is_open: bool
    library: str
    said: str


async def read(source: Source) -> Driver:
    """Gather."""
    text = source.read("proc/driver/nvidia/version").partition("\n")[0]
    module = VERSION.search(text)
    asked = await source.run(*QUERY)
    said = f"{asked.out}\n{asked.err}"
    library = LIBRARY.search(said)
    packages = await source.run(*PACKAGES)
    installed = [line.split() for line in packages.out.splitlines() if line.endswith(" installed")]
    package = VERSION.search(installed[0][1]) if installed else None
    return Driver(
        module=module[1] if module else "",
        is_open="Open Kernel Module" in text,
        library=library[1] if library else package[1] if package else "",
        said="" if asked.ok else " ".join(said.split())[:160],
    )


def check(driver: Driver) -> Iterator[Finding]:
    """Judge."""
    if not driver.module:
        yield warning(
            "driver.loaded",
            f"no /proc/driver/nvidia/version ({driver.said or 'nvidia-smi says nothing'})",
            "NVIDIA's module is loaded (a machine without a GPU serves only with glm53_device: cpu)",
            "`modprobe nvidia`; after an upgrade of the kernel: reboot",
        )
        return
    branch = driver.module.partition(".")[0]
    if branch == "590":
        yield error(
            "driver.branch",
            driver.module,
            f"{BRANCH}.x: 590.x hangs in CUDA graphs",
            f"install the {BRANCH} branch on both nodes and hold it (glm53_hold_versions: true)",
        )
    elif branch != BRANCH:
        yield warning(
            "driver.branch",
            driver.module,
            f"{BRANCH}.x, the one that is known to serve",
            "use 580 on both nodes",
        )
    else:
        yield good("driver.branch", driver.module)
    if not driver.is_open:
        yield error(
            "driver.open",
            "the closed kernel module",
            "the open one: a GB10 does not run with the other (Xid 169)",
            "apt install the nvidia-*-open package of the same version, reboot",
        )
    if driver.library and not _fit(driver.module, driver.library):
        yield error(
            "driver.mismatch",
            f"module {driver.module} is loaded, library {driver.library} is installed",
            "one version: an upgrade ran while the module was loaded, and the next container fails",
            "reboot; to keep it from coming back: glm53_hold_versions or glm53_unattended_exclude: true",
        )


def _fit(module: str, library: str) -> bool:
    """Compare as far as both are written: 580.95 fits 580.95.05."""
    pairs = list(zip(module.split("."), library.split("."), strict=False))
    return len(list(takewhile(lambda pair: int(pair[0]) == int(pair[1]), pairs))) == len(pairs)


NOUN = Noun(
    name="driver",
    read=read,
    check=check,
    files=("proc/driver/nvidia/version",),
    parity=lambda driver: {"driver": driver.module, "driver.library": driver.library},
)
