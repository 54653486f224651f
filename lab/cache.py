"""Things that are slow to make, kept under a name that is a hash of what they were made from."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from lab.errors import LabError
from lab.run import step

UNFINISHED = ".unfinished-"


def key(inputs: object) -> str:
    """12 hex digits over `inputs` (anything JSON can hold)."""
    text = json.dumps(inputs, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def entry(cache: Path, kind: str, inputs: object) -> Path:
    """Where the thing of this kind made from `inputs` lies, or would lie."""
    return cache / f"{kind}-{key(inputs)}"


def ensure(target: Path, what: str, build: Callable[[Path], None]) -> Path:
    """Return `target`, building it first if it is not there.

    `build` fills an empty folder with a temporary name beside it, which is renamed when complete: a build
    that dies half way leaves no entry, and what it left is removed by the next one.
    """
    if target.is_dir():
        return target
    part = target.with_name(UNFINISHED + target.name)
    remove_tree(part)
    part.mkdir(parents=True)
    with step(what):
        build(part)
        part.rename(target)
    return target


def prune(kept: Iterable[Path]) -> None:
    """Remove the entries that these have replaced: same kind, made from other inputs."""
    for target in kept:
        kind = target.name.rpartition("-")[0]
        for path in target.parent.glob(f"{kind}-*"):
            if path != target and path.name.rpartition("-")[0] == kind:
                remove_tree(path)


def clear(cache: Path, kinds: Iterable[str]) -> None:
    """Remove the entries of these kinds, finished or not, and the folder itself if nothing else is in it."""
    if not cache.is_dir():
        return
    starts = tuple(start for kind in kinds for start in (kind, UNFINISHED + kind))
    for path in cache.iterdir():
        if path.name.startswith(starts):
            remove_tree(path)
    with contextlib.suppress(OSError):
        cache.rmdir()


def remove_tree(path: Path) -> None:
    """Remove `path` and what is below it, if it exists; refuses to follow into another file system.

    Raises LabError when something is mounted below it.
    """
    if not path.exists():
        return
    mounted = mounts_below(path)
    if mounted:
        raise LabError(f"{path}: {mounted[0]} is mounted. Do: umount {mounted[0]}, then again")
    shutil.rmtree(path)


def mounts_below(path: Path) -> list[Path]:
    """Mount points at or below `path`, the deepest first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point == path or path in point.parents:
            points.append(point)
    return sorted(points, reverse=True)
