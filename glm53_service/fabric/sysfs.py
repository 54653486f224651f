"""Reads the RDMA devices of a machine from /sys/class/infiniband, as plain data."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hca:
    """One RDMA device (one PCIe function, one port) and the network device on top of it."""

    name: str
    netdev: str | None
    state: str
    gids: tuple[Gid, ...]

    def roce_v2_index(self, address: str) -> int | None:
        """Return the GID index that holds `address` as RoCE v2; there is no default index, ever."""
        return next(
            (gid.index for gid in self.gids if "RoCE v2" in gid.kind and gid.address == address), None
        )


def read_hcas(root: Path = Path("/")) -> tuple[Hca, ...]:
    """Return the RDMA devices below `root`, by name; empty when there are none."""
    folder = root / "sys/class/infiniband"
    return tuple(_hca(path) for path in sorted(folder.iterdir())) if folder.is_dir() else ()


def _hca(path: Path) -> Hca:
    netdevs = sorted(entry.name for entry in (path / "device/net").glob("*"))
    port = path / "ports/1"
    return Hca(
        name=path.name,
        netdev=netdevs[0] if netdevs else None,
        state=_read(port / "state").partition(":")[2].strip() or "unknown",
        gids=_gids(port),
    )


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
