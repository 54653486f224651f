"""Asks the GPU how it runs, and judges whether it is held down or only waits. It is never a fault."""

from __future__ import annotations

import csv
import logging
import re
from dataclasses import dataclass

from glm53_service.errors import UnavailableError
from glm53_service.run import Runner
from glm53_service.story import event

log = logging.getLogger(__name__)

FIELDS = ("index", "name", "clocks.sm", "clocks.max.sm", "power.draw", "utilization.gpu", "driver_version")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")

BUSY_PERCENT = 90
"""A GPU below that has little to do, and a low clock is then its right."""

HEALTHY_SM_MHZ = 2000
"""What a healthy GB10 reaches at 90 % and more (jayleaton's gpuwatch; clamped ones ran at 507 to 890)."""

CLAMP_RATIO = 0.7
"""Of the clock that is expected: the ratio at which the same watch raises its alarm."""

WORK_WATTS = 30.0
"""A GB10 that works draws 40 W and more (long prefills 46 W). At 16 to 27 W with 95 % utilisation it was seen
to spin in a collective (eugr/spark-vllm-docker #260), and at 12 to 19 W to be clamped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU now. Clocks in MHz, power in watts, utilisation in percent; None: the driver has no figure."""

    index: int
    name: str
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    power_watts: float | None
    utilisation_percent: int | None
    driver: str


async def read_gpus(runner: Runner) -> tuple[Gpu, ...]:
    """Return every GPU that nvidia-smi lists; none, with the reason in the debug log, where it cannot be
    asked.
    """
    try:
        return parse(await runner(QUERY))
    except UnavailableError as error:
        log.debug(event("the GPU cannot be asked", reason=error.message))
        return ()


def parse(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in nvidia-smi's CSV text, asked with QUERY; UnavailableError when it is something
    else.
    """
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row:
            continue
        if len(row) != len(FIELDS) or not row[0].strip().isdigit():
            raise UnavailableError(
                f"nvidia-smi said {', '.join(row)[:120]!r},"
                f" expected {len(FIELDS)} columns ({', '.join(FIELDS)})",
                hint="run nvidia-smi by hand: does the driver answer?",
            )
        index, name, clock, most, power, used, driver = (cell.strip() for cell in row)
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                sm_clock_mhz=_whole(clock),
                max_sm_clock_mhz=_whole(most),
                power_watts=_number(power),
                utilisation_percent=_whole(used),
                driver=driver,
            )
        )
    return tuple(gpus)


def clamped(gpu: Gpu) -> str:
    """Return in words that a busy GPU is held far below its clock; empty when it is not, or nobody can tell.

    Such a GPU stays so through a warm reboot, shows no throttle reason and drags the whole pair. A GPU that
    only spins (`spin_wait`) keeps its clock, so it is never called clamped; one that draws the power of work
    is not either, whatever its clock: its owner has capped it.
    """
    clock, power = gpu.sm_clock_mhz, gpu.power_watts
    if clock is None or not _busy(gpu) or (power is not None and power >= WORK_WATTS):
        return ""
    if clock >= CLAMP_RATIO * _expected(gpu):
        return ""
    return (
        f"GPU {gpu.index} is clamped: {clock} MHz{_draws(gpu)} at {gpu.utilisation_percent} % utilisation,"
        f" expected {_expected(gpu)} MHz. It survives a reboot: power off, unplug the adapter for 60 s"
    )


def spin_wait(gpu: Gpu) -> str:
    """Return in words that a GPU looks busy at full clock but draws no power: it waits for another rank."""
    power = gpu.power_watts
    if power is None or power >= WORK_WATTS or not _busy(gpu) or clamped(gpu):
        return ""
    return (
        f"GPU {gpu.index} spins: {gpu.utilisation_percent} % utilisation{_draws(gpu)}, work draws more than"
        f" {WORK_WATTS:g} W. Its kernels wait for another rank: look at the other node's GPU and the fabric"
    )


def _busy(gpu: Gpu) -> bool:
    return gpu.utilisation_percent is not None and gpu.utilisation_percent >= BUSY_PERCENT


def _expected(gpu: Gpu) -> int:
    """The clock of a healthy GPU under load: a locked clock (nvidia-smi -lgc) may lie below it."""
    return min(gpu.max_sm_clock_mhz or HEALTHY_SM_MHZ, HEALTHY_SM_MHZ)


def _draws(gpu: Gpu) -> str:
    return "" if gpu.power_watts is None else f" and {gpu.power_watts:g} W"


def _number(cell: str) -> float | None:
    """A figure, or None for [N/A], [Not Supported], [Unknown Error] and their like."""
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def _whole(cell: str) -> int | None:
    value = _number(cell)
    return None if value is None else int(value)
