"""Tells systemd how this service stands (sd_notify(3)): one datagram, no library needed."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

WATCHDOG_SHARE = 3
"""Pings a WatchdogSec; sd_watchdog_enabled(3) asks for at least two."""


class Notifier:
    """Sends state changes to the service manager; does nothing where there is none."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        limit = environment.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(limit) / 1e6 / WATCHDOG_SHARE if limit.isdigit() else None
        self._last_status = ""

    def ready(self) -> None:
        """Say that the service is up."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Say that the service goes down on purpose."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Say that the loop turns; a stalled engine is not this signal's business."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Show `text` in `systemctl status`; sent only when it changed."""
        if text != self._last_status:
            self._last_status = text
            self._send("STATUS=" + " ".join(text.split()))

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(text.encode(), address)
