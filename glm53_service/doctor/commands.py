"""The verbs of `glm53` that look at a machine, or at a snapshot of one, and change nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from glm53_service.doctor import rails
from glm53_service.doctor.snapshot import take
from glm53_service.doctor.source import Source, open_tree, this_machine
from glm53_service.fabric.trouble import EXIT_CODES


def source_of(etc: Path, tree: Path | None) -> Source:
    """Return this machine, or the one that the snapshot in `tree` was taken of."""
    return open_tree(tree) if tree else this_machine(etc, time.time())


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
    node = rails.known_node(source.etc)
    name = node.node if node else socket.gethostname()
    taken = datetime.fromtimestamp(source.wall, UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = out or Path(f"glm53-snapshot-{name}-{taken}")

    async def check(recording: Source) -> object:
        return await rails.view_of(recording, node)

    size = asyncio.run(take(source, folder, files=rails.FILES, check=check, node=name))
    print(
        f"{folder}: {size / 1024:.0f} KiB. Look through it before you send it: tar czf {folder}.tgz {folder}"
    )
    return 0
