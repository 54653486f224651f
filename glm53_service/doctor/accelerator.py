"""The GPU now: held down, spinning, and whether a cap of its clock still holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.gpu import Gpu, clamped, read_gpus, spin_wait

CAP_UNIT = "etc/systemd/system/glm53-clock-cap.service"
CAP = re.compile(r"--lock-gpu-clocks=(?:\d+,)?(\d+)")
SLACK_MHZ = 30
"""A locked clock is rounded to a step of the GPU's own table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """`cap_mhz`: the cap that our unit sets, None without one."""

    gpus: tuple[Gpu, ...]
    cap_mhz: int | None


async def read(source: Source) -> Accelerator:
    """Gather."""
    cap = CAP.search(source.read(CAP_UNIT))
    return Accelerator(gpus=await read_gpus(source.runner), cap_mhz=int(cap[1]) if cap else None)


def check(found: Accelerator) -> Iterator[Finding]:
    """Judge."""
    for gpu in found.gpus:
        held = clamped(gpu)
        if held:
            yield warning(
                "gpu.clamped",
                held.partition(". ")[0],
                "2000 MHz and 40 W under load; one slow GPU slows the pair",
                "shut down, unplug the power adapter for 60 s, start: a reboot does not cure it",
            )
        spins = spin_wait(gpu)
        if spins:
            yield warning(
                "gpu.spins",
                spins.partition(". ")[0],
                "40 W and more when it works",
                "its kernels wait for the other rank: look at that node's GPU, the fabric, `glm53 status`",
            )
        clock, cap = gpu.sm_clock_mhz, found.cap_mhz
        if clock is not None and cap is not None and clock > cap + SLACK_MHZ:
            yield warning(
                "gpu.cap",
                f"{clock} MHz",
                f"at most {cap} MHz (glm53-clock-cap.service)",
                "systemctl restart glm53-clock-cap: a restart of nvidia-persistenced forgets the cap",
            )
        if not held and not spins:
            yield good(
                "gpu.state", f"{gpu.name}: {clock} MHz, {gpu.power_watts} W, {gpu.utilisation_percent} %"
            )
    if not found.gpus:
        yield info("gpu.state", "nvidia-smi lists no GPU")


NOUN = Noun(
    name="gpu",
    read=read,
    check=check,
    files=(CAP_UNIT,),
    parity=lambda found: {"gpu.cap_mhz": str(found.cap_mhz or "none")},
)
