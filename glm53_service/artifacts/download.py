"""Brings one snapshot from the hub to the head's disk: what is missing, hashed, with a manifest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from glm53_service.artifacts.adopt import adopt
from glm53_service.artifacts.disk import Free, check_room, check_writable, free_bytes, held, trouble
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
from glm53_service.artifacts.present import Work, have, look, needs, record
from glm53_service.artifacts.progress import Progress
from glm53_service.artifacts.snapshot import (
    INDEX,
    extra_weights,
    own_word,
    quick_check,
    shards_of,
    summary,
)
from glm53_service.artifacts.sources import Want
from glm53_service.errors import ArtifactError, Glm53Error, UnavailableError
from glm53_service.files import write_durably
from glm53_service.settings import Source

STREAMS = 4


FOUND_HERE = "hashed as found here; no hub has said that this is right"
"""What is said of a snapshot whose manifest was made from its own files."""


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


class IncompleteError(ArtifactError):
    """The repository's own index names files that it does not have."""


def download(want: Want, options: Options, world: World) -> Outcome:
    """Return once `want` is on disk as the hub has it; Glm53Error says what is in the way.

    A complete snapshot is recognised without a network and without a write.
    """
    known = _known(want.layout.folder, options)
    own = known is None or known.adopted
    if known is not None and not known.adopted:
        _same_source(want, known)
    final = not own or options.offline or want.source is None
    if known is not None and final and not options.full and not quick_check(want.layout, known):
        _tidy(want.layout.folder)
        return _there(known)
    if options.offline or (own and want.source is None and not own_word(want.layout)):
        return _offline(want, known, options, world)
    try:
        source, manifest = _listing(want, None if own else known, options, world)
    except UnavailableError as error:
        if own and not own_word(want.layout):
            world.say(f"{error.message}; what is here is complete by its own index")
            return _offline(want, known, options, world)
        raise
    try:
        return _bring(want, source, manifest, options, world)
    except IncompleteError as error:
        if want.fallback is None or source == want.fallback:
            raise
        world.say(f"{error.message}; falling back to {want.fallback}")
        manifest = _ask(world.hub(), want.fallback, world)
        return _bring(want, want.fallback, manifest, options, world)


def _known(folder: Path, options: Options) -> Manifest | None:
    try:
        return read_manifest(folder)
    except ArtifactError:
        if not options.repair:
            raise
        return None


def _same_source(want: Want, known: Manifest) -> None:
    here = (known.repository, known.revision)
    wanted = [source for source in (want.source, want.fallback) if source is not None]
    if wanted and here not in [(source.repository, source.revision) for source in wanted]:
        raise ArtifactError(
            f"{want.layout.folder} holds {known.repository}@{known.revision[:12]}, wanted is {want.source}",
            hint="give the new snapshot a path of its own (the old one stays for going back), or set the"
            f" source to what is there; for another try in place remove {want.layout.folder / NAME}",
        )


def _offline(want: Want, known: Manifest | None, options: Options, world: World) -> Outcome:
    """Return what is there when it is complete; without a manifest its own files become one."""
    layout = want.layout
    problems = quick_check(layout, known) if known is not None else own_word(layout)
    if problems:
        raise ArtifactError(
            f"{layout.folder} is not complete, and no hub is asked:\n{summary(problems)}",
            hint=f"run this with a network, or copy these files here; if they are meant to be so, remove"
            f" {layout.folder / NAME}: they are hashed anew"
            if known is not None and known.adopted
            else "run this with a network, or copy these files here",
        )
    if known is None:
        with held(layout.folder):
            known = adopt(layout, clock=world.clock, as_json=options.as_json, threads=options.streams)
            _check_drafter_hash(want, known)
            write_manifest(layout.folder, known)
    return _there(known)


def _there(known: Manifest) -> Outcome:
    return Outcome(manifest=known, notes=(FOUND_HERE,) if known.adopted else ())


def _listing(want: Want, known: Manifest | None, options: Options, world: World) -> tuple[Source, Manifest]:
    """Return the source in use, and its list of files: the manifest on disk, else the hub's.

    A repair asks the hub: it may be the manifest that is wrong.
    """
    if want.source is None:
        raise ArtifactError(
            f"nobody says where {want.title} comes from",
            hint="glm53_model_source: {repository: OWNER/NAME, revision: 40 digits}",
        )
    first, fallback = want.source, want.fallback
    if known is not None:
        first, fallback = Source(repository=known.repository, revision=known.revision), None
        if not options.repair:
            return first, known
    hub = world.hub()
    try:
        return first, _ask(hub, first, world)
    except _Gone as gone:
        if fallback is None:
            raise gone.error from None
        world.say(f"{gone.error.message}; falling back to {fallback}")
    try:
        return fallback, _ask(hub, fallback, world)
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
    folder = want.layout.folder
    check_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder):
            return _fill(want, source, manifest, options, world)
    except OSError as error:
        raise trouble(error, folder) from None


def _fill(want: Want, source: Source, manifest: Manifest, options: Options, world: World) -> Outcome:
    layout, folder = want.layout, want.layout.folder
    work = look(layout, manifest, options, world)
    check_room(needs(layout, work.fetch), free=world.free)
    for place in {layout.folder, *(part_of(layout, entry).parent for entry in work.fetch)}:
        check_writable(place)
    fetched = _fetch_all(layout, source, manifest, work, options, world)
    done = msgspec.structs.replace(manifest, files=tuple(work.proven))
    _check_drafter_hash(want, done)
    notes = _point_main(layout)
    write_manifest(folder, done)  # the last: with it the next run has nothing to do
    _tidy(folder)
    notes += [str(problem) for problem in extra_weights(layout, done)]
    return Outcome(
        manifest=done, fetched=len(fetched), bytes=sum(e.size for e in fetched), notes=tuple(notes)
    )


def _fetch_all(
    layout: Layout, source: Source, manifest: Manifest, work: Work, options: Options, world: World
) -> list[Entry]:
    """Fetch `work.fetch`, the small files first; the first failure stops the others where they are."""
    if not work.fetch:
        _check_index(layout, manifest)
        return []
    fetch = sorted(work.fetch, key=lambda e: (e.path != INDEX, e.size))
    there = sum(e.size for e in work.proven) + sum(have(part_of(layout, e), e) for e in fetch)
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

    def one(entries: Sequence[Entry]) -> None:
        done = fetcher.fetch(entries[0])
        for twin in entries[1:]:
            link(layout.folder / twin.path, (layout.folder / entries[0].path).resolve())
            progress.count(twin.size)
        with lock:
            for entry in entries:
                progress.file_done()
                work.proven.append(msgspec.structs.replace(entry, sha256=done.sha256))
            if not done.small:  # what is small is hashed again anyway
                record(layout, manifest, work.proven)

    if fetch[0].path == INDEX:
        one([fetch.pop(0)])
    _check_index(layout, manifest)
    _all(one, _by_content(layout, fetch), options.streams, stop)
    progress.end()
    return work.fetch


def _by_content(layout: Layout, fetch: Sequence[Entry]) -> list[list[Entry]]:
    """Return what grows in one unfinished file together: in a cache, files of equal content are one blob."""
    groups: dict[Path, list[Entry]] = {}
    for entry in fetch:
        groups.setdefault(part_of(layout, entry), []).append(entry)
    return list(groups.values())


def _all(
    one: Callable[[Sequence[Entry]], None],
    groups: Sequence[Sequence[Entry]],
    streams: int,
    stop: threading.Event,
) -> None:
    with ThreadPoolExecutor(streams, thread_name_prefix="fetch") as pool:
        futures: list[Future[None]] = [pool.submit(one, group) for group in groups]
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


def _tidy(folder: Path) -> None:
    """Remove what a run that was killed has written down, once there is a manifest."""
    for name in (UNFINISHED, f".{UNFINISHED}.tmp"):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


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
    write_durably(layout.storage / "refs/main", layout.revision)
    return ["refs/main was missing and now names this revision"]
