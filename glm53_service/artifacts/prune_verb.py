"""The verb `glm53 prune`: lists what old releases left on this node, and removes it with --yes."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53_service.artifacts.verbs import result, say, verb
from glm53_service.engines.base import LABEL
from glm53_service.errors import ArtifactError, Glm53Error, UnavailableError

if TYPE_CHECKING:
    from glm53_service.artifacts.layout import Layout
    from glm53_service.artifacts.prune import Item

LONG_SECONDS = 600.0
"""Docker takes minutes to remove an image of 25 GB."""


def add_prune_verb(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the parser of `glm53`."""
    text = "list images, snapshots and caches that neither this release nor the one before needs"
    prune = verb(commands, "prune", _prune, text)
    prune.add_argument(
        "folders", nargs="*", type=Path, help="snapshots in use (the head's settings name its own)"
    )
    prune.add_argument("--yes", action="store_true", help="remove what is listed")
    prune.add_argument(
        "--state", type=Path, default=Path("/var/lib/glm53"), help="where caches are (%(default)s)"
    )


def _prune(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.progress import gigabytes

    items, notes, layouts = _items(arguments)
    for note in notes:
        say(f"note: {note}")
    failed = 0
    for item in items:
        done = ""
        if arguments.yes:
            done = _remove(item)
            failed += done != "removed"
        data = {"event": "item", **item.data(), "result": done or None}
        result(arguments, data, f"{gigabytes(item.bytes):>10}  {item.kind:10} {item.name}  {done}".rstrip())
    total = sum(item.bytes for item in items)
    word = "were listed" if not arguments.yes else "were to go"
    text = f"{gigabytes(total):>10}  in all" + (
        "" if arguments.yes or not items else "; remove: glm53 prune --yes"
    )
    data = {"event": "result", "items": len(items), "bytes": total, "failed": failed}
    data |= {"folders": [str(layout.folder) for layout in layouts], "notes": notes}
    result(arguments, data, text)
    if failed:
        raise ArtifactError(f"{failed} of {len(items)} that {word} are still there", hint="run it as root")
    return 0


def _items(arguments: argparse.Namespace) -> tuple[list[Item], list[str], list[Layout]]:
    """Return what may go, what a person should know, and the snapshots that are in use."""
    from glm53_service.artifacts import prune
    from glm53_service.artifacts.layout import layout_of
    from glm53_service.artifacts.served import NAME, noted_image
    from glm53_service.artifacts.sources import wants
    from glm53_service.settings import read_settings

    layouts = [layout_of(folder.absolute()) for folder in arguments.folders]
    reference = ""
    if (arguments.etc / "settings.yaml").exists():
        settings = read_settings(arguments.etc)
        reference = settings.image
        layouts = layouts or [want.layout for want in wants(settings)]
    files = prune.caches(arguments.state) + prune.file_items(layouts, time.time())
    try:
        ranks, inspected = _ranks(), _inspect()
    except UnavailableError as error:
        return files, [f"images are not listed: {error.message}"], layouts
    # What is served may be older than the settings: whatever a rank here has by name stays.
    said = json.dumps(ranks)
    files = [item for item in files if json.dumps(item.name)[1:-1] not in said]
    used = [*(str(rank["Image"]) for rank in ranks), noted_image(arguments.state / NAME)]
    current = _current(inspected, reference or used[0])
    if current is None:
        return files, ["images are not listed: which image is in use here is not known"], layouts
    images = prune.old(prune.images(inspected, reference), str(current["Id"]))
    return [image for image in images if image.name not in used] + files, [], layouts


def _ranks() -> list[dict[str, Any]]:
    """Return `docker inspect` of the ranks that run here."""
    ids = _docker("ps", "--quiet", "--no-trunc", "--filter", f"label={LABEL}.cluster").split()
    return list(json.loads(_docker("inspect", *ids))) if ids else []


def _current(inspected: list[dict[str, Any]], reference: str) -> dict[str, Any] | None:
    """Return the image of that name or id, None when it is not here."""
    from glm53_service.artifacts.images.reference import familiar

    wanted = {reference, familiar(reference)}
    for image in inspected:
        names = [*(image.get("RepoTags") or []), *(image.get("RepoDigests") or []), image["Id"]]
        if wanted & set(names):
            return image
    return None


def _inspect() -> list[dict[str, Any]]:
    ids = _docker("image", "ls", "--quiet", "--no-trunc").split()
    return list(json.loads(_docker("image", "inspect", *dict.fromkeys(ids)))) if ids else []


def _docker(*argv: str) -> str:
    from glm53_service.run import run

    return asyncio.run(run(["docker", *argv], timeout_seconds=LONG_SECONDS))


def _remove(item: Item) -> str:
    """Return `removed`, or why it is still there."""
    from glm53_service.artifacts.prune import Kind, remove_files

    try:
        if item.kind is not Kind.IMAGE:
            remove_files(item)
            return "removed"
        (image,) = json.loads(_docker("image", "inspect", item.name))
        names = [*(image.get("RepoTags") or []), *(image.get("RepoDigests") or [])]
        # By its names and without force: docker itself refuses an image that a container uses.
        _docker("image", "rm", *names)
    except Glm53Error as error:
        return f"NOT removed: {error.message}"
    return "removed"
