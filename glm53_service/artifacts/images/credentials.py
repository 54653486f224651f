"""The login for a registry: a token file on this node, or what `docker login` left for the account.

A secret goes to docker's socket and nowhere else: not into argv, environment, log or message.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from glm53_service.artifacts.hub import read_token
from glm53_service.artifacts.images.reference import Reference
from glm53_service.errors import ConfigError, UnavailableError
from glm53_service.run import ENVIRONMENT

HELPER_SECONDS = 30.0
HELPER_NAME = re.compile(r"[A-Za-z0-9_.-]+")
TOKEN_USER = "<token>"
"""What a helper says for a user when its secret is an identity token."""

HELPER_PATHS = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who asks a registry. `source` says where it comes from; the secret is in no text that this makes."""

    user: str
    secret: str = field(repr=False)
    source: str

    def header(self, registry: str) -> str:
        """Return the value of X-Registry-Auth."""
        login = (
            {"identitytoken": self.secret, "serveraddress": registry}
            if self.user == TOKEN_USER
            else {"username": self.user, "password": self.secret, "serveraddress": registry}
        )
        return base64.urlsafe_b64encode(json.dumps(login).encode()).decode()


def token_login(user: str, path: Path | None) -> Login | None:
    """Return the login of the inventory, None without one; ConfigError for half of one or a file that is open
    to others.
    """
    if path is None:
        if user:
            raise ConfigError(
                "registry login", [f"user: found {user!r} without a token file"], hint="--token-file FILE"
            )
        return None
    if not user:
        raise ConfigError("registry login", [f"{path}: found no user beside it"], hint="--registry-user NAME")
    secret = read_token(path, {})
    assert secret is not None
    return Login(user=user, secret=secret, source=str(path))


async def docker_login(reference: Reference, home: Path) -> Login | None:
    """Return what `docker login` left for the account whose home this is; None when it left nothing.

    As docker's own client chooses: the registry's helper, else the store, else the file itself.
    """
    path = home / ".docker/config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]
        ) from None
    helper = (config.get("credHelpers") or {}).get(reference.key) or config.get("credsStore")
    if helper:
        return await _helped(str(helper), reference.key, home)
    auths = config.get("auths") or {}
    for key in (reference.key, f"https://{reference.registry}", f"https://{reference.registry}/v1/"):
        entry = auths.get(key) or {}
        if token := entry.get("identitytoken"):
            return Login(user=TOKEN_USER, secret=str(token), source=str(path))
        if entry.get("auth"):
            return _plain(str(entry["auth"]), path)
    return None


def _plain(word: str, path: Path) -> Login:
    try:
        user, colon, secret = base64.b64decode(word, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        raise ConfigError(str(path), ["auths: found an entry that is no login"], hint="`docker login` again")
    return Login(user=user, secret=secret, source=str(path))


async def _helped(name: str, key: str, home: Path) -> Login | None:
    """Ask a helper program: the registry's name on its input, the login on its output."""
    program = f"docker-credential-{name}"
    if not HELPER_NAME.fullmatch(name):
        raise ConfigError("credential helper", [f"found {name!r}, expected the name of a program"])
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**ENVIRONMENT, "PATH": HELPER_PATHS, "HOME": str(home)},
        )
        async with asyncio.timeout(HELPER_SECONDS):
            out, _ = await process.communicate(key.encode())
    except OSError as error:
        raise UnavailableError(
            f"the credential helper {program} cannot be run: {error.strerror}",
            hint="install it, or use glm53_registry_token_file; ~/.docker/config.json names it",
        ) from None
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnavailableError(
            f"the credential helper {program} gave no answer within {HELPER_SECONDS:g} s",
            hint="it may wait for a desktop to unlock its store: use glm53_registry_token_file",
        ) from None
    if process.returncode:  # what it says is not shown: it may be part of a login
        return None
    try:
        found = json.loads(out)
        return Login(user=str(found["Username"]), secret=str(found["Secret"]), source=program)
    except (ValueError, LookupError, TypeError):
        raise UnavailableError(
            f"the credential helper {program} gave no login",
            hint="`docker login` again as this account, or use glm53_registry_token_file",
        ) from None
