"""Decides over which rails the ranks talk: a pure function of what every node found at this start.

A rail joins two nodes when their addresses share a subnet, their MTUs are equal, and a full packet came back
in both directions. Names and cages need not be the same on both ends: a crossed cable is as good.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from glm53_service.fabric.rails import Fabric, Rail
from glm53_service.fabric.trouble import Kind, Trouble

TOPOLOGY = (
    "rings and meshes are not supported yet: every node needs one rail in a subnet that all nodes share (a"
    " switch), or there are two nodes"
)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One node, by its name, and what it found."""

    node: str
    fabric: Fabric


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The rails of this start: for each node, in the order given, its addresses in rail order.

    All nodes have the same number, and number i of one reaches number i of another; the lead's first rail is
    the first, or there is a `trouble`. `dropped` says why a rail that some node has is not among them.
    """

    rails: tuple[tuple[str, ...], ...] = ()
    trouble: Trouble | None = None
    dropped: tuple[Trouble, ...] = ()


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """Two rails, one of each node, and why they cannot be used together; none: they can."""

    rails: tuple[Rail, Rail]
    trouble: Trouble | None = None


def agree(nodes: Sequence[Seen]) -> Agreement:
    """Return the rails that join all `nodes`; the first node leads, and its rails give the order."""
    bad = next((seen.fabric.trouble for seen in nodes if seen.fabric.trouble), None)
    if bad:
        return Agreement(trouble=bad)
    if len(nodes) == 1:
        return Agreement(rails=(tuple(rail.address for rail in nodes[0].fabric.rails),))
    lead, *others = nodes
    edges = [pair_rails(lead, other) for other in others]
    meeting = [{edge.rails[0].address: edge for edge in found if not edge.trouble} for found in edges]
    rows = [
        (rail.address, *(found[rail.address].rails[1].address for found in meeting))
        for rail in lead.fabric.rails
        if all(rail.address in found for found in meeting)
    ]
    dropped = tuple(_unmatched(nodes, rows, list(itertools.chain.from_iterable(edges))))
    first = bool(rows) and rows[0][0] == lead.fabric.rails[0].address
    trouble = _between(others, rows) or (None if first else _why_not(nodes, edges))
    if trouble:
        return Agreement(trouble=trouble, dropped=dropped)
    return Agreement(rails=tuple(zip(*rows, strict=True)), dropped=dropped)


def pair_rails(one: Seen, other: Seen) -> tuple[Edge, ...]:
    """Return the pairs of rails of two nodes, each rail at most once, whatever order they are listed in.

    Within a subnet (both twins may share one) a pair that works in both directions is taken before one that
    does not, then equal cages, then the order of addresses. Sides can be swapped: the pairs are the same.
    """
    edges = [
        Edge(rails=(mine, theirs), trouble=_trouble(one, other, mine, theirs))
        for mine in one.fabric.rails
        for theirs in other.fabric.rails
        if mine.network and mine.network == theirs.network
    ]
    edges.sort(key=_order)
    taken: set[str] = set()
    chosen = []
    for edge in edges:
        ends = {rail.address for rail in edge.rails}
        if not ends & taken:
            taken |= ends
            chosen.append(edge)
    return tuple(chosen)


def _order(edge: Edge) -> tuple[bool, str, bool, bool, list[str]]:
    mine, theirs = edge.rails
    crossed = _function(mine) != _function(theirs)
    addresses = sorted((mine.address, theirs.address), key=_sortable)
    return bool(edge.trouble), mine.network, mine.port != theirs.port, crossed, addresses


def _function(rail: Rail) -> str:
    """Return which of the two PCIe functions behind a cage this is, as its name says (enp1..., enP2p1...)."""
    return rail.netdev.partition("p")[0] if rail.netdev.startswith("enp") else rail.netdev[:4]


def _sortable(address: str) -> str:
    return ".".join(f"{int(part):03}" for part in address.split("."))


def _trouble(one: Seen, other: Seen, mine: Rail, theirs: Rail) -> Trouble | None:
    if mine.mtu != theirs.mtu:
        first, second = sorted(
            (f"{mine.mtu} on {one.node}'s {mine.netdev}", f"{theirs.mtu} on {other.node}'s {theirs.netdev}")
        )
        return Trouble(
            kind=Kind.MTU,
            text=f"the MTUs differ: {first}, {second}",
            fix="Run site.yml, it sets both (a firmware update can set one back)",
        )
    for seen, rail, peer in ((one, mine, theirs), (other, theirs, mine)):
        reason = _reached(seen.fabric, rail, peer)
        if reason:
            return Trouble(kind=reason.kind, text=f"{seen.node}: {reason.text}", fix=reason.fix)
    return None


def _reached(fabric: Fabric, rail: Rail, peer: Rail) -> Trouble | None:
    """Return why `peer` is not reached over `rail`. Not probed is not reached."""
    for reach in fabric.reach:
        if (reach.address, reach.peer) == (rail.address, peer.address):
            return reach.trouble
    text = f"{peer.address} was not probed through {rail.netdev} ({rail.address})"
    return Trouble(kind=Kind.PEER_SILENT, text=text)


def _between(others: Sequence[Seen], rows: Sequence[tuple[str, ...]]) -> Trouble | None:
    """Return what keeps two followers from talking over a rail that each shares with the lead."""
    for (i, one), (j, other) in itertools.combinations(enumerate(others), 2):
        for row in rows:
            mine, theirs = _rail(one, row[i + 1]), _rail(other, row[j + 1])
            if mine.network != theirs.network:
                return Trouble(kind=Kind.TOPOLOGY, text=TOPOLOGY)
            trouble = _trouble(one, other, mine, theirs)
            if trouble:
                return trouble
    return None


def _rail(seen: Seen, address: str) -> Rail:
    return next(rail for rail in seen.fabric.rails if rail.address == address)


def _why_not(nodes: Sequence[Seen], edges: Sequence[tuple[Edge, ...]]) -> Trouble:
    """Return why the lead's first rail does not join all nodes: the supervisors and the ranks meet on it."""
    first = nodes[0].fabric.rails[0]
    for found in edges:
        for edge in found:
            if edge.trouble and edge.rails[0].address == first.address:
                return edge.trouble
    if len(nodes) > 2:
        return Trouble(kind=Kind.TOPOLOGY, text=TOPOLOGY)
    has = "; ".join(
        f"{seen.node} has {', '.join(f'{rail.address} in {rail.network}' for rail in seen.fabric.rails)}"
        for seen in nodes
    )
    return Trouble(
        kind=Kind.SUBNET,
        text=f"no rail of {nodes[1].node} shares the subnet of {first.address}: {has}",
        fix="give both ends of a cable an address in the same subnet (glm53_fabric_rails)",
    )


def _unmatched(
    nodes: Sequence[Seen], rows: Sequence[tuple[str, ...]], edges: Sequence[Edge]
) -> Iterable[Trouble]:
    """Yield the reason for each rail that is not used; one that both ends share comes once."""
    used = set(itertools.chain.from_iterable(rows))
    said: set[str] = set()
    for seen in nodes:
        for rail in seen.fabric.rails:
            if rail.address in used:
                continue
            reason = next(
                (e.trouble for e in edges if e.trouble and rail.address in (r.address for r in e.rails)), None
            )
            reason = reason or _no_peer(seen, rail, nodes)
            if str(reason) not in said:
                said.add(str(reason))
                yield reason.about(f"the rail of {seen.node}'s {rail.netdev} ({rail.address})")


def _no_peer(seen: Seen, rail: Rail, nodes: Sequence[Seen]) -> Trouble:
    others = [other for other in nodes if other.node != seen.node]
    why = "; ".join(f"{other.node}: {warning}" for other in others for warning in other.fabric.warnings)
    names = " and ".join(other.node for other in others)
    return Trouble(
        kind=Kind.SUBNET, text=f"{names} has no usable rail in {rail.network}" + (f" ({why})" if why else "")
    )
