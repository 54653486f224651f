"""Folders of weights: which are needed, what differs between nodes, what is copied, what room it takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.draft import read_draft_files
from glm53_service.artifacts.folders import needed_folders, unused_drafter
from glm53_service.settings import Settings, settings_from
from tests.unit.plugin_loader import load

filters = load("filter", "glm53")
manifest = load("modules", "glm53_manifest")
times = load("modules", "glm53_times")

LICENCE = {"accepted_by": "Ada Example", "accepted_on": "2026-11-02", "use": "non-commercial"}
GIB = 1024**3


def entry(size: int, mtime: int = 5, sha256: str = "") -> dict[str, Any]:
    """One file of a manifest."""
    return {"size": size, "mtime": mtime, **({"sha256": sha256} if sha256 else {})}


def folder(name: str = "model", *, system: int = 7, free: int = 10**6, **files: Any) -> dict[str, Any]:
    """A folder as glm53_manifest lists it; a number is the size of a file."""
    return {
        "name": name,
        "path": f"/data/{name}",
        "exists": True,
        "files": {n: entry(f) if isinstance(f, int) else f for n, f in files.items()},
        "dangling": [],
        "lacking": [],
        "file_system": system,
        "free_bytes": free,
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """How `theirs` differs from the head's folder."""
    found: dict[str, Any] = filters.glm53_folder_differences([ours], [theirs])[0]
    return found


def settings(**drafter: Any) -> Settings:
    """Settings of TensorFold with this drafter section."""
    return settings_from(
        {
            "version": 1,
            "cluster": "probe",
            "image": "example/engine@sha256:" + "a" * 64,
            "model": {"path": "/data/model", "name": "M"},
            "drafter": drafter,
        },
        "test",
    )


def test_only_what_is_missing_counts() -> None:
    """Prevents a disk check that asks for room for files that are there already."""
    found = differences(folder(one=10, two=20, three=30), folder(one=10, two=21, more=1))
    assert (found["missing"], found["replaced"], found["doubtful"]) == (["three"], ["two"], [])
    assert (found["extra"], found["same"]) == (["more"], False)
    assert filters.glm53_extra_files([found]) == ["1 files in /data/model (more)"]
    assert (found["bytes"], found["room"]) == (50, 50)
    same = differences(folder(one=10), folder(one=10))
    assert (same["same"], same["room"]) == (True, 0)


def test_an_owners_own_download_is_compared_not_fetched_again() -> None:
    """Prevents 164 GiB over the fabric, beside an owner's own cache, because of other times."""
    ours, theirs = folder(a=entry(50, 5), b=entry(70, 5)), folder(a=entry(50, 9), b=entry(70, 9))
    found = differences(ours, theirs)
    assert (found["doubtful"], found["bytes"], found["room"], found["same"]) == (["a", "b"], 0, 70, False)
    pins = [{"name": "model", "path": "/data/model"}]
    [doubts] = filters.glm53_doubts(
        pins, [ours], [[ours], [theirs], [folder(a=entry(50, 5), b=entry(71, 9))]]
    )
    assert doubts == {"name": "model", "path": "/data/model", "names": ["a", "b"]}
    for part, hashes in ((ours, ("x", "y")), (theirs, ("x", "z"))):
        part["files"]["a"]["sha256"], part["files"]["b"]["sha256"] = hashes
    known = differences(ours, theirs)
    assert (known["retimed"], known["replaced"], known["doubtful"]) == ({"a": 5}, ["b"], [])
    assert filters.glm53_copies([known]) == [{"name": "model", "path": "/data/model", "files": ["b"]}]


def test_equal_content_gets_the_heads_time_once(tmp_path: Path) -> None:
    """Prevents reading a whole checkpoint again at every run, and a link of the cache replaced by a file."""
    (tmp_path / "blob").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a").symlink_to(tmp_path / "blob")
    wanted = [{"path": str(tmp_path / "model"), "retimed": {"a": 1111}}]
    assert times.late(wanted) == [(tmp_path / "model/a", 1111)]
    os.utime(tmp_path / "blob", (1, 1111.5))
    assert times.late(wanted) == []


def test_a_file_that_grew_needs_its_growth_and_the_old_file_meanwhile() -> None:
    """Prevents a copy that runs out of room because the old file stays until the new one is complete."""
    found = differences(folder(a=100, b=40), folder(a=90, b=44))
    assert (found["replaced"], found["bytes"], found["room"]) == (["a", "b"], 140, 110)


def test_equal_size_and_time_with_another_hash_is_copied() -> None:
    """Prevents a drafter of other bytes that no run ever mends."""
    found = differences(folder(a=entry(8, 5, "aa")), folder(a=entry(8, 5, "bb")))
    assert (found["same"], found["replaced"], found["bytes"]) == (False, ["a"], 8)
    assert filters.glm53_wrong_files([found]) == ["/data/model/a"]
    unknown = differences(folder(a=entry(8, 5, "aa")), folder(a=entry(8, 5)))
    assert unknown["same"] is True


def test_room_is_counted_for_all_folders_of_a_file_system_together() -> None:
    """Prevents a model that fits and a drafter that fits, which do not fit together."""
    wanted = [folder("model", a=700), folder("drafter", b=400)]
    absent = [folder("model", free=GIB + 1000), folder("drafter", free=GIB + 1000)]
    together = filters.glm53_folder_differences(wanted, absent)
    assert filters.glm53_tight_file_systems(together, 9) == [
        "1.07 GB free for /data/model and /data/drafter, 9.66 GB needed"
    ]
    assert len(filters.glm53_tight_file_systems(together, 1)) == 1
    absent[1]["file_system"] = 8
    assert filters.glm53_tight_file_systems(filters.glm53_folder_differences(wanted, absent), 1) == []


def test_a_full_disk_is_no_matter_when_all_is_there() -> None:
    """Prevents a second run that fails on a node whose weights are complete."""
    full = filters.glm53_folder_differences([folder(a=700)], [folder(a=700, free=0)])
    assert filters.glm53_tight_file_systems(full, 1) == []


def test_an_incomplete_head_is_named() -> None:
    """Prevents shipping half of a download, or a drafter that nobody pinned."""
    bad = folder("drafter", a=entry(3, 5, "b" * 64)) | {"lacking": ["config.json"], "dangling": ["x"]}
    gone = folder("model") | {"exists": False}
    pins = [{"sha256": {"a": "c" * 64, "other": "d" * 64}}, {}]
    assert filters.glm53_incomplete([bad, gone], pins) == [
        "drafter /data/drafter: config.json is missing or empty",
        "drafter /data/drafter: 1 links lead nowhere (x)",
        "drafter /data/drafter: a has SHA-256 bbbbbbbbbbbb, the inventory's glm53_drafter.sha256 is"
        " cccccccccccc",
        "model /data/model: no such directory",
    ]
    assert filters.glm53_incomplete([folder(a=1)], [{"sha256": {}}]) == []


def test_the_drafter_is_needed_once_its_licence_is_accepted() -> None:
    """Prevents a start that misses a folder which no run ever shipped."""
    both = needed_folders(settings(path="/data/draft", licence=LICENCE, sha256="c" * 64))
    assert [(f.name, f.path, f.hash) for f in both] == [
        ("model", "/data/model", False),
        ("drafter", "/data/draft", True),
    ]
    assert both[1].needed == ("config.json", "model.safetensors")
    assert both[1].sha256 == {"model.safetensors": "c" * 64}
    assert unused_drafter(settings(path="/data/draft", licence=LICENCE)) == ""


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"path": "/data/draft"}, "DFlash2's licence is not accepted"),
        ({"path": "/data/draft", "licence": LICENCE, "request": "mtp"}, "drafter.request: mtp"),
    ],
)
def test_a_drafter_without_leave_is_not_shipped_and_that_is_said(drafter: dict[str, Any], said: str) -> None:
    """Prevents spreading DFlash2 to nodes of somebody who never accepted its licence."""
    wanted = settings(**drafter)
    assert [f.name for f in needed_folders(wanted)] == ["model"]
    text = unused_drafter(wanted)
    assert text.startswith("drafter /data/draft is neither required nor shipped: ")
    assert said in text
    assert unused_drafter(settings()) == ""


def survey(path: Path, *receipts: Path, **more: Any) -> dict[str, Any]:
    """What the module says of one folder."""
    params = {"reader": "", "hash_limit_bytes": 0, "sha256": False, "receipts": [str(r) for r in receipts]}
    found: dict[str, Any] = manifest.survey({"name": "drafter", "path": str(path), **more}, params)
    return found


def test_needed_files_that_are_absent_or_empty_are_lacking(tmp_path: Path) -> None:
    """Prevents a download that was cut off at its first byte from counting as a folder."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    needed = ["config.json", "model.safetensors", "more.json"]
    assert survey(tmp_path, needed=needed)["lacking"] == ["model.safetensors", "more.json"]
    absent = survey(tmp_path / "no/such", needed=["config.json"])
    assert (absent["exists"], absent["lacking"]) == (False, ["config.json"])
    assert absent["file_system"] == tmp_path.stat().st_dev


def test_the_services_receipt_saves_a_read_and_never_outlives_its_file(tmp_path: Path) -> None:
    """Prevents 2.3 GB read at every run, and a hash that was right for another file.

    The receipt is written by the service itself: the two must agree on its form.
    """
    draft, state = tmp_path / "draft", tmp_path / "state"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"one")
    own = read_draft_files(draft, state, node="a", rank=0).sha256
    receipt = state / "drafter.json"
    assert survey(draft, receipt, hash=True)["files"]["model.safetensors"]["sha256"] == own
    receipt.write_text(receipt.read_text().replace(own, "f" * 64))
    assert survey(draft, receipt, hash=True)["files"]["model.safetensors"]["sha256"] == "f" * 64
    (draft / "next").write_bytes(b"two")
    (draft / "next").rename(draft / "model.safetensors")
    fresh = survey(draft, receipt, hash=True)["files"]["model.safetensors"]["sha256"]
    assert fresh == "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"
    assert "sha256" not in survey(draft, receipt)["files"]["model.safetensors"]
    named = survey(draft, receipt, names=["config.json"])["files"]
    assert ("sha256" in named["config.json"], "sha256" in named["model.safetensors"]) == (True, False)
    receipt.write_text("not json")
    assert survey(draft, receipt, hash=True)["files"]["model.safetensors"]["sha256"] == fresh


NODE = """version: 1
cluster: probe
node: n-a
nodes:
- {node: n-a, management: 10.9.0.1, fabric: [10.1.0.1]}
- {node: n-b, management: 10.9.0.2, fabric: [10.1.0.2]}
"""
SETTINGS = """version: 1
cluster: probe
image: example/engine@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
model: {path: /data/model, name: M}
drafter: {path: /data/draft}
gate: {port: 8777}
"""


def test_the_playbooks_are_told_what_the_settings_need_of_the_nodes() -> None:
    """Prevents a playbook that reckons for itself what the service reads otherwise."""
    config = load("action", "glm53_config")
    found, problems = config.read(SETTINGS, NODE, 2)
    assert problems == []
    assert [folder["path"] for folder in found["folders"]] == ["/data/model"]
    assert found["unused_drafter"].startswith("drafter /data/draft")
    assert [claim["port"] for claim in found["claims"]["n-b"]] == [8777]
    worker, problems = config.read("", NODE, 2)
    assert (worker["folders"], problems) == ([], [])
    _, both = config.read(SETTINGS.replace("8777", "no"), NODE.replace("10.1.0.2", "x"), 3)
    assert ["gate.port" in both[0], "nodes[1].fabric" in both[1], len(both)] == [True, True, 2]
