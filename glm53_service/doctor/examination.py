"""One node's examination as data, and several laid side by side."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from glm53_service.doctor import rails
from glm53_service.doctor.finding import ORDER, Finding, Level
from glm53_service.doctor.registry import NOUNS
from glm53_service.doctor.source import Source
from glm53_service.errors import EXIT_DOCTOR_ERRORS, EXIT_DOCTOR_WARNINGS, UsageError
from glm53_service.fabric.pairing import Seen, agree
from glm53_service.fabric.rails import Fabric

FORMAT = 1
PAIR = "pair"

SEVERE = {
    "driver": "ranks on two drivers fail in ways that look like a network fault",
    "release": "supervisors of two releases do not form a pair",
    "nodes": "the nodes do not agree on who they are",
    "image": "ranks of two images do not fit",
    "weights": "ranks of two checkpoints give garbage, or do not start",
    "weights.manifest": "ranks of two checkpoints give garbage, or do not start",
    "drafter.manifest": "ranks of two drafters draft different tokens",
}
"""What must be equal, and why; any other difference is a warning."""

SHIP = "`glm53 verify --full` on both says which is right; `glm53 ship` on the head brings it to a worker"

FIXES = {
    "driver": "install one version on both nodes, hold it (glm53_hold_versions: true), reboot",
    "kernel": "boot the same kernel on both nodes",
    "docker.toolkit": "install one version on both nodes; do not change the mode on the way",
    "gpu.cap_mhz": "glm53_clock_cap_mhz in the group_vars of both, then playbooks/host.yml",
    "sysctl.vm.swappiness": "glm53_swappiness in the group_vars of both, then playbooks/host.yml",
    "fabric.firmware": "update the card's firmware on both nodes, then reboot both",
    "weights.manifest": SHIP,
    "drafter.manifest": SHIP,
    "firmware": "update both nodes (DGX Dashboard or fwupdmgr), then reboot both",
}


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on one node. `taken` in Unix seconds; `parity` is compared between nodes."""

    format: int
    node: str
    taken: float
    findings: tuple[Finding, ...]
    parity: dict[str, str]
    fabric: Fabric | None = None


async def examine(source: Source) -> Examination:
    """Look at everything and return what was found; nothing is changed."""
    findings: list[Finding] = []
    parity: dict[str, str] = {}
    name, fabric = "", None
    for noun in NOUNS:
        facts = await noun.read(source)
        findings += noun.check(facts)
        parity |= noun.parity(facts)
        if isinstance(facts, rails.Facts):
            fabric = facts.view.fabric
            name = facts.node.node if facts.node else ""
    name = name or source.read("proc/sys/kernel/hostname").strip() or socket.gethostname()
    return Examination(
        format=FORMAT,
        node=name,
        taken=source.wall,
        findings=tuple(msgspec.structs.replace(finding, node=name) for finding in findings),
        parity=parity,
        fabric=fabric,
    )


def read_examination(text: str, source: str) -> Examination:
    """Return what `glm53 doctor --json` wrote; UsageError when it is something else."""
    try:
        found = msgspec.json.decode(text, type=Examination)
    except msgspec.DecodeError as error:
        raise UsageError(f"{source} is not what `glm53 doctor --json` writes: {error}") from None
    if found.format != FORMAT:
        raise UsageError(f"{source} has format {found.format}, this glm53 reads {FORMAT}: run site.yml")
    return found


def compare(nodes: Sequence[Examination]) -> tuple[Finding, ...]:
    """Return what differs between nodes that should be alike, and whether their rails meet. Pure."""
    keys = dict.fromkeys(key for node in nodes for key in node.parity)
    found = [finding for key in keys if (finding := _difference(key, nodes))]
    return (*found, *_meeting(nodes))


def _difference(key: str, nodes: Sequence[Examination]) -> Finding | None:
    values = {node.node: node.parity.get(key, "") for node in nodes}
    if len({value for value in values.values() if value}) < 2:
        return None
    return Finding(
        id=f"parity.{key}",
        level=Level.ERROR if key in SEVERE else Level.WARNING,
        measured=", ".join(f"{node} has {value or 'none'}" for node, value in values.items()),
        expected=f"the same on all nodes{': ' + SEVERE[key] if key in SEVERE else ''}",
        fix=FIXES.get(key, "make them equal; where our playbooks set it: run site.yml"),
        node=PAIR,
    )


def _meeting(nodes: Sequence[Examination]) -> tuple[Finding, ...]:
    seen = [Seen(node=node.node, fabric=node.fabric) for node in nodes if node.fabric]
    if len(seen) < 2 or len(seen) < len(nodes):
        return ()
    agreed = agree(seen)
    if agreed.trouble:
        if any(one.fabric.trouble == agreed.trouble for one in seen):
            return ()  # that node's own finding says it
        trouble = agreed.trouble
        return (_rail_finding(Level.ERROR, f"fabric.{trouble.kind}", trouble.text, trouble.fix),)
    dropped = [_rail_finding(Level.WARNING, f"fabric.{t.kind}", t.text, t.fix) for t in agreed.dropped]
    said = f"rails={len(agreed.rails[0])}: " + ", ".join(
        " - ".join(row) for row in zip(*agreed.rails, strict=True)
    )
    return (*dropped, Finding(id="fabric.pair", level=Level.OK, measured=said, node=PAIR))


def _rail_finding(level: Level, id_: str, text: str, fix: str) -> Finding:
    expected = "rails that both nodes find and reach"
    return Finding(
        id=id_,
        level=level,
        measured=text,
        expected=expected,
        fix=fix or "docs/fabric.md has a row",
        node=PAIR,
    )


def worst(findings: Sequence[Finding]) -> Level:
    """Return the highest level among `findings`."""
    return min((finding.level for finding in findings), key=ORDER.index, default=Level.OK)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 where nothing is above info, else the code of the worst."""
    return {Level.ERROR: EXIT_DOCTOR_ERRORS, Level.WARNING: EXIT_DOCTOR_WARNINGS}.get(worst(findings), 0)


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings for a person: worst first, with what was expected and what to do below each."""
    ordered = sorted(findings, key=lambda finding: ORDER.index(finding.level))
    width = max((len(finding.node) for finding in ordered), default=0)
    lines = []
    for finding in ordered:
        lines.append(f"{finding.level:8} {finding.node:{width}}  {finding.id:22} {finding.measured}")
        if finding.level in (Level.ERROR, Level.WARNING):
            lines.append(f"{'':{width + 11}} expected: {finding.expected}")
            lines.append(f"{'':{width + 11}} fix:      {finding.fix}")
        elif finding.fix:
            lines.append(f"{'':{width + 11}} fix:      {finding.fix}")
    counts = {level: sum(finding.level is level for finding in ordered) for level in ORDER}
    lines.append(", ".join(f"{count} {level}" for level, count in counts.items()))
    return lines
