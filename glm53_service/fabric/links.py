"""Reads network devices and their IPv4 addresses from `ip -j address`, as plain data."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One network device. `mtu` in bytes; `addresses` are IPv4 with prefix length (192.0.2.1/24)."""

    name: str
    carrier: bool
    mtu: int
    addresses: tuple[str, ...]

    def interface(self, address: str) -> ipaddress.IPv4Interface | None:
        """Return `address` with its prefix as this device has it, or None."""
        found = (ipaddress.IPv4Interface(text) for text in self.addresses)
        return next((interface for interface in found if str(interface.ip) == address), None)


ARGV = ("ip", "-j", "address", "show")


def parse_links(text: str) -> tuple[Link, ...]:
    """Return the links in the output of `ip -j address show`."""
    return tuple(
        Link(
            name=entry["ifname"],
            carrier="LOWER_UP" in entry.get("flags", []),
            mtu=entry.get("mtu", 0),
            addresses=tuple(
                f"{a['local']}/{a['prefixlen']}" for a in entry.get("addr_info", []) if a["family"] == "inet"
            ),
        )
        for entry in json.loads(text)
        if entry.get("ifname")
    )
