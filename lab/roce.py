"""The RoCE tree of a virtual Spark: what /sys/class/infiniband shows, made from a small data model.

File names and formats are the kernel's (Documentation/ABI/stable/sysfs-class-infiniband). Only what a reader
of facts opens is there; nothing behind it can carry RDMA.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from lab.settings import RAILS, Host

EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
V1 = "IB/RoCE v1"
V2 = "RoCE v2"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One RDMA device with one Ethernet port; `table_size` counts its GID files, the empty ones too."""

    name: str
    netdev: str
    gids: tuple[Gid, ...]
    table_size: int = 16
    active: bool = True
    rate: str = "200 Gb/sec (4X HDR)"
    extra: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """Relative path below /sys/class/infiniband/NAME -> content without the final newline."""
        found = {
            "node_type": "1: CA",
            "ports/1/link_layer": "Ethernet",
            "ports/1/rate": self.rate,
            f"device/net/{self.netdev}/type": "1",
            **port_state(self.active),
        }
        used = {entry.index: entry for entry in self.gids}
        for index in range(self.table_size):
            entry = used.get(index)
            found[f"ports/1/gids/{index}"] = entry.gid if entry else EMPTY_GID
            if entry:
                found[f"ports/1/gid_attrs/types/{index}"] = entry.kind
                found[f"ports/1/gid_attrs/ndevs/{index}"] = entry.netdev
        return found | self.extra


def port_state(active: bool) -> dict[str, str]:
    """The two files that tell a port with carrier from one without."""
    return {
        "ports/1/state": "4: ACTIVE" if active else "1: DOWN",
        "ports/1/phys_state": "5: LinkUp" if active else "3: Disabled",
    }


def ipv4_gid(address: str) -> str:
    """An IPv4 address as a GID: ::ffff:a.b.c.d in the kernel's eight groups of four hex digits."""
    value = int(ipaddress.IPv4Address(address))
    return f"0000:0000:0000:0000:0000:ffff:{value >> 16:04x}:{value & 0xFFFF:04x}"


def link_local_gid(mac: str) -> str:
    """The fe80::/64 GID that a port has from its MAC address (EUI-64)."""
    part = [int(byte, 16) for byte in mac.split(":")]
    eui = [part[0] ^ 2, part[1], part[2], 0xFF, 0xFE, part[3], part[4], part[5]]
    groups = [f"{eui[i]:02x}{eui[i + 1]:02x}" for i in range(0, 8, 2)]
    return ":".join(["fe80", "0000", "0000", "0000", *groups])


def spark_devices(host: Host) -> tuple[Device, ...]:
    """A lab host's devices: link-local entries first, the RoCE v2 IPv4 entry at the host's own index."""
    devices = []
    for rail in RAILS:
        local = link_local_gid(host.mac(rail.number))
        routed = ipv4_gid(host.fabric(rail.number))
        last = host.gid_index
        entries = [(0, local, V1), (1, local, V2), (last - 1, routed, V1), (last, routed, V2)]
        gids = tuple(Gid(index, gid, kind, rail.netdev) for index, gid, kind in entries)
        devices.append(Device(name=rail.rdma, netdev=rail.netdev, gids=gids))
    return tuple(devices)


def write_tree(folder: Path, devices: tuple[Device, ...]) -> None:
    """Write the devices below `folder` (which stands for /sys/class/infiniband)."""
    for device in devices:
        for name, content in device.files().items():
            path = folder / device.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content + "\n")


def write_state(folder: Path, device: str, active: bool) -> None:
    """Change a port's state in place, as its carrier changes; readers that have the tree mounted see it."""
    for name, content in port_state(active).items():
        with (folder / device / name).open("r+") as file:
            file.write(content + "\n")
            file.truncate()
