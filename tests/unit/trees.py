"""Snapshot trees of a Spark: a healthy one, built of little, that a test changes in the way of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm53_service.doctor.source import MANIFEST, VERSION, Source, open_tree
from glm53_service.fabric.links import ARGV
from glm53_service.fabric.probe import KERNEL_LOG
from glm53_service.fabric.reach import HEADERS, SMALL, ping_argv
from tests.unit.test_fabric import FE80, add_hca, mapped

TAKEN = 1_790_000_000.0
MTU = 9000


@dataclass(slots=True)
class Device:
    """One twin: its RDMA device, its network device, the address on it (empty: none) and its GID index."""

    hca: str
    netdev: str
    address: str
    index: int = 3
    mtu: int = MTU
    carrier: bool = True
    state: str = "4: ACTIVE"
    gids: dict[int, tuple[str, str]] | None = None
    prefix: int = 24


def twins(host: int, *, cage: int = 1) -> list[Device]:
    """Return the two twins of a cage of host number `host`, each in a subnet of its own."""
    return [
        Device(f"rocep1s0f{cage}", f"enp1s0f{cage}np{cage}", f"192.0.2.{host}"),
        Device(f"roceP2p1s0f{cage}", f"enP2p1s0f{cage}np{cage}", f"198.51.100.{host}"),
    ]


@dataclass(slots=True)
class Spark:
    """What a snapshot of a node holds.

    `silent` are the peer addresses that no ping reaches, `short` those that only small pings reach.
    """

    name: str = "spark-a"
    host: int = 1
    devices: list[Device] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    commands: dict[tuple[str, ...], tuple[int | None, str]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    management: str = "203.0.113."
    wishes: dict[str, Any] = field(default_factory=dict)
    gpu_mode: str = "gpus"
    installed: bool = True
    lan: Mapping[str, Any] = field(default_factory=lambda: {"ifname": "enP7s7", "mtu": 1500})

    def __post_init__(self) -> None:
        if not self.devices:
            self.devices = twins(self.host)

    def links(self) -> list[dict[str, Any]]:
        """Return what `ip -j address show` says."""
        lan = {
            **self.lan,
            "flags": ["UP", "LOWER_UP"],
            "addr_info": [{"family": "inet", "local": f"{self.management}{self.host}", "prefixlen": 24}],
        }
        return [lan, *(self._link(device) for device in self.devices)]

    @staticmethod
    def _link(device: Device) -> dict[str, Any]:
        return {
            "ifname": device.netdev,
            "mtu": device.mtu,
            "flags": ["UP", "LOWER_UP"] if device.carrier else ["UP"],
            "addr_info": [
                {"family": "inet", "local": device.address, "prefixlen": device.prefix},
                {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
            ][0 if device.address else 1 :],
        }

    def node_yaml(self) -> str:
        """Return the node.yaml of this one of two nodes, whose addresses are those of `twins`."""
        fabric = {host: [device.address for device in twins(host)] for host in (1, 2)}
        nodes = [
            {"node": name, "management": f"{self.management}{host}", "fabric": fabric[host]}
            for host, name in ((1, "spark-a"), (2, "spark-b"))
        ]
        nodes[self.host - 1] |= self.wishes
        own = {"version": 1, "cluster": "unit", "node": self.name, "gpu_mode": self.gpu_mode}
        return json.dumps({**own, "nodes": nodes})

    def write(self, folder: Path) -> Path:
        """Write the snapshot below `folder` and return it."""
        for device in self.devices:
            gids = device.gids if device.gids is not None else _gids(device)
            if device.hca:
                add_hca(folder, device.hca, device.netdev, gids, device.state)
                _put(
                    folder,
                    f"sys/class/infiniband/{device.hca}/device/net/{device.netdev}/mtu",
                    str(device.mtu),
                )
        commands: dict[tuple[str, ...], tuple[int | None, str]] = {
            ARGV: (0, json.dumps(self.links())),
            KERNEL_LOG: (0, ""),
            **self._pings(),
            **self.commands,
        }
        files = dict(self.files)
        if self.installed:
            files.setdefault("etc/glm53/node.yaml", self.node_yaml())
        files[MANIFEST] = json.dumps({"version": VERSION, "taken": TAKEN, "node": self.name})
        for number, (argv, (code, out)) in enumerate(commands.items()):
            kept = {"argv": list(argv), "rc": code, "stdout": out, "stderr": "" if code == 0 else out}
            files[f"commands/{number:03}.json"] = json.dumps(kept)
        for path, text in files.items():
            _put(folder, path, text)
        return folder

    def source(self, folder: Path) -> Source:
        """Write the snapshot and open it."""
        return open_tree(self.write(folder))

    def _pings(self) -> dict[tuple[str, ...], tuple[int | None, str]]:
        peers = [device.address for device in twins(3 - self.host)]
        found: dict[tuple[str, ...], tuple[int | None, str]] = {}
        for device in self.devices:
            for peer in peers:
                full = 1 if peer in self.silent | self.short else 0
                found[ping_argv(device.netdev, peer, device.mtu - HEADERS)] = (full, "")
                found[ping_argv(device.netdev, peer, SMALL)] = (1 if peer in self.silent else 0, "")
        return found


def _gids(device: Device) -> dict[int, tuple[str, str]]:
    found = {0: (FE80, "IB/RoCE v1"), 1: (FE80, "RoCE v2")}
    if device.address:
        found |= {
            device.index - 1: (mapped(device.address), "IB/RoCE v1"),
            device.index: (mapped(device.address), "RoCE v2"),
        }
    return found


def _put(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
