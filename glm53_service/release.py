"""Names a release by its content, so that two nodes with the same id run the same code."""

from __future__ import annotations

import hashlib
from pathlib import Path

from glm53_service.errors import ConfigError

RELEASE_DIGITS = 12


def release_id(root: Path) -> str:
    """Return 12 hex digits over the package's sources and the node's locked requirements in checkout
    `root`.
    """
    files = [
        *sorted((root / "glm53_service").rglob("*.py")),
        root / "pyproject.toml",
        root / "requirements/node.txt",
    ]
    digest = hashlib.sha256()
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                str(root),
                [f"{path.relative_to(root)} cannot be read: {error.strerror}"],
                hint="run from a whole checkout",
            ) from None
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:RELEASE_DIGITS]


def running_release(prefix: Path) -> str:
    """Return the id of the release installed at `prefix` (`/opt/glm53/releases/<id>`), or `unreleased`."""
    return prefix.name if prefix.parent.name == "releases" else "unreleased"
