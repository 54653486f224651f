"""What a snapshot holds, what it does not, and that a tree alone gives the answer of its machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53_service import cli
from glm53_service.doctor import rails
from glm53_service.doctor.redact import redact
from glm53_service.doctor.snapshot import take
from glm53_service.doctor.source import Source, open_tree
from glm53_service.errors import UsageError
from glm53_service.fabric.trouble import EXIT_CODES, Kind
from tests.unit.test_fabric import FE80, mapped
from tests.unit.trees import Device, Spark, twins


def fabric_exit(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and output of `glm53 fabric --from`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["fabric", "--from", str(folder)])
    return int(str(ended.value.code)), capsys.readouterr().out


def with_gids(*entries: tuple[int, str, str]) -> list[Device]:
    """Return the right cage of host 1, the first twin with these GIDs."""
    first, second = twins(1)
    first.gids = {index: (value, kind) for index, value, kind in entries}
    return [first, second]


HOLE = with_gids((0, FE80, "IB/RoCE v1"), (1, FE80, "RoCE v2"))
OTHER_CAGE = [Device("rocep1s0f0", "enp1s0f0np0", "192.0.2.1"), *twins(1)[1:]]
AT_4 = [Device("rocep1s0f1", "enp1s0f1np1", "192.0.2.1", 4)]
BARE_TWIN = [twins(1)[0], Device("roceP2p1s0f1", "enP2p1s0f1np1", "")]
DARK = [Device("rocep1s0f1", "enp1s0f1np1", "", carrier=False, state="1: DOWN")]
NO_ADDRESS = [Device("rocep1s0f1", "enp1s0f1np1", "")]
LAN_ONLY = [Device("", "enP7s8", "192.0.2.1")]
AER = "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0\n"
LOG = ("journalctl", "-k", "-b", "-o", "cat", "-n", "2000", "--no-pager")


@pytest.mark.parametrize(
    ("report", "spark", "kind", "said"),
    [
        ("healthy", Spark(), None, "rail 1: netdev=enP2p1s0f1np1"),
        ("1, a hole", Spark(devices=HOLE), Kind.NO_GID, "no RoCE v2 GID for 192.0.2.1"),
        ("2, the index of this node", Spark(devices=AT_4), None, "gid_index=4"),
        ("3, it moved", Spark(devices=AT_4, wishes={"gid_index": 3}), Kind.OVERRIDE, "v2 at 4"),
        ("6, a selector", Spark(wishes={"hca": "=rocep1s0f1:1,roceP2p1s0f1:1"}), None, "rail 1: "),
        ("7, a name", Spark(devices=OTHER_CAGE, wishes={"hca": "rocep1s0f1"}), Kind.OVERRIDE, "rocep1s0f1;"),
        ("10, a bare twin", Spark(devices=BARE_TWIN), None, "not used: no device has 198.51.100.1"),
        ("15, a small MTU on the way", Spark(short={"192.0.2.2"}), Kind.MTU, "none of 8972 bytes"),
        ("20, a silent second rail", Spark(silent={"198.51.100.2"}), None, "198.51.100.2 does not answer"),
        ("21, another cage", Spark(devices=OTHER_CAGE), None, "hca=rocep1s0f0"),
        ("25, a LAN port", Spark(devices=[*LAN_ONLY, *DARK]), Kind.NO_DEVICE, "Is this the CX7 port?"),
        ("36, no carrier", Spark(devices=DARK), Kind.NO_CARRIER, "has a carrier"),
        ("36, no address", Spark(devices=NO_ADDRESS), Kind.NO_ADDRESS, "though enp1s0f1np1 has a carrier"),
        ("36, a silent peer", Spark(silent={"192.0.2.2"}), Kind.PEER_SILENT, "192.0.2.2 does not answer"),
        ("42, gone", Spark(devices=LAN_ONLY, commands={LOG: (0, AER)}), Kind.NEEDS_REBOOT, "Reboot"),
        ("31, nothing is installed", Spark(devices=LAN_ONLY, installed=False), None, "not installed yet"),
    ],
)  # fmt: skip
def test_each_report_has_its_answer(
    report: str,
    spark: Spark,
    kind: Kind | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prevents a state that owners met from being called something else, or nothing."""
    code, out = fabric_exit(spark.write(tmp_path), capsys)
    assert said in out, report
    assert code == (EXIT_CODES[kind] if kind else 0), report


def test_a_privacy_address_leaves_one_rail_and_names_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents (report 4) a node whose twins have no index in common from failing without a reason."""
    first, second = twins(1)
    second.gids = {
        0: (FE80, "IB/RoCE v1"),
        1: (FE80, "RoCE v2"),
        4: ("fe80:0000:0000:0000:91c2:77aa:0b0c:0d0e", "RoCE v2"),
        6: (mapped(second.address), "RoCE v2"),
    }
    code, out = fabric_exit(Spark(devices=[first, second]).write(tmp_path), capsys)
    assert code == 0
    assert "rail 1 is not used: its GID index is 6, rail 0 has 3" in out
    assert "eui64" in out
    assert "rail 1: " not in out


def test_json_has_the_whole_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a program from having to read what is written for people."""
    folder = Spark(devices=[Device("rocep1s0f1", "enp1s0f1np1", "", carrier=False)]).write(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["fabric", "--json", "--from", str(folder)])
    data = json.loads(capsys.readouterr().out)
    assert (data["node"], data["exit"], data["trouble"]["kind"]) == ("spark-a", 23, "no_carrier")
    assert [device["name"] for device in data["devices"]] == ["rocep1s0f1"]


def snapshot_of(source: Source, out: Path) -> Source:
    """Take a snapshot of `source` and open it."""

    async def check(recording: Source) -> object:
        return await rails.view_of(recording, rails.known_node(recording.etc))

    asyncio.run(take(source, out, files=rails.FILES, check=check, node="spark-a"))
    return open_tree(out)


@pytest.mark.parametrize("spark", [Spark(), Spark(silent={"198.51.100.2"}), Spark(devices=DARK)])
def test_a_snapshot_alone_gives_the_answer_of_its_machine(tmp_path: Path, spark: Spark) -> None:
    """Prevents a snapshot that lacks what a check reads: the answer of a tree is that of its machine."""
    machine = spark.source(tmp_path / "machine")
    copy = snapshot_of(machine, tmp_path / "copy")
    node = rails.known_node(machine.etc)
    first, second = (asyncio.run(rails.view_of(source, node)) for source in (machine, copy))
    assert first == second
    assert first.hcas != ()


def test_a_second_snapshot_does_not_write_into_the_first(tmp_path: Path) -> None:
    """Prevents two machines, or two moments, in one tree."""
    machine = Spark().source(tmp_path / "machine")
    snapshot_of(machine, tmp_path / "copy")
    with pytest.raises(UsageError, match="is not empty"):
        snapshot_of(machine, tmp_path / "copy")


def test_a_folder_that_is_no_snapshot_is_said_to_be_none(tmp_path: Path) -> None:
    """Prevents a healthy verdict over an empty folder."""
    with pytest.raises(UsageError, match="is no snapshot"):
        open_tree(tmp_path)


def test_no_secret_leaves_the_machine(tmp_path: Path) -> None:
    """Prevents a token in a bug report: whatever file or command it stands in."""
    secret = "CANARYKEY123"
    spark = Spark(files={"etc/glm53/settings.yaml": f"extra_env: {{HF_TOKEN: {secret}}}\n"})
    machine = spark.source(tmp_path / "machine")

    async def leaking(argv: Sequence[str]) -> str:
        return f"http_proxy=http://bob:{secret}@proxy:3128 hf_{secret}{secret}\nAPI_KEY='{secret}'"

    source = Source(root=machine.root, runner=leaking, etc=machine.etc, wall=machine.wall)

    async def check(recording: Source) -> object:
        return await recording.run("env")

    asyncio.run(take(source, tmp_path / "copy", files=rails.FILES, check=check, node="spark-a"))
    written = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"settings.yaml", "node.yaml", "snapshot.json"}
    assert [path for path in written if secret in path.read_text()] == []


@pytest.mark.parametrize("text", ["max_tokens: 24", "rails=2", "--max-tokens 400", "tokens 3,4"])
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """Prevents a snapshot that is of no use: numbers of tokens are no tokens."""
    assert redact(text) == text
