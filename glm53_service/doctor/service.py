"""Our own unit on this node: is it installed, enabled, alive, and what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from glm53_service.doctor.finding import Finding, Noun, error, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.errors import ConfigError
from glm53_service.node import Node, read_node
from glm53_service.settings import read_settings
from glm53_service.settings import warnings as settings_warnings

STATUS = ("/opt/glm53/current/bin/glm53", "status", "--json")
VERSION = ("/opt/glm53/current/bin/glm53", "version", "--verify")
SHOWN = "Id,LoadState,ActiveState,UnitFileState,NRestarts,Result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """`problems` are those of the files in /etc/glm53; `unit` is systemd's word, `status` the gate's; `drift`
    is why the release's files are not those that were installed.
    """

    node: Node | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    unit: dict[str, str]
    status: dict[str, Any]
    version: str
    drift: str = ""


async def read(source: Source) -> Service:
    """Gather."""
    if not (source.etc / "node.yaml").exists():
        return Service(node=None, problems=(), warnings=(), unit={}, status={}, version="")
    node: Node | None = None
    problems: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    try:
        node = read_node(source.etc)
        if node.rank == 0:
            known = settings_warnings(read_settings(source.etc))
    except ConfigError as wrong:
        problems = wrong.problems
    name = "glm53-head.service" if node is None or node.rank == 0 else "glm53-worker.service"
    shown = await source.run("systemctl", "show", name, "-p", SHOWN)
    said = await source.run(*STATUS)
    try:
        status = json.loads(said.out)
    except ValueError:
        status = {}
    release = await source.run(*VERSION)
    return Service(
        node=node,
        problems=tuple(problems),
        warnings=tuple(known),
        unit=dict(line.partition("=")[::2] for line in shown.out.splitlines()),
        status=status if isinstance(status, dict) else {},
        version=release.out.strip(),
        drift="" if release.ok else (release.err or "no answer").strip().partition("\n")[0],
    )


def check(service: Service) -> Iterator[Finding]:
    """Judge."""
    for problem in service.problems:
        yield error(
            "service.files", problem, "files that the service accepts", "correct the inventory, run site.yml"
        )
    if service.node is None:
        if not service.problems:
            yield info("service.unit", "nothing is installed here yet", "", "ansible-playbook site.yml")
        return
    for text in service.warnings:
        yield warning(
            "service.settings", text, "settings without a known trap", "`glm53 config --origin` shows them"
        )
    if service.drift:
        yield error(
            "service.release",
            service.drift,
            "the files that site.yml installed",
            "glm53 version --verify names them, and what to do",
        )
    yield from _unit(service.unit)
    state, reasons = str(service.status.get("state", "")), service.status.get("reasons") or []
    said = f"{state}: {'; '.join(reasons)}" if reasons else state
    if service.status.get("ready"):
        yield good("service.state", said)
    elif state:
        yield info("service.state", said, "", "docs/runbook.md has a row for it")
    for rank in service.status.get("ranks") or []:
        for text in rank.get("warnings") or []:
            yield warning("service.rank", f"rank {rank.get('rank')}: {text}", "no warning", "see the text")


def _unit(unit: dict[str, str]) -> Iterator[Finding]:
    name = unit.get("Id", "?")
    if unit.get("LoadState") != "loaded":
        yield warning(
            "service.unit",
            f"{name} is {unit.get('LoadState', 'unknown')}",
            "installed",
            "ansible-playbook site.yml",
        )
        return
    active, restarts = unit.get("ActiveState", "?"), unit.get("NRestarts", "0")
    measured = f"{name}: {active}, {unit.get('UnitFileState', '?')}, {restarts} restarts"
    if active == "failed":
        yield error(
            "service.unit",
            f"{measured} ({unit.get('Result', '?')})",
            "active",
            f"journalctl -u {name} -p err; then systemctl reset-failed and start",
        )
    elif unit.get("UnitFileState") != "enabled":
        yield warning(
            "service.unit",
            measured,
            "enabled: the pair comes back after a power cut",
            f"systemctl enable {name}",
        )
    elif restarts not in ("0", ""):
        yield warning("service.unit", measured, "no restart by systemd", f"journalctl -u {name}")
    else:
        yield good("service.unit", measured)


def parity(service: Service) -> dict[str, str]:
    """Return what has to be equal on all nodes: the release, and who the nodes are."""
    if service.node is None:
        return {}
    nodes = msgspec.json.encode((service.node.cluster, service.node.supervisor_port, service.node.nodes))
    return {"release": service.version, "nodes": hashlib.sha256(nodes).hexdigest()[:12]}


NOUN = Noun(name="service", read=read, check=check, parity=parity)
