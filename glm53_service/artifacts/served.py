"""Which image this node's rank was made of last: a worker keeps no settings that would say so.

Of several images that came from the head the newest need not be it: one may be there for the next release,
or for going back.
"""

from __future__ import annotations

import json
from pathlib import Path

from glm53_service.files import read_json, write_durably

NAME = "image.json"
FILE = f"var/lib/glm53/{NAME}"
"""Where the record is, below a machine's root."""


def note_image(state: Path, image: str) -> None:
    """Write down the local id of the image, unless it is there already; OSError when it cannot be."""
    if read_json(state / NAME).get("id") != image:
        write_durably(state / NAME, json.dumps({"id": image}) + "\n")


def noted_image(path: Path) -> str:
    """Return the id in the record at `path`, empty when there is none."""
    try:
        return read_note(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def read_note(text: str) -> str:
    """Return the id in a record's text, empty for none."""
    try:
        found = json.loads(text)["id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) else ""
