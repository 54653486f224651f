"""The filters that turn inventory and found facts into what the roles are given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glm53_service.doctor.examination import examine
from tests.unit.doctor_trees import NVIDIA, healthy
from tests.unit.plugin_loader import load

filters = load("filter", "glm53")
facts = load("modules", "glm53_facts")

HOSTS: dict[str, Any] = {
    "a": {"ansible_host": "10.9.0.1", "glm53_fabric_rails": [{"netdev": "x0", "address": "10.1.0.1/24"}]},
    "b": {
        "ansible_host": "b.example",
        "ansible_port": 2222,
        "glm53_management_address": "10.9.0.2",
        "glm53_fabric_rails": [{"netdev": "y0", "address": "10.1.0.2/24"}],
        "__glm53_found": {
            "account": {"name": "bob", "home": "/home/bob"},
            "host_key": "ssh-ed25519 AAAA",
            "netdevs": {"y0": {"addresses": ["10.7.0.2/24"]}},
        },
    },
}


def test_nodes_keep_rank_order_and_prefer_the_stated_address() -> None:
    """Defect: ranks are sorted by name, or a DNS name lands where only an address is understood."""
    assert filters.glm53_nodes(["b", "a"], HOSTS) == [
        {"node": "b", "management": "10.9.0.2", "fabric": ["10.1.0.2"], "netdevs": ["y0"]},
        {"node": "a", "management": "10.9.0.1", "fabric": ["10.1.0.1"], "netdevs": ["x0"]},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"glm53_fabric_hca": "^=roce1 ", "glm53_fabric_gid_index": "4"}, {"hca": "^=roce1", "gid_index": 4}),
        ({"glm53_fabric_hca": "", "glm53_fabric_gid_index": ""}, {}),
        ({"glm53_fabric_hca": " ", "glm53_fabric_gid_index": 0}, {"gid_index": 0}),
    ],
)
def test_an_empty_override_is_not_handed_on(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Defect: an empty GID index reaches a node, and is read as index 0 there."""
    [node] = filters.glm53_nodes(["a"], {"a": {**HOSTS["a"], **given}})
    assert {key: node[key] for key in node if key in ("hca", "gid_index")} == expected


def test_known_hosts_has_every_address_with_its_port() -> None:
    """Defect: the host key is pinned under the management name alone, so copying fails."""
    assert filters.glm53_known_hosts(["b"], HOSTS) == [
        "[b]:2222,[b.example]:2222,[10.9.0.2]:2222,[10.1.0.2]:2222 ssh-ed25519 AAAA"
    ]


def test_targets_use_the_heads_own_devices_and_the_workers_account() -> None:
    """Defect: the worker's device names are used on the head, or the head's account on the worker."""
    [target] = filters.glm53_targets(["b"], HOSTS, ["x0"], 1500)
    assert target["before"] == ["10.7.0.2"]
    assert (target["netdev"], target["address"], target["user"], target["port"]) == (
        "x0",
        "10.1.0.2",
        "bob",
        2222,
    )


RAILS = [{"netdev": "x0", "address": "10.1.0.1/24"}, {"netdev": "x1", "address": "10.2.0.1/24"}]


def definition(netdev: str, *addresses: str, kind: str = "ethernets") -> dict[str, Any]:
    """What another netplan file says of a device."""
    return {
        "file": "/etc/netplan/40-cx7.yaml",
        "kind": kind,
        "netdev": netdev,
        "mtu": 4000,
        "addresses": list(addresses),
    }


def test_another_files_equal_addresses_are_adopted() -> None:
    """Defect: a second definition of the same rail is written beside NVIDIA's."""
    assert filters.glm53_foreign_rails(RAILS, [definition("x0", "10.1.0.1/24")], "4000") == {
        "adopted": ["x0"],
        "conflicts": [],
    }


@pytest.mark.parametrize(
    "other",
    [
        definition("x0", "10.5.0.1/24"),
        definition("x0", "10.1.0.1/24", "10.5.0.1/24"),
        definition("x0"),
        definition("x0", "10.1.0.1/24", kind="bonds"),
    ],
)
def test_another_files_other_addresses_are_a_conflict(other: dict[str, Any]) -> None:
    """Defect: netplan adds lists up, so the rail ends with two addresses."""
    found = filters.glm53_foreign_rails(RAILS, [other], 4000)
    assert found["adopted"] == []
    assert len(found["conflicts"]) == 1
    assert "/etc/netplan/40-cx7.yaml" in found["conflicts"][0]
    assert "10.1.0.1/24" in found["conflicts"][0]


def test_another_file_without_our_mtu_is_a_conflict() -> None:
    """Defect: a file without an MTU is adopted, and the next boot brings 1500 on this end only."""
    found = filters.glm53_foreign_rails(RAILS, [definition("x0", "10.1.0.1/24")], 9000)
    assert found["adopted"] == []
    assert "MTU 4000, the inventory 9000: set glm53_fabric_mtu: 4000" in found["conflicts"][0]


def test_a_rail_with_the_wrong_mtu_is_not_set() -> None:
    """Defect: an address alone counts as configured, and large packets vanish."""
    netdevs = {
        "x0": {"addresses": ["10.1.0.1/24"], "mtu": 1500},
        "x1": {"addresses": ["10.2.0.1/24"], "mtu": 9000},
    }
    assert [rail["netdev"] for rail in filters.glm53_unset_rails(RAILS, netdevs, 9000)] == ["x0"]
    assert [rail["netdev"] for rail in filters.glm53_unset_rails(RAILS, {}, 9000)] == ["x0", "x1"]


def test_netplan_definitions_are_found_by_name_pattern_and_membership() -> None:
    """Defect: a file that matches the device by pattern, or enslaves it, is overlooked."""
    documents = {
        "/etc/netplan/1.yaml": {
            "network": {"version": 2, "ethernets": {"all": {"match": {"name": "enp1*"}}}}
        },
        "/etc/netplan/2.yaml": {"network": {"bonds": {"b0": {"interfaces": ["enp1s0f0np0"]}}}},
        "/etc/netplan/3.yaml": {
            "network": {"ethernets": {"enp1s0f0np0": {"addresses": [{"10.1.0.1/24": {}}], "mtu": 9000}}}
        },
        "/etc/netplan/4.yaml": {"network": {"wifis": {"wlan0": {}}}},
        "/etc/netplan/5.yaml": None,
    }
    found = facts.netplan_definitions(documents, ["enp1s0f0np0"])
    assert [entry["file"] for entry in found] == [f"/etc/netplan/{number}.yaml" for number in (1, 2, 3)]
    assert found[2]["addresses"] == ["10.1.0.1/24"]
    assert [entry["mtu"] for entry in found] == [1500, 1500, 9000]


@pytest.mark.parametrize(
    ("version", "info", "expected"),
    [
        ({"Components": [{"Name": "Engine"}]}, {"DockerRootDir": "/var/lib/docker"}, "engine"),
        ({"Components": [{"Name": "Podman Engine"}]}, {}, "podman"),
        ({}, {"SecurityOptions": ["name=seccomp", "name=rootless"]}, "rootless"),
        ({}, {"DockerRootDir": "/var/snap/docker/common"}, "snap"),
    ],
)
def test_docker_flavours(version: dict[str, Any], info: dict[str, Any], expected: str) -> None:
    """Defect: a rootless or snap docker is taken for the engine and fails only when a rank needs a device."""
    assert facts.docker_flavour(version, info) == expected


def test_the_doctors_of_all_nodes_are_laid_side_by_side(tmp_path: Path) -> None:
    """Defect: a difference between the nodes, which neither can see alone, is not told; or an error hides."""
    texts = []
    for host, more in ((1, {}), (2, {"proc/driver/nvidia/version": NVIDIA.format("580.126.09")})):
        found = asyncio.run(examine(healthy(host, more=more).source(tmp_path / str(host))))
        texts.append(msgspec.json.encode(found).decode())
    shown = filters.glm53_doctor(texts)
    assert shown["errors"][0] == "pair: parity.driver, spark-a has 580.95.05, spark-b has 580.126.09"
    assert shown["table"].splitlines()[0].split()[:3] == ["error", "pair", "parity.driver"]
