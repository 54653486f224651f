"""What a run would move, before it moves anything: per node what is there, what is missing, how, how long.

Pure. `glm53 artifacts plan` and the playbooks' check mode look at the nodes with the same eyes (look.py) and
say these words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from glm53_service.artifacts.manifest import WEIGHTS, Entry, Manifest, decode_manifest
from glm53_service.artifacts.progress import duration, gigabytes
from glm53_service.artifacts.rates import HUB
from glm53_service.artifacts.sources import Want
from glm53_service.errors import Glm53Error

KNOWN_BYTES = {
    "Mia-AiLab/GLM-5.3-Flash-EXL3-4bpw-TensorFold": 176_000_000_000,
    "Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw": 176_000_000_000,
    "incoai/GLM-5.3-Flash-DFlash2": 2_300_000_000,
}
"""What the recipes say of their size, for a snapshot of which nothing is here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A snapshot on one node, as look.look() saw it; `manifest` None: nobody knows what belongs there."""

    node: str
    manifest: Manifest | None
    files: Mapping[str, tuple[int, int]]
    free: int
    file_system: int = 0
    changed: Mapping[str, str] | None = None
    parts: Mapping[str, int] | None = None
    missing: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is complete by its own index, its names and its links."""
        return (
            not self.missing and "config.json" in self.files and any(n.endswith(WEIGHTS) for n in self.files)
        )

    def differs(self, entry: Entry) -> bool:
        """Whether the file is not there, or is known to be another one."""
        found = self.files.get(entry.path)
        known = (self.changed or {}).get(entry.path)
        return (
            found is None or found[0] != entry.size or bool(known and entry.sha256 and known != entry.sha256)
        )

    def proves(self, entry: Entry, time: int | None) -> bool:
        """Whether this node's own manifest vouches for the file; not for one that changed since, unless it
        has the head's `time`.
        """
        own = {e.path: e.sha256 for e in self.manifest.files} if self.manifest else {}
        if not entry.sha256 or own.get(entry.path) != entry.sha256:
            return False
        touched = (self.changed or {}).get(entry.path)
        return touched is None or touched == entry.sha256 or self.files[entry.path][1] == time


def place_of(node: str, seen: Mapping[str, Any]) -> Place:
    """Return the place of what was seen; a manifest that cannot be read counts as none."""
    manifest = None
    if seen["manifest"]:
        try:
            manifest = decode_manifest(seen["manifest"].encode(), seen["folder"])
        except Glm53Error:
            manifest = None
    files = {str(path): (int(size), int(time)) for path, (size, time) in seen["files"].items()}
    return Place(
        node=node,
        manifest=manifest,
        files=files,
        free=int(seen["free"]),
        file_system=int(seen["file_system"]),
        changed={str(path): str(seen["hashes"].get(path, "")) for path in seen["changed"]},
        parts=seen["parts"],
        missing=(*seen["dangling"], *(name for name in seen["shards"] if name not in files)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One snapshot on one node. Bytes are exact unless `estimated`; seconds None: no rate is known yet.

    `hash_bytes` are read there once, to be compared. `settled`: nothing at all is to be done.
    """

    node: str
    what: str
    source: str
    folder: str
    over: str
    there_bytes: int
    missing_bytes: int
    missing_files: int | None
    hash_bytes: int
    estimated: bool
    settled: bool
    seconds: int | None
    need_bytes: int
    free_bytes: int
    file_system: int
    extra: tuple[str, ...] = ()
    room: bool = True

    def data(self) -> dict[str, Any]:
        """Return it for --json."""
        return asdict(self)

    def __str__(self) -> str:
        name = f"{self.node}: {self.what} {self.source}".rstrip()
        hashed = f", {gigabytes(self.hash_bytes)} of it to be hashed once" if self.hash_bytes else ""
        there = f"{gigabytes(self.there_bytes)} in {self.folder}{hashed}"
        extra = (
            f"; {len(self.extra)} files there that the head has not ({', '.join(self.extra[:3])})"
            if self.extra
            else ""
        )
        if not self.missing_bytes and not self.missing_files:
            return f"{name}: all there ({there}){extra}"
        about = "about " if self.estimated else ""
        files = f"{self.missing_files} files, " if self.missing_files is not None else ""
        time = f", {duration(self.seconds)} at the last rate" if self.seconds is not None else ""
        room = "" if self.room else f"; THERE IS NO ROOM FOR IT ({gigabytes(self.free_bytes)} free)"
        had = f" ({there})" if self.there_bytes else f" into {self.folder}"
        size = f"{files}{about}{gigabytes(self.missing_bytes)}"
        return f"{name}: {size} to get {self.over}{time}{room}{had}{extra}"


def from_head(routes: Iterable[str]) -> str:
    """Return the path to a worker in words."""
    return "from the head, " + "; ".join(routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot and where it is wanted: on the head, and on each worker, with the path there in words."""

    want: Want
    head: Place
    workers: Sequence[tuple[Place, str]]


def plan(snapshots: Sequence[Snapshot], *, rates: Mapping[str, float], spare: int) -> tuple[Step, ...]:
    """Return a step a node and snapshot.

    `rates` are bytes a second, by worker and for the hub (rates.HUB). Room is counted for all that comes to a
    file system together, and `spare` bytes must stay.
    """
    steps: list[Step] = []
    for snapshot in snapshots:
        head = snapshot.head
        steps.append(_head_step(snapshot.want, head, rates.get(HUB)))
        for place, over in snapshot.workers:
            steps.append(_worker_step(snapshot.want, head, place, over, rates.get(place.node)))
    return tuple(replace(step, room=_has_room(step, steps, spare)) for step in steps)


def _has_room(step: Step, steps: Sequence[Step], spare: int) -> bool:
    if not step.need_bytes:
        return True
    beside = [s for s in steps if (s.node, s.file_system) == (step.node, step.file_system)]
    return step.free_bytes >= sum(s.need_bytes for s in beside) + spare


def _head_step(want: Want, head: Place, rate: float | None) -> Step:
    hashed = sum(size for size, _ in head.files.values()) if head.manifest is None and head.whole else 0
    return _step(want, head, "from the hub", rate, reference=head.manifest, whole=head.whole, hashed=hashed)


def _worker_step(want: Want, head: Place, place: Place, over: str, rate: float | None) -> Step:
    reference = head.manifest or (_own_manifest(head) if head.whole else None)
    extra: tuple[str, ...] = ()
    hashed, settled = 0, False
    if reference is not None:
        names = {entry.path for entry in reference.files}
        extra = tuple(sorted(name for name in place.files if name not in names and name not in head.files))
        there = [entry for entry in reference.files if not place.differs(entry)]
        doubtful = [
            e for e in there if not e.small and not place.proves(e, head.files.get(e.path, (0, 0))[1])
        ]
        hashed = sum(entry.size for entry in doubtful)
        same = place.manifest is not None and place.manifest == reference
        settled = same and not doubtful and len(there) == len(reference.files)
    return _step(
        want, place, over, rate, reference=reference, whole=False, hashed=hashed, extra=extra, settled=settled
    )


def _own_manifest(place: Place) -> Manifest:
    """Return the files that are there as a manifest without hashes: what they are is not known yet."""
    entries = tuple(Entry(path=path, size=size) for path, (size, _) in sorted(place.files.items()))
    return Manifest(repository="", revision="0" * 40, files=entries)


def _step(
    want: Want,
    place: Place,
    over: str,
    rate: float | None,
    *,
    reference: Manifest | None,
    whole: bool,
    hashed: int,
    extra: tuple[str, ...] = (),
    settled: bool | None = None,
) -> Step:
    name = want.source.repository if want.source else ""
    if reference is not None:
        missing = [entry for entry in reference.files if place.differs(entry)]
        size, count = sum(entry.size for entry in missing), len(missing)
        need = sum(entry.size - _part(place, entry) for entry in missing)
        there = reference.bytes - size
    else:
        there, count = sum(size for size, _ in place.files.values()), None
        need = size = 0 if whole else max(KNOWN_BYTES.get(name, 0) - there, 1)
    return Step(
        node=place.node,
        what=want.what,
        source=str(want.source or ""),
        folder=str(want.layout.folder),
        over=over,
        there_bytes=there,
        missing_bytes=size,
        missing_files=count,
        hash_bytes=hashed,
        estimated=reference is None and size > 0,
        settled=settled if settled is not None else reference is not None and not missing,
        seconds=round(size / rate) if rate and size else None,
        need_bytes=need,
        free_bytes=place.free,
        file_system=place.file_system,
        extra=extra,
    )


def _part(place: Place, entry: Entry) -> int:
    """Return what an unfinished copy of the file has already."""
    folder, slash, name = entry.path.rpartition("/")
    size = (place.parts or {}).get(f"{folder}{slash}.{name}.{entry.sha256[:16]}.incomplete", 0)
    return size if size <= entry.size else 0
