"""What else on a node is in the pair's way, and whether it can be stopped and given back. Pure.

Owners come from other recipes with their containers, units and watchdogs running. In the way is what listens
where the pair will, what was made with a GPU, and what would start such a thing again. Everything else is
nobody's business here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from glm53_service.node import Node
from glm53_service.settings import Settings

OWN_UNITS = ("glm53-head.service", "glm53-worker.service")
ALIVE = ("running", "restarting", "paused")
PROTECTED = ("docker.service", "containerd.service", "ssh.service", "sshd.service", "dbus.service")
"""Units that are never stopped, whatever they hold; nor is anything of systemd itself."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A port that the pair listens on, on these addresses of one node."""

    port: int
    addresses: tuple[str, ...]
    use: str

    def meets(self, port: int, address: str) -> bool:
        """Say whether a listener on `address` keeps the pair from its port."""
        if port != self.port:
            return False
        return ipaddress.ip_address(address).is_unspecified or address in self.addresses


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in the way.

    `what` names it, `why` says what it holds or starts. `refusal` says why we cannot stop it and give it back
    later; empty when we can. `fix` is the command with which its owner ends it. `scope` is the account of a
    unit that is not the system's.
    """

    kind: Literal["container", "unit", "job", "process"]
    name: str
    what: str
    why: tuple[str, ...]
    fix: str
    id: str = ""
    scope: str = ""
    refusal: str = ""

    def line(self) -> str:
        """Return one readable line."""
        kept = f"; cannot be given back: {self.refusal}" if self.refusal else ""
        return f"{self.what}: {', '.join(self.why)}{kept}. To end it: `{self.fix}`"


def claims(settings: Settings, node: Node) -> dict[str, tuple[Claim, ...]]:
    """Return the ports that each node of the pair listens on, by its name."""
    return {
        peer.node: _claims(settings, node, rank, peer.management, peer.fabric)
        for rank, peer in enumerate(node.nodes)
    }


def _claims(
    settings: Settings, node: Node, rank: int, management: str, fabric: Sequence[str]
) -> tuple[Claim, ...]:
    loopback = "127.0.0.1"
    gate = (loopback, management) if settings.gate.bind == "management" else (loopback,)
    found = (Claim(port=settings.gate.port, addresses=gate, use="the gate"),)
    if rank:
        return found
    api = management if settings.api.bind == "management" else loopback
    return (
        Claim(port=settings.api.port, addresses=(api,), use="the API"),
        *found,
        Claim(port=node.supervisor_port, addresses=(*fabric, management), use="the supervisors"),
        Claim(port=settings.rendezvous_port, addresses=(fabric[0],), use="the ranks' rendezvous"),
    )


def findings(
    seen: Mapping[str, Any],
    claimed: Iterable[Claim],
    recipes: Iterable[str],
    spared: Iterable[str] = (),
) -> tuple[Finding, ...]:
    """Return what is in the way of a node's part of the pair, in the order in which it has to be stopped.

    `seen` is what plugins/modules/glm53_foreign.py read there; `recipes` are its markers of other recipes,
    which count without a container, since they would make one. `spared` are containers that may keep the GPU,
    such as a monitor; a port of ours they may not.
    """
    claimed, spared = tuple(claimed), set(spared)
    why = {
        c["id"]: _container_reasons(c, seen["listeners"], claimed, spared=c["name"] in spared)
        for c in seen["containers"]
    }
    containers = [c for c in seen["containers"] if _in_the_way(c, why[c["id"]])]
    starts = {c["name"] for c in containers} | set(recipes)
    units = _units(seen, claimed, starts)
    kept = {(unit.name, unit.scope) for unit in units if not unit.refusal}
    processes = _listeners(seen, claimed, kept) + _scripts(seen, starts, kept)
    by_unit = {
        name for unit in seen["units"] if (unit["name"], unit["scope"]) in kept for name in unit["mentions"]
    }
    return (
        *units,
        *(_container(c, why[c["id"]], c["name"] in by_unit) for c in containers),
        *_jobs(seen["jobs"], starts),
        *processes,
    )


# Containers


def _container_reasons(
    container: Mapping[str, Any],
    listeners: Sequence[Mapping[str, Any]],
    claimed: Sequence[Claim],
    *,
    spared: bool,
) -> tuple[str, ...]:
    ports = [(entry["port"], entry["address"]) for entry in container["published"]]
    ports += [(e["port"], e["address"]) for e in listeners if e["holder"]["container"] == container["id"]]
    held = tuple(dict.fromkeys(text for port, address in ports if (text := _held(port, address, claimed))))
    return (("has the GPU",) if container["gpu"] and not spared else ()) + held


def _held(port: int, address: str, claimed: Sequence[Claim]) -> str:
    """Return in words which of our ports a listener holds, empty for none."""
    use = next((claim.use for claim in claimed if claim.meets(port, address)), "")
    return f"listens on {address}:{port} ({use})" if use else ""


def _in_the_way(container: Mapping[str, Any], reasons: tuple[str, ...]) -> bool:
    """Say whether a container holds something of ours now, or will after the next boot.

    Docker starts again what has the policy always, and on-failure after a failure; unless-stopped only what
    nobody stopped, and such a container is alive.
    """
    returns = container["policy"] == "always" or (
        container["policy"] == "on-failure" and container["exit_code"] != 0
    )
    return not container["ours"] and bool(reasons) and (container["state"] in ALIVE or returns)


def _container(container: Mapping[str, Any], reasons: tuple[str, ...], by_unit: bool) -> Finding:
    name, refusal, fix = container["name"], "", f"docker stop {container['name']}"
    if container["swarm"]:
        refusal = f"docker swarm's service {container['swarm']} starts it anew"
        fix = f"docker service scale {container['swarm']}=0"
    elif container["state"] == "paused":
        refusal, fix = "it is paused", f"docker unpause {name} && docker stop {name}"
    elif container["auto_remove"] and not by_unit:
        refusal = "it was made with --rm, so stopping it removes it"
    elif container["policy"] != "no":
        fix = f"docker update --restart=no {name} && docker stop {name}"
    return Finding(
        kind="container",
        name=name,
        id=container["id"],
        what=(
            f"container {name} (image {container['image']}, {container['state']}, restart policy"
            f" {container['policy']})"
        ),
        why=reasons,
        refusal=refusal,
        fix=fix,
    )


# Units


def _units(seen: Mapping[str, Any], claimed: Sequence[Claim], starts: set[str]) -> list[Finding]:
    """Return units, those first that trigger others: a timer would start its service again."""
    held: dict[tuple[str, str], list[str]] = {}
    for entry in seen["listeners"]:
        holder = entry["holder"]
        if text := _held(entry["port"], entry["address"], claimed):
            held.setdefault((holder["unit"], holder["scope"]), []).append(text)
    found: dict[tuple[str, str], Finding] = {}
    for unit in seen["units"]:
        key = (unit["name"], unit["scope"])
        named = tuple(f"starts {name}" for name in unit["mentions"] if name in starts)
        reasons = (*held.get(key, ()), *named)
        if reasons and (unit["active"] or unit["enabled"]) and not _protected(unit["name"]):
            found[key] = _unit(unit, reasons)
    return sorted(found.values(), key=lambda unit: unit.name.endswith(".service"))


def _protected(name: str) -> bool:
    return name in (*OWN_UNITS, *PROTECTED) or name.startswith(("systemd-", "user@"))


def _unit(unit: Mapping[str, Any], reasons: tuple[str, ...]) -> Finding:
    name, scope = unit["name"], unit["scope"]
    state = [word for word in ("active", "enabled") if unit[word]]
    stop = f"systemctl disable --now {name}"
    owner = f" of {scope}" if scope else ""
    return Finding(
        kind="unit",
        name=name,
        scope=scope,
        what=f"unit {name}{owner} ({', '.join(state)})",
        why=reasons,
        refusal="" if unit["managed"] else f"{scope}'s own systemd does not run",
        fix=f"sudo systemctl --user -M {scope}@ disable --now {name}" if scope else f"sudo {stop}",
    )


# Jobs and processes


def _jobs(jobs: Sequence[Mapping[str, Any]], starts: set[str]) -> list[Finding]:
    return [
        Finding(
            kind="job",
            name=f"{job['file']}:{job['line']}",
            what=f"line {job['line']} of {job['file']}",
            why=tuple(f"starts {name}" for name in named),
            refusal="we edit nobody's jobs",
            fix=f"sudo sed -i '{job['line']}s/^/# /' {job['file']}",
        )
        for job in jobs
        if (named := [name for name in job["mentions"] if name in starts])
    ]


def _listeners(
    seen: Mapping[str, Any], claimed: Sequence[Claim], units: set[tuple[str, str]]
) -> list[Finding]:
    published = {entry["port"] for c in seen["containers"] for entry in c["published"]}
    found = []
    for entry in seen["listeners"]:
        holder, text = entry["holder"], _held(entry["port"], entry["address"], claimed)
        known = (holder["unit"], holder["scope"]) in units or holder["unit"] in OWN_UNITS
        proxy = holder["command"] == "docker-proxy" and entry["port"] in published
        if text and not (holder["container"] or known or proxy):
            found.append(_process(holder, f"process {holder['command']}", (text,)))
    return found


def _scripts(seen: Mapping[str, Any], starts: set[str], units: set[tuple[str, str]]) -> list[Finding]:
    found = []
    for entry in seen["scripts"]:
        named = tuple(f"may start {name}" for name in entry["mentions"] if name in starts)
        holder = entry["holder"]
        if named and (holder["unit"], holder["scope"]) not in units:
            found.append(_process(holder, f"script {entry['script']}", named))
    return found


def _process(holder: Mapping[str, Any], name: str, reasons: tuple[str, ...]) -> Finding:
    where = f", in {holder['terminal']}" if holder["terminal"] else ""
    where += f", in {holder['unit']}" if holder["unit"] else ""
    init = holder["pid"] == 1
    return Finding(
        kind="process",
        name=f"{holder['pid']}",
        what=f"{name} (pid {holder['pid']} of {holder['user']}{where})",
        why=reasons,
        refusal="systemd itself listens, for a socket unit" if init else "nothing could start it again",
        fix="systemctl list-sockets" if init else f"sudo kill {holder['pid']}",
    )
