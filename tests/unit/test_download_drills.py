"""The download broken on purpose: kill -9 at every step, full disks, rotten records, hostile lists."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from glm53_service.artifacts import fetch, manifest
from glm53_service.artifacts.disk import free_bytes
from glm53_service.artifacts.download import Options, Outcome, World, download
from glm53_service.artifacts.hashing import hash_file
from glm53_service.artifacts.hub import Hub
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import NAME, UNFINISHED, Entry, read_manifest
from glm53_service.artifacts.sources import Want
from glm53_service.artifacts.verify import verify
from glm53_service.errors import ArtifactError, BusyError, ConfigError, Glm53Error
from glm53_service.files import write_durably
from glm53_service.settings import Source
from tests.unit import hub_server
from tests.unit.drills import apart, as_root, fill, is_free, killed, read_only, small_disk
from tests.unit.hub_server import COMMIT, Repository, sha256
from tests.unit.snapshots import REPOSITORY, cache, contents, flat, hidden, model_files
from tests.unit.test_download import Site, files, hub, site, snapshot_path

__all__ = ["hub", "site"]
FEW = {n: d for n, d in model_files(1, size=700).items() if n not in ("README.md", "config.json")}
FIRST = "model-00001-of-00001.safetensors"
SMALL = "provenance/source.json"


def part_in(folder: Path, name: str, data: bytes) -> Path:
    """Return where the unfinished file of a flat folder grows."""
    return folder / f".{name}.{sha256(data)[:16]}.incomplete"


def leftovers(folder: Path) -> set[str]:
    """Return what a finished snapshot has no use for, in a cache also beside it."""
    root = layout_of(folder).storage
    found = {p for pattern in ("*.incomplete", "*.link", "*.tmp") for p in root.rglob(pattern)}
    return {str(path.relative_to(root)) for path in found} | (hidden(folder) - {NAME})


# kill -9


@pytest.mark.parametrize("start", ["flat", "cache", "adopted flat", "adopted cache", "full", "repair"])
def test_killed_at_any_step_nothing_is_worse_and_it_goes_on(site: Site, tmp_path: Path, start: str) -> None:
    """Prevents every state that only a kill in an unlucky moment leaves: half a manifest, a blob without its
    link, an empty refs/main, a wrong file in place, a lock that stays.
    """
    site.hub.repositories[REPOSITORY].files = dict(FEW)
    options = {"full": start == "full", "repair": start == "repair"}
    for cut in range(1, 200):
        folder = begin(site, tmp_path / str(cut), start)
        before = {name: data for name, data in contents(folder).items() if FEW[name] == data}
        died = killed(cut, lambda: one_stream(site, folder, **options))  # noqa: B023
        after = contents(folder)
        assert {n: d for n, d in after.items() if FEW[n] != d and n != (start == "repair" and FIRST)} == {}
        assert before.items() <= after.items()
        assert not folder.exists() or is_free(folder)
        site.hub.asked.clear()
        outcome = one_stream(site, folder, **options)
        assert (contents(folder), leftovers(folder)) == (FEW, set())
        assert [n for n in after if FEW[n] == after[n] and site.hub.sent(n)] == [], "fetched what was there"
        assert outcome.manifest is not None
        assert {e.path: e.sha256 for e in outcome.manifest.files} == {n: sha256(d) for n, d in FEW.items()}
        if start.endswith("cache"):
            assert (folder.parents[1] / "refs/main").read_text() == COMMIT
        if not died:
            break
    assert cut > (4 if start in ("adopted flat", "full") else 8)
    assert not died


def begin(site: Site, root: Path, start: str) -> Path:
    """Return a folder as it is before the run: empty, a copy by other means, or one of ours."""
    if start.endswith("cache"):
        return cache(root / "hub", FEW) if start == "adopted cache" else snapshot_path(root)
    if start == "flat":
        return flat(root / "m", {SMALL: FEW[SMALL]})
    folder = flat(root / "m", FEW)
    if start != "adopted flat":
        one_stream(site, folder)
    if start == "repair":
        (folder / FIRST).write_bytes(bytes(len(FEW[FIRST])))
        (folder / NAME).unlink()
    return folder


def one_stream(site: Site, folder: Path, **options: bool) -> Outcome:
    """Download one file after the other: the steps come in the same order each time."""
    want = Want(what="model", layout=layout_of(folder), source=Source(repository=REPOSITORY, revision=COMMIT))
    world = World(hub=lambda: Hub(endpoint=site.hub.url), say=site.said.append, free=lambda _: 10**12)
    return download(want, Options(streams=1, **options), world)


def test_killed_in_the_middle_of_verify_the_disk_is_as_before(tmp_path: Path, site: Site) -> None:
    """Prevents a check that writes: the first step that would change anything is never reached."""
    folder = tmp_path / "m"
    site.get(folder)
    assert not killed(1, lambda: verify(layout_of(folder), full=True))


# A full disk


@as_root
@pytest.mark.parametrize("kind", ["flat", "cache"])
def test_a_disk_that_fills_up_in_the_middle_says_so_and_goes_on(
    site: Site, tmp_path: Path, kind: str
) -> None:
    """Prevents a traceback, a lost half or a broken record when another writer takes the last page."""
    big = model_files(2, size=300_000)
    site.hub.repositories[REPOSITORY].files = big

    def drill() -> None:
        disk = small_disk(tmp_path / "disk", 2 << 20)
        folder = disk / "m" if kind == "flat" else snapshot_path(disk)
        folder.mkdir(parents=True)
        other = fill(disk, 400_000)
        with pytest.raises(ArtifactError, match=r"the disk is full \(No space left on device\); .* missing"):
            one_stream(site, folder)
        assert all(big[name] == data for name, data in contents(folder).items())
        assert is_free(folder)
        (part,) = layout_of(folder).storage.rglob("*.incomplete")
        have = part.stat().st_size
        assert have > 50_000
        other.unlink()
        starts: list[int] = []
        honest = Hub.fetch

        def watched(self: Hub, source: Source, entry: Entry, file: BinaryIO, have: int) -> None:
            starts.append(have)
            honest(self, source, entry, file, have)

        Hub.fetch = watched  # type: ignore[method-assign]
        one_stream(site, folder)
        assert starts[0] == have
        assert (contents(folder), leftovers(folder)) == (big, set())

    apart(drill)


@as_root
@pytest.mark.parametrize("leave", range(0, 9 * 4096, 4096))
def test_a_disk_without_a_page_left_is_an_error_not_a_traceback(
    site: Site, tmp_path: Path, leave: int
) -> None:
    """Prevents an empty manifest or refs/main, and a traceback, when the last small write finds no room."""
    site.hub.repositories[REPOSITORY].files = dict(FEW)

    def drill() -> None:
        disk = small_disk(tmp_path / "disk", 1 << 20)
        folder = snapshot_path(disk)
        folder.mkdir(parents=True)
        other = fill(disk, leave)
        said = ""
        try:
            one_stream(site, folder)
        except ArtifactError as error:
            said = error.message
        assert not said or "the disk is full (No space left on device)" in said
        assert all(FEW[name] == data for name, data in contents(folder).items())
        assert not said or read_manifest(folder) is None
        other.unlink()
        one_stream(site, folder)
        assert (contents(folder), leftovers(folder)) == (FEW, set())
        assert (folder.parents[1] / "refs/main").read_text() == COMMIT

    apart(drill)


@as_root
def test_a_disk_that_is_too_small_is_named_before_the_first_byte(site: Site, tmp_path: Path) -> None:
    """Prevents a night's download that could never end: both numbers, the folder, and nothing fetched."""

    def drill() -> None:
        folder = small_disk(tmp_path / "disk", 1 << 20) / "m"
        site.free = free_bytes
        with pytest.raises(
            ArtifactError, match=rf"{folder}: 1\.0 MB free, but 9\.\d kB are missing and 1\.1 GB"
        ):
            site.get(folder)
        assert site.hub.asked == []
        assert contents(folder) == {}

    apart(drill)


@as_root
def test_a_disk_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    """Prevents advice to chown what is mounted read-only; a whole snapshot there is complete all the same."""
    site.get(tmp_path / "whole")
    flat(tmp_path / "half", {"config.json": files(site)["config.json"]})

    def drill() -> None:
        read_only(tmp_path)
        assert site.get(tmp_path / "whole").fetched == 0
        assert verify(layout_of(tmp_path / "whole"), full=True).right
        for name in ("half", "new"):
            with pytest.raises(ArtifactError, match=r"mounted read-only\)\n.*mount it writable"):
                site.get(tmp_path / name)

    apart(drill)


# Two at once


def test_two_snapshots_of_one_cache_do_not_write_one_blob_together(site: Site, tmp_path: Path) -> None:
    """Prevents a second download that cuts or overwrites a blob while, or after, the first has put it in
    place: each holds its own folder only.
    """
    folder = snapshot_path(tmp_path)
    name = "model-00001-of-00003.safetensors"
    data = files(site)[name]
    part = folder.parents[1] / "blobs" / f"{sha256(data)}.incomplete"
    site.hub.hold = threading.Event()
    first = threading.Thread(target=lambda: site.get(folder))
    first.start()
    while not (part.exists() and part.stat().st_size):
        assert first.is_alive()
    entry = Entry(path=name, size=len(data), sha256=sha256(data))
    with pytest.raises(BusyError, match="is being written by another run"):
        fetch.Sink(part, entry, lambda _: None, threading.Event())
    site.hub.hold.set()
    first.join()
    assert contents(folder) == files(site)


def test_files_of_equal_content_are_one_blob_fetched_once(site: Site, tmp_path: Path) -> None:
    """Prevents two streams of one run that write the same unfinished file: a licence that is there twice."""
    twins = {"LICENSE": b"x" * 2000, "provenance/LICENSE": b"x" * 2000, "a/empty": b"", "b/empty": b""}
    files(site).update(twins)
    for folder in (snapshot_path(tmp_path), tmp_path / "m"):
        site.hub.asked.clear()
        site.get(folder)
        assert (contents(folder), leftovers(folder)) == (files(site), set())
        assert verify(layout_of(folder), full=True).right
    assert len(site.hub.sent("LICENSE")) == 1


# Flipped bits


def test_any_flipped_bit_of_the_manifest_is_mended_by_a_repair(site: Site, tmp_path: Path) -> None:
    """Prevents right weights that are called wrong for ever, or fetched anew without an end, since the
    manifest is what rots; and a bit there that makes a right file worse.
    """
    folder = tmp_path / "m"
    site.hub.repositories[REPOSITORY].files = dict(FEW)
    site.get(folder)
    text = (folder / NAME).read_bytes()
    site.hub.asked.clear()
    for bit in range(3, len(text) * 8, 197):
        rotten = bytearray(text)
        rotten[bit // 8] ^= 1 << (bit % 8)
        (folder / NAME).write_bytes(rotten)
        said = ""
        try:
            site.get(folder, full=True, repair=True)
        except Glm53Error as error:
            said = str(error)
        # Another repository or revision by its own word is not ours to replace.
        assert "holds " in said or NAME in said if said else (folder / NAME).read_bytes() == text
        assert contents(folder) == FEW
    assert site.hub.asked == []


@pytest.mark.parametrize("text", [b"", b"{", b'{"files": [{"path": "../x", "size": 1}]}', b"\xff\xfe"])
def test_a_record_of_what_was_proven_that_is_rotten_is_not_used(
    site: Site, tmp_path: Path, text: bytes
) -> None:
    """Prevents a download that no run gets past: the record only saves work."""
    folder = flat(tmp_path / "m", {SHARD_TWO: files(site)[SHARD_TWO]})
    (folder / UNFINISHED).write_bytes(text)
    site.get(folder)
    assert (contents(folder), hidden(folder)) == (files(site), {NAME})
    assert site.hub.sent(SHARD_TWO) == []


SHARD_TWO = "model-00002-of-00003.safetensors"


# What else may lie there


def socket_at(path: Path) -> None:
    """Make a socket."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path.parent.parent / "s"))  # a path of 107 bytes is the longest
    (path.parent.parent / "s").rename(path)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": socket_at,
    "a device": lambda path: os.mknod(path, 0o020644, os.makedev(1, 3)),
}


@as_root
@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("name", [SHARD_TWO, "config.json", "b/empty"])
def test_what_is_no_file_is_named_and_left(site: Site, tmp_path: Path, what: str, name: str) -> None:
    """Prevents a check that waits for a pipe without end, and a folder or a device that is replaced."""
    files(site)["b/empty"] = b""
    folder = tmp_path / "m"
    site.get(folder)
    (folder / name).unlink()
    NO_FILES[what](folder / name)
    (problem,) = verify(layout_of(folder), full=True).problems
    assert str(problem) == f"{name}: is {what}, expected a file: move it away"
    for repair in (False, True):
        with pytest.raises(
            ArtifactError, match=rf"{name}: is {what}, expected a file(.|\n)*move it away, then"
        ):
            site.get(folder, repair=repair)
    assert not (folder / name).is_file()
    (folder / NAME).unlink()
    assert verify(layout_of(folder), full=False).right is (name == "b/empty")


@as_root
def test_a_pipe_in_the_manifests_place_is_not_waited_for(site: Site, tmp_path: Path) -> None:
    """Prevents a start of the service that hangs."""
    folder = tmp_path / "m"
    site.get(folder)
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)
    with pytest.raises(ArtifactError, match=rf"{NAME} is no file\n  Fix: move it away"):
        site.get(folder)


def test_a_link_in_a_folders_place_is_not_followed_out(site: Site, tmp_path: Path) -> None:
    """Prevents a download that writes into somebody else's folder, to which a link in ours leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = flat(tmp_path / "m", {"config.json": files(site)["config.json"]})
    (folder / "provenance").symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=rf"source\.json: leads to {elsewhere}, outside {folder}"):
        site.get(folder)
    assert list(elsewhere.iterdir()) == []
    (folder / "provenance").unlink()
    (folder / "provenance").symlink_to("nowhere")
    with pytest.raises(ArtifactError, match=rf"{folder}/provenance: File exists\n.*link to nowhere"):
        site.get(folder)


def test_an_unfinished_file_is_not_written_through_a_link(site: Site, tmp_path: Path) -> None:
    """Prevents a download that appends to a file of somebody else."""
    folder, other = tmp_path / "m", tmp_path / "other"
    other.write_bytes(b"precious")
    folder.mkdir()
    part_in(folder, SHARD_TWO, files(site)[SHARD_TWO]).symlink_to(other)
    with pytest.raises(ArtifactError, match=r"incomplete: Too many levels of symbolic links\n.*move it away"):
        site.get(folder)
    assert other.read_bytes() == b"precious"


def test_a_folder_that_is_a_link_to_nowhere_is_named(site: Site, tmp_path: Path) -> None:
    """Prevents a traceback for a disk that is not mounted."""
    (tmp_path / "m").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(ArtifactError, match=rf"{tmp_path}/m: File exists\n.*link to nowhere"):
        site.get(tmp_path / "m")


@as_root
def test_what_another_account_has_closed_is_named(site: Site, tmp_path: Path) -> None:
    """Prevents a traceback, or "complete", for files and folders that this account may not look into."""
    folder = tmp_path / "m"
    site.get(folder)
    (folder / SHARD_TWO).chmod(0o600)
    flat(tmp_path / "closed", {"m/config.json": b"{}"})
    (tmp_path / "closed").chmod(0o700)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    site.hub.asked.clear()

    def drill() -> None:
        os.setgid(65534)
        os.setuid(65534)
        (problem,) = verify(layout_of(folder), full=True).problems
        assert "cannot be read by this account (owner 0:0, mode 600)" in str(problem)
        with pytest.raises(ArtifactError, match=rf"closed/m/{NAME} cannot be read: Permission denied"):
            site.get(tmp_path / "closed/m")
        with pytest.raises(ArtifactError, match=r"belongs to root, mode 755: nobody cannot write there"):
            site.get(folder)

    apart(drill)
    assert site.hub.asked == []


# Names


def test_unusual_names_arrive(site: Site, tmp_path: Path) -> None:
    """Prevents a name that becomes an option, a pattern, or too long once ours are added to it."""
    strange = [
        " a b ",
        "-rf",
        "--help",
        "Ünï ✓ 模型",
        "*?[x]",
        "%s{}",
        "x" * 251 + ".txt",
        "é" * 126,
        "'\"$(x)`",
    ]
    files(site).update({f"{name}/{name}": name.encode() for name in strange})
    for folder in (tmp_path / "m", snapshot_path(tmp_path)):
        site.get(folder)
        assert (contents(folder), leftovers(folder)) == (files(site), set())
        assert verify(layout_of(folder), full=True).right


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/../../x", "a\nb", "a\x1b[2Jb", "\u202etxt", ".glm53-manifest.json", ".glm53-x/y"],
)
def test_a_hostile_list_is_refused_before_anything_is_made(site: Site, tmp_path: Path, name: str) -> None:
    """Prevents a repository that writes outside the folder, over our records, or on the reader's terminal."""
    files(site)[name] = b"x"
    with pytest.raises(ConfigError) as caught:
        site.get(tmp_path / "m")
    assert f"found the path {name!r}, expected one inside the snapshot" in str(caught.value)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("digest", ["../../../evil", "/evil", "", "A" * 64, "0" * 63])
@pytest.mark.parametrize("name", [SHARD_TWO, "config.json"])
def test_a_hostile_hash_is_no_path(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, name: str
) -> None:
    """Prevents a hub that names a file outside the cache by the hash of its content."""
    honest = hub_server._item

    def item(path: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = dict(honest(path, data))
        if path == name and "lfs" in found:
            found["lfs"] = {**found["lfs"], "oid": digest}
        elif path == name:
            found["oid"] = digest
        return found

    monkeypatch.setattr(hub_server, "_item", item)
    with pytest.raises(ArtifactError, match=r"the list of .* (cannot be used: .*regex|has no hash of)"):
        site.get(snapshot_path(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_sends_more_than_it_listed_fills_no_disk(site: Site, tmp_path: Path) -> None:
    """Prevents a file that grows until the disk is full."""
    listed = files(site)[SHARD_TWO]

    class Longer(dict[str, bytes]):
        def __getitem__(self, name: str) -> bytes:
            return listed + bytes(10_000) if name == SHARD_TWO else super().__getitem__(name)

    site.hub.repositories[REPOSITORY] = Repository(files=Longer(files(site)))
    with pytest.raises(ArtifactError, match=rf"{SHARD_TWO}: more comes than the {len(listed)} bytes"):
        site.get(tmp_path / "m")
    assert sum(p.stat().st_size for p in (tmp_path / "m").rglob(f".{SHARD_TWO}*")) <= len(listed)


def test_thousands_of_small_files(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents work that grows with the square of the files (a record of all, written after each), and 4 MiB
    faulted in to hash four bytes: 10,000 files took three minutes.
    """
    monkeypatch.setattr(hub_server, "PAGE", 1000)
    many = {f"d{n % 20}/f{n}": b"%d" % n for n in range(2_000)}
    files(site).update(many)
    folder = flat(tmp_path / "m", many)
    written: list[str] = []

    def counted(path: Path, text: str) -> None:
        written.append(path.name)
        write_durably(path, text)

    monkeypatch.setattr(manifest, "write_durably", counted)
    site.get(folder)
    assert (len(contents(folder)), hidden(folder)) == (2_007, {NAME})
    assert written.count(UNFINISHED) <= 3
    assert written.count(NAME) == 1
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    hash_file(folder / "d0/f0")
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100
    assert verify(layout_of(folder), full=True).right


@pytest.mark.parametrize("when", [0, 4_000_000_000])
def test_a_clock_that_was_wrong_changes_nothing(site: Site, tmp_path: Path, when: int) -> None:
    """Prevents a decision by a file's time: a Spark without a battery boots in 1970."""
    folder = tmp_path / "m"
    site.get(folder)
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (when, when))
    shutil.copy(folder / SHARD_TWO, part_in(folder, SHARD_TWO, files(site)[SHARD_TWO]))
    (folder / SHARD_TWO).unlink()
    os.utime(part_in(folder, SHARD_TWO, files(site)[SHARD_TWO]), (when, when))
    site.hub.asked.clear()
    site.get(folder)
    assert site.hub.asked == []
    assert contents(folder) == files(site)
