"""`glm53 snapshot`: everything that the checks read, as a tree of plain files.

    snapshot.json    version, when it was taken, of which node
    sys/ proc/ etc/  the small files that the checks read, at their own paths
    commands/        each command that the checks ran: argv, rc, stdout, stderr

The checks run once while it is taken, so a check that reads more brings its answer with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm53_service.doctor.redact import redact
from glm53_service.doctor.source import MANIFEST, MOST_BYTES, VERSION, Source, read_text
from glm53_service.errors import CommandError, UnavailableError, UsageError
from glm53_service.run import Runner

MOST_FILES = 5000
MOST_IN_ALL = 16 * 1024 * 1024
EMPTY_GID = re.compile(r"[0:]+\n?")


@dataclass(slots=True)
class Recorder:
    """A runner that runs what it is told and keeps how each command ended."""

    runner: Runner
    kept: dict[tuple[str, ...], dict[str, object]] = field(default_factory=dict)

    async def __call__(self, argv: Sequence[str]) -> str:
        """Run `argv` as the runner inside does."""
        try:
            out = await self.runner(argv)
        except CommandError as error:
            self._keep(argv, error.code, error.out, error.err)
            raise
        except UnavailableError as error:
            self._keep(argv, None, "", error.message)
            raise
        self._keep(argv, 0, out, "")
        return out

    def _keep(self, argv: Sequence[str], code: int | None, out: str, err: str) -> None:
        self.kept[tuple(argv)] = {
            "argv": list(argv),
            "rc": code,
            "stdout": redact(out[:MOST_BYTES]),
            "stderr": redact(err[:MOST_BYTES]),
        }


async def take(
    source: Source,
    out: Path,
    *,
    files: Sequence[str],
    check: Callable[[Source], Awaitable[object]],
    node: str,
) -> int:
    """Write a snapshot of `source` below `out` (a new or empty folder) and return its size in bytes.

    `files` are glob patterns below the root; `check` runs all checks against the source that it is given.
    UsageError when the folder has something in it, or when there is far more to read than there should be.
    """
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="give a new folder with --out")
    recorder = Recorder(source.runner)
    await check(replace(source, runner=recorder))
    found = _files(source, files)
    for argv, kept in recorder.kept.items():
        found[f"commands/{_slug(argv)}.json"] = json.dumps(kept, indent=1) + "\n"
    manifest = {"version": VERSION, "taken": source.wall, "node": node}
    found[MANIFEST] = json.dumps(manifest, indent=1) + "\n"
    size = sum(len(text.encode()) for text in found.values())
    if len(found) > MOST_FILES or size > MOST_IN_ALL:
        raise UsageError(
            f"the snapshot would be {len(found)} files, {size} bytes; that is not what it is for"
        )
    for path, text in found.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text, encoding="utf-8")
    return size


def _files(source: Source, patterns: Sequence[str]) -> dict[str, str]:
    """Return path to redacted text of what matches; what cannot be read is not there, as for the checks."""
    found: dict[str, str] = {}
    own = [("etc/glm53", source.etc / name) for name in ("node.yaml", "settings.yaml")]
    paths = [
        (str(path.parent.relative_to(source.root)), path) for p in patterns for path in source.root.glob(p)
    ]
    for folder, path in [*paths, *own]:
        text = read_text(path) if path.is_file() else ""
        empty_slot = path.parent.name == "gids" and EMPTY_GID.fullmatch(text)
        if text and not empty_slot:
            found[f"{folder}/{path.name}"] = redact(text)
    return found


def _slug(argv: Sequence[str]) -> str:
    said = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(argv)).strip("-")[:60]
    return f"{said}-{hashlib.sha256(json.dumps(list(argv)).encode()).hexdigest()[:8]}"
