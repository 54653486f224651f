"""Which netdevs have a carrier, for power and plugs in every combination that the lab stages."""

from lab.cables import MANAGEMENT, Port, ports, with_carrier
from lab.settings import Host, hosts

A, B = hosts(2)


def test_two_hosts_on_and_plugged_have_carrier_everywhere() -> None:
    """Prevents a lab whose fabric is dark from the start."""
    assert with_carrier([A, B], [A, B], []) == set(ports([A, B]))


def test_one_pulled_plug_darkens_both_ends_of_that_rail_only() -> None:
    """Prevents an unplug that only one host notices: on a direct cable both do, and the twin rail stays."""
    lost = set(ports([A, B])) - with_carrier([A, B], [A, B], [Port(1, 0)])
    assert lost == {Port(0, 0), Port(1, 0)}


def test_a_host_without_power_darkens_the_peer_but_not_its_management() -> None:
    """Prevents a power cut after which the peer still sees a cable, or loses its own management link."""
    assert with_carrier([A, B], [A], []) == {Port(0, MANAGEMENT)}


def test_three_hosts_hang_on_a_switch() -> None:
    """Prevents one host's power cut from darkening hosts that are not at the other end of its cable."""
    three = hosts(3)
    live = with_carrier(three, [three[0], three[1]], [Port(0, 1)])
    assert live == {Port(0, 0), Port(1, 0), Port(1, 1), Port(0, MANAGEMENT), Port(1, MANAGEMENT)}


def test_pulled_management_leaves_the_fabric() -> None:
    """Prevents `unplug --management` from touching a rail."""
    lost = set(ports([A, B])) - with_carrier([A, B], [A, B], [Port(0, MANAGEMENT)])
    assert lost == {Port(0, MANAGEMENT)}


def test_link_names_are_unique_and_short_enough_for_the_kernel() -> None:
    """Prevents two cables with one name; Linux allows 15 characters."""
    names = [port.link for port in ports([Host(index) for index in range(4)])]
    assert len(set(names)) == len(names) == 12
    assert max(map(len, names)) <= 15
