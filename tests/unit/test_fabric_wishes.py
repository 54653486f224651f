"""What the inventory says of devices and indices is checked; a lost card is told from none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53_service.fabric.links import Link
from glm53_service.fabric.rails import Fabric, Signs, Wishes, find_fabric, unused_twins
from glm53_service.fabric.selector import parse_selector
from glm53_service.fabric.sysfs import connectx_functions, read_hcas
from glm53_service.fabric.trouble import EXIT_CODES, Kind
from glm53_service.node import load_node
from tests.unit.test_fabric import FE80, RAIL0, RAIL1, add_hca, links, mapped, pair_of

PRIVACY = "fe80:0000:0000:0000:91c2:77aa:0b0c:0d0e"
BOTH = ("rocep1s0f1", "roceP2p1s0f1")


def spark(root: Path, indices: tuple[int, int] = (3, 3)) -> list[Link]:
    """Write both twins of the right cage, and return their links."""
    add_hca(root, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, indices[0]))
    add_hca(root, "roceP2p1s0f1", "enP2p1s0f1np1", pair_of(RAIL1, indices[1]))
    return links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", RAIL1))


def found(root: Path, up: Sequence[Link], wishes: Wishes) -> Fabric:
    """Return what an RDMA rank with both rails would get."""
    return find_fabric((RAIL0, RAIL1), up, read_hcas(root), rdma=True, wishes=wishes)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("=rocep1s0f1:1,roceP2p1s0f1:1", BOTH),
        ("rocep1s0f1,roceP2", BOTH),
        ("=rocep1s0f1", BOTH[:1]),
        ("^roceP2", BOTH[:1]),
        ("^=roceP2p1s0f1", BOTH[:1]),
        ("^=roceP2", BOTH),
        ("", BOTH),
    ],
)
def test_a_selector_means_what_nccl_reads_in_it(tmp_path: Path, text: str, taken: tuple[str, ...]) -> None:
    """Prevents a legal selector (list, port, exact, exclusion) from being taken for a device's name."""
    fabric = found(tmp_path, spark(tmp_path), Wishes(selector=parse_selector(text)))
    if text == "^=roceP2":  # names no device: NCCL would shrug, the inventory is wrong
        assert fabric.trouble is not None
        assert fabric.trouble.kind is Kind.OVERRIDE
        return
    assert tuple(rail.hca for rail in fabric.rails) == taken
    assert len(fabric.warnings) == 2 - len(taken)


@pytest.mark.parametrize("text", ["=a,,b", "a:x", "^"])
def test_a_selector_that_cannot_be_meant_is_refused(text: str) -> None:
    """Prevents an empty member, which NCCL takes as the beginning of every name."""
    with pytest.raises(ValueError, match="expected NAME or NAME:PORT"):
        parse_selector(text)


@pytest.mark.parametrize("text", ["=rocep1s0f0", "rocep1s0f1:2"])
def test_a_selector_that_names_nothing_here_is_an_error(tmp_path: Path, text: str) -> None:
    """Prevents the fall back to index 3 when the named device is on the other node only."""
    fabric = found(tmp_path, spark(tmp_path), Wishes(selector=parse_selector(text)))
    assert fabric.rails == ()
    assert f"{text.removeprefix('=')}; here are roceP2p1s0f1 (ACTIVE), rocep1s0f1" in fabric.problem


def test_a_stored_index_that_moved_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    """Prevents a silent hang in the handshake: the address sits at 4 since a reboot, the inventory says 3."""
    fabric = found(tmp_path, spark(tmp_path, (4, 4)), Wishes(gid_index=3))
    assert fabric.rails == ()
    assert "says GID index 3, but rocep1s0f1 has 192.0.2.1 as RoCE v2 at 4" in fabric.problem


def test_a_stored_index_that_is_right_is_used(tmp_path: Path) -> None:
    """Prevents an override that is only ever an error."""
    fabric = found(tmp_path, spark(tmp_path, (4, 4)), Wishes(gid_index=4))
    assert [rail.gid_index for rail in fabric.rails] == [4, 4]


def test_a_device_that_is_another_than_the_inventorys_is_an_error(tmp_path: Path) -> None:
    """Prevents a template's default device: the cable sits in the other cage, and the names are known."""
    fabric = found(tmp_path, spark(tmp_path), Wishes(netdevs=("enp1s0f0np0", "enP2p1s0f1np1")))
    assert "192.0.2.1 is on enp1s0f1np1, the inventory says enp1s0f0np0" in fabric.problem


def test_a_privacy_address_is_named_with_its_cure(tmp_path: Path) -> None:
    """Prevents a riddle: no index is common, since a second link-local GID has shifted one table."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3))
    shifted = {
        0: (FE80, "IB/RoCE v1"),
        1: (FE80, "RoCE v2"),
        2: (PRIVACY, "IB/RoCE v1"),
        4: (PRIVACY, "RoCE v2"),
        5: (mapped(RAIL1), "IB/RoCE v1"),
        6: (mapped(RAIL1), "RoCE v2"),
    }
    add_hca(tmp_path, "roceP2p1s0f1", "enP2p1s0f1np1", shifted)
    up = links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", RAIL1))
    fabric = found(tmp_path, up, Wishes())
    assert [rail.hca for rail in fabric.rails] == ["rocep1s0f1"]
    [warning] = fabric.warnings
    assert warning.kind is Kind.NO_COMMON_INDEX
    assert warning.fix.startswith("roceP2p1s0f1: two link-local GIDs")
    assert "eui64" in warning.fix


def test_an_index_that_both_devices_have_is_found_among_several(tmp_path: Path) -> None:
    """Prevents one rail where two would do: an address may be in a table twice."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3) | {5: (mapped(RAIL0), "RoCE v2")})
    add_hca(tmp_path, "roceP2p1s0f1", "enP2p1s0f1np1", {5: (mapped(RAIL1), "RoCE v2")})
    up = links(("enp1s0f1np1", RAIL0), ("enP2p1s0f1np1", RAIL1))
    assert [rail.gid_index for rail in found(tmp_path, up, Wishes()).rails] == [5, 5]


def test_two_addresses_on_one_device_are_one_rail(tmp_path: Path) -> None:
    """Prevents a device that is listed twice for NCCL."""
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", pair_of(RAIL0, 3) | {5: (mapped(RAIL1), "RoCE v2")})
    link = Link(name="enp1s0f1np1", carrier=True, mtu=9000, addresses=(f"{RAIL0}/24", f"{RAIL1}/24"))
    fabric = found(tmp_path, [link], Wishes())
    assert [rail.hca for rail in fabric.rails] == ["rocep1s0f1"]
    assert "which a rail has already" in str(fabric.warnings[0])


def test_the_twin_of_a_cage_in_use_is_found(tmp_path: Path) -> None:
    """Prevents half the bandwidth going unnoticed: the twin has a carrier and no rail."""
    up = spark(tmp_path)
    hcas = read_hcas(tmp_path)
    one = find_fabric((RAIL0,), up, hcas, rdma=True)
    assert [hca.name for hca in unused_twins(one, up, hcas)] == ["roceP2p1s0f1"]
    assert unused_twins(find_fabric((RAIL0, RAIL1), up, hcas, rdma=True), up, hcas) == ()


def test_a_cable_in_the_other_cage_is_pointed_at(tmp_path: Path) -> None:
    """Prevents a search on the wrong side: the configured cage is dark, the other one has a carrier."""
    add_hca(tmp_path, "rocep1s0f0", "enp1s0f0np0", pair_of(RAIL0, 3))
    add_hca(tmp_path, "rocep1s0f1", "enp1s0f1np1", {})
    up = [
        Link(name="enp1s0f0np0", carrier=False, mtu=9000, addresses=(f"{RAIL0}/24",)),
        *links(("enp1s0f1np1", "")),
    ]
    fabric = find_fabric((RAIL0,), up, read_hcas(tmp_path), rdma=True)
    assert "another cage: enp1s0f1np1 has a carrier" in fabric.problem


AER = "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0"


@pytest.mark.parametrize(
    ("signs", "kind"),
    [
        (Signs(kernel_log=f"usb 1-1: new device\n{AER}\n"), Kind.NEEDS_REBOOT),
        (Signs(connectx=("0000:01:00.1",)), Kind.NEEDS_REBOOT),
        (Signs(kernel_log="pcieport 0000:00:00.0: AER: Corrected error received"), Kind.NO_DEVICE),
    ],
)
def test_a_lost_card_needs_a_reboot_and_none_is_none(tmp_path: Path, signs: Signs, kind: Kind) -> None:
    """Prevents a restart loop over a ConnectX that fell off the bus, which only a reboot brings back."""
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    fabric = find_fabric((RAIL0,), [], read_hcas(tmp_path), rdma=True, signs=signs)
    assert fabric.trouble is not None
    assert fabric.trouble.kind is kind


def test_the_bus_is_asked_for_connectx_functions(tmp_path: Path) -> None:
    """Prevents a network card of another maker from being taken for a ConnectX."""
    for name, vendor in (("0000:01:00.0", "0x15b3"), ("0007:01:00.0", "0x10ec")):
        (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / name / "vendor").write_text(f"{vendor}\n")
    assert connectx_functions(tmp_path) == ("0000:01:00.0",)


def test_the_cage_is_the_drivers_word_else_the_name(tmp_path: Path) -> None:
    """Prevents twins from being told apart by their names where udev gave them others."""
    add_hca(tmp_path, "roce-a", "fabric0", {})
    add_hca(tmp_path, "roce-b", "enP2p1s0f1np1", {})
    (tmp_path / "sys/class/infiniband/roce-a/device/net/fabric0/phys_port_name").write_text("p1\n")
    assert [hca.port for hca in read_hcas(tmp_path)] == ["1", "1"]


def test_every_kind_has_an_exit_code_of_its_own() -> None:
    """Prevents two faults that a script cannot tell apart, and a code that sysexits.h has."""
    assert len(set(EXIT_CODES.values())) == len(Kind)
    assert min(EXIT_CODES.values()) >= 20
    assert max(EXIT_CODES.values()) < 64


NODE = """{{version: 1, cluster: unit, node: a, nodes: [
 {{node: a, management: 10.0.0.1, fabric: [192.0.2.1, 198.51.100.1], {wish}}},
 {{node: b, management: 10.0.0.2, fabric: [192.0.2.2, 198.51.100.2]}}]}}"""


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ('hca: "=a,,b"', "nodes[0].hca: '=a,,b': found the member ''"),
        ("netdevs: [x0]", "nodes[0].netdevs: found 1, expected one for each of 2 addresses"),
        ("gid_index: 300", "nodes[0].gid_index: found 300"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_with_its_key(wish: str, said: str) -> None:
    """Prevents an override that is only found out at a start."""
    from glm53_service.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        load_node(NODE.format(wish=wish), "node.yaml")
    assert said in str(caught.value)


def test_an_empty_wish_is_none() -> None:
    """Prevents an empty value from being handed on: NCCL reads an empty index as 0."""
    wishes = load_node(NODE.format(wish='hca: ""'), "node.yaml").me.wishes
    assert wishes == Wishes()
