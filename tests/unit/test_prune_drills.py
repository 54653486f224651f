"""Prune broken on purpose: kill -9 in the middle, two at once, beside a run, with clocks that jump."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from glm53_service.artifacts.disk import held
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Manifest, write_manifest
from glm53_service.artifacts.prune import GOING, Kind, caches, file_items, remove_files
from glm53_service.errors import ArtifactError
from tests.unit.drills import apart, as_root, killed, read_only
from tests.unit.hub_server import COMMIT
from tests.unit.snapshots import cache, contents, flat, model_files

FILES = {n: d for n, d in model_files(2, size=50).items() if not n.endswith("README.md")}
NOW = time.time()
AGES = ("now", "before", "older", "oldest")


def aged(path: Path, days: float) -> Path:
    """Make a file or a folder with all in it so many days old."""
    for found in [path, *(path.rglob("*") if path.is_dir() else ())]:
        os.utime(found, (NOW - days * 86400,) * 2, follow_symlinks=False)
    return path


def releases(root: Path, kind: str) -> tuple[Path, dict[str, Path]]:
    """Write four snapshots; return the one in use, and all by name."""
    folders = {}
    for days, name in reversed([*enumerate(AGES)]):
        files = {**FILES, "config.json": name.encode()}
        if kind == "flat":
            folders[name] = flat(root / "models" / name, files)
            write_manifest(folders[name], Manifest(repository="unit-lab/x", revision=COMMIT, files=()))
            continue
        made = cache(root / "hub", files)
        folders[name] = made.rename(made.parent / (str(days) * 40)) if days else made
    for days, name in enumerate(AGES):
        aged(folders[name], 10 + days)
    if kind == "cache":
        aged(folders["now"].parents[1] / "blobs", 30)
    return folders["now"], folders


def prune(current: Path) -> None:
    """Remove what is listed, as `glm53 prune --yes` does."""
    for item in file_items([layout_of(current)], NOW):
        remove_files(item)


def forget(state: Path) -> None:
    """Remove the compiled kernels that are listed."""
    for item in caches(state):
        remove_files(item)


@pytest.mark.parametrize("kind", ["flat", "cache"])
def test_killed_at_any_step_the_release_to_go_back_to_stays(tmp_path: Path, kind: str) -> None:
    """Prevents the loss of the good snapshot: half of an old one was written last, so it was taken for the
    one before, and the real one before was listed; and halves that nothing lists again.
    """
    for cut in range(1, 100):
        current, folders = releases(tmp_path / str(cut), kind)
        died = killed(cut, lambda: prune(current))  # noqa: B023
        prune(current)
        for name in ("now", "before"):
            assert contents(folders[name]) == {**FILES, "config.json": name.encode()}
        left = {p.name for p in current.parent.iterdir()}
        assert left == {folders[name].name for name in ("now", "before")}
        if not died:
            break
    assert cut > 8


def test_killed_at_any_step_no_compiled_kernels_are_lost(tmp_path: Path) -> None:
    """Prevents an hour of compiling: half of an old folder, just written to, in the place of a good one."""
    names = ("a-1", "a-2", "b-1", "a-0", "b-0")
    for cut in range(1, 100):
        state = tmp_path / str(cut)
        for days, name in enumerate(names):
            aged(flat(state / "cache" / name, {"x/k1": b"1", "x/k2": b"2", "k3": b"3"}), 10 + days)
        died = killed(cut, lambda: forget(state))  # noqa: B023
        forget(state)
        assert {path.name for path in (state / "cache").iterdir()} == {"a-1", "a-2", "b-1"}
        if not died:
            break
    assert cut > 5


def test_two_at_once_and_one_beside_a_run_are_apart(tmp_path: Path) -> None:
    """Prevents "cannot be removed" for what the other prune removed, and a snapshot that goes while it is
    filled again.
    """
    current, folders = releases(tmp_path, "flat")
    first = file_items([layout_of(current)], NOW)
    with held(folders["oldest"]), pytest.raises(ArtifactError, match="oldest is being filled by another run"):
        prune(current)
    assert contents(folders["oldest"]) == {**FILES, "config.json": b"oldest"}
    for _ in range(2):
        for item in first:
            remove_files(item)
    assert not folders["oldest"].exists()
    assert not list(tmp_path.rglob(f"{GOING}*"))


@pytest.mark.parametrize("kind", ["flat", "cache"])
def test_what_a_run_needs_is_not_listed_whatever_the_clock_says(tmp_path: Path, kind: str) -> None:
    """Prevents a prune that takes halves and blobs from under a download, since the clock was set meanwhile:
    a Spark without a battery boots in 1970.
    """
    current, _ = releases(tmp_path, kind)
    halves = [
        aged(flat(current, {".x.0123456789abcdef.incomplete": b"x"}) / ".x.0123456789abcdef.incomplete", 9)
    ]
    if kind == "cache":
        blobs = current.parents[1] / "blobs"
        halves.append(aged(flat(blobs, {f"{'c' * 64}.incomplete": b"x"}) / f"{'c' * 64}.incomplete", 9))
        aged(flat(blobs, {"d" * 64: b"its link comes last"}) / ("d" * 64), 20000)
    with held(current):
        descriptors = [os.open(half, os.O_RDONLY) for half in halves]
        for descriptor in descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = file_items([layout_of(current)], NOW)
        assert [item for item in found if item.kind is not Kind.SNAPSHOT] == []
        for descriptor in descriptors:
            os.close(descriptor)
    found = file_items([layout_of(current)], NOW)
    assert {Path(i.name) for i in found if i.kind is Kind.UNFINISHED} == set(halves)
    assert bool([i for i in found if i.name.endswith("d" * 64)]) is (kind == "cache")


@as_root
def test_a_disk_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    """Prevents a traceback, and a snapshot that lost its name or a part."""
    current, folders = releases(tmp_path, "flat")

    def drill() -> None:
        read_only(tmp_path)
        with pytest.raises(ArtifactError, match="cannot be removed: Read-only file system"):
            prune(current)
        assert contents(folders["oldest"]) == {**FILES, "config.json": b"oldest"}

    apart(drill)
