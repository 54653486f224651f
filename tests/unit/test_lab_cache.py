"""The cache: complete entries only, found again by what they were made from."""

from pathlib import Path

import pytest

from lab import cache
from lab.image import pinned, torch_index


def test_a_build_that_fails_leaves_no_entry_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    """Prevents a half-built tree from being taken for a whole one."""
    target = cache.entry(tmp_path, "tree", ["x"])

    def dies(part: Path) -> None:
        (part / "half").touch()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        cache.ensure(target, "tree", dies)
    assert not target.exists()
    cache.ensure(target, "tree", lambda part: (part / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_complete_entry_is_not_built_again(tmp_path: Path) -> None:
    """Prevents a warm start from costing minutes."""
    target = cache.ensure(cache.entry(tmp_path, "tree", 1), "tree", lambda part: None)

    def again(part: Path) -> None:
        raise AssertionError("built twice")

    assert cache.ensure(target, "tree", again) == target


def test_other_inputs_have_another_name(tmp_path: Path) -> None:
    """Prevents a changed package list from being served by the old tree."""
    assert cache.entry(tmp_path, "tree", ["a", "b"]) != cache.entry(tmp_path, "tree", ["a", "c"])


def test_clearing_spares_what_the_lab_did_not_make(tmp_path: Path) -> None:
    """Prevents `clean-cache` from emptying a folder that holds other things too."""
    for name in ("model-1", ".unfinished-model-2", "models"):
        (tmp_path / name).mkdir()
    cache.clear(tmp_path, ["model-"])
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_torch_comes_from_the_extra_index_only_without_a_fitting_local_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a needless index on machines with the wheel, and its absence on all others."""
    monkeypatch.setenv("GLM53_TORCH_INDEX", "https://mirror.example/cpu")
    (tmp_path / "torch-9.1+cpu-cp311-cp311-manylinux_x86_64.whl").touch()
    text = "sympy==1\ntorch==9.1+cpu\n"
    assert torch_index(text, [tmp_path], "cp311", "x86_64") == ""
    for python, machine in (("cp312", "x86_64"), ("cp311", "aarch64")):
        assert torch_index(text, [tmp_path], python, machine) == "https://mirror.example/cpu"


def test_pinned_reads_the_whole_name() -> None:
    """Prevents `torch` from being read out of another package's line."""
    assert pinned("torchx==1\ntorch==2.5+cpu\n", "torch") == "2.5+cpu"


def test_pruning_removes_only_what_was_replaced(tmp_path: Path) -> None:
    """Prevents a cache that grows with every change, and the loss of another suite's tree."""
    for name in ("tree-trixie-1", "tree-trixie-2", "tree-bookworm-3", "tree-4", "downloads"):
        (tmp_path / name).mkdir()
    cache.prune([tmp_path / "tree-trixie-2"])
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["downloads", "tree-4", "tree-bookworm-3", "tree-trixie-2"]
    cache.prune([tmp_path / "tree-4"])
    assert sorted(path.name for path in tmp_path.iterdir()) == left
