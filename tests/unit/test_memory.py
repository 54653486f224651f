"""Memory before a start and around a running rank, with published figures of real Sparks as input (GiB)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from glm53_service.engines import engine_for
from glm53_service.errors import UnavailableError
from glm53_service.settings import Settings, Supervision, warnings
from glm53_service.supervisor.memory import (
    guard_problem,
    memory_warning,
    start_problem,
    wait_for_memory,
)
from glm53_service.supervisor.world import World
from glm53_service.system import GIB, Memory
from tests.unit.fixtures import settings_of, tensorfold_data, vllm_data

TOTAL = 121.69


def memory(free: float, available: float) -> Memory:
    """Return a Spark's memory."""
    return Memory(free=int(free * GIB), available=int(available * GIB), total=int(TOTAL * GIB))


class Spark:
    """A node whose memory changes as time passes; `rows` are (MemFree, MemAvailable) at each look."""

    def __init__(self, root: Path, rows: list[tuple[float, float]]) -> None:
        self.root, self.rows, self.now = root, rows, 0.0
        (root / "proc").mkdir(parents=True)
        self.show()

    def show(self) -> None:
        """Write /proc/meminfo of now."""
        free, available = self.rows[0]
        kib = {"MemTotal": TOTAL, "MemFree": free, "MemAvailable": available}
        text = "".join(f"{name}: {int(value * 1024**2)} kB\n" for name, value in kib.items())
        (self.root / "proc/meminfo").write_text(text)

    def process(self, pid: int, name: str, gib: float) -> None:
        """Add a process with so much resident memory."""
        folder = self.root / "proc" / str(pid)
        folder.mkdir()
        (folder / "status").write_text(f"Name:\t{name}\nVmRSS:\t{int(gib * 1024**2)} kB\n")

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.rows = self.rows[1:] or self.rows
        self.show()

    def wait(self, settings: Settings, others: Mapping[str, Memory] | None = None) -> None:
        """Wait for the memory of a start."""
        world = World(clock=lambda: self.now, sleep=self.sleep, root=self.root, state=self.root / "state")
        asyncio.run(wait_for_memory(world, settings, engine_for(settings), lambda: others or {}))


def tensorfold(**supervision: Any) -> Settings:
    """Return TensorFold's settings for a Spark, so supervised."""
    return settings_of(tensorfold_data(supervision=supervision))


BASELINE, WRITTEN, DELETED = (103.25, 115.85), (41.52, 115.65), (103.30, 115.87)


@pytest.mark.parametrize(("row", "starts"), [(BASELINE, True), (WRITTEN, False), (DELETED, True)])
def test_page_cache_is_not_free_for_cuda(row: tuple[float, float], starts: bool) -> None:
    """Prevents a start right after 60 GB of weights were written: MemAvailable says 115 GiB, CUDA gets 41."""
    settings = tensorfold(min_free_gib=100)
    problem = start_problem(settings, engine_for(settings), memory(*row))
    assert problem == ("" if starts else "MemFree is 41.5 GiB, 100 needed (supervision.min_free_gib)")


def test_memavailable_counts_as_well() -> None:
    """Prevents a start where MemFree is enough and MemAvailable, which vLLM's own check reads, is not."""
    settings = tensorfold(min_free_gib=100)
    problem = start_problem(settings, engine_for(settings), memory(104.0, 98.5))
    assert problem == "MemAvailable is 98.5 GiB, 100 needed (supervision.min_free_gib)"


def test_no_start_below_the_guard() -> None:
    """Prevents a start that the guard would end as soon as it loads, where the engine has no rule."""
    settings = settings_of(
        vllm_data(
            device="cpu",
            vllm={"kv_cache_memory": "64M"},
            supervision={"min_free_gib": 0, "load_guard_gib": 20},
        )
    )
    engine = engine_for(settings)
    assert "a loading rank is stopped below 20" in start_problem(settings, engine, memory(19.0, 19.0))
    assert start_problem(settings, engine, memory(25.0, 25.0)) == ""


def test_a_restart_waits_for_the_kernel_to_take_memory_back(tmp_path: Path) -> None:
    """Prevents a refusal (or a start that fails) a minute too early: 99 GiB were seen where 103.4 are
    needed, and 118 a moment later.
    """
    spark = Spark(tmp_path, [(gib, gib) for gib in (62.0, 88.0, 99.0, 118.0)])
    spark.wait(tensorfold(min_free_gib=103.44, min_free_wait_seconds=60))
    assert spark.rows[0][0] == 118.0


def test_the_engines_own_rule_waits_too(tmp_path: Path) -> None:
    """Prevents a refusal at once where only the engine, and not min_free_gib, asks for more memory."""
    spark = Spark(tmp_path, [(gib, gib) for gib in (62.0, 88.0, 118.0)])
    spark.wait(tensorfold(min_free_gib=0, min_free_wait_seconds=60))
    assert spark.rows[0][0] == 118.0


def test_who_holds_the_memory_is_named(tmp_path: Path) -> None:
    """Prevents a search through a machine at night: the head also has a desktop."""
    spark = Spark(tmp_path, [(90.0, 95.0)])
    spark.process(1201, "gnome-shell", 1.8)
    spark.process(1, "systemd", 0.01)
    with pytest.raises(UnavailableError) as refused:
        spark.wait(tensorfold(min_free_gib=100, min_free_wait_seconds=9))
    assert refused.value.message == (
        "MemFree is 90.0 GiB, 100 needed (supervision.min_free_gib);"
        " the largest processes here: gnome-shell (pid 1201, 1.8 GiB), systemd (pid 1, 0.0 GiB)"
    )
    assert 9 <= spark.now < 12


@pytest.mark.parametrize(
    ("own", "other", "first"),
    [
        (
            102.0,
            110.0,
            "102.0 GiB are free, vllm.gpu_memory_utilization 0.87 of 121.7 GiB needs 105.9; what is"
            " free now allows 0.83",
        ),
        (
            110.0,
            95.0,
            "spark-b: 95.0 GiB are free, vllm.gpu_memory_utilization 0.87 of 121.7 GiB needs 105.9;"
            " what is free now allows 0.78",
        ),
        (
            102.0,
            95.0,
            "spark-b: 95.0 GiB are free, vllm.gpu_memory_utilization 0.87 of 121.7 GiB needs 105.9;"
            " what is free now allows 0.78; 102.0 GiB are free",
        ),
    ],
)
def test_the_poorer_node_decides(tmp_path: Path, own: float, other: float, first: str) -> None:
    """Prevents a share that fits the head from being taken for one that fits the pair."""
    spark = Spark(tmp_path, [(own, own)])
    settings = settings_of(
        vllm_data(vllm={"gpu_memory_utilization": 0.87}, supervision={"min_free_wait_seconds": 4})
    )
    with pytest.raises(UnavailableError) as refused:
        spark.wait(settings, {"spark-b": memory(other, other)})
    assert refused.value.message.startswith(first)


GUARDS = Supervision(load_guard_gib=16, steady_guard_gib=3.5)


@pytest.mark.parametrize(
    ("available", "loading", "stopped"),
    [
        (25.0, True, False),
        (19.0, True, False),
        (15.0, True, True),
        (8.0, False, False),
        (4.7, False, False),
        (3.4, False, True),
    ],
)
def test_the_guard_knows_loading_from_serving(available: float, loading: bool, stopped: bool) -> None:
    """Prevents a Spark that freezes without a log, and the end of a ready engine, which idles near 8 GiB."""
    problem = guard_problem(GUARDS, memory(1, available), node="spark-b", loading=loading)
    assert bool(problem) is stopped
    if stopped and loading:
        assert problem == (
            "memory guard: MemAvailable is 15.0 GiB on spark-b while loading, limit 16"
            " (supervision.load_guard_gib)"
        )


def test_the_guard_can_be_off() -> None:
    """Prevents a small machine on which nothing can be tried."""
    off = Supervision(load_guard_gib=0, steady_guard_gib=0)
    for loading in (True, False):
        assert guard_problem(off, memory(0, 0.1), node="a", loading=loading) == ""


@pytest.mark.parametrize(
    ("available", "loading"), [(4.5, True), (7.0, False), (10.5, False), (4.7, False), (5.6, False)]
)
def test_the_defaults_end_nothing_healthy(available: float, loading: bool) -> None:
    """Prevents defaults that kill TensorFold at its own: what it was seen to leave, loading and serving."""
    assert guard_problem(Supervision(), memory(1, available), node="a", loading=loading) == ""


@pytest.mark.parametrize(
    ("available", "loading", "warned", "warns"),
    [
        (5.9, False, False, True),
        (6.1, False, False, False),
        (6.4, False, True, True),
        (6.6, False, True, False),
        (5.0, True, False, False),
    ],
)
def test_little_memory_while_serving_is_a_warning(
    available: float, loading: bool, warned: bool, warns: bool
) -> None:
    """Prevents a surprise at the next long prompt, a line a second about it, and one for every load."""
    assert bool(memory_warning(memory(1, available), loading=loading, warned=warned)) is warns


def test_guards_that_would_hurt_are_warned_of() -> None:
    """Prevents the published 16 GiB from being copied: it ends every TensorFold at its defaults."""
    found = warnings(tensorfold(load_guard_gib=16, steady_guard_gib=0, min_free_gib=100))
    assert "supervision.load_guard_gib: 16; a healthy TensorFold may leave 4.5 GiB" in found
    assert any(text.startswith("supervision.steady_guard_gib: 0; a Spark whose memory") for text in found)
    assert not any("guard" in text for text in warnings(tensorfold(min_free_gib=100)))
