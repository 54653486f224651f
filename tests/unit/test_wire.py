"""The supervisors' channel: who may speak, and what is thrown away."""

from __future__ import annotations

import pytest

from glm53_service.errors import AuthError, ConfigError
from glm53_service.supervisor.messages import Beat, Stop
from glm53_service.supervisor.wire import (
    Challenge,
    Open,
    Sealer,
    accept,
    answer,
    open_frame,
    parse_tokens,
    token_name,
)

NEW, OLD = "1a" * 32, "2b" * 32


def shake(follower: tuple[str, ...], lead: tuple[str, ...], cluster: str = "unit") -> tuple[Sealer, Sealer]:
    """Return both ends of a channel."""
    opened = open_frame(cluster, "b", follower, "nonce-of-b")
    challenge, key = answer(opened, lead, "unit")
    return Sealer(accept(challenge, opened, follower), lead=False), Sealer(key, lead=True)


@pytest.mark.parametrize("follower", [(NEW,), (OLD,), (NEW, OLD)])
def test_current_and_previous_token_fit(follower: tuple[str, ...]) -> None:
    """Prevents an outage while a token is rotated node by node."""
    mine, theirs = shake(follower, (NEW, OLD))
    assert theirs.open(mine.seal(Beat())) == Beat()
    stop = Stop(epoch=3, reason="x", fault=True)
    assert mine.open(theirs.seal(stop)) == stop


def test_a_stranger_and_another_cluster_are_turned_away() -> None:
    """Prevents a rank that joins the neighbours' pair on the same switch."""
    with pytest.raises(AuthError, match="another token"):
        shake((OLD,), (NEW,))
    with pytest.raises(AuthError, match="belongs to cluster 'other'"):
        shake((NEW,), (NEW,), cluster="other")


def test_a_lead_without_the_token_is_not_believed() -> None:
    """Prevents a follower from running what anybody on the fabric sends."""
    opened = open_frame("unit", "b", (NEW,), "n")
    forged = Challenge(protocol=1, nonce="m", token=token_name(NEW), proof="00" * 32)
    with pytest.raises(AuthError, match="could not prove"):
        accept(forged, opened, (NEW,))


def test_replayed_reordered_changed_and_mirrored_frames_are_refused() -> None:
    """Prevents a recorded `stop` from ending tomorrow's epoch."""
    mine, theirs = shake((NEW,), (NEW,))
    first, second = mine.seal(Beat()), mine.seal(Stop(epoch=1, reason="r", fault=False))
    with pytest.raises(AuthError):
        theirs.open(second)
    mine, theirs = shake((NEW,), (NEW,))
    first = mine.seal(Beat())
    assert theirs.open(first) == Beat()
    with pytest.raises(AuthError):
        theirs.open(first)
    mine, theirs = shake((NEW,), (NEW,))
    with pytest.raises(AuthError):
        theirs.open(mine.seal(Stop(epoch=1, reason="r", fault=False)).replace('"epoch":1', '"epoch":2'))
    with pytest.raises(AuthError):
        mine.open(mine.seal(Beat()))
    with pytest.raises(AuthError):
        theirs.open("é")


def test_no_frame_holds_the_token() -> None:
    """Prevents a secret on the wire."""
    opened = open_frame("unit", "b", (NEW,), "n")
    challenge, _ = answer(opened, (NEW,), "unit")
    assert isinstance(opened, Open)
    assert NEW not in f"{opened} {challenge}"


@pytest.mark.parametrize("text", ["", "xyz", NEW.upper(), f"{NEW}\n{OLD}\n{NEW}", NEW[:-1]])
def test_a_bad_token_file_is_refused_without_showing_it(text: str) -> None:
    """Prevents both a weak token and its appearance in the journal."""
    with pytest.raises(ConfigError) as caught:
        parse_tokens(text, "/etc/glm53/token")
    assert NEW[:8] not in str(caught.value)
    assert parse_tokens(f"{NEW}\n{OLD}\n", "t") == (NEW, OLD)
