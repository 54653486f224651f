"""How many bytes an image is, by its registry's own manifest; docker's API does not tell.

Only the manifest is read, by this process, with the proxy and the authorities that docker uses. It is a
figure for a plan: whatever comes in the way makes it unknown, and nothing else. The standard library
alone: the module glm53_image_size has this file too (plugins/module_utils), on nodes with nothing of ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 20.0
LONGEST = 4 << 20
"""Bytes of a manifest; registries take no larger ones."""

DOCKER_HUB = "docker.io"
DOCKER_HUB_HOST = "registry-1.docker.io"
HUB_NAMES = (DOCKER_HUB, "index.docker.io", DOCKER_HUB_HOST)
"""Names of Docker Hub, which is meant where a reference names no registry."""

KINDS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


def split_reference(text: str) -> tuple[str, str, str]:
    """Return registry, repository and digest of `NAME[:TAG]@DIGEST`, as docker reads the name."""
    name, _, digest = text.partition("@")
    head, colon, tag = name.rpartition(":")
    name = head if colon and "/" not in tag else name
    first, slash, rest = name.partition("/")
    if not (slash and ("." in first or ":" in first or first == "localhost")):
        first, rest = DOCKER_HUB, name
    if first in HUB_NAMES:
        return DOCKER_HUB, rest if "/" in rest else f"library/{rest}", digest
    return first, rest, digest


class Unknown(Exception):
    """The size cannot be known now; the text says why."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a login would go along to wherever it leads."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Registry:
    """One registry. `login` is user and secret. `info` is docker's own /info: its proxy and exceptions."""

    def __init__(
        self,
        name: str,
        info: Mapping[str, Any],
        *,
        login: tuple[str, str] | None = None,
        certificates: Path = Path("/etc/docker/certs.d"),
    ) -> None:
        self._host = DOCKER_HUB_HOST if name == DOCKER_HUB else name
        self._login = login
        context = ssl.create_default_context()
        for authority in sorted((certificates / name).glob("*.crt")):
            context.load_verify_locations(cafile=str(authority))
        proxy = str(info.get("HttpsProxy") or "")
        past = urllib.request.proxy_bypass_environment(  # type: ignore[attr-defined]  # not in typeshed
            urllib.parse.urlsplit(f"//{self._host}").hostname or "", {"no": str(info.get("NoProxy") or "")}
        )
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({"https": proxy} if proxy and not past else {}),
            urllib.request.HTTPSHandler(context=context),
            _Stay(),
        )
        self._word = ""

    def size(self, repository: str, digest: str, architecture: str) -> int:
        """Return the bytes of config and layers for linux on `architecture`, as they come; Unknown says why
        not.
        """
        manifest = self._manifest(repository, digest)
        if "manifests" in manifest:
            fitting = [
                entry
                for entry in manifest["manifests"]
                if (entry.get("platform") or {}).get("architecture") == architecture
                and (entry.get("platform") or {}).get("os") == "linux"
            ]
            if not fitting:
                raise Unknown(f"the index has nothing for linux/{architecture}")
            manifest = self._manifest(repository, str(fitting[0]["digest"]))
        try:
            return sum(int(part["size"]) for part in (manifest["config"], *manifest["layers"]))
        except (LookupError, TypeError, ValueError):
            raise Unknown("its manifest lists no sizes") from None

    def _manifest(self, repository: str, digest: str) -> dict[str, Any]:
        url = f"https://{self._host}/v2/{repository}/manifests/{digest}"
        try:
            body = self._read(url)
        except urllib.error.HTTPError as error:
            asked = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not asked or self._word:
                raise Unknown(f"{self._host} answers {error.code}") from None
            self._word = self._authorization(asked, repository)
            try:
                body = self._read(url)
            except (OSError, ValueError) as again:
                raise Unknown(f"{self._host}: {again}") from None
        except (OSError, ValueError) as error:
            raise Unknown(f"{self._host}: {error}") from None
        if "sha256:" + hashlib.sha256(body).hexdigest() != digest:
            raise Unknown(f"{self._host} answers with another manifest than {digest[:19]}...")
        found: dict[str, Any] = json.loads(body)
        return found

    def _read(self, url: str, *, word: str | None = None, limit: int = LONGEST) -> bytes:
        headers = {"Accept": ", ".join(KINDS)}
        if word or (word is None and self._word):
            headers["Authorization"] = word or self._word
        with self._opener.open(
            urllib.request.Request(url, headers=headers), timeout=ANSWER_SECONDS
        ) as answer:
            body: bytes = answer.read(limit + 1)
        if len(body) > limit:
            raise ValueError("the answer is too long")
        return body

    def _authorization(self, asked: str, repository: str) -> str:
        """Return the word for the next request: the login itself, or a token that it (or nobody) gets."""
        kind, _, rest = asked.partition(" ")
        basic = ""
        if self._login:
            basic = "Basic " + base64.b64encode(":".join(self._login).encode()).decode()
        if kind.lower() == "basic":
            if not basic:
                raise Unknown(f"{self._host} wants a login")
            return basic
        values = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = values.get("realm", "")
        if kind.lower() != "bearer" or not realm.startswith("https://"):
            raise Unknown(f"{self._host} asks for a login of another kind")
        query = {"service": values.get("service", ""), "scope": f"repository:{repository}:pull"}
        try:
            body = self._read(f"{realm}?{urllib.parse.urlencode(query)}", word=basic)
            found = json.loads(body)
            return f"Bearer {found.get('token') or found['access_token']}"
        except (OSError, ValueError, LookupError) as error:
            raise Unknown(f"{self._host} gives no token: {error}") from None
