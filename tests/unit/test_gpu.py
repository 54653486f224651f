"""nvidia-smi's words, and what they mean: clamped, spinning, or neither."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from glm53_service.errors import UnavailableError
from glm53_service.gpu import Gpu, clamped, parse, read_gpus, spin_wait

BUSY = Gpu(
    index=0,
    name="NVIDIA GB10",
    sm_clock_mhz=2411,
    max_sm_clock_mhz=3003,
    power_watts=45.2,
    utilisation_percent=96,
    driver="580.95.05",
)


def test_one_call_gives_every_field() -> None:
    """Prevents a column that is read as another, and units that make a number no number."""
    asked: list[Sequence[str]] = []

    async def runner(argv: Sequence[str]) -> str:
        asked.append(argv)
        return "0, NVIDIA GB10, 2411, 3003, 45.20, 96, 580.95.05\n"

    assert asyncio.run(read_gpus(runner)) == (BUSY,)
    assert [(a[0], a[2]) for a in asked] == [("nvidia-smi", "--format=csv,noheader,nounits")]


def test_what_the_driver_does_not_know_is_none() -> None:
    """Prevents a GB10, whose driver has no figure for some fields, from ending the supervisor."""
    (gpu,) = parse("1, NVIDIA GB10, [N/A], [Not Supported], [N/A], [Unknown Error], 580.95.05\n")
    assert gpu == replace(
        BUSY, index=1, sm_clock_mhz=None, max_sm_clock_mhz=None, power_watts=None, utilisation_percent=None
    )
    assert clamped(gpu) == spin_wait(gpu) == ""


@pytest.mark.parametrize("said", ["No devices were found\n", "0, NVIDIA GB10\n"])
def test_another_answer_is_no_gpu(said: str) -> None:
    """Prevents a driver that fails in words from being read as figures, or from ending the supervisor."""

    async def runner(_: Sequence[str]) -> str:
        return said

    with pytest.raises(UnavailableError, match="expected 7 columns"):
        parse(said)
    assert asyncio.run(read_gpus(runner)) == ()


def test_without_nvidia_smi_there_is_no_gpu() -> None:
    """Prevents a supervisor that dies on a machine without the driver."""

    async def runner(_: Sequence[str]) -> str:
        raise UnavailableError("`nvidia-smi` cannot be run: No such file or directory")

    assert asyncio.run(read_gpus(runner)) == ()


@pytest.mark.parametrize(
    ("change", "is_clamped", "spins"),
    [
        ({}, False, False),
        ({"sm_clock_mhz": 695, "power_watts": 17.0}, True, False),
        ({"sm_clock_mhz": 890, "power_watts": 12.0, "utilisation_percent": 90}, True, False),
        ({"sm_clock_mhz": 695, "power_watts": None}, True, False),
        ({"sm_clock_mhz": 695, "power_watts": 17.0, "max_sm_clock_mhz": None}, True, False),
        ({"sm_clock_mhz": 208, "power_watts": 4.1, "utilisation_percent": 0}, False, False),
        ({"sm_clock_mhz": 695, "power_watts": 17.0, "utilisation_percent": 89}, False, False),
        ({"power_watts": 16.0}, False, True),
        ({"power_watts": 27.0}, False, True),
        ({"sm_clock_mhz": 2000, "power_watts": 20.0}, False, True),
        ({"sm_clock_mhz": 1300, "power_watts": 42.0}, False, False),
        ({"sm_clock_mhz": 900, "max_sm_clock_mhz": 900, "power_watts": 20.0}, False, True),
        ({"power_watts": None}, False, False),
        ({"power_watts": 46.0}, False, False),
    ],
)
def test_clamp_and_spin_wait_are_told_apart(
    change: dict[str, float | None], is_clamped: bool, spins: bool
) -> None:
    """Prevents an owner from draining the power of a healthy Spark whose peer hangs, and the reverse."""
    gpu = replace(BUSY, **change)  # type: ignore[arg-type]
    assert (bool(clamped(gpu)), bool(spin_wait(gpu))) == (is_clamped, spins)


def test_the_words_have_the_figures() -> None:
    """Prevents an alarm that does not say what was seen, what was expected and what to do."""
    assert clamped(replace(BUSY, sm_clock_mhz=695, power_watts=17.0)) == (
        "GPU 0 is clamped: 695 MHz and 17 W at 96 % utilisation, expected 2000 MHz."
        " It survives a reboot: power off, unplug the adapter for 60 s"
    )
    assert "96 % utilisation and 21.5 W" in spin_wait(replace(BUSY, power_watts=21.5))
