"""Asks this node's supervisor, through its gate, what it does now."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from glm53_service.errors import UnavailableError

ASK_SECONDS = 5.0


def gate_port(etc: Path) -> int:
    """Return the gate's port: the head's settings name it, a follower's is the default."""
    from glm53_service.node import read_node
    from glm53_service.settings import Gate, read_settings

    return read_settings(etc).gate.port if read_node(etc).rank == 0 else Gate().port


def ask(port: int) -> dict[str, Any]:
    """Return what the gate on `port` says; UnavailableError when nothing answers there."""
    url = f"http://127.0.0.1:{port}/status"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ASK_SECONDS) as response:
            data: dict[str, Any] = json.load(response)
            return data
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(
            f"the gate at {url} does not answer: {reason}",
            hint="systemctl status glm53-head (or glm53-worker)",
        ) from None
