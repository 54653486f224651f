"""An authenticated channel: who holds the cluster's token may speak, and no frame can be forged, replayed or
reordered.

Frames are text, `<hmac-sha256 hex> <json>`; the key of a connection is derived from the token and a nonce of
each side, and every frame's code covers its direction and number. Nothing is encrypted: nothing secret is
said.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from glm53_service.errors import AuthError, ConfigError
from glm53_service.supervisor.messages import PROTOCOL, Message

TOKEN_DIGITS = 64
MAX_FRAME_BYTES = 1024 * 1024


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """The dialling side's first frame, in clear; `tokens` names (does not reveal) the tokens it holds."""

    cluster: str
    node: str
    protocol: int
    nonce: str
    tokens: tuple[str, ...]


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The listening side's answer: its nonce and its proof."""

    protocol: int
    nonce: str
    token: str
    proof: str


def parse_tokens(text: str, source: str) -> tuple[str, ...]:
    """Return the current token and, where there is one, the previous; ConfigError without showing any of
    it.
    """
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    good = all(len(t) == TOKEN_DIGITS and set(t) <= set("0123456789abcdef") for t in tokens)
    if not 1 <= len(tokens) <= 2 or not good:
        raise ConfigError(
            source,
            [f"found {len(tokens)} lines, expected one or two of {TOKEN_DIGITS} hex digits"],
            hint="run site.yml, or playbooks/rotate_token.yml for a new one",
        )
    return tokens


def token_name(token: str) -> str:
    """Return a name for `token` that does not help to find it."""
    return hashlib.sha256(b"glm53 token name " + token.encode()).hexdigest()[:16]


def new_nonce() -> str:
    """Return 128 random bits as hex."""
    return secrets.token_hex(16)


def open_frame(cluster: str, node: str, tokens: Sequence[str], nonce: str) -> Open:
    """Return the dialling side's first frame."""
    return Open(
        cluster=cluster, node=node, protocol=PROTOCOL, nonce=nonce, tokens=tuple(map(token_name, tokens))
    )


def answer(opened: Open, tokens: Sequence[str], cluster: str) -> tuple[Challenge, bytes]:
    """Return the listening side's challenge and the connection's key; AuthError says what does not fit."""
    if opened.cluster != cluster:
        raise AuthError(f"{opened.node} belongs to cluster {opened.cluster!r}, this is {cluster!r}")
    token = next((t for t in tokens if token_name(t) in opened.tokens), None)
    if token is None:
        raise AuthError(
            f"{opened.node} holds another token", hint="run site.yml: it gives every node the same token"
        )
    nonce = new_nonce()
    key = _key(token, opened.nonce, nonce)
    proof = _mac(key, "proof", 0, opened.cluster.encode())
    return Challenge(protocol=PROTOCOL, nonce=nonce, token=token_name(token), proof=proof), key


def accept(challenge: Challenge, opened: Open, tokens: Sequence[str]) -> bytes:
    """Return the connection's key on the dialling side; AuthError when the other side did not prove its
    token.
    """
    token = next((t for t in tokens if token_name(t) == challenge.token), None)
    if token is None:
        raise AuthError(
            "the lead holds another token", hint="run site.yml: it gives every node the same token"
        )
    key = _key(token, opened.nonce, challenge.nonce)
    if not hmac.compare_digest(
        challenge.proof.encode(), _mac(key, "proof", 0, opened.cluster.encode()).encode()
    ):
        raise AuthError("the lead could not prove that it holds the token")
    return key


class Sealer:
    """One end of a channel: seals what this side says, opens what the other said."""

    def __init__(self, key: bytes, *, lead: bool) -> None:
        self._key = key
        self._mine, self._theirs = ("lead", "follower") if lead else ("follower", "lead")
        self._sent = 0
        self._received = 0

    def seal(self, message: Message) -> str:
        """Return the frame of `message`."""
        self._sent += 1
        body = msgspec.json.encode(message)
        return f"{_mac(self._key, self._mine, self._sent, body)} {body.decode()}"

    def open(self, frame: str) -> Message:
        """Return the message of `frame`; AuthError when it was not made by the other end, in this order."""
        code, _, body = frame.partition(" ")
        self._received += 1
        if not hmac.compare_digest(
            code.encode(), _mac(self._key, self._theirs, self._received, body.encode()).encode()
        ):
            raise AuthError("a frame's code is wrong: forged, replayed or out of order")
        message: Message = _decoder.decode(body)
        return message


_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Message)


def _key(token: str, theirs: str, ours: str) -> bytes:
    return hmac.digest(token.encode(), f"glm53 channel {theirs} {ours}".encode(), "sha256")


def _mac(key: bytes, direction: str, number: int, body: bytes) -> str:
    return hmac.digest(key, f"{direction} {number} ".encode() + body, "sha256").hex()
