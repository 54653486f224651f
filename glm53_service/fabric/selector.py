"""NCCL's way of naming RDMA devices (NCCL_IB_HCA): `a,b`, `=a,b`, `^a`, `^=a`, each with `:port`.

A selector is a wish of the inventory: it is checked against the devices that are there, never handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PORT = 1
"""The one port that each RDMA device of a Spark has; its two cages are devices of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """`exclude`: everything but the members; `exact`: whole names, else beginnings of names."""

    text: str
    exclude: bool
    exact: bool
    members: tuple[tuple[str, int | None], ...]

    def takes(self, hca: str) -> bool:
        """Return whether the device is selected."""
        named = any(self._names(name, hca) and port in (None, PORT) for name, port in self.members)
        return named is not self.exclude

    def strangers(self, hcas: Sequence[str]) -> tuple[str, ...]:
        """Return the members that name no device, or a port that it does not have."""
        return tuple(
            name if port is None else f"{name}:{port}"
            for name, port in self.members
            if port not in (None, PORT) or not any(self._names(name, hca) for hca in hcas)
        )

    def _names(self, name: str, hca: str) -> bool:
        return hca == name if self.exact else hca.startswith(name)


def parse_selector(text: str) -> Selector | None:
    """Return the selector in `text`, None for an empty one: an empty value is no value.

    ValueError for what NCCL would read otherwise than it looks (an empty member, a port that is no number).
    """
    if not text.strip():
        return None
    rest = text.strip()
    exclude = rest.startswith("^")
    rest = rest.removeprefix("^")
    exact = rest.startswith("=")
    rest = rest.removeprefix("=")
    members = []
    for member in rest.split(","):
        name, colon, port = member.strip().partition(":")
        if not name or (colon and not port.isdigit()):
            raise ValueError(f"{text!r}: found the member {member!r}, expected NAME or NAME:PORT")
        members.append((name, int(port) if colon else None))
    return Selector(text=text, exclude=exclude, exact=exact, members=tuple(members))
