"""The hub of models, through huggingface_hub's own client: what a repository has, and a file's bytes.

The client is imported when it is first used: it is 34 MiB that nothing else on a node needs.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from glm53_service.artifacts.layout import safe_member
from glm53_service.artifacts.manifest import Entry, Manifest
from glm53_service.errors import ArtifactError, AuthError, ConfigError, Glm53Error, UnavailableError

if TYPE_CHECKING:
    from glm53_service.settings import Source

CREDENTIAL = "hub-token"
"""Name of the systemd credential that holds the hub's token."""

ENVIRONMENT = {
    # Xet's transfers cannot be continued after a kill, and take memory by the gigabyte.
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
}
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Answers of the hub that are worth another try."""

CHUNK = 1 << 20
"""Bytes that each stream gathers before they are written: the client's own 10 MB cost 100 MiB more, and are
lost when a connection is cut.
"""

TALKERS = ("huggingface_hub", "httpx2", "httpcore2")
"""The client's loggers: they tell whole addresses, which are signed for whoever asked."""


class Refused(Exception):
    """A request that failed. `again`: another try may help; `gone`: the repository cannot be had at all."""

    def __init__(
        self, error: Glm53Error, *, again: bool = False, gone: bool = False, wait_seconds: float = 0.0
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again
        self.gone = gone
        self.wait_seconds = wait_seconds


class Stopped(Exception):
    """Whoever takes the bytes wants no more: another file failed for good. The next run goes on."""


def read_token(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the hub's token from `path`, else from the systemd credential, None without either.

    Never from a variable or an argument: both can be read by others. ConfigError for a file that is open to
    others, empty, or no token.
    """
    folder = environment.get("CREDENTIALS_DIRECTORY")
    if path is None and folder and (Path(folder) / CREDENTIAL).exists():
        path = Path(folder) / CREDENTIAL
    if path is None:
        return None
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {getattr(error, 'strerror', error)}"]) from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            str(path),
            [f"found mode {stat.S_IMODE(mode):o}, expected 600: others can read this token"],
            hint=f"chmod 600 {path}; and make a new token, since this one may be known",
        )
    if not re.fullmatch(r"[!-~]{8,256}", text):
        raise ConfigError(str(path), ["found no token, expected one line as the hub gives it (hf_...)"])
    return text


class Hub:
    """One hub; `endpoint` None is the public one. The token is kept out of every text that this makes."""

    def __init__(self, token: str | None = None, *, endpoint: str | None = None) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        try:
            from huggingface_hub import HfApi, constants, file_download
        except ImportError:
            raise UnavailableError(
                "huggingface_hub is not installed here",
                hint="site.yml installs it with the release; elsewhere: pip install -r requirements/node.txt",
            ) from None
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, CHUNK)
        for name in TALKERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._token: str | bool = token or False
        self._api: Any = HfApi(endpoint=endpoint, token=self._token)
        self._files: Any = file_download
        self._endpoint = endpoint

    @property
    def name(self) -> str:
        """The hub's address."""
        return str(self._api.endpoint)

    def manifest(self, source: Source) -> Manifest:
        """Return what the hub has of `source`, with the hashes it gives; Refused says why not."""
        try:
            listed = list(
                self._api.list_repo_tree(
                    source.repository, revision=source.revision, recursive=True, token=self._token
                )
            )
        except Exception as error:  # noqa: BLE001 - the client's errors have no common base
            raise self._refused(error, source) from None
        files = tuple(self._entry(item, source) for item in listed if hasattr(item, "blob_id"))
        return Manifest(repository=source.repository, revision=source.revision, files=files)

    def _entry(self, item: Any, source: Source) -> Entry:
        """Return one line of the hub's list. Its hash becomes a file's name, so it has to be one."""
        found = {
            "path": safe_member(item.path, f"{self.name}/{source.repository}"),
            "size": item.size,
            "sha256": item.lfs.sha256 if item.lfs else "",
            "git_sha1": "" if item.lfs else item.blob_id,
        }
        try:
            entry = msgspec.convert(found, Entry)
        except msgspec.ValidationError as error:
            raise ArtifactError(f"{self.name}: the list of {source} cannot be used: {error}") from None
        if not entry.etag:
            raise ArtifactError(f"{self.name}: the list of {source} has no hash of {entry.path}")
        return entry

    def fetch(self, source: Source, entry: Entry, file: BinaryIO, have: int) -> None:
        """Append the bytes of `entry` from offset `have` to `file`; Refused says why it ended early.

        The client asks again by itself while bytes keep coming; what was written stays. Where the server
        ignores the offset, the client truncates `file` and begins anew.
        """
        url = self._files.hf_hub_url(
            source.repository, entry.path, revision=source.revision, endpoint=self._endpoint
        )
        try:
            found = self._files.get_hf_file_metadata(url, token=self._token, endpoint=self._endpoint)
            headers = self._headers(url, found.location)
            self._files.http_get(
                found.location,
                file,
                resume_size=have,
                headers=headers,
                expected_size=entry.size,
                displayed_filename=entry.path,
            )
        except (Glm53Error, Stopped):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise self._refused(error, source) from None

    def _headers(self, url: str, location: str) -> dict[str, str]:
        """Return the headers of a download: the token goes to the hub, never to where it redirects."""
        from urllib.parse import urlsplit

        same = urlsplit(url)[:2] == urlsplit(location)[:2]
        headers: dict[str, str] = self._files.build_hf_headers(token=self._token if same else False)
        return headers

    def _refused(self, error: Exception, source: Source) -> Refused:
        import httpx2
        from huggingface_hub import errors

        if isinstance(error, OSError) and error.errno in (28, 122, 27, 5, 30):
            raise error
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if response is not None and status is not None:
            return _by_status(status, error, source, self._token is not False, errors, response.headers)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return Refused(
                UnavailableError(
                    f"HF_HUB_OFFLINE is set, and {source} is not complete here",
                    hint="unset HF_HUB_OFFLINE, or copy the snapshot here by other means",
                )
            )
        if isinstance(error, (httpx2.TransportError, OSError)):
            reason = str(error) or type(error).__name__
            return Refused(
                UnavailableError(
                    f"no answer from {self.name}: {reason}",
                    hint="is there a way out of this machine (DNS, proxy: HTTPS_PROXY)? A snapshot that is"
                    " complete needs none; another hub: HF_ENDPOINT",
                ),
                again=True,
            )
        return Refused(UnavailableError(f"{self.name}: {type(error).__name__}: {error}"))


def _by_status(
    status: int, error: Exception, source: Source, has_token: bool, errors: Any, headers: Any
) -> Refused:
    page = f"https://huggingface.co/{source.repository}"
    if isinstance(error, errors.RevisionNotFoundError):
        return Refused(
            ArtifactError(
                f"404: {source.repository} has no revision {source.revision}",
                hint="set the revision to a commit that the repository's history shows (40 digits)",
            ),
            gone=True,
        )
    if status == 403 or isinstance(error, errors.GatedRepoError):
        who = "this token's account" if has_token else "nobody without a token"
        return Refused(
            AuthError(
                f"{status}: {source.repository} is gated, and {who} may read it",
                hint=f"accept its terms on {page} with your account, and give a token that may read it"
                " (--token-file)",
            )
            if not has_token
            else AuthError(
                f"{status}: {source.repository} does not let this token read it",
                hint=f"accept its terms on {page} with the token's account; a fine-grained token also needs"
                " the scope to read gated repositories",
            )
        )
    if status == 401:
        if has_token:
            return Refused(
                AuthError(
                    "401: the hub does not accept this token",
                    hint="make a new one (huggingface.co/settings/tokens) and put it in the token file",
                )
            )
        return Refused(
            AuthError(
                f"401: the hub shows {source.repository} to nobody without a token: it is private, gated, or"
                " not there",
                hint="check the name; else give a token (--token-file)",
            ),
            gone=True,
        )
    if status == 404:
        return Refused(
            ArtifactError(
                f"404: there is no {source.repository}, or a file of it is gone",
                hint="check the repository's name and revision",
            ),
            gone=True,
        )
    wait = headers.get("Retry-After", "")
    return Refused(
        UnavailableError(f"{status}: the hub refuses for now", hint="try again later"),
        again=status in AGAIN,
        wait_seconds=min(float(wait), 300.0) if re.fullmatch(r"[0-9.]+", wait) else 0.0,
    )
