"""The TCP ports that the pair needs on this node, and who has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, error, good
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.node import read_node
from glm53_service.settings import Gate, read_settings

LISTENING = ("ss", "-ltnpH")
OWNER = re.compile(r'\("([^"]+)",pid=(\d+)')
UNITS = ("glm53-head.service", "glm53-worker.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One listening socket: `port`, where, and its owner (empty and 0: not told to this account)."""

    port: int
    address: str
    name: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """`needed`: port to what it is for. `ours`: whether one of our units runs, whose ranks may hold them."""

    needed: dict[int, str]
    listeners: tuple[Listener, ...]
    ours: bool


async def read(source: Source) -> Ports:
    """Gather."""
    listed = await source.run(*LISTENING)
    units = await source.run("systemctl", "is-active", *UNITS)
    return Ports(
        needed=_needed(source),
        listeners=tuple(found for line in listed.out.splitlines() if (found := _listener(line))),
        ours="active" in units.out.split(),
    )


def _needed(source: Source) -> dict[int, str]:
    """Return the ports of this node: the head's by its settings, a worker's gate; none where nothing is
    installed.
    """
    try:
        node = read_node(source.etc)
        if node.rank != 0:
            return {Gate().port: "gate"}
        settings = read_settings(source.etc)
    except ConfigError:
        return {}
    return {
        settings.api.port: "API",
        settings.gate.port: "gate",
        node.supervisor_port: "supervisors",
        settings.rendezvous_port: "rendezvous",
    }


def _listener(line: str) -> Listener | None:
    fields = line.split()
    if len(fields) < 4:
        return None
    address, _, port = fields[3].rpartition(":")
    owner = OWNER.search(line)
    if not port.isdigit():
        return None
    return Listener(
        port=int(port), address=address, name=owner[1] if owner else "", pid=int(owner[2]) if owner else 0
    )


def check(ports: Ports) -> Iterator[Finding]:
    """Judge."""
    if ports.ours:
        yield good("ports.free", f"our unit runs; ports {', '.join(map(str, ports.needed))} are its own")
        return
    taken = [listener for listener in ports.listeners if listener.port in ports.needed]
    for listener in taken:
        who = f"{listener.name} (pid {listener.pid})" if listener.name else "a process of another account"
        yield error(
            "ports.free",
            f"port {listener.port} ({ports.needed[listener.port]}) at {listener.address}: {who} has it",
            "free while the pair is stopped: else a rank ends minutes into its load",
            f"end it (`ss -ltnp 'sport = :{listener.port}'`), or set another port in the inventory",
        )
    if not taken and ports.needed:
        yield good("ports.free", f"ports {', '.join(map(str, ports.needed))} are free")


NOUN = Noun(name="ports", read=read, check=check)
