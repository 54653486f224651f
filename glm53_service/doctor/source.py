"""Where the checks read: this machine, or a tree of plain files that a snapshot of another one left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm53_service.errors import CommandError, UnavailableError, UsageError
from glm53_service.run import Runner, run

MANIFEST = "snapshot.json"
VERSION = 1
MOST_BYTES = 256 * 1024
"""Of a file or of a command's output: what the checks read is far smaller, so more is an accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended; `code` None: it could not be run, or gave no answer in time."""

    code: int | None
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One machine to look at. `etc` is its folder of node.yaml; `wall` when it looks (or looked), in Unix
    seconds; `live` is false for a tree. `weights` are the folders of weights that a start needs, the model's
    first, where somebody said so: only the head has settings that name them.
    """

    root: Path
    runner: Runner
    etc: Path
    wall: float
    live: bool = True
    weights: tuple[str, ...] = ()

    def read(self, path: str) -> str:
        """Return the text of the file `path` (relative to the root), empty where it cannot be read."""
        return read_text(self.root / path)

    def names(self, pattern: str) -> tuple[str, ...]:
        """Return the paths below the root that match `pattern`, sorted."""
        return tuple(sorted(str(found.relative_to(self.root)) for found in self.root.glob(pattern)))

    async def run(self, *argv: str) -> Ran:
        """Return how the command ended, here or when the snapshot was taken."""
        try:
            return Ran(code=0, out=await self.runner(argv))
        except CommandError as error:
            return Ran(code=error.code, out=error.out, err=error.err)
        except UnavailableError as error:
            return Ran(code=None, err=error.message)


def this_machine(etc: Path, wall: float, runner: Runner = run, *, weights: Sequence[str] = ()) -> Source:
    """Return the machine that this runs on."""
    return Source(root=Path("/"), runner=runner, etc=etc, wall=wall, weights=tuple(weights))


def open_tree(folder: Path) -> Source:
    """Return the machine that the snapshot in `folder` was taken of; UsageError when it is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, taken = manifest["version"], float(manifest["taken"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} is no snapshot: {MANIFEST} cannot be read ({error})",
            hint="give the folder that `glm53 snapshot` wrote (unpack the archive first)",
        ) from None
    if version != VERSION:
        raise UsageError(f"{folder} is a snapshot of version {version}, this glm53 reads {VERSION}")
    return Source(root=folder, runner=recorded(folder), etc=folder / "etc/glm53", wall=taken, live=False)


def recorded(folder: Path) -> Runner:
    """Return a runner that answers from the commands that were recorded below `folder`."""
    answers: dict[tuple[str, ...], Ran] = {}
    for path in sorted((folder / "commands").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        answers[tuple(data["argv"])] = Ran(code=data["rc"], out=data["stdout"], err=data.get("stderr", ""))

    async def answer(argv: Sequence[str]) -> str:
        ran = answers.get(tuple(argv), Ran(code=None, err=f"`{' '.join(argv)}` is not in this snapshot"))
        if ran.code is None:
            raise UnavailableError(ran.err)
        if ran.code:
            message = f"`{' '.join(argv)}` ended with {ran.code}: {ran.err}"
            raise CommandError(message, code=ran.code, out=ran.out, err=ran.err)
        return ran.out

    return answer


def read_text(path: Path) -> str:
    """Return at most MOST_BYTES of a file as text; empty where it cannot be read, as much of sysfs."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
