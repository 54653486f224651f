"""Folders of compiled kernels: one an image and shape, and no lock that nobody holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.kernels import build_locks, cache_folder, old_caches, open_cache
from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt, Launch
from tests.unit.doubles import make_settings

CONTENT = "sha256:" + "0a1b2c3d4e5f" + "9" * 52
STATE = Path("/var/lib/unit")


def folder(*, content: str = CONTENT, attempt: Attempt | None = None, world: int = 2, **changes: Any) -> Path:
    """Return the folder of a start with these settings."""
    settings = make_settings(Path("/srv/models/unit"), **changes)
    launch = Launch(
        epoch=4,
        settings=settings,
        image_content=content,
        master="192.0.2.1",
        world=world,
        attempt=attempt or Attempt(),
    )
    return cache_folder(STATE, content, engine_for(settings).kernel_shape(launch))


BASES: dict[str, dict[str, Any]] = {
    "vllm": {"vllm": {"max_num_seqs": 3, "max_model_len": 8192}},
    "tensorfold": {"engine": "tensorfold", "tensorfold": {"kv": "bf16", "context": 65536}},
}


def changed(engine: str, **values: Any) -> Path:
    """Return the folder with these of the engine's own settings changed."""
    base = BASES[engine]
    return folder(**{**base, engine: {**base[engine], **values}})


def test_the_folder_is_named_by_image_and_shape() -> None:
    """Prevents a name that says nothing to who looks for what to remove."""
    found = folder(**BASES["vllm"])
    assert found.parent == STATE / "cache"
    assert found.name.partition("-")[0] == "0a1b2c3d4e5f"
    assert len(found.name) == len("0a1b2c3d4e5f-") + 8


@pytest.mark.parametrize("engine", BASES)
def test_kernels_of_another_image_or_number_of_ranks_are_never_loaded(engine: str) -> None:
    """Prevents a kernel of one image from being loaded by another under the same name."""
    base = BASES[engine]
    other = "sha256:" + "ffff2c3d4e5f" + "9" * 52
    assert folder(**base) == folder(**base)
    assert len({folder(**base), folder(content=other, **base), folder(world=4, **base)}) == 3


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("vllm", {"max_num_batched_tokens": 2048}),
        ("vllm", {"max_num_seqs": 5}),
        ("vllm", {"dtype": "bfloat16"}),
        ("vllm", {"extra_env": {"VLLM_X": "1"}}),
        ("tensorfold", {"kv": "fp8"}),
        ("tensorfold", {"dense": "bf16"}),
        ("tensorfold", {"extra_args": ("--quiet",)}),
    ],
)
def test_another_shape_has_its_own_folder(engine: str, changes: dict[str, Any]) -> None:
    """Prevents a folder in which the kernels of many settings pile up."""
    assert changed(engine, **changes) != folder(**BASES[engine])


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("vllm", {"max_model_len": 4096}),
        ("vllm", {"rendezvous_port": 29999}),
        ("vllm", {"gpu_memory_utilization": 0.5}),
        ("tensorfold", {"context": 32768}),
        ("tensorfold", {"vision": False}),
        ("tensorfold", {"rendezvous_port": 29999}),
    ],
)
def test_what_no_kernel_depends_on_compiles_nothing_anew(engine: str, changes: dict[str, Any]) -> None:
    """Prevents an hour of compiling after a change of a port or of the window."""
    assert changed(engine, **changes) == folder(**BASES[engine])


def test_another_attempt_of_the_same_start_has_the_same_folder() -> None:
    """Prevents a refit of the window that begins with compiling everything again."""
    base = BASES["tensorfold"]
    assert folder(attempt=Attempt(number=2, window=32768, split=False), **base) == folder(**base)


def test_opening_notes_the_use(tmp_path: Path) -> None:
    """Prevents a prune of the kernels that are used every day but were compiled long ago."""
    cache = tmp_path / "cache/x"
    assert open_cache(cache) == []
    os.utime(cache, (1, 1))
    open_cache(cache)
    assert cache.stat().st_mtime > 1


def test_only_torchs_locks_are_taken(tmp_path: Path) -> None:
    """Prevents a lock below torch's folder a Python version from being missed, and others' from going."""
    ours = [
        f"{where}/k/lock"
        for where in ("torch_extensions", "torch_extensions/py312_cu130", "a/torch_extensions")
    ]
    others = ["torch_extensions/k/lock.c", "triton/lock", "flashinfer/k.lock"]
    for name in ours + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "torch_extensions/lock").mkdir()
    assert build_locks(tmp_path) == sorted(tmp_path / name for name in ours)
    assert open_cache(tmp_path) == sorted(tmp_path / name for name in ours)
    assert build_locks(tmp_path) == []
    assert all((tmp_path / name).exists() for name in others)


@pytest.mark.parametrize(
    ("used", "gone"),
    [
        ({}, []),
        ({"a-1": 9.0}, []),
        ({"a-1": 9.0, "b-1": 8.0}, []),
        ({"a-1": 9.0, "a-2": 8.0, "b-1": 7.0}, []),
        ({"a-1": 9.0, "a-2": 8.0, "b-1": 7.0, "b-2": 6.0, "a-3": 5.0}, ["a-3", "b-2"]),
        ({"a-1": 9.0, "b-1": 8.0, "c-1": 7.0}, ["c-1"]),
        ({"a-1": 9.0, "a-2": 8.0, "a-3": 7.0}, ["a-3"]),
        ({"0a1b2c3d4e5f": 1.0, "b-1": 9.0, "b-2": 8.0, "c-1": 7.0}, ["0a1b2c3d4e5f"]),
    ],
)
def test_the_last_two_and_the_last_of_another_image_stay(used: dict[str, float], gone: list[str]) -> None:
    """Prevents a way back that compiles for an hour, and folders that are kept for ever."""
    assert old_caches(used) == gone
