"""Reads network devices and their IPv4 addresses from `ip -j address`, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One network device. `mtu` in bytes; `addresses` are IPv4 without prefix length."""

    name: str
    carrier: bool
    mtu: int
    addresses: tuple[str, ...]


ARGV = ("ip", "-j", "address", "show")


def parse_links(text: str) -> tuple[Link, ...]:
    """Return the links in the output of `ip -j address show`."""
    return tuple(
        Link(
            name=entry["ifname"],
            carrier="LOWER_UP" in entry.get("flags", []),
            mtu=entry.get("mtu", 0),
            addresses=tuple(a["local"] for a in entry.get("addr_info", []) if a.get("family") == "inet"),
        )
        for entry in json.loads(text)
        if entry.get("ifname")
    )
