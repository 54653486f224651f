"""Remembers how fast the last large copy to each node was, for the next plan's time."""

from __future__ import annotations

import json
from pathlib import Path

from glm53_service.files import read_json, write_durably

HUB = "hub"
"""What the download is called among the workers' names."""

LEAST_BYTES = 100_000_000
"""Smaller copies say more about starting than about the path."""


def rates_file(home: Path) -> Path:
    """Return where an account keeps them."""
    return home / ".cache/glm53/rates.json"


def remember(path: Path, node: str, size: int, seconds: float) -> None:
    """Write down bytes a second to `node`; too small a copy changes nothing, nor does a file that cannot be
    written.
    """
    if size < LEAST_BYTES or seconds <= 0:
        return
    try:
        write_durably(path, json.dumps({**read_rates(path), node: size / seconds}))
    except OSError:
        return


def read_rates(path: Path) -> dict[str, float]:
    """Return bytes a second by node; empty when nothing was measured."""
    return {str(k): float(v) for k, v in read_json(path).items() if isinstance(v, (int, float)) and v > 0}
