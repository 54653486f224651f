"""What a check says, and how much it matters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from glm53_service.doctor.source import Source

Facts = TypeVar("Facts")


class Level(StrEnum):
    """ERROR: it will not serve, or ends by this. WARNING: it serves worse, or until something happens. INFO:
    worth knowing. OK: looked at, as it should be.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    OK = "ok"


ORDER = tuple(Level)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `id` is stable: `noun.what`; `node` is set by who collects it."""

    id: str
    level: Level
    measured: str
    expected: str = ""
    fix: str = ""
    node: str = ""


def error(id_: str, measured: str, expected: str, fix: str) -> Finding:
    """Return a finding that keeps the pair from serving."""
    return Finding(id=id_, level=Level.ERROR, measured=measured, expected=expected, fix=fix)


def warning(id_: str, measured: str, expected: str, fix: str) -> Finding:
    """Return a finding that makes it worse."""
    return Finding(id=id_, level=Level.WARNING, measured=measured, expected=expected, fix=fix)


def info(id_: str, measured: str, expected: str = "", fix: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(id=id_, level=Level.INFO, measured=measured, expected=expected, fix=fix)


def good(id_: str, measured: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(id=id_, level=Level.OK, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noun(Generic[Facts]):
    """One thing that is looked at: `read` only gathers, `check` only judges what was gathered.

    `files` are the glob patterns of the files that `read` opens, so that a snapshot can bring them. `parity`
    gives what has to be equal on all nodes, as `key: value`.
    """

    name: str
    read: Callable[[Source], Awaitable[Facts]]
    check: Callable[[Facts], Iterable[Finding]]
    files: tuple[str, ...] = ()
    parity: Callable[[Facts], Mapping[str, str]] = lambda _: {}
