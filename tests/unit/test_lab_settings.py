"""Names and addresses of the lab's hosts."""

import pytest

from lab.errors import UsageError
from lab.settings import Paths, find_host, find_rail, hosts


def test_addresses_of_the_third_host() -> None:
    """Prevents an address plan that is right for the first pair only."""
    host = hosts(3)[2]
    assert (host.name, host.machine, host.management) == ("spark-c", "g5-c", "10.78.0.3")
    assert [host.fabric(0), host.fabric(1)] == ["10.77.0.3", "10.77.1.3"]


def test_macs_differ_and_are_locally_administered_unicast() -> None:
    """Prevents two netdevs on one bridge with one address, and addresses that belong to a maker."""
    macs = [host.mac(medium) for host in hosts(4) for medium in (0, 1, 255)]
    assert len(set(macs)) == 12
    assert {int(mac[:2], 16) & 0b11 for mac in macs} == {0b10}


@pytest.mark.parametrize("name", ["spark-b", "b"])
def test_a_host_is_found_by_name_or_letter(name: str) -> None:
    """Prevents a verb that works with one spelling only."""
    assert find_host(name, 2).index == 1


def test_an_unknown_host_is_refused_with_the_known_ones() -> None:
    """Prevents acting on a host that this lab does not have."""
    with pytest.raises(UsageError, match=r"'c'.*spark-a, spark-b"):
        find_host("c", 2)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_host_counts_out_of_range_are_refused(count: int) -> None:
    """Prevents a lab of one host, or of more than there are letters."""
    with pytest.raises(UsageError, match=f"^{count} hosts: .*2 to 4"):
        hosts(count)


def test_an_unknown_rail_is_refused() -> None:
    """Prevents an unplug that silently does nothing."""
    with pytest.raises(UsageError, match="no rail 2: each host has rails 0, 1"):
        find_rail(2)


def test_a_relative_state_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents state that depends on where the command was typed."""
    monkeypatch.setenv("GLM53_LAB_STATE", "here")
    with pytest.raises(UsageError, match="GLM53_LAB_STATE=here: expected an absolute path"):
        Paths()
