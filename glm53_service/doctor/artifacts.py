"""Image and weights of a node, to be laid beside another's. Names, sizes and ids: no weight is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glm53_service.artifacts.content import LOCAL_REPOSITORY, image_content
from glm53_service.doctor.finding import Finding, Noun, error, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.settings import read_settings

FILES = ("-L", "-type", "f", "-printf", "%P %s\n")
DANGLING = ("-xtype", "l", "-printf", "%P\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """`image`: the content id of the settings' image, or of the one that came from the head; `weights`: name
    and size of each file of `model`; `dangling`: links in it that lead nowhere.
    """

    reference: str
    image: str
    architecture: str
    machine: str
    model: str
    weights: tuple[tuple[str, int], ...]
    dangling: tuple[str, ...]


async def read(source: Source) -> Artifacts:
    """Gather."""
    try:
        settings = read_settings(source.etc)
        reference, model = settings.image, settings.model.path
    except ConfigError:
        reference, model = "", await _mounted(source)
    inspect = await _image(source, reference)
    listed = await source.run("find", *_below(model, FILES)) if model else None
    lost = await source.run("find", *_below(model, DANGLING)) if model else None
    rows = [line.rsplit(" ", 1) for line in listed.out.splitlines()] if listed else []
    machine = await source.run("uname", "-m")
    return Artifacts(
        reference=reference or LOCAL_REPOSITORY,
        image=image_content(inspect) if inspect else "",
        architecture=str(inspect.get("Architecture", "")),
        machine=machine.out.strip(),
        model=model,
        weights=tuple(sorted((row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdigit())),
        dangling=tuple(lost.out.splitlines()) if lost else (),
    )


def _below(model: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return find's arguments; -L comes before the path."""
    return (tests[0], model, *tests[1:]) if tests[0] == "-L" else (model, *tests)


async def _image(source: Source, reference: str) -> dict[str, Any]:
    """Return the inspect of the settings' image; on a worker, of the newest that came from the head."""
    if not reference:
        listed = await source.run("docker", "image", "ls", "--quiet", "--no-trunc", LOCAL_REPOSITORY)
        reference = next(iter(listed.out.split()), "")
    found = await source.run("docker", "image", "inspect", reference) if reference else None
    try:
        data = json.loads(found.out) if found else []
    except ValueError:
        return {}
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}


async def _mounted(source: Source) -> str:
    """Return the model folder that a rank here has mounted: a worker keeps no settings."""
    listed = await source.run("docker", "ps", "--all", "--quiet", "--filter", "label=glm53.rank")
    ids = listed.out.split()
    found = await source.run("docker", "inspect", *ids) if ids else None
    try:
        binds = json.loads(found.out)[0]["HostConfig"]["Binds"] if found else []
    except (ValueError, LookupError, TypeError):
        binds = []
    return next((str(bind).split(":")[0] for bind in binds if str(bind).endswith(":ro")), "")


def check(found: Artifacts) -> Iterator[Finding]:
    """Judge."""
    if found.image:
        yield good("artifacts.image", f"{found.reference}: content {found.image[7:19]}, {found.architecture}")
    else:
        yield info(
            "artifacts.image", f"no image {found.reference} here", "", "run site.yml: it ships the head's"
        )
    known = {"x86_64": "amd64", "aarch64": "arm64"}
    expected = known.get(found.machine, found.machine)
    if found.architecture and expected and found.architecture != expected:
        yield error(
            "artifacts.architecture",
            f"the image is for {found.architecture}",
            f"{expected}: else 'exec format error'",
            f"docker pull --platform linux/{expected}, on the head",
        )
    if found.dangling:
        yield error(
            "artifacts.links",
            f"{len(found.dangling)} links in {found.model} lead nowhere: {', '.join(found.dangling[:3])}",
            "every file of the model is there",
            "copy the model with its blobs (site.yml does), or download it again",
        )
    if found.weights:
        size = sum(size for _, size in found.weights)
        yield good("artifacts.weights", f"{found.model}: {len(found.weights)} files, {size / 1e9:.1f} GB")
    elif found.model:
        yield warning(
            "artifacts.weights",
            f"nothing in {found.model}",
            "the checkpoint",
            "set glm53_model_dir to where it is, or run site.yml on a worker",
        )


def parity(found: Artifacts) -> dict[str, str]:
    """Return what has to be equal on all nodes; empty values are not compared."""
    listing = "\n".join(f"{name} {size}" for name, size in found.weights)
    return {
        "image": found.image[7:19],
        "weights": hashlib.sha256(listing.encode()).hexdigest()[:12] if found.weights else "",
    }


NOUN = Noun(name="artifacts", read=read, check=check, parity=parity)
