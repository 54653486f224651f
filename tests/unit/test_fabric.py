"""Rails and GID indices from trees in the shapes that owners reported; addresses are from documentation
ranges.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53_service.errors import UnavailableError
from glm53_service.fabric.environment import rank_environment
from glm53_service.fabric.links import Link, parse_links
from glm53_service.fabric.probe import probe
from glm53_service.fabric.rails import Fabric, find_fabric
from glm53_service.fabric.sysfs import read_hcas
from glm53_service.fabric.trouble import Kind

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
FE80 = "fe80:0000:0000:0000:4ebb:47ff:fe00:0001"
RAIL0, RAIL1 = "192.0.2.1", "198.51.100.1"


def mapped(address: str) -> str:
    """Return the GID of an IPv4 address as sysfs writes it."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def add_hca(
    root: Path, name: str, netdev: str, gids: dict[int, tuple[str, str]], state: str = "4: ACTIVE"
) -> None:
    """Write an RDMA device below `root`; slots up to 7 that are not in `gids` are zeros without a readable
    type.
    """
    folder = root / "sys/class/infiniband" / name
    (folder / "device/net" / netdev).mkdir(parents=True)
    port = folder / "ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    for index in range(8):
        value, kind = gids.get(index, (ZERO, ""))
        (port / "gids" / str(index)).write_text(value + "\n")
        if kind:
            (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")


def pair_of(address: str, index: int) -> dict[int, tuple[str, str]]:
    """Return the v1 and v2 entries of `address`, the v2 one at `index`."""
    return {
        0: (FE80, "IB/RoCE v1"),
        1: (FE80, "RoCE v2"),
        index - 1: (mapped(address), "IB/RoCE v1"),
        index: (mapped(address), "RoCE v2"),
    }


def links(*found: tuple[str, str]) -> list[Link]:
    """Return links that are up with MTU 9000."""
    return [
        Link(name=name, carrier=True, mtu=9000, addresses=(f"{address}/24",) if address else ())
        for name, address in found
    ]


def fabric(root: Path, up: Sequence[Link], addresses: Sequence[str] = (RAIL0,)) -> Fabric:
    """Return what an RDMA rank would get."""
    return find_fabric(addresses, up, read_hcas(root), rdma=True)


@pytest.mark.parametrize("index", [3, 4, 5])
def test_the_index_is_the_one_that_holds_the_address(tmp_path: Path, index: int) -> None:
    """Prevents an assumed index 3: on one node it is 3, on the next 4 or 5, and it moves with a reboot."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, index))
    found = fabric(tmp_path, links(("enp1s0f1np1", RAIL0)))
    assert found.problem == ""
    assert rank_environment(found, rdma=True) == {
        "VLLM_HOST_IP": RAIL0,
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "TP_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_SOCKET_IFNAME": "enp1s0f1np1",
        "UCX_NET_DEVICES": "enp1s0f1np1",
        "NCCL_IB_HCA": "=rocep1s0f1",
        "NCCL_IB_GID_INDEX": str(index),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
    }


def test_a_hole_is_a_problem_and_prints_the_table(tmp_path: Path) -> None:
    """Prevents `ibv_modify_qp` errno 61 a minute into the start: slot 3 may be empty on one node."""
    add_hca(
        tmp_path,
        "rocep1s0f1",
        "enp1s0f1np1",
        {0: (FE80, "IB/RoCE v1"), 1: (FE80, "RoCE v2"), 2: (mapped(RAIL0), "IB/RoCE v1")},
    )
    found = fabric(tmp_path, links(("enp1s0f1np1", RAIL0)))
    assert found.rails == ()
    assert "rocep1s0f1 has no RoCE v2 GID for 192.0.2.1" in found.problem
    assert "2=192.0.2.1 IB/RoCE v1" in found.problem


def test_a_v2_entry_of_another_address_does_not_count(tmp_path: Path) -> None:
    """Prevents the first v2 entry from winning: it may belong to an old or a link-local address."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of("192.0.2.77", 3))
    assert "no RoCE v2 GID for 192.0.2.1" in fabric(tmp_path, links(("enp1s0f1np1", RAIL0))).problem


def test_both_twins_are_used_once_each(tmp_path: Path) -> None:
    """Prevents half the bandwidth, and a device that is listed twice."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3))
    add_hca(tmp_path, "roceP2p1s0f1", "enP2p1s0f1np1", pair_of(RAIL1, 3))
    found = fabric(tmp_path, links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", RAIL1)), (RAIL0, RAIL1))
    assert rank_environment(found, rdma=True)["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"


def test_twins_without_a_common_index_fall_to_one_rail_with_a_warning(tmp_path: Path) -> None:
    """Prevents a node with no index that is valid on both devices (an IPv6 privacy address shifts one
    table).
    """
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3))
    add_hca(tmp_path, "roceP2p1s0f1", "enP2p1s0f1np1", pair_of(RAIL1, 6))
    found = fabric(tmp_path, links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", RAIL1)), (RAIL0, RAIL1))
    assert [rail.hca for rail in found.rails] == ["rocep1s0f1"]
    assert [str(warning) for warning in found.warnings] == [
        "rail 1 is not used: its GID index is 6, rail 0 has 3; a rank can be told one only"
    ]
    assert found.warnings[0].kind is Kind.NO_COMMON_INDEX


def test_a_second_rail_that_is_down_degrades_and_does_not_stop(tmp_path: Path) -> None:
    """Prevents an outage for a rail that is optional."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3))
    add_hca(tmp_path, "roceP2p1s0f1", "enP2p1s0f1np1", pair_of(RAIL1, 3))
    found = fabric(tmp_path, links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", "")), (RAIL0, RAIL1))
    assert len(found.rails) == 1
    assert found.warnings[0].text.startswith("rail 1 is not used: no device has 198.51.100.1")


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (
            Link(name="enp1s0f1np1", carrier=False, mtu=9000, addresses=(f"{RAIL0}/24",)),
            "enp1s0f1np1 (192.0.2.1) has no carrier",
        ),
        (
            Link(name="enp1s0f1np1", carrier=False, mtu=9000, addresses=()),
            "no fabric device (enp1s0f1np1) has a carrier",
        ),
        (
            Link(name="enp1s0f1np1", carrier=True, mtu=9000, addresses=()),
            "though enp1s0f1np1 has a carrier. Run site.yml",
        ),
        (
            Link(name="enP7s7", carrier=True, mtu=1500, addresses=(f"{RAIL0}/24",)),
            "enP7s7 (192.0.2.1) has no RDMA device",
        ),
    ],
)
def test_each_state_of_a_link_has_its_own_words(tmp_path: Path, link: Link, said: str) -> None:
    """Prevents one message for an unplugged cable, a missing address and a LAN port."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3))
    assert said in fabric(tmp_path, [link]).problem


def test_a_port_that_is_down_is_named(tmp_path: Path) -> None:
    """Prevents a start over an RDMA port that is not ACTIVE."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3), state="1: DOWN")
    assert fabric(tmp_path, links(("enp1s0f1np1", RAIL0))).problem.startswith(
        "rocep1s0f1 (below enp1s0f1np1) is DOWN"
    )


def test_without_rdma_the_socket_interface_is_all_that_is_set(tmp_path: Path) -> None:
    """Prevents NCCL variables on a CPU pair."""
    found = find_fabric([RAIL0], links(("lab0", RAIL0)), read_hcas(tmp_path), rdma=False)
    assert rank_environment(found, rdma=False) == {
        "VLLM_HOST_IP": RAIL0,
        "GLOO_SOCKET_IFNAME": "lab0",
        "TP_SOCKET_IFNAME": "lab0",
    }


def test_ip_output_is_read_as_it_is_written() -> None:
    """Prevents a link without carrier, or an IPv6 address, from being taken for a rail."""
    text = json.dumps(
        [
            {"ifname": "x0", "flags": ["BROADCAST", "UP"], "mtu": 1500, "operstate": "DOWN", "addr_info": []},
            {
                "ifname": "x1",
                "flags": ["UP", "LOWER_UP"],
                "mtu": 9000,
                "addr_info": [
                    {"family": "inet", "local": RAIL0, "prefixlen": 24},
                    {"family": "inet6", "local": "fe80::1"},
                ],
            },
        ]
    )
    assert parse_links(text) == (
        Link(name="x0", carrier=False, mtu=1500, addresses=()),
        Link(name="x1", carrier=True, mtu=9000, addresses=(f"{RAIL0}/24",)),
    )


def test_a_tool_that_fails_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    """Prevents a supervisor that dies because `ip` was being upgraded."""

    async def broken(_: Sequence[str]) -> str:
        raise UnavailableError("`ip -j address show` cannot be run")

    found = asyncio.run(probe([RAIL0], rdma=True, runner=broken, root=tmp_path))
    assert found.problem == "`ip -j address show` cannot be run"
