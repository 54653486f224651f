"""Small snapshots for tests: the files of a repository, and cache layouts as people have them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

from tests.unit.hub_server import COMMIT, git_sha1, sha256

REPOSITORY = "unit-lab/GLM-unit"


def shard(number: int, size: int = 3000) -> bytes:
    """Return a valid safetensors file with one tensor of `size` bytes."""
    header = json.dumps({f"t{number}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes((number * 37 + i) % 251 for i in range(size))


def model_files(shards: int = 3, size: int = 3000) -> dict[str, bytes]:
    """Return a checkpoint with an index and small files, one of them in a folder."""
    names = [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    files = {name: shard(number, size) for number, name in enumerate(names, 1)}
    weight_map = {f"t{number}": name for number, name in enumerate(names, 1)}
    return {
        **files,
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "config.json": b'{"model_type": "unit", "num_nextn_predict_layers": 1}',
        "provenance/source.json": b'{"from": "unit"}',
        "README.md": b"# unit\n",
    }


def flat(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the files as they are."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def etag(name: str, data: bytes) -> str:
    """Return the cache's name of a file's content."""
    return sha256(data) if name.endswith(".safetensors") else git_sha1(data)


def cache(hub: Path, files: dict[str, bytes], *, kind: str = "model") -> Path:
    """Write a hub cache and return the snapshot's folder.

    `kind`: `model` (blobs per model), `hub` (blobs at the hub's level), `chain` (the model's blobs are links
    to the hub's).
    """
    storage = hub / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = storage / "snapshots" / COMMIT
    for name, data in files.items():
        digest = etag(name, data)
        shared = hub / "blobs" / digest[:2] / digest
        own = storage / "blobs" / digest
        real = own if kind == "model" else shared
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(data)
        if kind == "chain":
            own.parent.mkdir(parents=True, exist_ok=True)
            own.symlink_to(os.path.relpath(shared, own.parent))
        path = snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(own if kind == "chain" else real, path.parent))
    return snapshot


def contents(folder: Path) -> dict[str, bytes]:
    """Return every visible file below `folder`, links followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def hidden(folder: Path) -> set[str]:
    """Return what lies there besides the model: records, unfinished files."""
    return {str(path.relative_to(folder)) for path in folder.rglob(".*")}


def touch_after(path: Path, record: Path, act: Callable[[], object]) -> None:
    """Do `act` to `path` until the file system shows it to be later than `record`: its clock ticks in ms."""
    while True:
        act()
        if path.stat().st_ctime_ns > record.stat().st_ctime_ns:
            return
