"""What of a snapshot is there already, and how much of that is proven."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from glm53_service.artifacts.fetch import link, part_of
from glm53_service.artifacts.hashing import hash_file
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import NAME, UNFINISHED, Entry, Manifest, read_manifest, write_manifest
from glm53_service.artifacts.progress import Progress
from glm53_service.artifacts.snapshot import Kind, Problem, check_content, check_entry, summary
from glm53_service.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from glm53_service.artifacts.download import Options, World

FETCHED = (Kind.MISSING, Kind.DANGLING, Kind.SHORT)
"""What is fetched without being asked: nothing that was whole is lost by it."""


@dataclass(slots=True)
class Work:
    """What is to be done of one manifest: files to fetch, and what is proven already."""

    fetch: list[Entry] = field(default_factory=list)
    proven: list[Entry] = field(default_factory=list)


def look(layout: Layout, manifest: Manifest, options: Options, world: World) -> Work:
    """Return what is missing; files that are there and not proven yet are hashed here."""
    before = _before(layout.folder)
    known = {e.path: e for e in before.files} if before is not None and not options.full else {}
    work, wrong, unknown = Work(), [], []
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


def _before(folder: Path) -> Manifest | None:
    """Return what an earlier run has proven; a record that cannot be used proves nothing."""
    for name in (NAME, UNFINISHED):
        with contextlib.suppress(ArtifactError, ConfigError):
            if (found := read_manifest(folder, name)) is not None:
                return found
    return None


def _fix(wrong: Sequence[Problem]) -> str:
    if any(problem.kind is Kind.NO_FILE for problem in wrong):
        return "move it away, then run this again"
    if any(problem.kind in (Kind.UNREADABLE, Kind.OUTSIDE) for problem in wrong):
        return "give this account the files (sudo chown, for this snapshot only), and keep links inside"
    return "--repair replaces them with the hub's; keep a copy first if somebody changed them on purpose"


def _match(entry: Entry, known: Entry | None) -> Entry | None:
    """Return the proven entry when it is of the same content."""
    if known is None or known.size != entry.size or not known.sha256:
        return None
    same = known.sha256 == entry.sha256 if entry.sha256 else known.git_sha1 == entry.git_sha1
    return known if same else None


def _relink(layout: Layout, entry: Entry, work: Work, unknown: list[Entry]) -> None:
    """Use a cache's blob of that content if one is there (its link was lost), else fetch."""
    for blob in layout.blobs(entry.etag):
        if blob.is_file() and blob.stat().st_size == entry.size:
            link(layout.folder / entry.path, blob)
            unknown.append(entry)
            return
    work.fetch.append(entry)


def _prove(
    layout: Layout, manifest: Manifest, unknown: list[Entry], work: Work, options: Options, world: World
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
        problem = check_content(layout, entry, progress.count)
        sha256 = entry.sha256 or ("" if problem else hash_file(layout.folder / entry.path))
        return entry, problem, sha256

    with ThreadPoolExecutor(options.streams, thread_name_prefix="check") as pool:
        for entry, problem, sha256 in pool.map(one, unknown):
            progress.file_done()
            if problem is None:
                work.proven.append(msgspec.structs.replace(entry, sha256=sha256))
                if not entry.small:
                    record(layout, manifest, work.proven)
            elif options.repair:
                work.fetch.append(entry)
            else:
                wrong.append(problem)
    progress.end()
    return wrong


def needs(layout: Layout, fetch: Sequence[Entry]) -> dict[Path, int]:
    """Return the missing bytes of each folder; what an unfinished file has already does not count."""
    found: dict[Path, int] = {}
    for part, entry in {part_of(layout, entry): entry for entry in fetch}.items():
        found[part.parent] = found.get(part.parent, 0) + entry.size - have(part, entry)
    return found


def have(part: Path, entry: Entry) -> int:
    """Return how many bytes of `entry` are in its unfinished file."""
    size = part.stat().st_size if part.exists() else 0
    return size if size <= entry.size else 0


def record(layout: Layout, manifest: Manifest, proven: Sequence[Entry]) -> None:
    """Write down what is proven so far; OSError as it comes."""
    write_manifest(layout.folder, msgspec.structs.replace(manifest, files=tuple(proven)), UNFINISHED)
