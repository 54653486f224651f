"""Where a snapshot's files lie: a flat folder, or one snapshot of a hub cache. Pure: paths in, paths out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from glm53_service.errors import ConfigError

SNAPSHOT = re.compile(
    r"^(?P<hub>/.*)/models--(?P<owner>[A-Za-z0-9._-]+?)--(?P<name>[A-Za-z0-9._-]+)"
    r"/snapshots/(?P<revision>[0-9a-f]{40})/?$"
)
"""A snapshot folder of huggingface_hub's cache: `<hub>/models--OWNER--NAME/snapshots/<revision>`."""

OURS = ".glm53-"
"""What the names of our own files beside a model begin with: no list may name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A snapshot's folder; in a hub cache also the cache's root, the repository and the revision."""

    folder: Path
    hub: Path | None = None
    repository: str = ""
    revision: str = ""

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache (blobs, refs, snapshots); the folder itself when flat."""
        if self.hub is None:
            return self.folder
        return self.hub / f"models--{self.repository.replace('/', '--')}"

    @property
    def root(self) -> Path:
        """What a container must see so that every link in the folder leads somewhere."""
        return self.hub or self.folder

    def blobs(self, name: str) -> tuple[Path, ...]:
        """Return where a cache may keep the content `name`: per model, and at the hub's level."""
        if self.hub is None:
            return ()
        return (self.storage / "blobs" / name, self.hub / "blobs" / name[:2] / name)


def layout_of(path: str | Path) -> Layout:
    """Return the layout that the path itself says; nothing is read."""
    folder = Path(path)
    match = SNAPSHOT.match(str(folder))
    if match is None:
        return Layout(folder=folder)
    return Layout(
        folder=folder,
        hub=Path(match["hub"]),
        repository=f"{match['owner']}/{match['name']}",
        revision=match["revision"],
    )


def safe_member(name: str, source: str) -> str:
    """Return `name`, a file's path inside a snapshot; ConfigError when it leads out of the folder.

    Lists of files come from other machines.
    """
    path = PurePosixPath(name)
    inside = bool(name) and not path.is_absolute() and ".." not in path.parts and str(path) == name
    # Control characters would reach a terminal with the next message; no file of a model has one.
    if not inside or not name.isprintable() or path.parts[0].startswith(OURS):
        raise ConfigError(source, [f"files: found the path {name!r}, expected one inside the snapshot"])
    return name
