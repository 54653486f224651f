"""Probes a peer through one rail: does a packet of full size come back without being cut on the way?

Small packets pass a link whose ends differ in MTU, and the first large all-gather then dies or hangs.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence

from glm53_service.errors import CommandError, UnavailableError
from glm53_service.fabric.rails import Rail, Reach
from glm53_service.fabric.trouble import Kind, Trouble
from glm53_service.run import Runner

HEADERS = 28
"""Bytes of an IPv4 and an ICMP header, which the MTU counts and ping's size does not."""

SMALL = 56
PACKETS = 3
"""One answer is enough: the first packet may be lost while the neighbour's address is asked for."""


def ping_argv(netdev: str, peer: str, size: int) -> tuple[str, ...]:
    """Return the ping of `size` bytes that may not be fragmented, bound to `netdev`: at most 1.4 s."""
    count = ("-c", str(PACKETS), "-i", "0.2", "-W", "1")
    return ("ping", "-n", "-q", *count, "-M", "do", "-s", str(size), "-I", netdev, peer)


async def probe_rail(rail: Rail, peer: str, runner: Runner) -> Reach:
    """Return whether `peer` answers a packet of the rail's MTU sent through the rail's own device."""
    full = rail.mtu - HEADERS
    try:
        await runner(ping_argv(rail.netdev, peer, full))
    except CommandError:
        trouble = await _why(rail, peer, full, runner)
        return Reach(address=rail.address, peer=peer, trouble=trouble)
    except UnavailableError as error:
        broken = Trouble(kind=Kind.UNREADABLE, text=error.message, fix="Install iputils-ping")
        return Reach(address=rail.address, peer=peer, trouble=broken)
    return Reach(address=rail.address, peer=peer)


async def _why(rail: Rail, peer: str, full: int, runner: Runner) -> Trouble:
    try:
        await runner(ping_argv(rail.netdev, peer, SMALL))
    except UnavailableError:
        return Trouble(
            kind=Kind.PEER_SILENT,
            text=f"{peer} does not answer through {rail.netdev} ({rail.address})",
            fix="Is the peer on, is this the cable between them, does a firewall drop it?",
        )
    return Trouble(
        kind=Kind.MTU,
        text=f"{peer} answers small packets through {rail.netdev} and none of {full} bytes (MTU {rail.mtu})",
        fix="Give every device on the way one MTU: `ip link` on both nodes, glm53_fabric_mtu, the switch",
    )


async def probe_peers(rails: Sequence[Rail], peers: Sequence[str], runner: Runner) -> tuple[Reach, ...]:
    """Return what each rail reaches of the `peers` addresses in its own subnet; all at the same time."""
    probes = [probe_rail(rail, peer, runner) for rail in rails for peer in peers if _same(rail, peer)]
    return tuple(await asyncio.gather(*probes))


def _same(rail: Rail, peer: str) -> bool:
    return bool(rail.network) and ipaddress.IPv4Address(peer) in ipaddress.IPv4Network(rail.network)
