"""What old releases left: listed with sizes, removed only when told, never somebody else's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts import prune_verb
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Manifest, write_manifest
from glm53_service.artifacts.prune import Item, Kind, file_items, images, old
from glm53_service.artifacts.served import note_image
from glm53_service.errors import UnavailableError
from tests.unit.doubles import settings_text
from tests.unit.hub_server import COMMIT
from tests.unit.snapshots import cache, contents, flat, model_files
from tests.unit.test_artifact_verbs import run

DAY = 86400.0
NOW = 1_900_000_000.0
OURS = "ghcr.io/unit-lab/engine"


def image(identity: str, *names: str, day: int = 1, size: int = 25_000_000_000) -> dict[str, Any]:
    """Return `docker image inspect` of one image."""
    return {
        "Id": f"sha256:{identity}",
        "RepoTags": [name for name in names if "@" not in name],
        "RepoDigests": [name for name in names if "@" in name],
        "Created": f"2026-11-{day:02}T10:00:00.123456789Z",
        "Size": size,
        "Architecture": "arm64",
        "RootFS": {"Layers": [identity]},
        "Config": {},
    }


def aged(path: Path, days: float) -> Path:
    """Make a file or a folder with all in it so many days old."""
    for found in [path, *(path.rglob("*") if path.is_dir() else ())]:
        os.utime(found, (NOW - days * DAY,) * 2, follow_symlinks=False)
    return path


def item(name: str, used: float) -> Item:
    """Return one image."""
    return Item(kind=Kind.IMAGE, name=name, bytes=1, used=used)


def test_the_current_and_the_one_before_stay() -> None:
    """Prevents a prune after which nobody can go back: three releases, only the oldest may go."""
    found = [item("a", 1), item("b", 3), item("c", 2)]
    assert [i.name for i in old(found, "b")] == ["a"]
    assert [i.name for i in old(found, "a")] == ["c"]
    assert [i.name for i in old(found[:2], "b")] == []


def test_somebody_elses_images_are_never_listed() -> None:
    """Prevents the loss of an image that the owner built, also one that only shares a name's beginning, and
    of the base of those that we built.
    """
    found = images(
        [
            image("1", f"{OURS}:v1", f"{OURS}@sha256:11"),
            image("2", f"{OURS}@sha256:22"),
            image("3", "glm53/engine:abcdef012345"),
            image("9", "glm53/built:abcdef012345", "glm53/engine:012345abcdef"),
            image("b", "glm53/base:abcdef012345"),
            image("c", "nvcr.io/nvidia/pytorch@sha256:cc", "glm53/base:012345abcdef"),
            image("4", f"{OURS}-other:v1"),
            image("5", f"{OURS}:v2", "owner/mine:keep"),
            image("6"),
            image("7", "localhost:5000/glm53/engine:1"),
            image("8", "ubuntu:24.04"),
        ],
        f"{OURS}@sha256:22",
    )
    assert [i.name for i in found] == ["sha256:1", "sha256:2", "sha256:3", "sha256:9"]


def test_a_caches_other_revisions_and_their_blobs(tmp_path: Path) -> None:
    """Prevents 176 GB of the last release's weights from staying for ever, and the blobs that both share from
    going.
    """
    files = model_files()
    storage = tmp_path / "hub/models--unit-lab--GLM-unit"
    for number, name in enumerate("abc"):
        changed = {**files, "config.json": name.encode()}
        cache(tmp_path / "hub", changed).rename(storage / "snapshots" / (name * 40))
        aged(storage / "snapshots" / (name * 40), 30 - number)
    current = cache(tmp_path / "hub", files)
    aged(storage / "blobs", 10)
    fresh = storage / "blobs" / ("f" * 64)
    fresh.write_bytes(b"a download that runs: its link comes last")
    os.utime(fresh, (NOW - 60, NOW - 60))
    found = file_items([layout_of(current)], NOW)
    assert {i.name for i in found if i.kind is Kind.SNAPSHOT} == {
        str(storage / "snapshots" / ("a" * 40)),
        str(storage / "snapshots" / ("b" * 40)),
    }
    sizes = sorted(i.bytes for i in found if i.kind is Kind.BLOB)
    assert sizes == [1, 1], "only the two config.json that nobody else has"


def test_flat_snapshots_are_ours_by_their_manifest(tmp_path: Path) -> None:
    """Prevents a prune of a model that the owner put beside ours."""
    for number, name in enumerate(("new", "before", "older", "oldest")):
        folder = flat(tmp_path / "models" / name, {"config.json": b"{}"})
        write_manifest(folder, Manifest(repository="unit-lab/x", revision=COMMIT, files=()))
        aged(folder, number)
    other = flat(tmp_path / "models/other", {"config.json": b"{}"})
    write_manifest(other, Manifest(repository="unit-lab/y", revision=COMMIT, files=()))
    aged(flat(tmp_path / "models/owners", {"config.json": b"{}"}), 99)
    found = file_items([layout_of(tmp_path / "models/new")], NOW)
    assert [Path(i.name).name for i in found] == ["oldest", "older"]


def test_unfinished_files_of_a_running_download_stay(tmp_path: Path) -> None:
    """Prevents a prune that takes the file from under a download that goes on."""
    folder = tmp_path / "m"
    folder.mkdir()
    aged(flat(folder, {".a.0123.incomplete": b"xxx"}), 2)
    (folder / ".b.0123.incomplete").write_bytes(b"y")
    os.utime(folder / ".b.0123.incomplete", (NOW - 60, NOW - 60))
    found = file_items([layout_of(folder)], NOW)
    assert [(i.kind, Path(i.name).name, i.bytes) for i in found] == [
        (Kind.UNFINISHED, ".a.0123.incomplete", 3)
    ]


class Docker:
    """Docker's command line with some images, one of which a container uses."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self.images = {image["Id"]: image for image in found}
        self.used: set[str] = set()
        self.ranks: dict[str, str] = {}
        self.arguments: list[str] = []
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *argv: str) -> str:
        self.calls.append(argv)
        if argv[0] == "ps":
            return "\n".join(self.ranks)
        if argv[0] == "inspect":
            return json.dumps([{"Image": self.ranks[name], "Args": self.arguments} for name in argv[1:]])
        if argv[:2] == ("image", "ls"):
            return "\n".join(self.images)
        if argv[:2] == ("image", "inspect"):
            return json.dumps([self.images[identity] for identity in argv[2:]])
        for identity, found in list(self.images.items()):
            if set(argv[2:]) & {*found["RepoTags"], *found["RepoDigests"]}:
                if identity in self.used:
                    raise UnavailableError("conflict: a container uses it")
                del self.images[identity]
        return ""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Docker]:
    """A head with three images and six kernel caches; the arguments of glm53 and its docker."""
    current = image("new", f"{OURS}@sha256:33", day=9)
    docker = Docker(
        image("oldest", f"{OURS}@sha256:11", day=1),
        image("before", f"{OURS}@sha256:22", "glm53/engine:0123", day=5),
        current,
        image("foreign", "owner/x:1"),
    )
    monkeypatch.setattr(prune_verb, "_docker", docker)
    model = flat(tmp_path / "m", {"config.json": b"{}"})
    etc = tmp_path / "etc"
    etc.mkdir()
    text = settings_text(model, image=f"{OURS}@sha256:33")
    (etc / "settings.yaml").write_text(text)
    state = tmp_path / "state"
    for number, name in enumerate(("third-1", "now-1", "before-1", "before-2", "now-2", "now-3")):
        aged(flat(state / "cache" / name, {"kernel.so": b"k" * 7}), 50 - number)
    return ["--etc", str(etc), "prune", "--state", str(state)], docker


def test_prune_lists_and_touches_nothing(
    site: tuple[list[str], Docker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a prune that removes by being looked at."""
    argv, docker = site
    before = contents(tmp_path)
    assert run(*argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["image", "sha256:oldest"],
        ["cache", str(tmp_path / "state/cache/third-1")],
        ["cache", str(tmp_path / "state/cache/now-1")],
        ["cache", str(tmp_path / "state/cache/before-1")],
        ["in", "all;"],
    ]
    assert contents(tmp_path) == before
    assert not [call for call in docker.calls if call[1] == "rm"]


def test_prune_yes_removes_what_was_listed_and_no_more(
    site: tuple[list[str], Docker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents "prune all": the current image, the one before and everybody else's stay."""
    argv, docker = site
    assert run(*argv, "--yes", "--json") == 0
    assert set(docker.images) == {"sha256:before", "sha256:new", "sha256:foreign"}
    left = {path.name for path in (tmp_path / "state/cache").iterdir()}
    assert left == {"now-3", "now-2", "before-2"}, "in use, the one before, and the last of the image before"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == 0
    assert run(*argv, "--yes") == 0


def test_a_local_build_that_is_served_by_its_id_stays(
    site: tuple[list[str], Docker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents the loss of the image that is served, when it is the oldest and known by its id alone."""
    argv, docker = site
    served = "sha256:" + "0ab9" * 16
    docker.images[served] = {
        **image("x", "glm53/engine:served"),
        "Id": served,
        "Created": "2026-01-01T00:00:00Z",
    }
    (tmp_path / "etc/settings.yaml").write_text(settings_text(tmp_path / "m", image=served))
    docker.images["sha256:before"]["RepoDigests"] = []
    docker.images["sha256:new"].update(RepoTags=["glm53/engine:4567"], RepoDigests=[])
    assert run(*argv) == 0
    listed = capsys.readouterr().out
    assert served not in listed
    assert "sha256:before" in listed


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("ghcr.io/unit-lab/engine:v1", "ghcr.io/unit-lab/engine"),
        ("docker.io/unit-lab/engine", "unit-lab/engine"),
        ("unit-lab/engine:v2", "unit-lab/engine"),
        ("docker.io/library/engine", "engine"),
    ],
)
def test_a_pulled_image_is_known_as_docker_writes_it(
    site: tuple[list[str], Docker],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    written: str,
    known: str,
) -> None:
    """Prevents a prune that never finds the image in use, since docker writes its name shorter."""
    argv, docker = site
    digest = "sha256:" + "5a" * 32
    docker.images.clear()
    for number in range(1, 5):
        at = digest if number == 1 else f"sha256:{number:064}"
        docker.images[f"sha256:p{number}"] = image(f"p{number}", f"{known}@{at}", day=number)
    (tmp_path / "etc/settings.yaml").write_text(settings_text(tmp_path / "m", image=f"{written}@{digest}"))
    assert run(*argv) == 0
    said = capsys.readouterr()
    listed = [line.split()[3] for line in said.out.splitlines() if " image " in line]
    assert (listed, said.err) == (["sha256:p2", "sha256:p3"], "")


def test_a_worker_lists_images_once_its_rank_said_which_is_in_use(
    site: tuple[list[str], Docker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents the loss of a worker's image after going back: it has no settings to name it."""
    argv, docker = site
    (tmp_path / "etc/settings.yaml").unlink()
    for number in range(1, 5):
        name = f"glm53/engine:000{number}"
        docker.images[f"sha256:w{number}"] = image(f"w{number}", name, day=number)
    assert run(*argv) == 0
    said = capsys.readouterr()
    assert "which image is in use here is not known" in said.err
    assert "sha256:" not in said.out
    for running in (True, False):
        docker.ranks = {"c0ffee": "sha256:w1"} if running else {}
        if not running:
            note_image(tmp_path / "state", "sha256:w1")
        assert run(*argv) == 0
        listed = [line.split()[3] for line in capsys.readouterr().out.splitlines() if " image " in line]
        assert listed == ["sha256:w2", "sha256:w3"]


def test_what_a_rank_runs_with_stays_whatever_the_settings_say(
    site: tuple[list[str], Docker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents the loss of what is served, when other settings came and nobody has restarted yet."""
    argv, docker = site
    for number, name in enumerate(("served", "before", "older")):
        folder = flat(tmp_path / "models" / name, {"config.json": b"{}"})
        write_manifest(folder, Manifest(repository="unit-lab/x", revision=COMMIT, files=()))
        aged(folder, 50 - number)
    new = str(tmp_path / "models/older")

    def listed() -> set[str]:
        run(*argv, new)
        lines = capsys.readouterr().out.splitlines()
        return {Path(line.split()[3]).name for line in lines if " in all" not in line}

    assert {"served", "sha256:oldest"} <= listed()
    docker.ranks = {"c0ffee": "sha256:oldest", "beef": "sha256:before"}
    docker.arguments = ["serve", str(tmp_path / "models/served"), "--port", "8888"]
    assert listed() == {"third-1", "now-1", "before-1"}


def test_what_docker_will_not_give_is_named(
    site: tuple[list[str], Docker], capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents an image torn from under a container, and a failure that looks like success."""
    argv, docker = site
    docker.used.add("sha256:oldest")
    assert run(*argv, "--yes") == 65
    said = capsys.readouterr()
    assert "sha256:oldest  NOT removed: conflict: a container uses it" in said.out
    assert "1 of 4 that were to go are still there" in said.err
