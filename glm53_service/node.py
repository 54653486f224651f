"""Who this node is and who its peers are: `/etc/glm53/node.yaml`, the only thing that a worker keeps."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from glm53_service.engines.base import GpuMode
from glm53_service.errors import ConfigError
from glm53_service.fabric.rails import Wishes
from glm53_service.fabric.selector import parse_selector
from glm53_service.settings import Port, read_text
from glm53_service.structs import decode, load_yaml


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: its name, its management address, and its fabric addresses, one a rail, in rail order.

    `netdevs` (one a rail), `hca` (NCCL's selector) and `gid_index` are what the inventory says of its
    devices: each start compares them with what is there, and refuses where they differ. Empty is no value.
    """

    node: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
    management: str
    fabric: tuple[str, ...]
    netdevs: tuple[str, ...] = ()
    hca: str = ""
    gid_index: Annotated[int, Meta(ge=0, le=255)] | None = None

    @property
    def wishes(self) -> Wishes:
        """What the inventory says of this node's devices."""
        return Wishes(selector=parse_selector(self.hca), gid_index=self.gid_index, netdevs=self.netdevs)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of node.yaml. `nodes` is in rank order: the first leads."""

    version: Literal[1]
    cluster: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
    node: str
    supervisor_port: Port = 29540
    gpu_mode: GpuMode = GpuMode.GPUS
    nodes: tuple[Peer, ...]

    @property
    def rank(self) -> int:
        """This node's rank: its place in `nodes`."""
        return next(rank for rank, peer in enumerate(self.nodes) if peer.node == self.node)

    @property
    def me(self) -> Peer:
        """This node's own entry."""
        return self.nodes[self.rank]

    @property
    def lead(self) -> Peer:
        """The node of rank 0."""
        return self.nodes[0]

    @property
    def peer_fabric(self) -> tuple[str, ...]:
        """The fabric addresses of every other node."""
        return tuple(address for peer in self.nodes if peer.node != self.node for address in peer.fabric)

    @property
    def followers(self) -> tuple[Peer, ...]:
        """Every node but the lead, in rank order."""
        return self.nodes[1:]


def load_node(text: str, source: str) -> Node:
    """Return the node in YAML `text`; ConfigError lists every fault (key, found, expected, fix)."""
    node = decode(Node, load_yaml(text, source), source)
    problems = _cross_checks(node)
    if problems:
        raise ConfigError(source, problems)
    return node


def read_node(etc: Path) -> Node:
    """Return the node of this machine's `etc` folder; ConfigError when absent or wrong."""
    return load_node(read_text(etc / "node.yaml"), str(etc / "node.yaml"))


def _cross_checks(node: Node) -> list[str]:
    names = [peer.node for peer in node.nodes]
    problems = []
    if node.node not in names:
        problems.append(f"node: found {node.node!r}, expected one of the nodes: {', '.join(names)}")
    if not 2 <= len(names) <= 4:
        problems.append(f"nodes: found {len(names)}, expected 2 to 4: this model does not fit one machine")
    if len(set(names)) != len(names):
        problems.append(f"nodes: found {', '.join(names)}, expected each name once")
    rails = {len(peer.fabric) for peer in node.nodes}
    if rails not in ({1}, {2}):
        counts = ", ".join(f"{peer.node} has {len(peer.fabric)}" for peer in node.nodes)
        problems.append(
            f"nodes: {counts} fabric addresses; expected one a rail, 1 or 2, the same on every node"
        )
    seen: dict[str, str] = {}
    for rank, peer in enumerate(node.nodes):
        problems += _wish_problems(f"nodes[{rank}]", peer)
        for key, address in [("management", peer.management), *(("fabric", a) for a in peer.fabric)]:
            problems += _address(f"nodes[{rank}].{key}", address, peer.node, seen)
    return problems


def _wish_problems(key: str, peer: Peer) -> list[str]:
    problems = []
    try:
        parse_selector(peer.hca)
    except ValueError as error:
        problems.append(f"{key}.hca: {error}")
    if peer.netdevs and len(peer.netdevs) != len(peer.fabric):
        problems.append(
            f"{key}.netdevs: found {len(peer.netdevs)}, expected one for each of {len(peer.fabric)} addresses"
        )
    return problems


def _address(key: str, value: str, name: str, seen: dict[str, str]) -> list[str]:
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        return [
            f"{key}: found {value!r}, expected an IPv4 address without a prefix length (the fabric is IPv4)"
        ]
    if value in seen:
        return [f"{key}: found {value}, which {seen[value]} has already; every address once"]
    seen[value] = name
    return []
