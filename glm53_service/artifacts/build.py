"""Turns the inventory's `glm53_image_build` into what docker needs to build the image, and what it is of.

Runs on the control host, where patches and overlay are; source and wheels stay on the head. Pure but for the
reading of those files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from glm53_service.artifacts.built import built_labels, built_reference
from glm53_service.errors import ConfigError
from glm53_service.structs import decode

WHERE = "glm53_image_build"
SHORT_DIGITS = 32
PATCHES_DIGITS = 12
"""Digits of the label tf.patches, as the published recipe's images have it."""

MOST_BYTES = 16 * 1024 * 1024
"""Of patches and overlay: they travel as arguments of one task. What is larger is a wheel."""

REQUIREMENT = re.compile(
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?( ?== ?[^\s;]+| @ https://[^\s;]+)"
    r"( --hash=sha256:[0-9a-f]{64})+$"
)
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
AbsolutePath = Annotated[str, Meta(pattern=r"^/\S+$")]
Base = Annotated[
    str,
    Meta(
        pattern=r"^(\S+@)?sha256:[0-9a-f]{64}$",
        description="by digest, or by the id of an image that the head has; a tag can change under you",
    ),
]


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """TensorFold: a file or folder on the head with its hash, or a requirement line with one."""

    path: AbsolutePath | None = None
    sha256: Sha256 | None = None
    requirement: str | None = None


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What `glm53_image_build` says.

    `patches` and `overlay` are folders on the control host, relative to the inventory; `wheels` is one on the
    head, and with it nothing is asked of the network.
    """

    base: Base
    version: Literal["v0.6.0", "v0.6.6"] | None = None
    source: Package | None = None
    extras: tuple[str, ...] = ()
    wheels: AbsolutePath | None = None
    patches: str | None = None
    overlay: str | None = None


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """A build in full: the image's name, what it is built of, and all that the head is sent for it."""

    reference: str
    inputs: dict[str, str]
    base: str
    arguments: dict[str, str]
    labels: dict[str, str]
    files: dict[str, bytes]
    source: dict[str, str]
    wheels: str
    network: bool


def plan_build(data: Mapping[str, Any], engine: str, folder: Path, images: Path) -> Build:
    """Return the build that `data` asks for; ConfigError lists what is wrong with it.

    `folder` is where relative paths begin, `images` the folder with the Dockerfiles.
    """
    recipe = decode(Recipe, dict(data), WHERE)
    problems = _problems(recipe, engine)
    patches = _folder(recipe.patches, "patches", "*.patch", folder, problems)
    overlay = _folder(recipe.overlay, "overlay", "**/*", folder, problems)
    if sum(map(len, (*patches.values(), *overlay.values()))) > MOST_BYTES:
        problems.append(f"patches, overlay: found more than {MOST_BYTES >> 20} MiB. Fix: make it a wheel")
    if problems:
        raise ConfigError(WHERE, problems)
    package = recipe.source or Package()
    lines = [*sorted(recipe.extras), *([package.requirement] if package.requirement else [])]
    files = {
        "Dockerfile": (images / engine / "Dockerfile").read_bytes(),
        "requirements.txt": "".join(f"{line}\n" for line in lines).encode(),
        **patches,
        **overlay,
    }
    inputs = _inputs(recipe, engine, files)
    version = inputs.get("version", "")
    return Build(
        reference=built_reference(inputs),
        inputs=inputs,
        base=recipe.base,
        arguments={"VERSION": version} if version else {},
        labels=built_labels(inputs) | _labels(recipe.base, version, patches),
        files=files,
        source={"path": package.path, "sha256": package.sha256 or ""} if package.path else {},
        wheels=recipe.wheels or "",
        network=bool(lines) and not recipe.wheels,
    )


def _inputs(recipe: Recipe, engine: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """Return all that decides what the image will be; where wheels lie does not, for each has its hash."""
    inputs = {"base": recipe.base, "engine": engine}
    inputs |= {name: _short(content) for name, content in files.items() if name != "requirements.txt"}
    inputs |= {f"extras/{_name(line)}": _short(line.encode()) for line in recipe.extras}
    if recipe.source:
        inputs["version"] = recipe.version or "v0.6.0"
        inputs["source"] = recipe.source.sha256 or _short((recipe.source.requirement or "").encode())
    return inputs


def _problems(recipe: Recipe, engine: str) -> list[str]:
    problems = [
        f"extras: found {line!r}, expected NAME==VERSION --hash=sha256:64 digits (`pip hash` shows it)"
        for line in recipe.extras
        if not REQUIREMENT.match(line)
    ]
    names = [_name(line) for line in recipe.extras]
    problems += [f"extras: {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    if engine == "tensorfold":
        if recipe.overlay is not None:
            problems.append("overlay: for vllm alone; TensorFold's files are changed by patches")
        return problems + _source_problems(recipe.source)
    for key in ("source", "version"):
        if getattr(recipe, key) is not None:
            problems.append(f"{key}: for tensorfold alone; the base image has vLLM")
    if not (recipe.extras or recipe.patches or recipe.overlay):
        problems.append(
            "nothing is added to the base. Fix: say extras, patches or overlay, or set glm53_image"
        )
    return problems


def _source_problems(source: Package | None) -> list[str]:
    example = "expected {path: /FILE-OR-FOLDER/ON/THE/HEAD, sha256: ...} or {requirement: LINE-WITH-HASH}"
    if source is None:
        return [f"source: missing; {example}"]
    if source.requirement is not None:
        if source.path or source.sha256:
            return [f"source: found a requirement and a path; {example}"]
        if not REQUIREMENT.match(source.requirement):
            return [f"source.requirement: found {source.requirement!r}; {example}"]
        return []
    return [] if source.path and source.sha256 else [f"source: path and sha256 belong together; {example}"]


def _folder(name: str | None, key: str, pattern: str, folder: Path, problems: list[str]) -> dict[str, bytes]:
    """Return the files of a folder by their place in docker's context; hidden ones are left out."""
    if name is None:
        return {}
    root = folder / name
    files = {
        f"{key}/{path.relative_to(root)}": path.read_bytes()
        for path in sorted(root.glob(pattern))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    }
    if not files:
        what = "*.patch" if key == "patches" else "files"
        problems.append(f"{key}: found no {what} in {root}; expected a folder on the control host with some")
    return files


def _labels(base: str, version: str, patches: Mapping[str, bytes]) -> dict[str, str]:
    labels = {"glm53.base": base}
    if version:
        text = "".join(f"{name} {_short(content)}\n" for name, content in sorted(patches.items()))
        labels |= {"glm53.version": version, "tf.patches": _short(text.encode())[:PATCHES_DIGITS]}
    return labels


def _name(line: str) -> str:
    """Return the package of a requirement line, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=@ ]", line, maxsplit=1)[0]).lower()


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SHORT_DIGITS]
