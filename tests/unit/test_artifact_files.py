"""Layouts, manifests, checks and hashes of snapshots on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glm53_service.artifacts.disk import check_room
from glm53_service.artifacts.hashing import BLOCK, git_sha1, hash_file, hash_files
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import (
    NAME,
    Entry,
    Manifest,
    decode_manifest,
    encode_manifest,
    write_manifest,
)
from glm53_service.artifacts.ready import check_model
from glm53_service.artifacts.snapshot import Kind, full_check, own_word, quick_check
from glm53_service.artifacts.sources import FALLBACKS, RECIPES, drafter_note, wants
from glm53_service.artifacts.verify import verify
from glm53_service.engines import engine_for
from glm53_service.errors import ArtifactError, ConfigError, UnavailableError
from tests.unit.fixtures import launch_of, place, settings_of, tensorfold_data, vllm_data, with_dflash2
from tests.unit.hub_server import COMMIT, sha256
from tests.unit.hub_server import git_sha1 as git_sha1_of
from tests.unit.snapshots import REPOSITORY, cache, flat, model_files

SHARD = "model-00002-of-00003.safetensors"
FILES = model_files()


def manifest_of(files: dict[str, bytes]) -> Manifest:
    """Return the manifest of these files."""
    return Manifest(
        repository=REPOSITORY,
        revision=COMMIT,
        files=tuple(Entry(path=n, size=len(d), sha256=sha256(d)) for n, d in files.items()),
    )


def kinds(folder: Path) -> dict[str, Kind]:
    """Return what a quick check finds."""
    return {p.path: p.kind for p in quick_check(layout_of(folder), manifest_of(FILES))}


# Layouts and manifests


def test_a_path_says_its_layout() -> None:
    """Prevents a container that mounts the links of a cache without what they lead to."""
    path = f"/data/hf/hub/models--Mia-AiLab--GLM-5.3--x/snapshots/{COMMIT}"
    layout = layout_of(path)
    assert (layout.repository, layout.revision) == ("Mia-AiLab/GLM-5.3--x", COMMIT)
    assert (layout.root, layout.storage) == (
        Path("/data/hf/hub"),
        Path("/data/hf/hub/models--Mia-AiLab--GLM-5.3--x"),
    )
    plain = layout_of("/srv/models/glm")
    assert (plain.hub, plain.root) == (None, Path("/srv/models/glm"))
    assert layout_of("/data/models--a--b/snapshots/main").hub is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a//b", "./a", "a\0b"])
def test_a_manifest_cannot_lead_out_of_its_folder(name: str) -> None:
    """Prevents a manifest from another machine that makes a copy write elsewhere."""
    text = encode_manifest(Manifest(repository="a/b", revision=COMMIT, files=(Entry(path=name, size=1),)))
    with pytest.raises(ConfigError, match="expected one inside the snapshot"):
        decode_manifest(text.encode(), "worker")


def test_a_manifest_survives_its_own_text_and_a_broken_one_is_named() -> None:
    """Prevents hashes that change by being stored, and a traceback on half a file."""
    manifest = manifest_of(FILES)
    assert decode_manifest(encode_manifest(manifest).encode(), "x").same_files(manifest)
    with pytest.raises(ArtifactError, match="x is no manifest"):
        decode_manifest(encode_manifest(manifest).encode()[:-20], "x")


# Checks


@pytest.mark.parametrize("kind", ["model", "hub", "chain"])
def test_a_right_cache_is_right(tmp_path: Path, kind: str) -> None:
    """Prevents refusing a layout that the hub's tools make."""
    assert kinds(cache(tmp_path / "hub", FILES, kind=kind)) == {}


def test_what_is_wrong_is_named_for_what_it_is(tmp_path: Path) -> None:
    """Prevents "sync success" with links that lead nowhere, and one word for six different faults."""
    folder = cache(tmp_path / "hub", FILES, kind="hub")
    (folder / "model-00001-of-00003.safetensors").resolve().unlink()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(FILES[SHARD][:-1])
    (folder / "model-00003-of-00003.safetensors").unlink()
    (folder / "config.json").resolve().write_bytes(FILES["config.json"].replace(b"unit", b"UNIT"))
    outside = tmp_path / "elsewhere"
    outside.write_bytes(FILES["README.md"])
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(outside)
    (folder / "model-00009-of-00003.safetensors").write_bytes(b"old")
    assert kinds(folder) == {
        "model-00001-of-00003.safetensors": Kind.DANGLING,
        SHARD: Kind.SHORT,
        "model-00003-of-00003.safetensors": Kind.MISSING,
        "config.json": Kind.CHANGED,
        "README.md": Kind.OUTSIDE,
        "model-00009-of-00003.safetensors": Kind.EXTRA,
    }


def test_a_quick_check_reads_no_byte_of_the_weights(tmp_path: Path) -> None:
    """Prevents the walk over 164 GiB at every start: an access time that is older than the file stays so."""
    folder = flat(tmp_path / "m", FILES)
    for name in FILES:
        os.utime(folder / name, ns=(1, 2_000_000_000))
    assert kinds(folder) == {}
    read = {name for name in FILES if (folder / name).stat().st_atime_ns != 1}
    assert not {name for name in read if name.endswith(".safetensors")}
    assert full_check(layout_of(folder), manifest_of(FILES), lambda _: None, threads=2) == []
    read = {name for name in FILES if (folder / name).stat().st_atime_ns != 1}
    assert SHARD in read, "the filesystem keeps no access times, so this test proves nothing"


def test_a_full_check_finds_one_flipped_bit(tmp_path: Path) -> None:
    """Prevents weights that are wrong in one bit from being called right."""
    folder = flat(tmp_path / "m", FILES)
    data = bytearray(FILES[SHARD])
    data[-1] ^= 0x10
    (folder / SHARD).write_bytes(data)
    assert kinds(folder) == {}
    counted: list[int] = []
    found = full_check(layout_of(folder), manifest_of(FILES), counted.append, threads=3)
    assert [(p.path, p.kind) for p in found] == [(SHARD, Kind.CHANGED)]
    assert sum(counted) == sum(len(d) for n, d in FILES.items() if n.endswith(".safetensors"))


def test_a_snapshot_without_manifest_is_judged_by_its_headers(tmp_path: Path) -> None:
    """Prevents a shard that was cut off from passing because nobody wrote sizes down."""
    folder = flat(tmp_path / "m", FILES)
    assert own_word(layout_of(folder)) == []
    (folder / SHARD).write_bytes(FILES[SHARD][:-5])
    assert [(p.path, p.kind) for p in own_word(layout_of(folder))] == [(SHARD, Kind.SHORT)]
    (folder / SHARD).write_bytes(FILES[SHARD][:5])
    assert [p.text for p in own_word(layout_of(folder))] == ["has no whole safetensors header"]
    (folder / SHARD).unlink()
    assert [p.kind for p in own_word(layout_of(folder))] == [Kind.MISSING]
    (folder / "config.json").unlink()
    assert {p.path for p in own_word(layout_of(folder))} == {SHARD, "config.json"}


def test_verify_says_what_it_could_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a full check that compared nothing from being called right."""
    folder = flat(tmp_path / "m", FILES)
    layout = layout_of(folder)
    assert verify(layout, full=False).right
    assert [str(p) for p in verify(layout, full=True).problems] == [
        f"{folder}: no manifest, so no hash to compare"
    ]
    write_manifest(folder, manifest_of(FILES))
    assert verify(layout, full=True).right
    assert "3 of 3 files" in capsys.readouterr().err, "it read '0 of 7 files' once all were hashed"
    (folder / SHARD).write_bytes(bytes(len(FILES[SHARD])))
    assert (verify(layout, full=False).right, verify(layout, full=True).right) == (True, False)


# Hashes


def test_hashes_are_those_of_sha256sum_and_git(tmp_path: Path) -> None:
    """Prevents a hash that depends on how the file was read: block borders, an odd tail, an empty file."""
    for size in (0, 1, BLOCK, BLOCK + 511, 2 * BLOCK - 1):
        data = os.urandom(size)
        path = tmp_path / str(size)
        path.write_bytes(data)
        counted: list[int] = []
        assert hash_file(path, counted.append) == sha256(data)
        assert sum(counted) == size
        assert git_sha1(path) == git_sha1_of(data)


def test_one_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    """Prevents a check that ends at the first file that cannot be read."""
    (tmp_path / "a").write_bytes(b"a")
    results = dict(hash_files([tmp_path / "a", tmp_path / "gone"], threads=2))
    assert results[tmp_path / "a"] == sha256(b"a")
    assert isinstance(results[tmp_path / "gone"], FileNotFoundError)


def test_room_is_counted_per_filesystem(tmp_path: Path) -> None:
    """Prevents two folders on one disk from being promised the same room."""
    (tmp_path / "a").mkdir()
    needs = {tmp_path / "a/x": 600, tmp_path / "b": 500}
    check_room(needs, free=lambda _: 1110, spare=10)
    with pytest.raises(ArtifactError, match=r"1\.1 kB are missing"):
        check_room(needs, free=lambda _: 1109, spare=10)
    check_room({tmp_path: 0}, free=lambda _: 0, spare=10)


# What is wanted


def test_the_recipes_pins_are_the_default(tmp_path: Path) -> None:
    """Prevents a surprise download of another checkpoint when an engine's default moves."""
    (model,) = wants(settings_of(tensorfold_data()))
    assert (model.source, model.fallback) == (RECIPES["tensorfold"], None)
    (model,) = wants(settings_of(vllm_data()))
    assert (model.source, model.fallback) == (RECIPES["vllm"], FALLBACKS["vllm"])
    assert {len(s.revision) for s in (*RECIPES.values(), *FALLBACKS.values())} == {40}


def test_a_cache_path_is_its_own_source_and_must_agree(tmp_path: Path) -> None:
    """Prevents a path of one snapshot that is filled with another."""
    path = str(cache(tmp_path / "hub", {}).parent / COMMIT)
    source = {"repository": REPOSITORY, "revision": COMMIT}
    model = {"path": f"/hub/models--unit-lab--GLM-unit/snapshots/{COMMIT}"}
    (want,) = wants(settings_of(vllm_data(model=model)))
    assert (str(want.source), want.fallback) == (f"{REPOSITORY}@{COMMIT[:12]}", None)
    assert wants(settings_of(vllm_data(model={**model, "source": source})))[0].source == want.source
    wrong = {**source, "revision": "8" * 40}
    with pytest.raises(ConfigError, match=r"model\.path: found the snapshot unit-lab/GLM-unit@0123"):
        wants(settings_of(vllm_data(model={"path": path, **model, "source": wrong})))


@pytest.mark.parametrize("revision", ["main", "v1.0", "0123456789ab"])
def test_a_branch_is_no_revision(revision: str) -> None:
    """Prevents weights that change under a name: three different drafters have had the same one."""
    with pytest.raises(ConfigError, match=r"model\.source\.revision: .*a branch or tag can change"):
        settings_of(tensorfold_data(model={"source": {"repository": "a/b", "revision": revision}}))


def test_dflash2_is_wanted_only_once_its_licence_is_accepted() -> None:
    """Prevents a download of non-commercial weights that nobody has agreed to."""
    assert [want.what for want in wants(settings_of(tensorfold_data()))] == ["model"]
    assert "nobody has accepted its licence" in drafter_note(settings_of(tensorfold_data()))
    settings = settings_of(with_dflash2())
    model, drafter = wants(settings)
    assert (model.what, str(drafter.source)) == ("model", "incoai/GLM-5.3-Flash-DFlash2@bf582e4eacc1")
    assert drafter.sha256 == "ab" * 32
    assert drafter_note(settings) == ""
    assert NAME.startswith(".")


@pytest.mark.parametrize("engine", ["tensorfold", "vllm"])
def test_a_container_sees_what_a_caches_links_lead_to(engine: str) -> None:
    """Prevents a rank whose model is a folder of dangling links: a snapshot is links into its cache."""
    path = f"/data/hub/models--unit-lab--GLM-unit/snapshots/{COMMIT}"
    data = tensorfold_data if engine == "tensorfold" else vllm_data
    settings = settings_of(data(model={"path": path}))
    spec = engine_for(settings).container(launch_of(settings), place(1), "sha256:x")
    assert [m.source for m in spec.mounts if m.read_only] == ["/data/hub"]
    assert path in spec.command


def test_a_start_looks_at_names_links_sizes_and_small_files(tmp_path: Path) -> None:
    """Prevents a start that fails after minutes of loading: a shard is short, or a link leads nowhere."""
    folder = cache(tmp_path / "hub", FILES)
    write_manifest(folder, manifest_of(FILES))
    check_model(folder)
    (folder / "stranger.safetensors").write_bytes(b"x")
    check_model(folder)
    (folder / SHARD).resolve().unlink()
    with pytest.raises(UnavailableError, match=rf"not what its manifest says:\n  - {SHARD}: a link to"):
        check_model(folder)
    (folder / NAME).write_text("{")
    with pytest.raises(UnavailableError, match="is no manifest"):
        check_model(folder)
    (folder / NAME).unlink()
    check_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UnavailableError, match=r"config\.json cannot be read by this service: No such file"):
        check_model(folder)
