"""What can be wrong with the fabric, each with its own words and its own exit code of `glm53 fabric`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """One kind of fault; the value is its id in `--json`."""

    UNREADABLE = "unreadable"
    NO_DEVICE = "no_device"
    NEEDS_REBOOT = "needs_reboot"
    NO_CARRIER = "no_carrier"
    NO_ADDRESS = "no_address"
    PORT_DOWN = "port_down"
    NO_GID = "no_v2_gid"
    NO_COMMON_INDEX = "no_common_index"
    OVERRIDE = "override"
    SUBNET = "no_common_subnet"
    TOPOLOGY = "topology"
    PEER_SILENT = "peer_silent"
    MTU = "mtu_differs"
    UNUSED = "unused_twin"
    SLOW = "not_rdma"


EXIT_CODES = {kind: 20 + number for number, kind in enumerate(Kind)}
"""20 and up, in the order of Kind: no other command uses them. docs/fabric.md has the table."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what was found and what was expected, and what to do about it."""

    kind: Kind
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}. {self.fix}" if self.fix else self.text

    def about(self, rail: str) -> Trouble:
        """Return the same fault as the reason why `rail` is left out."""
        return Trouble(kind=self.kind, text=f"{rail} is not used: {self.text}", fix=self.fix)
