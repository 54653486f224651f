"""Reads the RDMA devices of a machine from /sys/class/infiniband, as plain data."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

MELLANOX = "0x15b3"
"""PCI vendor id of the ConnectX cards (pci.ids: Mellanox Technologies)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One filled entry of a port's GID table.

    `address` is the IPv4 address that a RoCE v2 entry stands for.
    """

    index: int
    value: str
    kind: str

    @property
    def address(self) -> str | None:
        """The IPv4 address mapped in this GID (::ffff:a.b.c.d), or None for any other entry."""
        mapped = ipaddress.IPv6Address(self.value).ipv4_mapped
        return str(mapped) if mapped else None

    @property
    def link_local(self) -> bool:
        """Whether it is an fe80:: entry."""
        return ipaddress.IPv6Address(self.value).is_link_local

    def __str__(self) -> str:
        return f"{self.index}={self.address or ipaddress.IPv6Address(self.value)} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hca:
    """One RDMA device (one PCIe function, one port) and the network device on top of it.

    `port` is the cage it is wired to ("0" next to the RJ-45, "1"), empty when nothing says so. Devices with
    the same port are twins: two PCIe functions behind one cable.
    """

    name: str
    netdev: str | None
    state: str
    gids: tuple[Gid, ...]
    port: str = ""

    def roce_v2_index(self, address: str) -> int | None:
        """Return the GID index that holds `address` as RoCE v2; there is no default index, ever."""
        return next(iter(self.roce_v2_indices(address)), None)

    def roce_v2_indices(self, address: str) -> tuple[int, ...]:
        """Return every GID index that holds `address` as RoCE v2."""
        return tuple(gid.index for gid in self.gids if "RoCE v2" in gid.kind and gid.address == address)

    @property
    def private_gids(self) -> tuple[Gid, ...]:
        """The link-local v2 entries, where there are more than the one of the MAC address: a privacy address
        has shifted the table.
        """
        found = tuple(gid for gid in self.gids if gid.link_local and "RoCE v2" in gid.kind)
        return found if len({gid.value for gid in found}) > 1 else ()

    @property
    def table(self) -> str:
        """The GID table in one line."""
        return ", ".join(map(str, self.gids)) or "empty"


def read_hcas(root: Path = Path("/")) -> tuple[Hca, ...]:
    """Return the RDMA devices below `root`, by name; empty when there are none."""
    folder = root / "sys/class/infiniband"
    return tuple(_hca(path) for path in sorted(folder.iterdir())) if folder.is_dir() else ()


def connectx_functions(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the PCI addresses of the ConnectX functions that the bus shows, with or without a driver."""
    folder = root / "sys/bus/pci/devices"
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(path.name for path in paths if _read(path / "vendor") == MELLANOX)


def _hca(path: Path) -> Hca:
    netdevs = sorted(entry.name for entry in (path / "device/net").glob("*"))
    port = path / "ports/1"
    netdev = netdevs[0] if netdevs else None
    return Hca(
        name=path.name,
        netdev=netdev,
        state=_read(port / "state").partition(":")[2].strip() or "unknown",
        gids=_gids(port),
        port=_port(path, netdev),
    )


def _port(path: Path, netdev: str | None) -> str:
    """Return the cage: the driver's own word (`p0`), else the end of the name that udev made of it."""
    said = _read(path / "device/net" / netdev / "phys_port_name") if netdev else ""
    found = re.fullmatch(r"p(\d+)", said) or re.search(r"np(\d+)$", netdev or "")
    return found[1] if found else ""


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for entry in sorted((port / "gids").glob("*"), key=lambda p: int(p.name)):
        value = _read(entry)
        # An empty slot reads as zeros, and its type file cannot be read at all (EINVAL).
        if value and int(ipaddress.IPv6Address(value)):
            kind = _read(port / "gid_attrs/types" / entry.name)
            found.append(Gid(index=int(entry.name), value=value, kind=kind))
    return tuple(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
