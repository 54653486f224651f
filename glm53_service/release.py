"""Names a release by its content, so that two nodes with the same id run the same code."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path

from glm53_service.errors import ArtifactError, ConfigError

RELEASE_DIGITS = 12
SHOWN = 5


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


def check_files(prefix: Path) -> None:
    """Return when every file of the packages below `prefix` is as it was installed; ArtifactError names those
    that are not.
    """
    changed = changed_files(prefix)
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise ArtifactError(
            f"changed since the release was installed: {', '.join(changed[:SHOWN])}{more}",
            hint="make the change in the checkout and run site.yml; for the same release again: stop the"
            f" pair, remove {prefix}, run site.yml",
        )


def changed_files(prefix: Path) -> list[str]:
    """Return the files below `prefix` (a virtual environment) that are missing or have another content than
    the packages' own records say: size and SHA-256 of each (PyPA's "recording installed projects").
    """
    return sorted(
        name
        for record in prefix.glob("lib/python3*/site-packages/*.dist-info/RECORD")
        for name in _unlike(record)
    )


def _unlike(record: Path) -> Iterator[str]:
    folder = record.parent.parent
    for name, recorded, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        if not recorded:
            continue  # the record itself, and what Python compiles
        try:
            digest = hashlib.sha256((folder / name).read_bytes()).digest()
        except OSError:
            yield name
            continue
        if recorded != "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode():
            yield name
