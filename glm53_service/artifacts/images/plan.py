"""What a run would move of the engine image: per node there, to pull, or to ship. Asks nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glm53_service.artifacts.content import image_content
from glm53_service.artifacts.progress import duration, gigabytes

REGISTRY = "registry"
"""What the pull is called among the rates."""

LOCAL_ONLY = "it is no image of a registry"
"""Why there is no size for an image that can only be here: a local build, or a tag."""

UNPACKED = 2
"""While an image is loaded it is on the disk twice: the stream, and its layers."""


def ship_rate(node: str) -> str:
    """Return what the shipping of images to `node` is called among the rates: docker's load sets the pace, so
    it is another one than that of weights.
    """
    return f"image:{node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlace:
    """The image on one node: what docker says of it, None when it is not there, and docker's free bytes,
    None: not known.
    """

    node: str
    inspect: Mapping[str, Any] | None
    free: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStep:
    """The image on one node, as artifacts.plan has its steps. `unknown` says why its size is not known;
    `missing_bytes` is then 1, and `estimated` true.
    """

    node: str
    source: str
    over: str
    there_bytes: int
    missing_bytes: int
    room: bool
    seconds: int | None
    unknown: str = ""
    what: str = "image"
    folder: str = "docker"

    @property
    def estimated(self) -> bool:
        """Whether the bytes are no figure."""
        return bool(self.unknown)

    def data(self) -> dict[str, Any]:
        """Return it for --json."""
        return {**asdict(self), "missing_files": None, "estimated": self.estimated}

    def __str__(self) -> str:
        name = f"{self.node}: image {self.source}"
        if not self.missing_bytes:
            return f"{name}: there ({gigabytes(self.there_bytes)})"
        size = f"size unknown ({self.unknown})" if self.unknown else gigabytes(self.missing_bytes)
        time = f", {duration(self.seconds)} at the last rate" if self.seconds is not None else ""
        room = "" if self.room else "; THERE IS NO ROOM FOR IT"
        return f"{name}: {size} to {self.over}{time}{room}"


def plan_image(
    source: str,
    registry: str,
    size: int | str,
    head: ImagePlace,
    workers: Sequence[tuple[ImagePlace, str]],
    *,
    rates: Mapping[str, float],
    spare: int,
) -> tuple[ImageStep, ...]:
    """Return a step a node. `registry` empty: the image is a local build, and can only be there. `size`: what
    the registry's manifest says, or why that is not known. `workers` come with the path to them in words.
    """
    wanted = image_content(head.inspect) if head.inspect else ""
    steps = [
        _step(source, head, size, f"pull from {registry}" if registry else "build", REGISTRY, rates, spare)
    ]
    for place, over in workers:
        same = bool(wanted and place.inspect and image_content(place.inspect) == wanted)
        there = ImagePlace(node=place.node, inspect=place.inspect if same else None, free=place.free)
        shipped = int(head.inspect.get("Size") or 0) if head.inspect else size
        steps.append(_step(source, there, shipped, f"ship {over}", ship_rate(place.node), rates, spare))
    return tuple(steps)


def _step(
    source: str,
    place: ImagePlace,
    size: int | str,
    over: str,
    path: str,
    rates: Mapping[str, float],
    spare: int,
) -> ImageStep:
    missing = 0 if place.inspect else size if isinstance(size, int) else 1
    unknown = size if missing and isinstance(size, str) else ""
    rate = rates.get(path)
    return ImageStep(
        node=place.node,
        source=source,
        over=over,
        there_bytes=int(place.inspect.get("Size") or 0) if place.inspect else 0,
        missing_bytes=missing,
        room=not missing or bool(unknown) or place.free is None or place.free >= UNPACKED * missing + spare,
        seconds=round(missing / rate) if rate and missing and not unknown else None,
        unknown=unknown,
    )
