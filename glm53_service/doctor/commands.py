"""The verbs of `glm53` that look at a machine, or at a snapshot of one, and change nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from glm53_service.doctor import rails
from glm53_service.doctor.examination import compare, examine, exit_code, read_examination, table
from glm53_service.doctor.finding import Finding
from glm53_service.doctor.registry import FILES
from glm53_service.doctor.snapshot import take
from glm53_service.doctor.source import Source, open_tree, this_machine
from glm53_service.errors import ConfigError, UsageError
from glm53_service.fabric.trouble import EXIT_CODES
from glm53_service.node import Node


def source_of(etc: Path, tree: Path | None, weights: Sequence[str] = ()) -> Source:
    """Return this machine, or the one that the snapshot in `tree` was taken of."""
    return open_tree(tree) if tree else this_machine(etc, time.time(), weights=weights)


def fabric_command(source: Source, *, as_json: bool) -> int:
    """Print the rails of a machine and return 0, or the exit code of its trouble."""
    node = rails.known_node(source.etc)
    view = asyncio.run(rails.view_of(source, node))
    shown = (
        json.dumps(rails.as_data(view, node), indent=1) if as_json else "\n".join(rails.as_lines(view, node))
    )
    print(shown)
    return EXIT_CODES[view.trouble.kind] if view.trouble else 0


def snapshot_command(source: Source, out: Path | None) -> int:
    """Write a snapshot of a machine and say where it is."""
    node = _node(source)
    name = node.node if node else socket.gethostname()
    taken = datetime.fromtimestamp(source.wall, UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = out or Path(f"glm53-snapshot-{name}-{taken}")

    size = asyncio.run(take(source, folder, files=FILES, check=examine, node=name))
    print(
        f"{folder}: {size / 1024:.0f} KiB. Look through it before you send it: tar czf {folder}.tgz {folder}"
    )
    return 0


def _node(source: Source) -> Node | None:
    try:
        return rails.known_node(source.etc)
    except ConfigError:
        return None


def doctor_command(source: Source, *, as_json: bool) -> int:
    """Examine a machine, print what was found, return 0 where nothing is above info."""
    found = asyncio.run(examine(source))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print("\n".join(table(found.findings)))
    return exit_code(found.findings)


def compare_command(paths: Sequence[Path], *, as_json: bool) -> int:
    """Lay examinations of several nodes (`glm53 doctor --json`) side by side and print all findings."""
    nodes = [read_examination(_text(path), str(path)) for path in paths]
    findings: list[Finding] = [*compare(nodes), *(finding for node in nodes for finding in node.findings)]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=1).decode())
    else:
        print("\n".join(table(findings)))
    return exit_code(findings)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
