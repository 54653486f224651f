"""Decides which rails this node has now and what its rank is told of them.

Nothing here is stored: names and GID indices move with reboots, firmware and `netplan apply`, so every start
looks anew. What the inventory says of them is a wish, and is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from glm53_service.fabric.links import Link
from glm53_service.fabric.selector import Selector
from glm53_service.fabric.sysfs import Hca
from glm53_service.fabric.trouble import Kind, Trouble

FATAL = re.compile(r"AER: .*Uncorrectable.*Fatal|mlx5_core .*(?:fatal|firmware fatal error|recovery)", re.I)
"""Kernel lines of a ConnectX that fell off the bus (a report: the ports vanish until a reboot)."""

EUI64 = (
    "a privacy address (IPv6 addr-gen-mode stable-privacy) has shifted its table: set eui64 on the fabric"
    " profile, or IPv6 link-local off, then unbind and bind the device in /sys/bus/pci/drivers/mlx5_core, or"
    " reboot (setting the addresses anew is not enough)"
)


class Rail(msgspec.Struct, frozen=True, kw_only=True):
    """One usable path: a network device with its fabric address, and the RDMA device below it where there is
    one.

    `mtu` in bytes. `gid_index` is the RoCE v2 entry that holds `address`; `network` is the address's subnet;
    `port` the cage ("0", "1", or empty).
    """

    netdev: str
    address: str
    mtu: int
    hca: str | None
    gid_index: int | None
    network: str = ""
    port: str = ""

    def line(self) -> str:
        """Return one readable line for the journal and `glm53 status`."""
        rdma = "hca=none"
        if self.hca:
            gid = f" gid=::ffff:{self.address}" if self.gid_index is not None else ""
            rdma = f"hca={self.hca} gid_index={self.gid_index}{gid}"
        port = f" port={self.port}" if self.port else ""
        return f"netdev={self.netdev} address={self.address} mtu={self.mtu} {rdma}{port}"


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe of a peer's address through one rail's device found; no `trouble`: a full packet came
    back.
    """

    address: str
    peer: str
    trouble: Trouble | None = None


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for a rank: its usable rails (never empty when there is no `trouble`), what was left
    out, and which peers answered over which rail.
    """

    rails: tuple[Rail, ...]
    trouble: Trouble | None = None
    warnings: tuple[Trouble, ...] = ()
    reach: tuple[Reach, ...] = ()

    @property
    def problem(self) -> str:
        """The trouble in words, empty when there is none."""
        return str(self.trouble) if self.trouble else ""

    def only(self, addresses: Sequence[str], warnings: Sequence[Trouble] = ()) -> Fabric:
        """Return this with the rails of `addresses` alone, in that order, and further warnings."""
        ours = {rail.address: rail for rail in self.rails}
        rails = tuple(ours[address] for address in addresses)
        return Fabric(rails=rails, warnings=(*self.warnings, *warnings), reach=self.reach)


def rail_lines(fabric: Fabric) -> tuple[str, ...]:
    """Return what was picked, one line a rail, for the story of a start."""
    return tuple(f"rails={len(fabric.rails)} {rail.line()}" for rail in fabric.rails)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the inventory says of a node's devices: NCCL's selector, a GID index, a device a rail."""

    selector: Selector | None = None
    gid_index: int | None = None
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What tells a machine without a ConnectX from one that lost it: PCI functions, the kernel's log."""

    connectx: tuple[str, ...] = ()
    kernel_log: str = ""


NO_WISHES = Wishes()
NO_SIGNS = Signs()


def find_fabric(
    addresses: Sequence[str],
    links: Sequence[Link],
    hcas: Sequence[Hca],
    *,
    rdma: bool,
    wishes: Wishes = NO_WISHES,
    signs: Signs = NO_SIGNS,
) -> Fabric:
    """Return the rails for this node's fabric `addresses` (rail order). Pure.

    With `rdma` a rail needs an active RDMA device with a RoCE v2 GID of its address, and all rails of the
    node one common GID index, since a rank is told a single one. The first rail must work; a further one that
    does not is a warning.
    """
    trouble = _node_trouble(hcas, wishes, signs) if rdma else None
    if trouble:
        return Fabric(rails=(), trouble=trouble)
    found: list[Rail] = []
    warnings: list[Trouble] = []
    common: frozenset[int] = frozenset()
    for number, address in enumerate(addresses):
        rail = _rail(number, address, links, hcas, wishes, rdma=rdma)
        if isinstance(rail, Rail) and found:
            rail = _beside(rail, found, hcas, common, rdma=rdma)
        if isinstance(rail, Trouble):
            if not found:
                return Fabric(rails=(), trouble=rail)
            warnings.append(rail.about(f"rail {number}"))
        else:
            indices = frozenset(_indices(rail, hcas))
            common = common & indices if found else indices
            found.append(rail)
    rails = [_told(rail, common, wishes) if rdma else rail for rail in found]
    return Fabric(rails=tuple(rails), warnings=tuple(warnings))


def unused_twins(fabric: Fabric, links: Sequence[Link], hcas: Sequence[Hca]) -> tuple[Hca, ...]:
    """Return the devices of a cage in use that have a carrier and carry no rail: half of the bandwidth."""
    used = {rail.hca for rail in fabric.rails}
    ports = {rail.port for rail in fabric.rails if rail.port}
    lit = {link.name for link in links if link.carrier}
    return tuple(hca for hca in hcas if hca.port in ports and hca.name not in used and hca.netdev in lit)


def _node_trouble(hcas: Sequence[Hca], wishes: Wishes, signs: Signs) -> Trouble | None:
    if not hcas:
        return no_device(signs)
    selector = wishes.selector
    strangers = selector.strangers([hca.name for hca in hcas]) if selector else ()
    if selector and strangers:
        there = ", ".join(f"{hca.name} ({hca.state})" for hca in hcas)
        return Trouble(
            kind=Kind.OVERRIDE,
            text=f"the inventory's selector {selector.text!r} names {', '.join(strangers)}; here are {there}",
            fix="correct glm53_fabric_hca of this node, or take it out: the devices are found at every start",
        )
    return None


def no_device(signs: Signs) -> Trouble:
    """Return why /sys/class/infiniband is empty: no card, or a card that is lost until a reboot."""
    fatal = next((line.strip() for line in signs.kernel_log.splitlines() if FATAL.search(line)), "")
    if fatal or signs.connectx:
        seen = f"the kernel said: {fatal}" if fatal else f"the PCI bus shows {', '.join(signs.connectx)}"
        return Trouble(
            kind=Kind.NEEDS_REBOOT,
            text=f"/sys/class/infiniband is empty, though this machine has a ConnectX ({seen})",
            fix="Reboot this node; if it comes back, cap the GPU's clock (heat); `dmesg` says more",
        )
    return Trouble(
        kind=Kind.NO_DEVICE,
        text="/sys/class/infiniband is empty and the PCI bus shows no ConnectX",
        fix="Is this a Spark? If it had one, shut it down, take its power for 60 s, start it",
    )


def _rail(
    number: int, address: str, links: Sequence[Link], hcas: Sequence[Hca], wishes: Wishes, *, rdma: bool
) -> Rail | Trouble:
    link = next((link for link in links if link.interface(address)), None)
    if link is None:
        return _no_address(address, links, hcas)
    if not link.carrier:
        return _no_carrier(link, address, links, hcas)
    asked = wishes.netdevs[number] if number < len(wishes.netdevs) else link.name
    if asked != link.name:
        return Trouble(
            kind=Kind.OVERRIDE,
            text=f"{address} is on {link.name}, the inventory says {asked}",
            fix=f"set netdev: {link.name} in glm53_fabric_rails of this node, or move the address",
        )
    hca = next((hca for hca in hcas if hca.netdev == link.name), None)
    rail = Rail(
        netdev=link.name,
        address=address,
        mtu=link.mtu,
        hca=hca.name if hca else None,
        gid_index=hca.roce_v2_index(address) if hca else None,
        network=str(network.network) if (network := link.interface(address)) else "",
        port=hca.port if hca else "",
    )
    return (_rdma_trouble(rail, hca, wishes) or rail) if rdma else rail


def _rdma_trouble(rail: Rail, hca: Hca | None, wishes: Wishes) -> Trouble | None:
    """Return why RDMA cannot use this rail."""
    where = f"{rail.netdev} ({rail.address})"
    if hca is None:
        return Trouble(
            kind=Kind.NO_DEVICE,
            text=f"{where} has no RDMA device in /sys/class/infiniband",
            fix="Is this the CX7 port? A LAN port cannot carry the ranks: give the node a fabric address",
        )
    if wishes.selector and not wishes.selector.takes(hca.name):
        return Trouble(
            kind=Kind.OVERRIDE,
            text=f"{rail.address} is on {hca.name}, which the selector {wishes.selector.text!r} leaves out",
            fix="correct glm53_fabric_hca of this node, or take it out: the devices are found at every start",
        )
    if hca.state != "ACTIVE":
        return Trouble(
            kind=Kind.PORT_DOWN, text=f"{hca.name} (below {rail.netdev}) is {hca.state}, expected ACTIVE"
        )
    indices = hca.roce_v2_indices(rail.address)
    if not indices:
        return Trouble(
            kind=Kind.NO_GID,
            text=f"{hca.name} has no RoCE v2 GID for {rail.address}; its table: {hca.table}",
            fix=EUI64 if hca.private_gids else "set the address anew (site.yml), or reboot this node",
        )
    if wishes.gid_index is not None and wishes.gid_index not in indices:
        return Trouble(
            kind=Kind.OVERRIDE,
            text=f"the inventory says GID index {wishes.gid_index}, but {hca.name} has {rail.address} as RoCE"
            f" v2 at {', '.join(map(str, indices))}",
            fix="take glm53_fabric_gid_index out: the index is found at every start; it moves with reboots",
        )
    return None


def _beside(
    rail: Rail, found: Sequence[Rail], hcas: Sequence[Hca], common: frozenset[int], *, rdma: bool
) -> Rail | Trouble:
    """Return `rail`, or why it cannot be used together with those already `found`."""
    if any(rail.netdev == other.netdev for other in found):
        return Trouble(
            kind=Kind.OVERRIDE, text=f"{rail.address} is on {rail.netdev} too, which a rail has already"
        )
    indices = _indices(rail, hcas)
    if not rdma or common & set(indices):
        return rail
    shifted = [hca.name for hca in hcas if hca.private_gids and hca.name in (rail.hca, found[0].hca)]
    return Trouble(
        kind=Kind.NO_COMMON_INDEX,
        text=f"its GID index is {', '.join(map(str, indices))}, rail 0 has"
        f" {', '.join(map(str, sorted(common)))}; a rank can be told one only",
        fix=f"{' and '.join(shifted)}: two link-local GIDs, {EUI64}" if shifted else "",
    )


def _indices(rail: Rail, hcas: Sequence[Hca]) -> tuple[int, ...]:
    hca = next((hca for hca in hcas if hca.name == rail.hca), None)
    return hca.roce_v2_indices(rail.address) if hca else ()


def _told(rail: Rail, common: frozenset[int], wishes: Wishes) -> Rail:
    """Return the rail with the one index that the rank is told: the wish, once it was found true."""
    index = wishes.gid_index if wishes.gid_index in common else min(common)
    return msgspec.structs.replace(rail, gid_index=index)


def _no_carrier(link: Link, address: str, links: Sequence[Link], hcas: Sequence[Hca]) -> Trouble:
    lit = [other.name for other in _fabric_links(links, hcas) if other.carrier]
    other = f" The cable seems to be in another cage: {', '.join(lit)} has a carrier." if lit else ""
    return Trouble(
        kind=Kind.NO_CARRIER,
        text=f"{link.name} ({address}) has no carrier",
        fix=f"Is the cable plugged in, is the peer powered on?{other}",
    )


def _fabric_links(links: Sequence[Link], hcas: Sequence[Hca]) -> list[Link]:
    return [link for link in links if any(hca.netdev == link.name for hca in hcas)]


def _no_address(address: str, links: Sequence[Link], hcas: Sequence[Hca]) -> Trouble:
    fabric = _fabric_links(links, hcas)
    lit = [link.name for link in fabric if link.carrier]
    if fabric and not lit:
        names = ", ".join(link.name for link in fabric)
        return Trouble(
            kind=Kind.NO_CARRIER,
            text=f"no device has {address}, and no fabric device ({names}) has a carrier",
            fix="Is the cable plugged in, is the peer powered on?",
        )
    if lit:
        text = f"no device has {address}, though {', '.join(lit)} has a carrier"
    else:
        text = f"no device has {address}, and no network device has an RDMA device below it"
    return Trouble(kind=Kind.NO_ADDRESS, text=text, fix="Run site.yml, it sets the addresses")
