"""Whether a node's model can be started with: looked at before every start, without reading weights."""

from __future__ import annotations

from pathlib import Path

from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import read_manifest
from glm53_service.artifacts.snapshot import Kind, quick_check, summary
from glm53_service.errors import ArtifactError, UnavailableError


def check_model(path: Path) -> None:
    """Raise UnavailableError unless `path` has a configuration, and all that its manifest names.

    Names, links, sizes and small files. Weights beside the manifest's are no reason to refuse: `glm53 verify`
    names them.
    """
    try:
        text = (path / "config.json").read_bytes()
    except OSError as error:
        raise UnavailableError(
            f"{path}/config.json cannot be read by this service: {error.strerror}",
            hint="run site.yml: it ships the head's model directory",
        ) from None
    if not text:
        raise UnavailableError(f"{path}/config.json is empty", hint="run site.yml again")
    try:
        manifest = read_manifest(path)
    except ArtifactError as error:
        raise UnavailableError(error.message, hint=error.hint) from None
    problems = (
        [p for p in quick_check(layout_of(path), manifest) if p.kind is not Kind.EXTRA] if manifest else []
    )
    if problems:
        raise UnavailableError(
            f"{path} is not what its manifest says:\n{summary(problems, most=3)}",
            hint="on the head `glm53 download`; for a worker `glm53 ship` on the head (docs/artifacts.md)",
        )
