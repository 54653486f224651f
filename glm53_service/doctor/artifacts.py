"""Image and weights of a node, to be laid beside another's: names, sizes, ids. No weight is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glm53_service.artifacts.built import drift
from glm53_service.artifacts.content import LOCAL_REPOSITORY, image_content
from glm53_service.artifacts.folders import needed_folders
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.served import FILE, read_note
from glm53_service.artifacts.snapshot import Kind
from glm53_service.doctor.finding import Finding, Noun, error, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.settings import read_settings

FILES = ("-L", "-type", "f", "-printf", "%P %s\n")
VERIFY = ("/opt/glm53/current/bin/glm53", "verify", "--json")
NAMES = ("weights", "drafter")
"""What a folder is called in the comparison, by its place: the model's is the first."""

OUR_OWN = ".glm53-manifest"
"""Beginning of the names of our own files there: a copy need not have the same ones as a download."""

DANGLING = ("-xtype", "l", "-printf", "%P\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """`image`: the content id of the settings' image, or of the one that came from the head; `drift`: why it
    is not the one that the head was to build, None where it was to build none; `weights`: name and size of
    each file of `model`; `dangling`: links in it that lead nowhere.
    """

    reference: str
    image: str
    drift: tuple[str, ...] | None
    architecture: str
    machine: str
    model: str
    weights: tuple[tuple[str, int], ...]
    dangling: tuple[str, ...]
    verified: tuple[Verified, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What `glm53 verify` says of a folder. `content` names its manifest's files, empty without a manifest;
    `refused` is why it says nothing, `problems` are (kind, words).
    """

    folder: str
    content: str = ""
    published: str = ""
    refused: str = ""
    problems: tuple[tuple[str, str], ...] = ()


async def read(source: Source) -> Artifacts:
    """Gather."""
    try:
        settings = read_settings(source.etc)
        reference, folders = settings.image, tuple(folder.path for folder in needed_folders(settings))
        inputs = settings.image_inputs
    except ConfigError:
        inputs = {}
        reference, folders = "", source.weights or await _mounted(source)
    model = folders[0] if folders else ""
    inspect = await _image(source, reference)
    listed = await source.run("find", *_below(model, FILES)) if model else None
    lost = await source.run("find", *_below(model, DANGLING)) if model else None
    lines = listed.out.splitlines() if listed else ()
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith(OUR_OWN)]
    machine = await source.run("uname", "-m")
    labels = (inspect.get("Config") or {}).get("Labels")
    return Artifacts(
        reference=reference or LOCAL_REPOSITORY,
        image=image_content(inspect) if inspect else "",
        drift=drift(labels, inputs) if inspect and inputs else None,
        architecture=str(inspect.get("Architecture", "")),
        machine=machine.out.strip(),
        model=model,
        weights=tuple(sorted((row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdigit())),
        dangling=tuple(lost.out.splitlines()) if lost else (),
        verified=tuple([await _verified(source, folder) for folder in folders]),
    )


async def _verified(source: Source, folder: str) -> Verified:
    """Return the quick verdict: names, links, sizes, and the content of small files."""
    ran = await source.run(*VERIFY, folder)
    try:
        said = json.loads(ran.out)
        problems = tuple((str(p["kind"]), f"{p['path']}: {p['text']}") for p in said["problems"])
        content, published = said.get("content") or "", f"{said['repository']}@{str(said['revision'])[:12]}"
        if not said["repository"]:
            published = "hashed as found on the head"
    except (ValueError, LookupError, TypeError):
        return Verified(folder=folder, refused=(ran.err or "no answer").strip().partition("\n")[0])
    return Verified(folder=folder, content=content, published=published, problems=problems)


def _below(model: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return find's arguments; -L comes before the path."""
    return (tests[0], model, *tests[1:]) if tests[0] == "-L" else (model, *tests)


async def _image(source: Source, reference: str) -> dict[str, Any]:
    """Return the inspect of the settings' image; on a worker, of the one that its rank had last, else of the
    newest that came from the head.
    """
    reference = reference or read_note(source.read(FILE))
    if not reference:
        listed = await source.run("docker", "image", "ls", "--quiet", "--no-trunc", LOCAL_REPOSITORY)
        reference = next(iter(listed.out.split()), "")
    found = await source.run("docker", "image", "inspect", reference) if reference else None
    try:
        data = json.loads(found.out) if found else []
    except ValueError:
        return {}
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}


async def _mounted(source: Source) -> tuple[str, ...]:
    """Return the folders of weights that a rank here reads, the model's first: a worker keeps no settings.

    A snapshot in a hub's cache is mounted with the whole cache, so the rank's arguments say which one it is.
    """
    listed = await source.run("docker", "ps", "--all", "--quiet", "--filter", "label=glm53.rank")
    ids = listed.out.split()
    found = await source.run("docker", "inspect", *ids) if ids else None
    try:
        inspect = json.loads(found.out)[0] if found else {}
        binds = [str(bind).split(":") for bind in inspect["HostConfig"]["Binds"]]
        words = [str(word) for word in inspect["Config"]["Cmd"]]
    except (ValueError, LookupError, TypeError):
        return ()
    roots = {bind[0] for bind in binds if bind[-1] == "ro"}
    named = [word for word in words if word.startswith("/") and str(layout_of(word).root) in roots]
    return tuple(dict.fromkeys(named))


def check(found: Artifacts) -> Iterator[Finding]:
    """Judge."""
    if found.image:
        yield good("artifacts.image", f"{found.reference}: content {found.image[7:19]}, {found.architecture}")
    else:
        yield info(
            "artifacts.image", f"no image {found.reference} here", "", "run site.yml: it ships the head's"
        )
    if found.drift:
        yield error(
            "artifacts.built",
            f"{found.reference}: {'; '.join(found.drift)}",
            "the image that glm53_image_build asks for",
            "run site.yml: it builds the image anew",
        )
    elif found.drift is not None:
        yield good("artifacts.built", f"{found.reference}: built here of what the settings say")
    known = {"x86_64": "amd64", "aarch64": "arm64"}
    expected = known.get(found.machine, found.machine)
    if found.architecture and expected and found.architecture != expected:
        yield error(
            "artifacts.architecture",
            f"the image is for {found.architecture}",
            f"{expected}: else 'exec format error'",
            f"set glm53_image to one for linux/{expected}, and `docker image rm` this one",
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
    yield from map(_weights, found.verified if found.weights else found.verified[1:])


def _weights(found: Verified) -> Finding:
    if found.refused:
        return info(
            "artifacts.manifest", f"{found.folder}: {found.refused}", "", "`glm53 verify` there, as root"
        )
    if not found.problems:
        if found.content:
            return good(
                "artifacts.manifest", f"{found.folder}: {found.published}, names, links and sizes right"
            )
        return info(
            "artifacts.manifest",
            f"{found.folder}: complete by its own index, no manifest",
            "",
            "`glm53 download` on the head makes one, so that the nodes' files can be compared",
        )
    measured = f"{found.folder}: {'; '.join(text for _, text in found.problems[:3])}"
    expected = "the files of its manifest, and no other weights"
    fix = "on the head `glm53 download`, for a worker `glm53 ship` there; `glm53 verify` lists all"
    level = warning if all(kind == Kind.EXTRA for kind, _ in found.problems) else error
    return level("artifacts.manifest", measured, expected, fix)


def parity(found: Artifacts) -> dict[str, str]:
    """Return what has to be equal on all nodes; empty values are not compared."""
    listing = "\n".join(f"{name} {size}" for name, size in found.weights)
    return {
        "image": found.image[7:19],
        "weights": hashlib.sha256(listing.encode()).hexdigest()[:12] if found.weights else "",
        **{
            f"{name}.manifest": verified.content
            for name, verified in zip(NAMES, found.verified, strict=False)
            if verified.content
        },
    }


NOUN = Noun(name="artifacts", read=read, check=check, parity=parity, files=(FILE,))
