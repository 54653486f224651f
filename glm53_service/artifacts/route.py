"""Over what a copy to an address would go: the fabric, another wire, or what nobody wants 164 GiB on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
    return Route(
        address=address,
        netdev=netdev,
        kind=_kind(netdev, root),
        megabits=_speed(root / f"sys/class/net/{netdev}"),
    )


def check_route(route: Route, *, any_network: bool) -> None:
    """Raise BusyError for a route that is not for so many bytes, unless it is asked for by name."""
    if any_network or route.kind not in (Kind.WIFI, Kind.VPN):
        return
    raise BusyError(
        f"{route}: not for weights; they would take hours there and nothing else would get through",
        hint="the fabric's address in the inventory (glm53_fabric_rails); or --any-network if you mean it",
    )


def _kind(netdev: str, root: Path) -> Kind:
    folder = root / f"sys/class/net/{netdev}"
    if netdev == "lo":
        return Kind.LOCAL
    if any(root.glob(f"sys/class/infiniband/*/device/net/{netdev}")):
        return Kind.FABRIC
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return Kind.WIFI
    if (folder / "tun_flags").exists() or _number(folder / "type") in TUNNELS:
        return Kind.VPN
    return Kind.WIRE


def _speed(folder: Path) -> int:
    return max(_number(folder / "speed"), 0)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
