"""Files that survive a power cut: written beside, synced, renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader or a power cut sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk gets its room back
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in `path`; empty when the file is absent or was never completed."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
