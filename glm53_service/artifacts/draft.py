"""What a node has of the draft model: complete or not, and the hash of its weights, read once a copy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from glm53_service.artifacts.cache import give_back
from glm53_service.drafter import DraftFiles
from glm53_service.files import read_json, write_durably

WEIGHTS = "model.safetensors"
NEEDED = ("config.json", WEIGHTS)


def read_draft_files(folder: Path, state: Path, *, node: str, rank: int) -> DraftFiles:
    """Return what `folder` holds of DFlash2.

    The weights (2.3 GB) are hashed when their size or time of change differs from the receipt in `state`, and
    their page cache is given back afterwards.
    """
    for name in NEEDED:
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return DraftFiles(node=node, rank=rank, problem=f"{folder / name}: {error.strerror}")
        if not size:
            return DraftFiles(node=node, rank=rank, problem=f"{folder / name} is empty")
    stat = (folder / WEIGHTS).stat()
    mark = [str(folder), stat.st_size, stat.st_mtime_ns, stat.st_ino]
    receipt = read_json(state / "drafter.json")
    if receipt.get("mark") == mark:
        return DraftFiles(node=node, rank=rank, sha256=str(receipt["sha256"]))
    try:
        with (folder / WEIGHTS).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return DraftFiles(node=node, rank=rank, problem=f"{folder / WEIGHTS}: {error.strerror}")
    give_back(folder)
    write_durably(state / "drafter.json", json.dumps({"mark": mark, "sha256": sha256}))
    return DraftFiles(node=node, rank=rank, sha256=sha256)


def has_mtp_head(model: Path) -> bool | None:
    """Return whether the checkpoint in `model` says that it has an MTP head; None when it cannot be read."""
    config = read_json(model / "config.json")
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_nextn_predict_layers")
    return None if not config else bool(layers)
