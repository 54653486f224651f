"""ufw beside our own table: what it drops, our accept cannot undo, so its own command is printed."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.fabric.links import ARGV, Link, parse_links
from glm53_service.node import Node, read_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Firewall:
    """`ufw` is what `ufw status` says (empty: not installed, or not told), `table` whether ours is loaded."""

    ufw: str
    table: bool
    node: Node | None
    links: tuple[Link, ...]


async def read(source: Source) -> Firewall:
    """Gather."""
    try:
        node: Node | None = read_node(source.etc)
    except ConfigError:
        node = None
    links = await source.run(*ARGV)
    return Firewall(
        ufw=(await source.run("ufw", "status")).out,
        table=(await source.run("nft", "list", "table", "inet", "glm53")).ok,
        node=node,
        links=parse_links(links.out) if links.ok else (),
    )


def check(found: Firewall) -> Iterator[Finding]:
    """Judge."""
    if "Status: active" in found.ufw and found.node is not None:
        missing = [
            command for command in commands(found.node, found.links) if not _allowed(command, found.ufw)
        ]
        if missing:
            yield warning(
                "firewall.ufw",
                "ufw is active and has no rule for the peers on the rails",
                "everything from the peers' fabric addresses on the rails: the ranks use random ports",
                "; ".join(missing),
            )
        else:
            yield good("firewall.ufw", "active, and lets the peers in on the rails")
    if found.table:
        yield good("firewall.table", "inet glm53 is loaded")
    elif found.node is not None:
        yield info(
            "firewall.table",
            "no table inet glm53 (or this account may not see it)",
            "",
            "with glm53_firewall: true it is loaded by glm53-firewall.service: systemctl status it",
        )


def commands(node: Node, links: tuple[Link, ...]) -> list[str]:
    """Return the ufw commands that this node needs: its peers on each rail; on the head the supervisors."""
    found = []
    for address in node.me.fabric:
        link = next((link for link in links if link.interface(address)), None)
        interface = link.interface(address) if link else None
        if link is None or interface is None:
            continue
        for peer in node.nodes:
            for theirs in peer.fabric if peer.node != node.node else ():
                if ipaddress.IPv4Address(theirs) in interface.network:
                    found.append(f"ufw allow in on {link.name} from {theirs}")
    if node.rank == 0:
        found += [
            f"ufw allow from {peer.management} to any port {node.supervisor_port} proto tcp"
            for peer in node.followers
        ]
    return found


def _allowed(command: str, status: str) -> bool:
    """Return whether a line of `ufw status` says what `command` would add."""
    words = shlex.split(command)
    source = words[words.index("from") + 1]
    target = f"on {words[words.index('on') + 1]}" if "on" in words else words[words.index("port") + 1]
    return any("ALLOW" in line and source in line.split() and target in line for line in status.splitlines())


NOUN = Noun(name="firewall", read=read, check=check)
