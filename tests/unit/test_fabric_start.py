"""A lead and a follower that look for their rails at every start: what they agree on, what they wait for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.pair import LINKS, Pair, links_of, quick, run_pair

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")

TWO = {"a": "127.0.1.1, 127.0.2.1", "b": "127.0.1.2, 127.0.2.2"}


def with_two_rails(pair: Pair) -> None:
    """Give both nodes a second rail."""
    pair.fabric = dict(TWO)
    pair.links = {"a": links_of("127.0.1.1", "127.0.2.1"), "b": links_of("127.0.1.2", "127.0.2.2")}


@pytest.mark.parametrize("node", ["a", "b"])
def test_an_address_that_comes_late_is_waited_for(tmp_path: Path, node: str) -> None:
    """Prevents a start that fails for ever since the address came 30 s after network-online.target."""

    async def story(pair: Pair) -> None:
        pair.links[node] = links_of("127.0.9.9")
        pair.start("a")
        pair.start("b")
        said = {"a": "no device has 127.0.1.1", "b": "no device has 127.0.1.2"}[node]
        lead = pair.service["a"]
        await pair.until(lambda: said in str(lead.status().reasons) + lead.status().last_end, said)
        assert pair.running() == (0, 0)
        pair.links[node] = LINKS
        await pair.until(lambda: bool(lead.status().ready), "serving")
        assert lead.status().faults == 0

    run_pair(tmp_path, story)


def test_each_start_probes_every_rail_both_ways(tmp_path: Path) -> None:
    """Prevents a rail that was good once from being trusted at the next start."""

    async def story(pair: Pair) -> None:
        with_two_rails(pair)
        await pair.both_serve()
        ways = {(name, argv[argv.index("-I") + 1], argv[-1]) for name, *argv in pair.pings}
        assert ways == {
            ("a", "f127.0.1.1", "127.0.1.2"),
            ("a", "f127.0.2.1", "127.0.2.2"),
            ("b", "f127.0.1.2", "127.0.1.1"),
            ("b", "f127.0.2.2", "127.0.2.1"),
        }
        assert [len(rank.rails) for rank in pair.service["a"].status().ranks] == [2, 2]
        pair.pings.clear()
        await pair.docker["a"].exit(pair.docker["a"].running()[0], 1)
        await pair.serving(2)
        assert len(pair.pings) == 4

    run_pair(tmp_path, story)


@pytest.mark.parametrize(("node", "peer"), [("a", "127.0.2.2"), ("b", "127.0.2.1")])
def test_a_second_rail_that_fails_one_way_is_left_out_on_both(tmp_path: Path, node: str, peer: str) -> None:
    """Prevents ranks with different rails, and an outage for a rail that is optional."""

    async def story(pair: Pair) -> None:
        with_two_rails(pair)
        pair.dead = {(node, peer)}
        await pair.both_serve()
        ranks = pair.service["a"].status().ranks
        assert [len(rank.rails) for rank in ranks] == [1, 1]
        for rank in (*ranks, *pair.service["b"].status().ranks):
            assert f"{node}: {peer} does not answer through" in rank.warnings[0]

    run_pair(tmp_path, story)


@pytest.mark.parametrize(("node", "peer"), [("a", "127.0.1.2"), ("b", "127.0.1.1")])
def test_a_first_rail_that_fails_is_refused_by_name_and_asked_again(
    tmp_path: Path, node: str, peer: str
) -> None:
    """Prevents a load that ends in a hang, and a pair that stays down after the cable is mended."""

    async def story(pair: Pair) -> None:
        pair.dead = {(node, peer)}
        pair.start("a")
        pair.start("b")
        lead = pair.service["a"]
        said = f"{node}: {peer} does not answer through"
        await pair.until(lambda: said in lead.status().last_end, said)
        assert "create" not in " ".join(pair.docker["a"].history + pair.docker["b"].history)
        pair.dead = set()
        await pair.until(lambda: bool(lead.status().ready), "serving")
        assert lead.status().faults == 0

    run_pair(tmp_path, story)


def test_a_difference_in_mtu_is_refused_with_both_values(tmp_path: Path) -> None:
    """Prevents a hang at the first large transfer: one end is back at 1500 since a firmware update."""

    async def story(pair: Pair) -> None:
        pair.links["b"] = links_of("127.0.1.2", mtu=1500)
        pair.start("a")
        pair.start("b")
        said = "the MTUs differ: 1500 on b's f127.0.1.2, 9000 on a's f127.0.1.1"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        assert pair.running() == (0, 0)

    run_pair(tmp_path, story)


def test_a_network_that_nccl_did_not_take_is_a_warning_in_status(tmp_path: Path) -> None:
    """Prevents half an hour of wondering why it is slow: a rank that talks over TCP says so in status."""

    async def story(pair: Pair) -> None:
        pair.docker["b"].said = ["x:1:1 [0] NCCL INFO NET/Socket : Using [0]f2:127.0.1.2<0>"]
        await pair.both_serve()
        await pair.until(
            lambda: "NCCL took NET/Socket" in str(pair.service["a"].status().ranks[1].warnings), "warned"
        )
        assert pair.service["a"].status().ready

    run_pair(tmp_path, story)


def test_a_lost_card_is_waited_for_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents (report 42) a restart loop over a ConnectX that only a reboot brings back."""
    monkeypatch.setattr("glm53_service.fabric.probe.read_hcas", lambda _: ())
    monkeypatch.setattr("glm53_service.fabric.probe.connectx_functions", lambda _: ())

    async def story(pair: Pair) -> None:
        pair.kernel_log["a"] = "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received\n"
        pair.start("a")
        pair.start("b")
        lead = pair.service["a"]
        await pair.until(lambda: "Reboot this node" in str(lead.status().reasons), "the reason")
        await asyncio.sleep(0.5)  # ten more looks
        status = lead.status()
        assert (status.state, status.epoch, status.faults) == ("waiting", 0, 0)
        assert not pair.tasks["a"].done()

    image = f"unit/engine@sha256:{'7' * 64}"
    run_pair(tmp_path, story, device="cuda", image=image, vllm={"kv_cache_memory": None})
