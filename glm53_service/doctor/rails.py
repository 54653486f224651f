"""The rails as a start would find them now, for `glm53 fabric` and the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from glm53_service.doctor.finding import Finding, Level, Noun, error, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError, UnavailableError
from glm53_service.fabric.links import ARGV, Link, parse_links
from glm53_service.fabric.probe import survey
from glm53_service.fabric.rails import Fabric, unused_twins
from glm53_service.fabric.sysfs import Hca, read_hcas
from glm53_service.fabric.trouble import EXIT_CODES, Trouble
from glm53_service.node import Node, read_node
from glm53_service.run import Runner
from glm53_service.settings import read_settings

FILES = (
    "sys/class/infiniband/*/fw_ver",
    "sys/class/infiniband/*/ports/1/state",
    "sys/class/infiniband/*/ports/1/gids/*",
    "sys/class/infiniband/*/ports/1/gid_attrs/types/*",
    "sys/class/infiniband/*/device/net/*/mtu",
    "sys/class/infiniband/*/device/net/*/phys_port_name",
    "sys/class/infiniband/*/device/net/*/type",
    "sys/bus/pci/devices/*/vendor",
    "proc/sys/net/ipv4/conf/*/arp_ignore",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What this node has (`links`, `hcas`) and, where node.yaml says which addresses are meant, its rails."""

    links: tuple[Link, ...]
    hcas: tuple[Hca, ...]
    fabric: Fabric | None
    twins: tuple[Hca, ...]

    @property
    def trouble(self) -> Trouble | None:
        """What would keep a start from happening: this node's fault, or a first rail without an answer."""
        if self.fabric is None or self.fabric.trouble:
            return self.fabric.trouble if self.fabric else None
        first = self.fabric.rails[0].address
        return next((r.trouble for r in self.fabric.reach if r.address == first and r.trouble), None)


async def view_of(source: Source, node: Node | None) -> View:
    """Return the view of a machine, or of a snapshot of one."""
    rdma = needs_rdma(source.etc, node)
    return await look(node, rdma=rdma, runner=source.runner, root=source.root)


async def look(node: Node | None, *, rdma: bool, runner: Runner, root: Path) -> View:
    """Return what is on this machine; without a `node` (nothing is installed yet) its devices alone."""
    try:
        links = parse_links(await runner(ARGV))
    except UnavailableError:
        links = ()
    hcas = read_hcas(root)
    if node is None:
        return View(links=links, hcas=hcas, fabric=None, twins=())
    me = node.me
    fabric = await survey(me.fabric, node.peer_fabric, rdma=rdma, runner=runner, root=root, wishes=me.wishes)
    twins = unused_twins(fabric, links, hcas) if rdma else ()
    return View(links=links, hcas=hcas, fabric=fabric, twins=twins)


def known_node(etc: Path) -> Node | None:
    """Return node.yaml, None where nothing is installed; a file that is wrong is a ConfigError."""
    return read_node(etc) if (etc / "node.yaml").exists() else None


def needs_rdma(etc: Path, node: Node | None) -> bool:
    """Return whether ranks need RDMA: the head's settings say it, a worker is told at a start."""
    if node is None or node.rank != 0:
        return True
    try:
        return read_settings(etc).device == "cuda"
    except ConfigError:
        return True


def as_lines(view: View, node: Node | None) -> list[str]:
    """Return the view for a person: devices, rails, warnings, then what is wrong."""
    lines = [f"{'device':16} {'cage':4} {'state':8} {'netdev':14} {'mtu':>5}  addresses"]
    links = {link.name: link for link in view.links}
    for hca in view.hcas:
        link = links.get(hca.netdev or "")
        carrier = "" if link is None or link.carrier else " (no carrier)"
        lines.append(
            f"{hca.name:16} {hca.port or '?':4} {hca.state:8} {hca.netdev or '-':14}"
            f" {link.mtu if link else 0:5}  {', '.join(link.addresses) if link else ''}{carrier}"
        )
        lines += [f"    gid {gid}" for gid in hca.gids]
    if not view.hcas:
        lines.append("(no RDMA device)")
    if node is None or view.fabric is None:
        return [
            *lines,
            "this node is not installed yet: there is no node.yaml that says which rails are meant",
        ]
    lines += [f"rail {n}: {rail.line()}" for n, rail in enumerate(view.fabric.rails)]
    for reach in view.fabric.reach:
        lines.append(f"{reach.address} -> {reach.peer}: {reach.trouble or 'full packets pass'}")
    lines += [f"warning: {warning}" for warning in view.fabric.warnings]
    lines += [f"warning: {twin_text(hca)}" for hca in view.twins]
    if view.trouble:
        lines.append(f"error {view.trouble.kind} ({EXIT_CODES[view.trouble.kind]}): {view.trouble}")
    return lines


def twin_text(hca: Hca) -> str:
    """Return what is to be said of a twin that is cabled and not used."""
    return (
        f"{hca.name} ({hca.netdev}) is the twin behind the same cable and carries no rail: half of the"
        " bandwidth is not used. Give it an address of its own in glm53_fabric_rails, on every node"
    )


def as_data(view: View, node: Node | None) -> dict[str, object]:
    """Return the view for a program; `exit` is the exit code."""
    code = EXIT_CODES[view.trouble.kind] if view.trouble else 0
    return {
        "node": node.node if node else None,
        "devices": [msgspec.to_builtins(hca) for hca in view.hcas],
        "fabric": msgspec.to_builtins(view.fabric) if view.fabric else None,
        "unused_twins": [hca.name for hca in view.twins],
        "trouble": msgspec.to_builtins(view.trouble) if view.trouble else None,
        "exit": code,
    }


# The doctor's part


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The view, what each card's firmware is, where ARP is answered strictly, and whether verbs devices are
    there (None: not told). `rdma`: whether ranks need them; None: this node does not know.
    """

    node: Node | None
    view: View
    firmware: dict[str, str]
    arp_ignore: dict[str, int]
    verbs: bool | None
    rdma: bool | None


async def read(source: Source) -> Facts:
    """Gather."""
    try:
        node = known_node(source.etc)
    except ConfigError:
        node = None
    view = await view_of(source, node)
    listed = await source.run("ls", "/dev/infiniband")
    paths = source.names("proc/sys/net/ipv4/conf/*/arp_ignore")
    values = {path.split("/")[-2]: source.read(path).strip() for path in paths}
    return Facts(
        node=node,
        view=view,
        firmware={
            hca.name: found
            for hca in view.hcas
            if (found := source.read(f"sys/class/infiniband/{hca.name}/fw_ver").strip())
        },
        arp_ignore={name: int(value) for name, value in values.items() if value.isdigit()},
        verbs=None if listed.code is None else "uverbs" in listed.out,
        rdma=needs_rdma(source.etc, node) if node and node.rank == 0 else None,
    )


def check(facts: Facts) -> Iterator[Finding]:
    """Judge."""
    view, fabric = facts.view, facts.view.fabric
    if fabric is None:
        yield info("fabric.rails", f"{len(view.hcas)} RDMA devices; no node.yaml says which rails are meant")
        return
    if view.trouble:
        yield _finding(Level.ERROR, view.trouble)
    for trouble in fabric.warnings:
        yield _finding(Level.WARNING, trouble)
    for reach in fabric.reach:
        if reach.trouble and reach.trouble != view.trouble:
            yield _finding(Level.WARNING, reach.trouble)
    for hca in view.twins:
        yield warning(
            "fabric.unused_twin", twin_text(hca), "both twins behind a cable are rails", "see there"
        )
    for number, rail in enumerate(fabric.rails):
        yield good("fabric.rails", f"rail {number}: {rail.line()}")
    if view.hcas and facts.verbs is False and facts.rdma is not False:
        level = error if facts.rdma else warning
        yield level(
            "fabric.verbs",
            "/dev/infiniband has no uverbs device",
            "one for each RDMA device: a container gets them from there",
            "modprobe ib_uverbs (package rdma-core loads it at boot)",
        )
    yield from _shared_subnet(facts, fabric)


def _finding(level: Level, trouble: Trouble) -> Finding:
    return Finding(
        id=f"fabric.{trouble.kind}",
        level=level,
        measured=trouble.text,
        expected="rails that both nodes find and reach",
        fix=trouble.fix or "docs/fabric.md has a row for it",
    )


def _shared_subnet(facts: Facts, fabric: Fabric) -> Iterator[Finding]:
    """Two devices of one subnet: the kernel answers for either address on both, unless it is told not to."""
    if len({rail.network for rail in fabric.rails}) == len(fabric.rails):
        return
    strict = facts.arp_ignore.get("all", 0)
    loose = [r.netdev for r in fabric.rails if max(strict, facts.arp_ignore.get(r.netdev, 0)) == 0]
    if facts.arp_ignore and loose:
        yield warning(
            "fabric.arp",
            f"{', '.join(loose)} share a subnet and answer for each other's address (arp_ignore 0)",
            "each device answers for its own address: else a rail's packets arrive on its twin",
            "; ".join(f"sysctl -w net.ipv4.conf.{name}.arp_ignore=1" for name in loose),
        )


def parity(facts: Facts) -> dict[str, str]:
    """Return what has to be equal on all nodes: the firmware of the cards, and how many rails are used."""
    rails = len(facts.view.fabric.rails) if facts.view.fabric else 0
    versions = sorted(set(facts.firmware.values()))
    return {"fabric.firmware": ", ".join(versions), "fabric.rails": str(rails) if rails else ""}


NOUN = Noun(name="fabric", read=read, check=check, files=FILES, parity=parity)
