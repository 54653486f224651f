"""Says whether a snapshot on this node is right, quickly at every start or byte by byte when asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm53_service.artifacts.hashing import THREADS
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import Manifest, read_manifest
from glm53_service.artifacts.progress import Progress
from glm53_service.artifacts.snapshot import Kind, Problem, full_check, own_word, quick_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was looked at, and what is wrong. `manifest` None: only its own index was asked."""

    folder: Path
    manifest: Manifest | None
    full: bool
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    layout: Layout,
    *,
    full: bool,
    clock: Callable[[], float] = time.monotonic,
    as_json: bool = False,
    threads: int = THREADS,
) -> Verdict:
    """Return the verdict on the snapshot in `layout`; ArtifactError when its manifest cannot be read.

    Reads only. Quick: names, links, sizes, and the hash of what is small and no weight.
    """
    began = clock()
    manifest = read_manifest(layout.folder)
    if manifest is None:
        problems = own_word(layout)
        if full and not problems:
            problems = [
                Problem(path=str(layout.folder), kind=Kind.MISSING, text="no manifest, so no hash to compare")
            ]
    elif full:
        large = [entry.size for entry in manifest.files if not entry.small]
        progress = Progress(
            f"hashing {layout.folder.name}", len(large), sum(large), clock=clock, as_json=as_json
        )
        problems = full_check(layout, manifest, progress.count, threads=threads, done=progress.file_done)
        progress.end()
    else:
        problems = quick_check(layout, manifest)
    return Verdict(
        folder=layout.folder,
        manifest=manifest,
        full=full and manifest is not None,
        seconds=clock() - began,
        problems=tuple(problems),
    )
