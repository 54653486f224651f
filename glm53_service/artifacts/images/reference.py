"""What an image reference says: registry, name, digest. Only a digest can be pulled."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm53_service.artifacts.images.registry import DOCKER_HUB, HUB_NAMES, split_reference
from glm53_service.errors import ArtifactError

HUB_KEY = "https://index.docker.io/v1/"
"""How `docker login` and credential helpers call Docker Hub."""

PULLABLE = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
LOCAL = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An image of a registry. `text` is what was written; `repository` is its path at `registry`."""

    text: str
    registry: str
    repository: str
    digest: str

    @property
    def pulled(self) -> str:
        """What docker is asked for: without a tag, which the digest makes meaningless."""
        return f"{_untagged(self.text.partition('@')[0])}@{self.digest}"

    @property
    def key(self) -> str:
        """How `docker login` calls the registry."""
        return HUB_KEY if self.registry == DOCKER_HUB else self.registry


def parse_reference(text: str) -> Reference:
    """Return what `text` refers to; ArtifactError for what cannot be pulled: a local id, a tag."""
    if LOCAL.fullmatch(text):
        raise ArtifactError(
            f"no image {text} in docker here, and the id of a local build cannot be pulled",
            hint="build it here again, bring it with `docker save` and `docker load`, or set glm53_image to"
            " NAME@sha256:DIGEST",
        )
    if not PULLABLE.fullmatch(text):
        raise ArtifactError(
            f"no image {text} in docker here, and it is named by a tag: only a digest is pulled, since a tag"
            " can be another image tomorrow",
            hint="set glm53_image to NAME@sha256:DIGEST, with the digest that the registry's page shows",
        )
    registry, repository, digest = split_reference(text)
    return Reference(text=text, registry=registry, repository=repository, digest=digest)


def familiar(text: str) -> str:
    """Return a reference as docker's lists have it: without a tag beside a digest, without Docker Hub's own
    names.
    """
    name, at, digest = text.partition("@")
    name = _untagged(name) if at else name
    for hub in HUB_NAMES:
        if name.startswith(f"{hub}/"):
            name = name.removeprefix(f"{hub}/").removeprefix("library/")
    return f"{name}{at}{digest}"


def _untagged(name: str) -> str:
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name
