"""The probe of a rail: full size, not fragmented, bound to its device, and what its failure is called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from glm53_service.errors import CommandError, UnavailableError
from glm53_service.fabric.nccl import Network
from glm53_service.fabric.rails import Rail
from glm53_service.fabric.reach import probe_peers
from glm53_service.fabric.trouble import Kind

RAIL = Rail(
    netdev="enp1s0f1np1",
    address="192.0.2.1",
    mtu=8988,
    hca="rocep1s0f1",
    gid_index=5,
    network="192.0.2.0/24",
)


def probed(passing: Sequence[int], *, broken: bool = False) -> tuple[list[list[str]], Kind | None]:
    """Return the commands of a probe in which pings of the `passing` sizes are answered, and its verdict."""
    ran: list[list[str]] = []

    async def runner(argv: Sequence[str]) -> str:
        ran.append(list(argv))
        if broken:
            raise UnavailableError("`ping` cannot be run: Operation not permitted")
        if int(argv[argv.index("-s") + 1]) not in passing:
            raise CommandError("no answer", code=1)
        return ""

    [reach] = asyncio.run(probe_peers([RAIL], ["192.0.2.2", "198.51.100.2"], runner))
    assert (reach.address, reach.peer) == ("192.0.2.1", "192.0.2.2")
    return ran, reach.trouble.kind if reach.trouble else None


def test_a_full_packet_is_sent_whole_through_the_rails_own_device() -> None:
    """Prevents a probe that passes over another device, in pieces, or in a size that always passes."""
    ran, kind = probed([8960])
    assert kind is None
    [argv] = ran
    options = dict(zip(argv[3:-1:2], argv[4:-1:2], strict=True))
    assert options == {
        "-c": "3",
        "-i": "0.2",
        "-W": "1",
        "-M": "do",
        "-s": "8960",
        "-I": "enp1s0f1np1",
    }
    assert argv[-1] == "192.0.2.2"


@pytest.mark.parametrize(("passing", "kind"), [([56], Kind.MTU), ([], Kind.PEER_SILENT)])
def test_a_small_answer_tells_an_mtu_fault_from_a_silent_peer(passing: list[int], kind: Kind) -> None:
    """Prevents 'the peer does not answer' where only large packets are lost."""
    assert probed(passing)[1] is kind


def test_a_ping_that_cannot_run_is_not_a_silent_peer() -> None:
    """Prevents a search for a cable fault where a package, or a capability of the unit, is missing."""
    assert probed([], broken=True)[1] is Kind.UNREADABLE


@pytest.mark.parametrize(
    ("lines", "troubles"),
    [
        (["spark-1:41:41 [0] NCCL INFO NET/IB : Using [0]rocep1s0f1:1/RoCE [RO]; OOB enp1s0f1np1"], 0),
        (["a:1:1 [0] NCCL INFO NET/IB : No device found.", "a:1:1 [0] NCCL INFO NET/Socket : Using [0]x"], 1),
        (["a:1:1 [0] NCCL INFO Using network Socket"] * 3, 1),
        (["a:1:1 [0] NCCL INFO Using network IB", "a:1:1 [0] NCCL INFO NET/Socket : Using [0]x"], 0),
    ],
)
def test_a_rank_that_took_tcp_is_noticed_once(lines: list[str], troubles: int) -> None:
    """Prevents a pair that serves at a tenth of its speed and says nothing."""
    network = Network()
    assert [bool(network.read(line)) for line in lines].count(True) == troubles
