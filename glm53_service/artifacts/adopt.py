"""Makes a snapshot's own files its manifest, where no hub can say what they should be.

Hashed once; from then on every node's copy is compared with the head's. Whether they are what somebody
published only a hub can say: `glm53 download` asks it as soon as it can.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from glm53_service.artifacts.disk import check_writable
from glm53_service.artifacts.hashing import THREADS, hash_files
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.look import entries
from glm53_service.artifacts.manifest import ADOPTED, Entry, Manifest
from glm53_service.artifacts.progress import Progress
from glm53_service.errors import ArtifactError


def adopt(
    layout: Layout,
    *,
    clock: Callable[[], float] = time.monotonic,
    as_json: bool = False,
    threads: int = THREADS,
) -> Manifest:
    """Return the manifest of what is in `layout`, every byte read once; ArtifactError names what cannot be
    read. Nothing is written.
    """
    check_writable(layout.folder)
    files, _ = entries(layout.folder)
    progress = Progress(
        f"hashing {layout.folder}",
        len(files),
        sum(stat.st_size for stat in files.values()),
        clock=clock,
        as_json=as_json,
    )
    found = []
    for path, result in hash_files([layout.folder / name for name in files], progress.count, threads=threads):
        if isinstance(result, OSError):
            raise ArtifactError(f"{path} cannot be read: {result.strerror}")
        name = str(path.relative_to(layout.folder))
        found.append(Entry(path=name, size=files[name].st_size, sha256=result))
        progress.file_done()
    progress.end()
    return Manifest(repository="", revision=ADOPTED, files=tuple(sorted(found, key=lambda e: e.path)))
