"""The RoCE tree, read back the way a reader of /sys/class/infiniband does."""

from pathlib import Path

from lab.roce import Device, Gid, ipv4_gid, link_local_gid, spark_devices, write_state, write_tree
from lab.settings import hosts


def test_an_ipv4_address_as_gid() -> None:
    """Prevents a GID table in which the fabric address cannot be found."""
    assert ipv4_gid("10.77.1.2") == "0000:0000:0000:0000:0000:ffff:0a4d:0102"


def test_a_link_local_gid_is_the_eui64_of_the_mac() -> None:
    """Prevents link-local entries that no kernel would make (the universal bit is inverted)."""
    assert link_local_gid("02:67:35:00:01:02") == "fe80:0000:0000:0000:0067:35ff:fe00:0102"


def test_the_routed_v2_entry_sits_at_another_index_on_each_host(tmp_path: Path) -> None:
    """Prevents a product that copies a GID index from one host to the other from passing in the lab."""
    found = {}
    for host in hosts(2):
        write_tree(tmp_path / host.letter, spark_devices(host))
        for port in (tmp_path / host.letter).glob("*/ports/1"):
            for kind in (port / "gid_attrs/types").iterdir():
                gid = (port / "gids" / kind.name).read_text().strip()
                if kind.read_text() == "RoCE v2\n" and gid.startswith("0000:"):
                    netdev = (port / "gid_attrs/ndevs" / kind.name).read_text().strip()
                    found[host.letter, port.parent.parent.name] = (int(kind.name), netdev, gid[-9:])
    assert found == {
        ("a", "rocep1s0f0"): (3, "enp1s0f0np0", "0a4d:0001"),
        ("a", "roceP2p1s0f0"): (3, "enP2p1s0f0np0", "0a4d:0101"),
        ("b", "rocep1s0f0"): (5, "enp1s0f0np0", "0a4d:0002"),
        ("b", "roceP2p1s0f0"): (5, "enP2p1s0f0np0", "0a4d:0102"),
    }


def test_each_device_names_its_netdev_and_is_ethernet(tmp_path: Path) -> None:
    """Prevents a tree in which a rail's netdev and RDMA device cannot be paired."""
    write_tree(tmp_path, spark_devices(hosts(2)[0]))
    netdevs = {path.parent.parent.parent.name: path.name for path in tmp_path.glob("*/device/net/*")}
    assert netdevs == {"rocep1s0f0": "enp1s0f0np0", "roceP2p1s0f0": "enP2p1s0f0np0"}
    assert {path.read_text() for path in tmp_path.glob("*/ports/1/link_layer")} == {"Ethernet\n"}


def test_a_port_follows_its_carrier_in_place(tmp_path: Path) -> None:
    """Prevents a state file that is replaced (a mounted tree misses it) or keeps old text."""
    device = Device(name="rocep9", netdev="eth9", gids=(Gid(7, ipv4_gid("10.77.0.9"), "RoCE v2", "eth9"),))
    write_tree(tmp_path, (device,))
    state = tmp_path / "rocep9/ports/1/state"
    before = state.stat().st_ino
    write_state(tmp_path, "rocep9", active=False)
    assert (state.read_text(), state.stat().st_ino) == ("1: DOWN\n", before)
    assert (tmp_path / "rocep9/ports/1/phys_state").read_text() == "3: Disabled\n"
    write_state(tmp_path, "rocep9", active=True)
    assert state.read_text() == "4: ACTIVE\n"


def test_unused_gid_slots_are_zero_and_have_no_attributes(tmp_path: Path) -> None:
    """Prevents a reader from being tested against a table without holes: real ones have them."""
    device = Device(name="r", netdev="n", gids=(Gid(2, ipv4_gid("10.77.0.9"), "RoCE v2", "n"),), table_size=4)
    write_tree(tmp_path, (device,))
    zero = ":".join(["0000"] * 8) + "\n"
    gids = [(tmp_path / f"r/ports/1/gids/{index}").read_text() for index in range(4)]
    assert gids == [zero, zero, ipv4_gid("10.77.0.9") + "\n", zero]
    assert [path.name for path in (tmp_path / "r/ports/1/gid_attrs/types").iterdir()] == ["2"]
