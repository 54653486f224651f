"""Which rails two nodes use together: properties over many layouts, and the layouts that owners reported."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Sequence

import pytest

from glm53_service.fabric.pairing import Agreement, Edge, Seen, agree, pair_rails
from glm53_service.fabric.rails import Fabric, Rail, Reach
from glm53_service.fabric.trouble import Kind, Trouble

SILENT = Trouble(kind=Kind.PEER_SILENT, text="no answer")


def rail(number: int, host: int, *, subnet: int | None = None, port: str = "1", mtu: int = 8988) -> Rail:
    """Return rail `number` of `host`: in the subnet of its number unless another is given."""
    third = number if subnet is None else subnet
    function = ("enp1s0", "enP2p1s0")[number]
    return Rail(
        netdev=f"{function}f{port}np{port}",
        address=f"198.51.{third}.{host + 16 * number}",
        mtu=mtu,
        hca=f"roce{number}-{host}",
        gid_index=4,
        network=f"198.51.{third}.0/24",
        port=port,
    )


def seen(node: str, rails: Sequence[Rail], reach: Sequence[Reach] = ()) -> Seen:
    """Return a node that found `rails`."""
    return Seen(node=node, fabric=Fabric(rails=tuple(rails), reach=tuple(reach)))


def probed(*nodes: Seen, dead: Sequence[tuple[str, str]] = ()) -> list[Seen]:
    """Return the nodes after each has probed all others in its subnets; `dead` are (from, to) without an
    answer.
    """
    done = []
    for node in nodes:
        reach = [
            Reach(
                address=mine.address,
                peer=theirs.address,
                trouble=SILENT if (mine.address, theirs.address) in dead else None,
            )
            for mine in node.fabric.rails
            for other in nodes
            if other is not node
            for theirs in other.fabric.rails
            if mine.network == theirs.network
        ]
        done.append(seen(node.node, node.fabric.rails, reach))
    return done


def couples(agreed: Agreement) -> set[frozenset[str]]:
    """Return the pairs of addresses, without an order."""
    return {frozenset(row) for row in zip(*agreed.rails, strict=True)}


def random_layout(seed: int) -> list[Seen]:
    """Return two nodes with random subnets, cages, MTUs and probe results."""
    dice = random.Random(seed)
    nodes = [
        seen(
            name,
            [
                rail(
                    number,
                    host,
                    subnet=dice.choice([0, 1, 7]),
                    port=dice.choice("01"),
                    mtu=dice.choice([8988] * 4 + [1500]),
                )
                for number in dice.sample([0, 1], k=dice.choice([1, 2, 2]))
            ],
        )
        for name, host in (("a", 1), ("b", 2))
    ]
    ways = [(m.address, t.address) for m in nodes[0].fabric.rails for t in nodes[1].fabric.rails]
    dead = [way if dice.random() < 0.5 else way[::-1] for way in ways if dice.random() < 0.2]
    return probed(*nodes, dead=dead)


def test_both_sides_choose_the_same_rails() -> None:
    """Prevents ranks with different rails: whoever computes it, in whatever order rails are listed, finds
    the same pairs, each rail once, never over two subnets, never over a probe that failed.
    """
    for seed in range(400):
        a, b = random_layout(seed)
        edges = pair_rails(a, b)
        good = usable(edges)
        flipped = [seen(node.node, node.fabric.rails[::-1], node.fabric.reach[::-1]) for node in (a, b)]
        assert (seed, usable(pair_rails(b, a))) == (seed, good)
        assert (seed, usable(pair_rails(*flipped))) == (seed, good)
        used = [rail.address for edge in edges for rail in edge.rails]
        assert (seed, len(set(used))) == (seed, len(used))
        answers = {(r.address, r.peer): r.trouble for node in (a, b) for r in node.fabric.reach}
        for edge in edges:
            mine, theirs = edge.rails
            assert ipaddress.IPv4Address(mine.address) in ipaddress.IPv4Network(theirs.network), seed
            if not edge.trouble:
                assert mine.mtu == theirs.mtu, seed
                assert answers[mine.address, theirs.address] is None, seed
                assert answers[theirs.address, mine.address] is None, seed


def usable(edges: Sequence[Edge]) -> set[frozenset[str]]:
    """Return the pairs of addresses that can be used, without an order."""
    return {frozenset(rail.address for rail in edge.rails) for edge in edges if not edge.trouble}


def test_an_agreement_is_whole_or_a_named_trouble() -> None:
    """Prevents a start over fewer rails than it says, and a rail that vanishes without a reason."""
    kinds = set()
    for seed in range(400):
        nodes = random_layout(seed)
        agreed = agree(nodes)
        kinds.add(agreed.trouble.kind if agreed.trouble else len(agreed.rails[0]))
        if agreed.trouble:
            assert agreed.rails == (), seed
            continue
        assert (seed, len(agreed.rails[0])) == (seed, len(agreed.rails[1]))
        assert (seed, agreed.rails[0][0]) == (seed, nodes[0].fabric.rails[0].address)
        said = " ".join(map(str, agreed.dropped))
        for place, node in enumerate(nodes):
            for found in node.fabric.rails:
                if found.address not in agreed.rails[place]:
                    reasons = [e.trouble.text for e in pair_rails(*nodes) if found in e.rails and e.trouble]
                    assert found.address in said or any(text in said for text in reasons), seed
    assert kinds == {1, 2, Kind.MTU, Kind.PEER_SILENT, Kind.SUBNET}


def test_crossed_cabling_is_as_good() -> None:
    """Prevents the head's device names from being looked for on the worker: left cage to right cage."""
    head = seen("a", [rail(0, 1, port="0"), rail(1, 1, port="0")])
    worker = seen("b", [rail(1, 2, port="1"), rail(0, 2, port="1")])
    agreed = agree(probed(head, worker))
    assert agreed.rails == (("198.51.0.1", "198.51.1.17"), ("198.51.0.2", "198.51.1.18"))
    assert agreed.dropped == ()


def test_both_twins_in_one_subnet_are_two_rails() -> None:
    """Prevents half the bandwidth on NVIDIA's own layout, which gives both twins one subnet."""
    head = seen("a", [rail(0, 1, subnet=9), rail(1, 1, subnet=9)])
    worker = seen("b", [rail(1, 2, subnet=9), rail(0, 2, subnet=9)])
    agreed = agree(probed(head, worker))
    assert couples(agreed) == {
        frozenset({"198.51.9.1", "198.51.9.2"}),
        frozenset({"198.51.9.17", "198.51.9.18"}),
    }


def test_two_cages_in_one_subnet_follow_the_cables() -> None:
    """Prevents pairing by cage number where two cables are crossed: the probes show which ends meet."""
    head = seen("a", [rail(0, 1, subnet=9, port="0"), rail(1, 1, subnet=9, port="1")])
    worker = seen("b", [rail(0, 2, subnet=9, port="0"), rail(1, 2, subnet=9, port="1")])
    straight = [("198.51.9.1", "198.51.9.2"), ("198.51.9.17", "198.51.9.18")]
    agreed = agree(probed(head, worker, dead=[*straight, *(way[::-1] for way in straight)]))
    assert agreed.rails == (("198.51.9.1", "198.51.9.17"), ("198.51.9.18", "198.51.9.2"))


@pytest.mark.parametrize("way", [("198.51.1.17", "198.51.1.18"), ("198.51.1.18", "198.51.1.17")])
def test_a_second_rail_that_fails_one_way_is_dropped_on_both_sides(way: tuple[str, str]) -> None:
    """Prevents `vendor_err 0x81` in the first all-gather: the twin was up, with a GID, and led nowhere."""
    agreed = agree(
        probed(seen("a", [rail(0, 1), rail(1, 1)]), seen("b", [rail(0, 2), rail(1, 2)]), dead=[way])
    )
    assert agreed.rails == (("198.51.0.1",), ("198.51.0.2",))
    assert [t.kind for t in agreed.dropped] == [Kind.PEER_SILENT]
    assert "no answer" in str(agreed.dropped[0])


@pytest.mark.parametrize("way", [("198.51.0.1", "198.51.0.2"), ("198.51.0.2", "198.51.0.1")])
def test_a_first_rail_that_fails_is_a_trouble(way: tuple[str, str]) -> None:
    """Prevents ranks that meet on a rail which does not carry full packets."""
    agreed = agree(
        probed(seen("a", [rail(0, 1), rail(1, 1)]), seen("b", [rail(0, 2), rail(1, 2)]), dead=[way])
    )
    assert agreed.trouble is not None
    assert agreed.trouble.kind is Kind.PEER_SILENT
    assert agreed.trouble.text.startswith("a: " if way[0] == "198.51.0.1" else "b: ")


def test_a_rail_that_was_not_probed_is_not_used() -> None:
    """Prevents an unknown from counting as good."""
    agreed = agree([seen("a", [rail(0, 1)]), seen("b", [rail(0, 2)])])
    assert agreed.trouble is not None
    assert "was not probed" in agreed.trouble.text


@pytest.mark.parametrize(("number", "refused"), [(0, True), (1, False)])
def test_a_difference_in_mtu_names_both(number: int, refused: bool) -> None:
    """Prevents IBV_WC_RETRY_EXC_ERR after a firmware update that set one end back to 1500."""
    head, worker = [rail(0, 1), rail(1, 1)], [rail(0, 2), rail(1, 2)]
    worker[number] = rail(number, 2, mtu=1500)
    agreed = agree(probed(seen("a", head), seen("b", worker)))
    [trouble] = [agreed.trouble] if agreed.trouble else agreed.dropped
    assert trouble.kind is Kind.MTU
    assert f"1500 on b's {worker[number].netdev}, 8988 on a's {head[number].netdev}" in trouble.text
    assert bool(agreed.trouble) is refused


def test_a_rail_that_only_one_node_has_is_dropped_with_the_others_reason() -> None:
    """Prevents a head with two rails against a worker with one, and a reason that only the worker knows."""
    why = Trouble(kind=Kind.NO_COMMON_INDEX, text="rail 1 is not used: its GID index is 6")
    worker = seen("b", [rail(0, 2)])
    head, worker = probed(seen("a", [rail(0, 1), rail(1, 1)]), worker)
    worker = Seen(
        node="b", fabric=Fabric(rails=worker.fabric.rails, reach=worker.fabric.reach, warnings=(why,))
    )
    agreed = agree([head, worker])
    assert agreed.rails == (("198.51.0.1",), ("198.51.0.2",))
    assert "its GID index is 6" in str(agreed.dropped[0])


def test_nodes_without_a_common_subnet_are_told_both_sides() -> None:
    """Prevents a hang in ncclCommInitRank over addresses that cannot meet."""
    agreed = agree(probed(seen("a", [rail(0, 1, subnet=3)]), seen("b", [rail(0, 2, subnet=4)])))
    assert agreed.trouble is not None
    assert agreed.trouble.kind is Kind.SUBNET
    assert "a has 198.51.3.1 in 198.51.3.0/24; b has 198.51.4.2 in 198.51.4.0/24" in agreed.trouble.text


def test_three_nodes_on_a_switch_agree_and_a_ring_is_refused() -> None:
    """Prevents a ring from hanging in the tree connect; a switch, one subnet for all, is no ring."""
    switch = agree(probed(*(seen(name, [rail(0, host)]) for host, name in enumerate("abc", 1))))
    assert switch.rails == (("198.51.0.1",), ("198.51.0.2",), ("198.51.0.3",))
    ring = agree(
        probed(
            seen("a", [rail(0, 1, subnet=1), rail(1, 1, subnet=3)]),
            seen("b", [rail(0, 2, subnet=1), rail(1, 2, subnet=2)]),
            seen("c", [rail(0, 3, subnet=2), rail(1, 3, subnet=3)]),
        )
    )
    assert ring.trouble is not None
    assert ring.trouble.kind is Kind.TOPOLOGY
    assert ring.trouble.text.startswith("rings and meshes are not supported yet")


def test_followers_that_cannot_talk_to_each_other_are_refused() -> None:
    """Prevents a start in which every rank reaches the head and two followers do not reach one another."""
    nodes = [seen(name, [rail(0, host)]) for host, name in enumerate("abc", 1)]
    agreed = agree(probed(*nodes, dead=[("198.51.0.3", "198.51.0.2")]))
    assert agreed.trouble is not None
    assert agreed.trouble.text == "c: no answer"


def test_a_node_alone_needs_no_peer() -> None:
    """Prevents a single node from being asked for a fabric that it has nobody to share with."""
    assert agree([seen("a", [])]).trouble is None
