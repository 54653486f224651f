"""Over what a copy to an address would go: the fabric, another wire, or what nobody wants 164 GiB on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from glm53_service.artifacts.look import link
from glm53_service.errors import BusyError, UnavailableError
from glm53_service.run import ENVIRONMENT

Runner = Callable[[Sequence[str]], str]
TUNNELS = (65534, 512, 768, 769, 776, 778)
"""ARPHRD_* of links without a wire: none (WireGuard, tun), ppp, tunnel, tunnel6, sit, gre (if_arp.h)."""


class Kind(StrEnum):
    """What a route is over. LOCAL: this very machine."""

    FABRIC = "fabric"
    WIRE = "wire"
    WIFI = "wifi"
    VPN = "vpn"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way to an address; `megabits` is the link's own speed, 0 when it does not say."""

    address: str
    netdev: str
    kind: Kind
    megabits: int = 0

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gb/s" if self.megabits else ""
        return f"{self.address} over {self.netdev} ({self.kind}{speed})"


def run_ip(argv: Sequence[str]) -> str:
    """Run one command of iproute2; UnavailableError with its own words."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"`{' '.join(argv)}` cannot be run: {error}") from None
    if done.returncode:
        raise UnavailableError(f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def find_route(address: str, *, root: Path = Path("/"), run: Runner = run_ip) -> Route:
    """Return the route that the kernel would take; UnavailableError when there is none."""
    answer = json.loads(run(["ip", "-j", "route", "get", address]))
    netdev = str(answer[0].get("dev", "")) if answer else ""
    if not netdev:
        raise UnavailableError(f"no route to {address}", hint="`ip route get` shows it; is the cable in?")
    return route_of(address, netdev, link(netdev, root))


def route_of(address: str, netdev: str, found: Mapping[str, Any]) -> Route:
    """Return the route over a device of which /sys says `found` (look.link)."""
    return Route(address=address, netdev=netdev, kind=_kind(netdev, found), megabits=int(found["speed"]))


def check_route(route: Route, *, any_network: bool) -> None:
    """Raise BusyError for a route that is not for so many bytes, unless it is asked for by name."""
    if any_network or route.kind not in (Kind.WIFI, Kind.VPN):
        return
    raise BusyError(
        f"{route}: not for weights; they would take hours there and nothing else would get through",
        hint="the fabric's address in the inventory (glm53_fabric_rails); or --any-network if you mean it",
    )


def _kind(netdev: str, found: Mapping[str, Any]) -> Kind:
    if netdev == "lo":
        return Kind.LOCAL
    if found["rdma"]:
        return Kind.FABRIC
    if found["wireless"]:
        return Kind.WIFI
    return Kind.VPN if found["tunnel"] or found["type"] in TUNNELS else Kind.WIRE
