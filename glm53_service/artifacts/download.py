"""Brings one snapshot from the hub to the head's disk: what is missing, hashed, with a manifest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from glm53_service.artifacts.disk import Free, check_room, check_writable, free_bytes, held
from glm53_service.artifacts.fetch import Client, Fetcher, link, part_of
from glm53_service.artifacts.hub import Refused, Stopped
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import (
    NAME,
    UNFINISHED,
    Entry,
    Manifest,
    read_manifest,
    write_manifest,
)
from glm53_service.artifacts.progress import Progress
from glm53_service.artifacts.snapshot import (
    INDEX,
    Kind,
    Problem,
    check_content,
    check_entry,
    extra_weights,
    own_word,
    quick_check,
    shards_of,
    summary,
)
from glm53_service.artifacts.sources import Want
from glm53_service.errors import ArtifactError, Glm53Error, UnavailableError
from glm53_service.settings import Source

STREAMS = 4
FETCHED = (Kind.MISSING, Kind.DANGLING, Kind.SHORT)
"""What is fetched without being asked: nothing that was whole is lost by it."""


class HubClient(Client, Protocol):
    """What a download asks of the hub."""

    def manifest(self, source: Source) -> Manifest:
        """Return what the hub has of `source`; Refused says why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`full` reads every byte again, `repair` replaces whole files that are wrong, `offline` asks nobody."""

    full: bool = False
    repair: bool = False
    offline: bool = False
    streams: int = STREAMS
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a download meets: a hub (made when it is first needed), clock, sleep, free bytes, and words."""

    hub: Callable[[], HubClient]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    free: Free = free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is on disk now. `fetched` files came from the hub; `notes` is what a person should know."""

    manifest: Manifest | None
    fetched: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Work:
    """What is to be done of one manifest: files to fetch, and what is proven already."""

    fetch: list[Entry] = field(default_factory=list)
    proven: list[Entry] = field(default_factory=list)


class IncompleteError(ArtifactError):
    """The repository's own index names files that it does not have."""


def download(want: Want, options: Options, world: World) -> Outcome:
    """Return once `want` is on disk as the hub has it; Glm53Error says what is in the way.

    A complete snapshot is recognised without a network and without a write.
    """
    folder = want.layout.folder
    known = read_manifest(folder)
    if known is not None:
        _same_source(want, known)
        if not options.full and not quick_check(want.layout, known):
            return Outcome(manifest=known)
    if options.offline:
        return _offline(want, known)
    try:
        source, manifest = _listing(want, known, world)
    except UnavailableError as error:
        if known is None and not own_word(want.layout):
            return Outcome(manifest=None, notes=(f"complete by its own index; no hashes: {error.message}",))
        raise
    try:
        return _bring(want, source, manifest, options, world)
    except IncompleteError as error:
        if want.fallback is None or source == want.fallback:
            raise
        world.say(f"{error.message}; falling back to {want.fallback}")
        manifest = _ask(world.hub(), want.fallback, world)
        return _bring(want, want.fallback, manifest, options, world)


def _same_source(want: Want, known: Manifest) -> None:
    here = (known.repository, known.revision)
    wanted = [source for source in (want.source, want.fallback) if source is not None]
    if wanted and here not in [(source.repository, source.revision) for source in wanted]:
        raise ArtifactError(
            f"{want.layout.folder} holds {known.repository}@{known.revision[:12]}, wanted is {want.source}",
            hint="give the new snapshot a path of its own (the old one stays for going back), or set the"
            f" source to what is there; for another try in place remove {want.layout.folder / NAME}",
        )


def _offline(want: Want, known: Manifest | None) -> Outcome:
    problems = quick_check(want.layout, known) if known is not None else own_word(want.layout)
    if problems:
        raise ArtifactError(
            f"{want.layout.folder} is not complete, and no hub is asked:\n{summary(problems)}",
            hint="run this with a network, or copy these files here",
        )
    notes = () if known is not None else ("complete by its own index; no manifest, so no hashes",)
    return Outcome(manifest=known, notes=notes)


def _listing(want: Want, known: Manifest | None, world: World) -> tuple[Source, Manifest]:
    """Return the source in use, and its list of files: the manifest on disk, else the hub's."""
    if want.source is None:
        raise ArtifactError(
            f"nobody says where {want.title} comes from",
            hint="glm53_model_source: {repository: OWNER/NAME, revision: 40 digits}",
        )
    if known is not None:
        return Source(repository=known.repository, revision=known.revision), known
    hub = world.hub()
    try:
        return want.source, _ask(hub, want.source, world)
    except _Gone as gone:
        if want.fallback is None:
            raise gone.error from None
        world.say(f"{gone.error.message}; falling back to {want.fallback}")
    try:
        return want.fallback, _ask(hub, want.fallback, world)
    except _Gone as gone:
        raise gone.error from None


class _Gone(Exception):
    def __init__(self, error: Glm53Error) -> None:
        super().__init__(str(error))
        self.error = error


def _ask(hub: HubClient, source: Source, world: World) -> Manifest:
    """Return the hub's list; the client itself tries again where that can help."""
    try:
        manifest = hub.manifest(source)
    except Refused as refused:
        raise (_Gone(refused.error) if refused.gone else refused.error) from None
    if not manifest.files:
        raise ArtifactError(f"{source} has no files", hint="check the repository and its revision")
    return manifest


def _bring(want: Want, source: Source, manifest: Manifest, options: Options, world: World) -> Outcome:
    layout, folder = want.layout, want.layout.folder
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        work = _look(layout, manifest, options, world)
        check_room(_needs(layout, work.fetch), free=world.free)
        for place in {layout.folder, *(part_of(layout, entry).parent for entry in work.fetch)}:
            check_writable(place)
        fetched = _fetch_all(layout, source, manifest, work, options, world)
        done = msgspec.structs.replace(manifest, files=tuple(work.proven))
        _check_drafter_hash(want, done)
        write_manifest(folder, done)
        (folder / UNFINISHED).unlink(missing_ok=True)
        notes = [*_point_main(layout)]
        notes += [str(problem) for problem in extra_weights(layout, done)]
    return Outcome(
        manifest=done, fetched=len(fetched), bytes=sum(e.size for e in fetched), notes=tuple(notes)
    )


def _look(layout: Layout, manifest: Manifest, options: Options, world: World) -> _Work:
    """Return what is missing; files that are there and not proven yet are hashed here."""
    before = read_manifest(layout.folder) or read_manifest(layout.folder, UNFINISHED)
    known = {e.path: e for e in before.files} if before is not None and not options.full else {}
    work, wrong, unknown = _Work(), [], []
    for entry in manifest.files:
        problem = check_entry(layout, entry)
        if problem is None and not entry.small and (proven := _match(entry, known.get(entry.path))):
            work.proven.append(proven)
        elif problem is None:
            unknown.append(entry)
        elif problem.kind in FETCHED or (options.repair and problem.kind is Kind.SIZE):
            _relink(layout, entry, work, unknown)
        else:
            wrong.append(problem)
    wrong += _prove(layout, manifest, unknown, work, options, world)
    if wrong:
        raise ArtifactError(
            f"{layout.folder}: files are there that are not those of"
            f" {manifest.repository}@{manifest.revision[:12]}:\n{summary(wrong)}",
            hint=_fix(wrong),
        )
    return work


def _fix(wrong: Sequence[Problem]) -> str:
    if any(problem.kind in (Kind.UNREADABLE, Kind.OUTSIDE) for problem in wrong):
        return "give this account the files (sudo chown, for this snapshot only), and keep links inside"
    return "--repair replaces them with the hub's; keep a copy first if somebody changed them on purpose"


def _match(entry: Entry, known: Entry | None) -> Entry | None:
    """Return the proven entry when it is of the same content."""
    if known is None or known.size != entry.size or not known.sha256:
        return None
    same = known.sha256 == entry.sha256 if entry.sha256 else known.git_sha1 == entry.git_sha1
    return known if same else None


def _relink(layout: Layout, entry: Entry, work: _Work, unknown: list[Entry]) -> None:
    """Use a cache's blob of that content if one is there (its link was lost), else fetch."""
    for blob in layout.blobs(entry.etag):
        if blob.is_file() and blob.stat().st_size == entry.size:
            link(layout.folder / entry.path, blob)
            unknown.append(entry)
            return
    work.fetch.append(entry)


def _prove(
    layout: Layout, manifest: Manifest, unknown: list[Entry], work: _Work, options: Options, world: World
) -> list[Problem]:
    """Hash files that are there; return those that are wrong and may not be replaced."""
    if not unknown:
        return []
    wrong = []
    total = sum(entry.size for entry in unknown)
    progress = Progress(
        "checking what is there", len(unknown), total, clock=world.clock, as_json=options.as_json
    )

    def one(entry: Entry) -> tuple[Entry, Problem | None, str]:
        from glm53_service.artifacts.hashing import hash_file

        problem = check_content(layout, entry, progress.count)
        sha256 = entry.sha256 or ("" if problem else hash_file(layout.folder / entry.path))
        return entry, problem, sha256

    with ThreadPoolExecutor(options.streams, thread_name_prefix="check") as pool:
        for entry, problem, sha256 in pool.map(one, unknown):
            progress.file_done()
            if problem is None:
                work.proven.append(msgspec.structs.replace(entry, sha256=sha256))
                if not entry.small:
                    _record(layout, manifest, work.proven)
            elif options.repair:
                work.fetch.append(entry)
            else:
                wrong.append(problem)
    progress.end()
    return wrong


def _needs(layout: Layout, fetch: Sequence[Entry]) -> dict[Path, int]:
    """Return the missing bytes of each folder; what an unfinished file has already does not count."""
    needs: dict[Path, int] = {}
    for entry in fetch:
        part = part_of(layout, entry)
        needs[part.parent] = needs.get(part.parent, 0) + entry.size - _have(part, entry)
    return needs


def _have(part: Path, entry: Entry) -> int:
    size = part.stat().st_size if part.exists() else 0
    return size if size <= entry.size else 0


def _record(layout: Layout, manifest: Manifest, proven: Sequence[Entry]) -> None:
    record = msgspec.structs.replace(manifest, files=tuple(proven))
    write_manifest(layout.folder, record, UNFINISHED)


def _fetch_all(
    layout: Layout, source: Source, manifest: Manifest, work: _Work, options: Options, world: World
) -> list[Entry]:
    """Fetch `work.fetch`, the small files first; the first failure stops the others where they are."""
    if not work.fetch:
        _check_index(layout, manifest)
        return []
    fetch = sorted(work.fetch, key=lambda e: (e.path != INDEX, e.size))
    there = sum(e.size for e in work.proven) + sum(_have(part_of(layout, e), e) for e in fetch)
    progress = Progress(
        str(source),
        len(manifest.files),
        manifest.bytes,
        clock=world.clock,
        there=there,
        files_there=len(work.proven),
        as_json=options.as_json,
    )
    stop = threading.Event()
    fetcher = Fetcher(
        world.hub(),
        layout,
        source,
        stop=stop,
        count=progress.count,
        say=progress.say,
        pause=world.pause,
    )
    lock = threading.Lock()

    def one(entry: Entry) -> None:
        done = fetcher.fetch(entry)
        progress.file_done()
        with lock:
            work.proven.append(done)
            _record(layout, manifest, work.proven)

    if fetch[0].path == INDEX:
        one(fetch.pop(0))
    _check_index(layout, manifest)
    _all(one, fetch, options.streams, stop)
    progress.end()
    return work.fetch


def _all(one: Callable[[Entry], None], fetch: Sequence[Entry], streams: int, stop: threading.Event) -> None:
    with ThreadPoolExecutor(streams, thread_name_prefix="fetch") as pool:
        futures: list[Future[None]] = [pool.submit(one, entry) for entry in fetch]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if any(f.done() and f.exception() for f in futures) or not all(f.done() for f in futures):
                stop.set()
                pool.shutdown(cancel_futures=True)
    failed = [e for f in futures if not f.cancelled() and (e := f.exception()) is not None]
    for error in failed:
        if not isinstance(error, Stopped):
            raise error


def _check_index(layout: Layout, manifest: Manifest) -> None:
    """Raise IncompleteError when the index names weights that the repository does not have."""
    try:
        missing = set(shards_of(layout.folder)) - {entry.path for entry in manifest.files}
    except (OSError, ValueError) as error:
        raise IncompleteError(f"{manifest.repository}: its index cannot be used: {error}") from None
    if missing:
        raise IncompleteError(
            f"{manifest.repository}@{manifest.revision[:12]} lacks {len(missing)} of the weight files that"
            f" its own index names ({', '.join(sorted(missing)[:3])})",
            hint="another revision, or another repository (model.source)",
        )


def _check_drafter_hash(want: Want, manifest: Manifest) -> None:
    found = next((e.sha256 for e in manifest.files if e.path == "model.safetensors"), "")
    if want.sha256 and found != want.sha256:
        raise ArtifactError(
            f"{want.title}: model.safetensors has SHA-256 {found[:12]}, drafter.sha256 says"
            f" {want.sha256[:12]}",
            hint="different weights have had this name; revision and sha256 must be of the same",
        )


def _point_main(layout: Layout) -> list[str]:
    """Write a cache's refs/main if there is none: tools that look the repository up by name need it."""
    if layout.hub is None or (layout.storage / "refs/main").exists():
        return []
    check_writable(layout.storage / "refs")
    (layout.storage / "refs").mkdir(exist_ok=True)
    (layout.storage / "refs/main").write_text(layout.revision, encoding="ascii")
    return ["refs/main was missing and now names this revision"]
