"""Keeps what explains a fault, before anything is removed: a folder a fault, the newest ten."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

KEEP = 10


def save_evidence(folder: Path, label: str, files: Mapping[str, str], *, wall: float) -> Path:
    """Write `files` (name to text) into a new folder below `folder` and return it; older ones than KEEP go.

    The folder appears under its final name only when it is whole.
    """
    stamp = datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"{stamp}-{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')[:60]}"
    draft = folder / f".{name}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file, text in files.items():
        (draft / file).write_text(text, encoding="utf-8")
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    for old in sorted(path for path in folder.iterdir() if not path.name.startswith("."))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target
