"""What docker's words about a registry mean for whoever wants an image: which error, and whether to try on.

Docker hands on the registry's own sentences, and different versions answer with different statuses, so the
words decide first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from glm53_service.artifacts.hub import Refused
from glm53_service.artifacts.images.reference import Reference
from glm53_service.errors import ArtifactError, AuthError, Glm53Error, UnavailableError


class Rule(NamedTuple):
    """Words that tell a refusal, the error for it, and whether another try may help."""

    words: re.Pattern[str]
    error: Callable[[Reference, str, bool], Glm53Error]
    again: bool


def _full(reference: Reference, words: str, _: bool) -> Glm53Error:
    return ArtifactError(
        f"{reference.text}: the disk of docker is full ({words})",
        hint="make room (`docker system df`, `glm53 prune`) and run this again",
    )


def _limit(reference: Reference, words: str, has_login: bool) -> Glm53Error:
    return UnavailableError(
        f"429: {reference.registry} lets nobody here pull more for now ({words})",
        hint="later; or with a login (glm53_registry_token_file, `docker login`): it has its own limit"
        if not has_login
        else "later: this login has used up its limit",
    )


def _platform(reference: Reference, words: str, _: bool) -> Glm53Error:
    return ArtifactError(
        f"{reference.text} has nothing for this machine ({words})",
        hint="set glm53_image to an image that is made for it: the registry's page lists the platforms",
    )


def _tls(reference: Reference, words: str, _: bool) -> Glm53Error:
    return UnavailableError(
        f"docker does not trust {reference.registry}: {words}",
        hint=f"put the registry's own authority into /etc/docker/certs.d/{reference.registry}/ca.crt (no"
        " restart needed); is the clock right; does a proxy in between replace certificates",
    )


def _login(reference: Reference, words: str, has_login: bool) -> Glm53Error:
    if has_login:
        return AuthError(
            f"401 or 403: {reference.registry} does not let this login read {reference.repository} ({words})",
            hint="a new token with the right to read packages, in glm53_registry_token_file with its"
            " glm53_registry_user; or `docker login` again as the login account",
        )
    return AuthError(
        f"401 or 403: {reference.registry} shows {reference.repository} to nobody without a login: it is"
        f" private, or not there ({words})",
        hint="check the name; else glm53_registry_user and glm53_registry_token_file, or `docker login"
        f" {reference.registry}` as the login account on this node",
    )


def _gone(reference: Reference, words: str, _: bool) -> Glm53Error:
    return ArtifactError(
        f"404: {reference.registry} has no {reference.repository}@{reference.digest[:19]}... ({words})",
        hint="take name and digest from the registry's page: this one was deleted, or is mistyped",
    )


def _way(reference: Reference, words: str, _: bool) -> Glm53Error:
    return UnavailableError(
        f"no way from docker to {reference.registry}: {words}",
        hint="DNS, route, and docker's own proxy (`docker info`; systemctl edit docker); a node without a way"
        " out gets the image from the head, and glm53_image_pull: never asks nobody",
    )


RULES = tuple(
    Rule(re.compile(words, re.IGNORECASE), error, again)
    for words, error, again in (
        (r"no space left on device|disk quota exceeded", _full, False),
        (r"toomanyrequests|too many requests|pull rate limit|\b429\b", _limit, True),
        (
            r"no matching manifest|no match for platform|does not match the specified platform",
            _platform,
            False,
        ),
        (r"x509|certificate|\btls: |HTTP response to HTTPS client", _tls, False),
        (r"proxyconnect|proxy authentication required", _way, False),
        (
            r"unauthorized|authentication required|no basic auth|denied|forbidden|incorrect username",
            _login,
            False,
        ),
        (r"manifest.* (unknown|not found)|name unknown|not found", _gone, False),
        (
            r"no such host|dial tcp|i/o timeout|connection re(fused|set)|unreachable|no route|timeout|EOF"
            r"|server misbehaving|context deadline|name resolution",
            _way,
            True,
        ),
    )
)


def refusal(status: int, words: str, reference: Reference, *, has_login: bool) -> Refused:
    """Return what docker's `words`, with its HTTP `status` (0: in the middle of a pull), mean."""
    words = " ".join(words.split())[:400]
    for rule in RULES:
        if rule.words.search(words):
            return Refused(rule.error(reference, words, has_login), again=rule.again)
    by_status = {401: _login, 403: _login, 404: _gone, 429: _limit}
    if status in by_status:
        return Refused(by_status[status](reference, words, has_login), again=status == 429)
    return Refused(
        UnavailableError(
            f"docker could not pull {reference.text}: {words}",
            hint="`journalctl -u docker` has what docker met; run this again",
        ),
        again=True,
    )
