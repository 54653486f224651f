"""The download with the hub's real client against a hub on loopback: layouts, faults, nothing made worse."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm53_service.artifacts import present
from glm53_service.artifacts.disk import held
from glm53_service.artifacts.download import FOUND_HERE, Options, Outcome, World, download
from glm53_service.artifacts.hub import Hub
from glm53_service.artifacts.layout import Layout, layout_of
from glm53_service.artifacts.manifest import NAME, UNFINISHED, Entry, read_manifest
from glm53_service.artifacts.snapshot import Problem, check_content
from glm53_service.artifacts.sources import Want
from glm53_service.errors import ArtifactError, AuthError, BusyError, Glm53Error, UnavailableError
from glm53_service.settings import Source
from tests.unit.hub_server import COMMIT, HubServer, Repository, serving, sha256
from tests.unit.snapshots import REPOSITORY, cache, contents, flat, hidden, model_files

SHARD = "model-00002-of-00003.safetensors"
OTHER = "unit-lab/GLM-elsewhere"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with one model, and a client that does not sleep between its own tries."""
    awake = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr("huggingface_hub.utils._http.time", awake)
    monkeypatch.setattr("huggingface_hub.file_download.time", awake)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    with serving(HubServer({REPOSITORY: Repository(files=model_files())})) as server:
        yield server


class Site:
    """One download: the place, the words it said, and how long it would have slept."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.said: list[str] = []
        self.pauses: list[float] = []
        self.free: Callable[[Path], int] = lambda _: 10**12

    def get(
        self,
        folder: Path,
        *,
        token: str | None = None,
        fallback: str = "",
        revision: str = COMMIT,
        sha: str = "",
        **options: bool,
    ) -> Outcome:
        """Run it."""
        want = Want(
            what="model",
            layout=layout_of(folder),
            source=Source(repository=REPOSITORY, revision=revision),
            fallback=Source(repository=fallback, revision=COMMIT) if fallback else None,
            sha256=sha,
        )
        world = World(
            hub=lambda: Hub(token, endpoint=self.hub.url),
            say=self.said.append,
            pause=self.pauses.append,
            free=lambda path: self.free(path),
        )
        return download(want, Options(streams=3, **options), world)


@pytest.fixture
def site(hub: HubServer) -> Site:
    """A download from that hub."""
    return Site(hub)


def snapshot_path(root: Path) -> Path:
    """Return where a hub cache has the model's snapshot."""
    return root / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / COMMIT


def files(site: Site) -> dict[str, bytes]:
    """Return what the hub has."""
    return site.hub.repositories[REPOSITORY].files


def test_a_flat_folder_gets_every_file_and_a_manifest(site: Site, tmp_path: Path) -> None:
    """Prevents a folder that looks complete and is not, and hashes that nobody can check later."""
    folder = tmp_path / "models/unit"
    outcome = site.get(folder)
    assert contents(folder) == files(site)
    assert hidden(folder) == {NAME}
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {e.path: e.sha256 for e in manifest.files} == {n: sha256(d) for n, d in files(site).items()}
    assert (outcome.fetched, outcome.bytes) == (7, sum(map(len, files(site).values())))


def test_a_cache_gets_blobs_links_and_main(site: Site, tmp_path: Path) -> None:
    """Prevents a cache that other tools do not find: blobs by hash, relative links, refs/main."""
    folder = snapshot_path(tmp_path)
    outcome = site.get(folder)
    assert contents(folder) == files(site)
    assert (folder / SHARD).readlink() == Path("../../blobs") / sha256(files(site)[SHARD])
    assert (folder.parents[1] / "refs/main").read_text() == COMMIT
    assert outcome.notes == ("refs/main was missing and now names this revision",)
    assert not list(folder.parents[1].rglob("*.incomplete"))


@pytest.mark.parametrize("kind", ["model", "hub", "chain"])
def test_an_existing_cache_is_adopted_in_place(site: Site, tmp_path: Path, kind: str) -> None:
    """Prevents a second copy of 164 GiB beside one of any layout that the hub's tools have made."""
    folder = cache(tmp_path / "hub", files(site), kind=kind)
    before = {path: path.readlink() for path in folder.rglob("*") if path.is_symlink()}
    outcome = site.get(folder)
    assert (outcome.fetched, site.hub.asked) == (0, [])
    assert {path: path.readlink() for path in folder.rglob("*") if path.is_symlink()} == before
    assert read_manifest(folder) is not None


@pytest.mark.parametrize("kind", ["model", "hub"])
def test_a_dangling_link_is_fetched_alone(site: Site, tmp_path: Path, kind: str) -> None:
    """Prevents a "complete" snapshot whose links lead nowhere, and a whole new copy to mend one."""
    folder = cache(tmp_path / "hub", files(site), kind=kind)
    (folder / SHARD).resolve().unlink()
    outcome = site.get(folder)
    assert (outcome.fetched, contents(folder)) == (1, files(site))
    assert [path for _, path, _ in site.hub.asked] == [SHARD]


def test_a_lost_link_is_set_without_a_download(site: Site, tmp_path: Path) -> None:
    """Prevents fetching what the cache still has under its hash."""
    folder = cache(tmp_path / "hub", files(site))
    (folder / SHARD).unlink()
    assert site.get(folder).fetched == 0
    assert contents(folder) == files(site)


def test_complete_means_no_network_and_no_write(site: Site, tmp_path: Path) -> None:
    """Prevents a start that needs the hub for what is on the disk."""
    folder = tmp_path / "m"
    site.get(folder)
    site.hub.asked.clear()
    site.hub.url = "http://127.0.0.1:9"
    stamp = (folder / NAME).stat().st_mtime_ns
    site.free = lambda _: 0
    assert site.get(folder).fetched == 0
    assert site.get(folder, offline=True).manifest is not None
    assert (folder / NAME).stat().st_mtime_ns == stamp


def test_without_a_manifest_and_network_its_own_index_is_asked(site: Site, tmp_path: Path) -> None:
    """Prevents refusing a whole copy somebody brought on a disk, and trusting one that was cut short."""
    folder = flat(tmp_path / "m", files(site))
    (folder / SHARD).write_bytes(files(site)[SHARD][:-1])
    url, site.hub.url = site.hub.url, "http://127.0.0.1:9"
    with pytest.raises(ArtifactError, match=rf"no hub is asked:\n.*{SHARD}: \d+ bytes, expected \d+"):
        site.get(folder, offline=True)
    with pytest.raises(UnavailableError, match=r"no answer from http://127\.0\.0\.1:9"):
        site.get(folder)
    assert not (folder / NAME).exists()
    (folder / SHARD).write_bytes(files(site)[SHARD])
    outcome = site.get(folder, offline=True)
    assert (outcome.manifest is not None, outcome.notes) == (True, (FOUND_HERE,))
    assert outcome == site.get(folder)
    site.hub.url = url


def test_what_was_found_here_is_measured_by_the_hub_once_it_answers(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a model that nobody published from passing for the hub's, and weights hashed twice for it."""
    folder = flat(tmp_path / "m", files(site))
    (folder / ".gitattributes").write_bytes(b"x")
    (folder / ".cache").mkdir()
    (folder / ".cache/note").write_bytes(b"of the hub's tools")
    found = site.get(folder, offline=True).manifest
    assert found is not None
    assert found.adopted
    assert {e.path for e in found.files} == {*files(site), ".gitattributes"}
    assert {e.path: e.sha256 for e in found.files if e.path in files(site)} == {
        name: sha256(data) for name, data in files(site).items()
    }
    read: list[str] = []

    def check(layout: Layout, entry: Entry, count: Callable[[int], None]) -> Problem | None:
        read.append(entry.path)
        return check_content(layout, entry, count)

    monkeypatch.setattr(present, "check_content", check)
    confirmed = site.get(folder)
    assert (confirmed.fetched, confirmed.notes) == (0, ())
    written = read_manifest(folder)
    assert written is not None
    assert (written.repository, written.revision) == (REPOSITORY, COMMIT)
    assert sorted(read) == sorted(name for name in files(site) if not name.endswith(".safetensors"))


def test_another_file_than_the_hubs_is_found_once_it_answers(site: Site, tmp_path: Path) -> None:
    """Prevents a rotten shard that became its own measure from staying so."""
    rotten = bytearray(files(site)[SHARD])
    rotten[-1] ^= 1
    folder = flat(tmp_path / "m", {**files(site), SHARD: bytes(rotten)})
    site.get(folder, offline=True)
    with pytest.raises(ArtifactError, match=rf"files are there that are not those of .*\n.*{SHARD}"):
        site.get(folder)
    (folder / "config.json").write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=r"config\.json: 2 bytes.*\n.*remove .*manifest\.json"):
        site.get(folder, offline=True)


def test_a_cut_connection_goes_on_in_the_middle(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents starting 1.5 GB anew for each dropped connection, and signed addresses in a log."""
    caplog.set_level(logging.DEBUG)
    site.hub.drop[SHARD] = [1000]
    site.get(tmp_path / "m")
    assert site.hub.sent(SHARD) == ["", "bytes=1000-"]
    assert "/store/" not in caplog.text
    assert contents(tmp_path / "m") == files(site)


def test_a_killed_run_goes_on_where_it_stopped(site: Site, tmp_path: Path) -> None:
    """Prevents losing what a killed download had: kill -9 in the middle of a file, then run again."""
    folder = tmp_path / "m"
    site.hub.hold = threading.Event()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            site.get(folder)
        finally:
            os._exit(1)
    small = [name for name in files(site) if not name.endswith(".safetensors")]
    part = folder / f".{SHARD}.{sha256(files(site)[SHARD])[:16]}.incomplete"
    for _ in range(1000):
        if part.exists() and part.stat().st_size == 1500 and all((folder / n).exists() for n in small):
            break
        time.sleep(0.01)
    os.kill(pid, 9)
    assert os.waitpid(pid, 0)[1] == 9
    site.hub.hold.set()
    site.hub.asked.clear()
    site.get(folder)
    assert site.hub.sent(SHARD) == ["bytes=1500-"]
    assert not [path for _, path, _ in site.hub.asked if path in small]
    assert (contents(folder), hidden(folder)) == (files(site), {NAME})


def test_a_rotten_unfinished_file_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    """Prevents a whole file of old and new halves: what a power cut left is not what was sent."""
    folder = snapshot_path(tmp_path)
    part = folder.parents[1] / "blobs" / f"{sha256(files(site)[SHARD])}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 500)
    site.get(folder)
    assert site.hub.sent(SHARD) == ["bytes=500-", ""]
    assert contents(folder) == files(site)


def test_a_server_without_ranges_is_read_from_the_start(site: Site, tmp_path: Path) -> None:
    """Prevents a file with its first half twice, when a proxy ignores where the download goes on."""
    site.hub.drop[SHARD] = [1000]
    site.hub.ignore_ranges = True
    site.get(tmp_path / "m")
    assert contents(tmp_path / "m") == files(site)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_refuses_for_now_is_asked_again(site: Site, tmp_path: Path, status: int) -> None:
    """Prevents giving up a night's download for a rate limit or a hub that restarts."""
    site.hub.refuse[SHARD] = [status]
    site.get(tmp_path / "m")
    assert contents(tmp_path / "m") == files(site)


def test_a_hub_that_stays_away_ends_the_run_and_nothing_is_lost(site: Site, tmp_path: Path) -> None:
    """Prevents a download that waits for ever, or that throws away the files it has."""
    site.hub.refuse[SHARD] = [503] * 99
    with pytest.raises(UnavailableError, match="503: the hub refuses for now"):
        site.get(tmp_path / "m")
    assert len(site.pauses) == 7
    assert 2 <= site.pauses[0] < site.pauses[-1] <= 78
    site.hub.refuse.clear()
    site.hub.asked.clear()
    site.get(tmp_path / "m")
    assert contents(tmp_path / "m") == files(site)
    assert (("GET", "config.json", "")) not in site.hub.asked


def test_wrong_bytes_are_never_put_in_place(site: Site, tmp_path: Path) -> None:
    """Prevents a flipped bit on the way from becoming the model; the file is fetched anew, then given up."""
    site.hub.wrong = {SHARD: 1, "config.json": 1}
    site.get(tmp_path / "a")
    assert contents(tmp_path / "a") == files(site)
    assert site.hub.sent("config.json") == ["", ""]
    site.hub.wrong[SHARD] = 9
    with pytest.raises(ArtifactError, match=rf"{SHARD}: what came is not what .* lists, three times"):
        site.get(tmp_path / "b")
    assert not (tmp_path / "b" / SHARD).exists()


@pytest.mark.parametrize(
    ("change", "token", "error", "said"),
    [
        ({"gated": True}, None, AuthError, "401: .* is gated.*\n  Fix: accept its terms on https.*GLM-unit"),
        ({"gated": True}, "hf_unit_0123456789", AuthError, "403: .* does not let this token read it"),
        ({}, "hf_wrong_token", AuthError, "401: the hub does not accept this token"),
    ],
)
def test_refusals_name_their_own_way_out(
    site: Site, tmp_path: Path, change: dict[str, bool], token: str | None, error: type[Glm53Error], said: str
) -> None:
    """Prevents one "download failed" for a missing token, a bad one, and terms nobody has accepted."""
    for key, value in change.items():
        setattr(site.hub.repositories[REPOSITORY], key, value)
    with pytest.raises(error, match=said) as caught:
        site.get(tmp_path / "m", token=token)
    assert "hf_" not in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_no_such_repository_or_revision(site: Site, tmp_path: Path) -> None:
    """Prevents a misspelt name that looks like a token problem, a moved revision that looks like none."""
    with pytest.raises(ArtifactError, match=f"404: {REPOSITORY} has no revision {'9' * 40}"):
        site.get(tmp_path / "m", revision="9" * 40)
    del site.hub.repositories[REPOSITORY]
    with pytest.raises(AuthError, match="401: the hub shows unit-lab/GLM-unit to nobody without a token"):
        site.get(tmp_path / "m")
    with pytest.raises(ArtifactError, match="404: there is no unit-lab/GLM-unit"):
        site.get(tmp_path / "m", token=site.hub.token)


def test_a_gated_repository_opens_and_the_token_stays_at_the_hub(site: Site, tmp_path: Path) -> None:
    """Prevents handing the token to the file store that the hub redirects to."""
    site.hub.repositories[REPOSITORY].gated = site.hub.repositories[REPOSITORY].terms = True
    site.get(tmp_path / "m", token=site.hub.token)
    assert contents(tmp_path / "m") == files(site)
    assert site.hub.leaked == []


@pytest.mark.parametrize("how", ["gone", "incomplete"])
def test_the_fallback_is_taken_when_the_first_cannot_be_had(site: Site, tmp_path: Path, how: str) -> None:
    """Prevents an install that ends because a re-host of the same weights was removed or is half uploaded."""
    site.hub.repositories[OTHER] = Repository(files=dict(files(site)))
    wanted = dict(files(site))
    if how == "gone":
        del site.hub.repositories[REPOSITORY]
    else:
        del files(site)[SHARD]
    outcome = site.get(tmp_path / "m", fallback=OTHER)
    assert contents(tmp_path / "m") == wanted
    assert outcome.manifest is not None
    assert outcome.manifest.repository == OTHER
    assert any(f"falling back to {OTHER}" in line for line in site.said)
    site.hub.url = "http://127.0.0.1:9"
    assert site.get(tmp_path / "m", fallback=OTHER).fetched == 0


def test_an_incomplete_repository_is_named_before_the_weights(site: Site, tmp_path: Path) -> None:
    """Prevents finding out after 150 GB that the repository lacks a shard of its own index."""
    del files(site)[SHARD]
    with pytest.raises(ArtifactError, match=f"lacks 1 of the weight files .*{SHARD}"):
        site.get(tmp_path / "m")
    assert [path for _, path, _ in site.hub.asked] == ["model.safetensors.index.json"]


def test_room_is_asked_of_what_is_missing_only(site: Site, tmp_path: Path) -> None:
    """Prevents a second start that dies of "147 GiB free, 385 needed" with everything there."""
    folder = flat(tmp_path / "m", files(site))
    (folder / SHARD).write_bytes(files(site)[SHARD][:100])
    missing = len(files(site)[SHARD])
    site.free = lambda _: missing + (1 << 30) - 1
    with pytest.raises(ArtifactError, match=r"3\.1 kB are missing and 1\.1 GB must stay free"):
        site.get(folder)
    assert site.hub.asked == []
    site.free = lambda _: missing + (1 << 30)
    assert site.get(folder).fetched == 1


def test_an_unfinished_file_counts_as_there(site: Site, tmp_path: Path) -> None:
    """Prevents asking room for the half that an interrupted download has already."""
    folder = snapshot_path(tmp_path)
    data = files(site)[SHARD]
    part = folder.parents[1] / "blobs" / f"{sha256(data)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:2000])
    total = sum(map(len, files(site).values()))
    site.free = lambda _: total - 2000 + (1 << 30)
    site.get(folder)
    assert contents(folder) == files(site)


def test_a_full_disk_ends_with_a_message_and_goes_on_later(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a traceback, or a lost night, when something else fills the disk meanwhile."""
    from glm53_service.artifacts import fetch

    real = fetch.Sink.write

    def full(self: fetch.Sink, data: bytes) -> int:
        if self._entry.path == SHARD:
            real(self, data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(fetch.Sink, "write", full)
        with pytest.raises(ArtifactError, match="the disk is full"):
            site.get(tmp_path / "m")
    site.hub.asked.clear()
    site.get(tmp_path / "m")
    assert site.hub.sent(SHARD) == ["bytes=500-"]
    assert contents(tmp_path / "m") == files(site)


def test_two_runs_at_once_do_not_mix(site: Site, tmp_path: Path) -> None:
    """Prevents two downloads that write one file together."""
    folder = tmp_path / "m"
    folder.mkdir()
    with held(folder), pytest.raises(BusyError, match=rf"another run \(process {os.getpid()}\)"):
        site.get(folder)
    assert site.get(folder).fetched == 7


def test_a_folder_of_another_account_is_named(site: Site, tmp_path: Path) -> None:
    """Prevents "Permission denied" in the middle, from a cache that a container made as root."""
    if os.geteuid() == 0:
        folder = snapshot_path(tmp_path)
        (folder.parents[1] / "blobs").mkdir(parents=True)
        tmp_path.chmod(0o755)
        for parent in tmp_path.parents:
            if parent.owner() == "root" and str(parent).startswith("/tmp/pytest"):
                parent.chmod(0o755)
        pid = os.fork()
        if pid == 0:
            os.setgid(65534)
            os.setuid(65534)
            code = 1
            try:
                site.get(folder)
            except ArtifactError as error:
                text = str(error)
                code = 0 if "belongs to root, mode 755" in text and "sudo " in text else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert site.hub.asked == []


def test_a_changed_small_file_is_named_and_only_replaced_when_asked(site: Site, tmp_path: Path) -> None:
    """Prevents serving a template somebody edited as if it were the hub's, and losing that edit silently."""
    folder = tmp_path / "m"
    site.get(folder)
    edited = b'{"model_type": "UNIT", "num_nextn_predict_layers": 1}'
    (folder / "config.json").write_bytes(edited)
    with pytest.raises(ArtifactError, match=r"config.json: its content has the hash .*\n.*--repair"):
        site.get(folder)
    assert (folder / "config.json").read_bytes() == edited
    assert site.get(folder, repair=True).fetched == 1
    assert contents(folder) == files(site)


@pytest.mark.parametrize("kind", ["model", "hub", "chain"])
def test_a_flipped_bit_is_found_by_full_and_repaired_alone(site: Site, tmp_path: Path, kind: str) -> None:
    """Prevents replies that are slightly wrong for ever, and 164 GiB of download for one bad block."""
    folder = cache(tmp_path / "hub", files(site), kind=kind)
    site.get(folder)
    blob = (folder / SHARD).resolve()
    data = bytearray(blob.read_bytes())
    data[2000] ^= 1
    blob.write_bytes(data)
    assert site.get(folder).fetched == 0
    with pytest.raises(ArtifactError, match=SHARD):
        site.get(folder, full=True)
    assert site.get(folder, full=True, repair=True).fetched == 1
    assert (contents(folder), site.hub.sent(SHARD)) == (files(site), [""])
    assert blob.read_bytes() == files(site)[SHARD]


def test_a_repair_never_writes_into_another_revisions_blob(site: Site, tmp_path: Path) -> None:
    """Prevents a repair that destroys the snapshot to go back to: the link led to the other's content."""
    folder = cache(tmp_path / "hub", files(site))
    other = folder.parents[1] / "blobs" / ("e" * 40)
    other.write_bytes(b"of another revision")
    (folder / "README.md").resolve().unlink()
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(Path("../../blobs") / other.name)
    with pytest.raises(ArtifactError, match=r"README\.md: 19 bytes, expected 7"):
        site.get(folder)
    assert site.get(folder, repair=True).fetched == 1
    assert other.read_bytes() == b"of another revision"
    assert contents(folder) == files(site)


def test_a_check_that_ends_early_is_not_made_twice(site: Site, tmp_path: Path) -> None:
    """Prevents hashing 164 GiB again because the last file of an adopted copy was wrong."""
    folder = flat(tmp_path / "m", files(site))
    (folder / "model-00003-of-00003.safetensors").write_bytes(
        bytes(len(files(site)["model-00003-of-00003.safetensors"]))
    )
    with pytest.raises(ArtifactError, match="model-00003"):
        site.get(folder)
    proven = read_manifest(folder, UNFINISHED)
    assert proven is not None
    assert {e.path for e in proven.files} >= {"model-00001-of-00003.safetensors", SHARD}


def test_another_revision_in_the_folder_is_refused(site: Site, tmp_path: Path) -> None:
    """Prevents files of two revisions in one folder, and the loss of the one to go back to."""
    site.get(tmp_path / "m")
    with pytest.raises(
        ArtifactError, match=r"holds unit-lab/GLM-unit@0123(.|\n)*give the new snapshot a path"
    ):
        site.get(tmp_path / "m", revision="9" * 40)


def test_the_drafters_own_hash_is_compared(site: Site, tmp_path: Path) -> None:
    """Prevents a drafter of other weights under the same name: half the accepted drafts, no error."""
    weights = model_files(1)["model-00001-of-00001.safetensors"]
    site.hub.repositories[REPOSITORY].files = {"config.json": b"{}", "model.safetensors": weights}
    with pytest.raises(ArtifactError, match=r"drafter\.sha256 says abababababab"):
        site.get(tmp_path / "m", sha="ab" * 32)
    assert site.get(tmp_path / "m", sha=sha256(weights)).manifest is not None


def test_a_list_that_leads_out_of_the_folder_is_refused(site: Site, tmp_path: Path) -> None:
    """Prevents a hostile repository from writing anywhere on the head."""
    files(site)["../outside.txt"] = b"x"
    with pytest.raises(Glm53Error, match=r"found the path '\.\./outside\.txt'"):
        site.get(tmp_path / "m")
