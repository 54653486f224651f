"""Decides which rails this node has now and what its rank is told of them.

Nothing here is stored: names and GID indices move with reboots, firmware and `netplan apply`, so every start
looks anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from glm53_service.fabric.links import Link
from glm53_service.fabric.sysfs import Hca


class Rail(msgspec.Struct, frozen=True, kw_only=True):
    """One usable path: a network device with its fabric address, and the RDMA device below it where there is
    one.

    `mtu` in bytes. `gid_index` is the RoCE v2 entry that holds `address`.
    """

    netdev: str
    address: str
    mtu: int
    hca: str | None
    gid_index: int | None

    def line(self) -> str:
        """Return one readable line for the journal and `glm53 status`."""
        rdma = f"hca={self.hca} gid_index={self.gid_index}" if self.hca else "hca=none"
        return f"netdev={self.netdev} address={self.address} mtu={self.mtu} {rdma}"


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for a rank: its usable rails (never empty when `problem` is empty) and what was left
    out.
    """

    rails: tuple[Rail, ...]
    problem: str = ""
    warnings: tuple[str, ...] = ()


def find_fabric(
    addresses: Sequence[str], links: Sequence[Link], hcas: Sequence[Hca], *, rdma: bool
) -> Fabric:
    """Return the rails for this node's fabric `addresses` (rail order). Pure.

    With `rdma` a rail needs an active RDMA device with a RoCE v2 GID of its address, and all rails of the
    node one common GID index, since a rank is told a single one. The first rail must work; a further one that
    does not is a warning.
    """
    found: list[Rail] = []
    warnings: list[str] = []
    for number, address in enumerate(addresses):
        rail = _rail(address, links, hcas, rdma=rdma)
        if isinstance(rail, str):
            if number == 0:
                return Fabric(rails=(), problem=rail)
            warnings.append(f"rail {number} is not used: {rail}")
        elif rdma and found and rail.gid_index != found[0].gid_index:
            warnings.append(
                f"rail {number} is not used: its GID index is {rail.gid_index}, rail 0 has"
                f" {found[0].gid_index}; a rank can be told one only"
            )
        else:
            found.append(rail)
    return Fabric(rails=tuple(found), warnings=tuple(warnings))


def _rail(address: str, links: Sequence[Link], hcas: Sequence[Hca], *, rdma: bool) -> Rail | str:
    link = next((link for link in links if address in link.addresses), None)
    if link is None:
        return _no_address(address, links, hcas)
    if not link.carrier:
        return f"{link.name} ({address}) has no carrier: is the cable plugged in, is the peer powered on?"
    hca = next((hca for hca in hcas if hca.netdev == link.name), None)
    index = hca.roce_v2_index(address) if hca else None
    if rdma and hca is None:
        return f"{link.name} ({address}) has no RDMA device in /sys/class/infiniband; is this the CX7 port?"
    if rdma and hca is not None and hca.state != "ACTIVE":
        return f"{hca.name} (below {link.name}) is {hca.state}, expected ACTIVE"
    if rdma and hca is not None and index is None:
        table = ", ".join(f"{gid.index}={gid.address or gid.value} {gid.kind}" for gid in hca.gids) or "empty"
        return f"{hca.name} has no RoCE v2 GID for {address}; its table: {table}"
    return Rail(
        netdev=link.name, address=address, mtu=link.mtu, hca=hca.name if hca else None, gid_index=index
    )


def _no_address(address: str, links: Sequence[Link], hcas: Sequence[Hca]) -> str:
    fabric = [link for link in links if any(hca.netdev == link.name for hca in hcas)]
    if not fabric:
        return f"no device has {address}, and no network device has an RDMA device below it"
    lit = [link.name for link in fabric if link.carrier]
    if not lit:
        names = ", ".join(link.name for link in fabric)
        return (
            f"no device has {address}, and no fabric device ({names}) has a carrier: is the cable plugged in?"
        )
    return (
        f"no device has {address}, though {', '.join(lit)} has a carrier: run site.yml, it sets the addresses"
    )
