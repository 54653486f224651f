"""A snapshot's manifest: every file with size and SHA-256, and the revision that they are of."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from glm53_service.artifacts.layout import safe_member
from glm53_service.errors import ArtifactError
from glm53_service.files import write_durably

NAME = ".glm53-manifest.json"
UNFINISHED = ".glm53-manifest.unfinished.json"
"""What a download has proven so far: the next one need not hash it again."""

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
ADOPTED = "0" * 40
"""The revision of a manifest that was made from the files themselves (adopt.py)."""

SMALL_BYTES = 64 << 20
"""Files up to this size that are no weights are hashed by the quick check as well."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `sha256` is empty while only git's SHA-1 of it is known (small files, before download)."""

    path: str
    size: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    git_sha1: Annotated[str, Meta(pattern=r"^([0-9a-f]{40})?$")] = ""

    @property
    def etag(self) -> str:
        """The name of this content in a hub cache."""
        return self.git_sha1 or self.sha256

    @property
    def small(self) -> bool:
        """Whether a quick check reads it."""
        return self.size <= SMALL_BYTES and not self.path.endswith(WEIGHTS)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one revision, sorted by path."""

    version: int = 1
    repository: str
    revision: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}$")]
    files: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def adopted(self) -> bool:
        """Whether these are the hashes of what was there, and no hub has said that they are right."""
        return self.revision == ADOPTED

    @property
    def origin(self) -> str:
        """Where the files are from, for a person."""
        return "as found here" if self.adopted else f"{self.repository}@{self.revision[:12]}"

    @property
    def content(self) -> str:
        """Name of what the files are, 12 hex digits: equal wherever the same files were published."""
        listing = msgspec.json.encode(sorted((e.path, e.size, e.sha256) for e in self.files))
        return hashlib.sha256(listing).hexdigest()[:12]

    def same_files(self, other: Manifest) -> bool:
        """Return whether both name the same content, wherever it was published."""
        return {(e.path, e.size, e.sha256) for e in self.files} == {
            (e.path, e.size, e.sha256) for e in other.files
        }


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Return the manifest in `data`; ArtifactError when it is none, ConfigError for a path that leads out."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ArtifactError(
            f"{source} is no manifest: {error}", hint=f"remove {source} and run `glm53 download` on the head"
        ) from None
    for entry in manifest.files:
        safe_member(entry.path, source)
    return manifest


def read_manifest(folder: Path, name: str = NAME) -> Manifest | None:
    """Return the manifest in `folder`, None when there is none; errors as decode_manifest."""
    path = folder / name
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise ArtifactError(f"{path} is no file", hint="move it away")
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    return decode_manifest(data, str(path))


def encode_manifest(manifest: Manifest) -> str:
    """Return `manifest` as text, one file a line: equal manifests give equal text."""
    ordered = msgspec.structs.replace(manifest, files=tuple(sorted(manifest.files, key=lambda e: e.path)))
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1).decode() + "\n"


def write_manifest(folder: Path, manifest: Manifest, name: str = NAME) -> None:
    """Write it into `folder`, durably; OSError as it comes."""
    write_durably(folder / name, encode_manifest(manifest))
