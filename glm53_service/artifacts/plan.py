"""What a run would move, before it moves anything: per node what is there, what is missing, how, how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glm53_service.artifacts.manifest import Manifest
from glm53_service.artifacts.progress import duration, gigabytes
from glm53_service.artifacts.rates import HUB
from glm53_service.artifacts.sources import Want

KNOWN_BYTES = {
    "Mia-AiLab/GLM-5.3-Flash-EXL3-4bpw-TensorFold": 176_000_000_000,
    "Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw": 176_000_000_000,
    "incoai/GLM-5.3-Flash-DFlash2": 2_300_000_000,
}
"""What the recipes say of their size, for a snapshot of which nothing is here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A snapshot on one node: the size of each file that is there, and the free bytes.

    `manifest` None: nobody knows what belongs there; `whole` then says whether its own index is content.
    """

    node: str
    manifest: Manifest | None
    there: Mapping[str, int]
    free: int
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One snapshot on one node. Bytes are exact unless `estimated`; seconds None: no rate is known yet."""

    node: str
    what: str
    source: str
    folder: str
    over: str
    there_bytes: int
    missing_bytes: int
    missing_files: int | None
    estimated: bool
    room: bool
    seconds: int | None

    def data(self) -> dict[str, Any]:
        """Return it for --json."""
        return asdict(self)

    def __str__(self) -> str:
        name = f"{self.node}: {self.what} {self.source}"
        if not self.missing_bytes:
            return f"{name}: all there ({gigabytes(self.there_bytes)} in {self.folder})"
        about = "about " if self.estimated else ""
        files = f"{self.missing_files} files, " if self.missing_files is not None else ""
        time = f", {duration(self.seconds)} at the last rate" if self.seconds is not None else ""
        room = "" if self.room else "; THERE IS NO ROOM FOR IT"
        return f"{name}: {files}{about}{gigabytes(self.missing_bytes)} to get {self.over}{time}{room}"


def plan(
    want: Want,
    head: Place,
    workers: Sequence[tuple[Place, str]],
    *,
    rates: Mapping[str, float],
    spare: int,
) -> tuple[Step, ...]:
    """Return a step a node. `workers` come with the path to them in words.

    `rates` are bytes a second, by worker and for the hub (rates.HUB).
    """
    steps = [_step(want, head, head.manifest, "from the hub", rates.get(HUB), spare)]
    steps += [
        _step(want, place, head.manifest, over, rates.get(place.node), spare) for place, over in workers
    ]
    return tuple(steps)


def _step(
    want: Want, place: Place, manifest: Manifest | None, over: str, rate: float | None, spare: int
) -> Step:
    name = want.source.repository if want.source else ""
    if manifest is not None:
        missing = [e for e in manifest.files if place.there.get(e.path) != e.size]
        size, count = sum(e.size for e in missing), len(missing)
        there = manifest.bytes - size
    else:
        there, count = sum(place.there.values()), None
        size = 0 if place.whole else max(KNOWN_BYTES.get(name, 0) - there, 1)
    return Step(
        node=place.node,
        what=want.what,
        source=str(want.source or ""),
        folder=str(want.layout.folder),
        over=over,
        there_bytes=there,
        missing_bytes=size,
        missing_files=count,
        estimated=manifest is None and size > 0,
        room=not size or place.free >= size + spare,
        seconds=round(size / rate) if rate and size else None,
    )
