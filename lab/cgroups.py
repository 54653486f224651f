"""One control group a host, so that all its processes can be found and ended, and nobody else's.

Two layouts are known. *Unified*: cgroup v2 at /sys/fs/cgroup, as on a current Debian or Ubuntu with systemd.
*Hybrid*: v1 controllers and a v2 tree without controllers at /sys/fs/cgroup/unified, with systemd's named v1
tree beside it. Only the hybrid layout has been run so far; the unified one follows the manuals.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError

GONE_SECONDS = 20.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where cgroups are made: the v2 tree, and in the hybrid layout systemd's named v1 tree as well."""

    v2: Path
    named: Path | None = None

    @property
    def trees(self) -> tuple[Path, ...]:
        return (self.v2,) if self.named is None else (self.v2, self.named)


def detect(mountinfo: str) -> Hierarchy:
    """Read the layout out of the text of /proc/self/mountinfo; raises LabError when there is no v2 tree."""
    v2: list[Path] = []
    named: list[Path] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point, kind = Path(before.split()[4]), after.split()[0]
        if kind == "cgroup2":
            v2.append(point)
        elif kind == "cgroup" and "name=systemd" in after.split()[2].split(","):
            named.append(point)
    if Path("/sys/fs/cgroup") in v2:
        return Hierarchy(Path("/sys/fs/cgroup"))
    if v2:
        return Hierarchy(v2[0], named[0] if named else None)
    raise LabError(
        "no cgroup v2 tree is mounted: the lab needs one at /sys/fs/cgroup or /sys/fs/cgroup/unified. "
        "Do: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified"
    )


def hierarchy() -> Hierarchy:
    """This machine's layout."""
    return detect(Path("/proc/self/mountinfo").read_text())


@dataclass(frozen=True, slots=True)
class Group:
    """The cgroup `name` below the top of each tree. Its own processes live in named children of it."""

    hierarchy: Hierarchy
    name: str

    @property
    def path(self) -> Path:
        return self.hierarchy.v2 / self.name

    def create(self) -> None:
        """Make it, with every controller there is given to its children."""
        for tree in self.hierarchy.trees:
            (tree / self.name).mkdir(exist_ok=True)
        controllers = (self.path / "cgroup.controllers").read_text().split()
        if controllers:
            (self.path / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))

    def join(self, child: str) -> None:
        """Move the calling process into the child group, making it first."""
        for tree in self.hierarchy.trees:
            group = tree / self.name / child
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def processes(self, child: str) -> list[int]:
        """Process ids directly in the child group; empty when there is no such group."""
        try:
            return [int(line) for line in (self.path / child / "cgroup.procs").read_text().split()]
        except (FileNotFoundError, OSError):
            return []

    def populated(self) -> bool:
        """Whether a process lives anywhere below it."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL every process below it and return when all are gone; raises LabError if they stay."""
        if not self.path.is_dir():
            return
        deadline = time.monotonic() + GONE_SECONDS
        (self.path / "cgroup.kill").write_text("1")
        while self.populated():
            if time.monotonic() > deadline:
                raise LabError(f"processes in {self.path} are still there {GONE_SECONDS:g} s after SIGKILL")
            time.sleep(POLL_SECONDS)

    def remove(self) -> None:
        """Remove the empty group and the empty groups below it, in every tree."""
        for tree in self.hierarchy.trees:
            _remove_below(tree / self.name)


def _remove_below(top: Path) -> None:
    if not top.is_dir():
        return
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            Path(folder).rmdir()
