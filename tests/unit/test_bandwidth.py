"""What is asked of ib_write_bw, what its report means, and when it is not asked at all."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53_service.artifacts.served import FILE
from glm53_service.bandwidth import command
from glm53_service.bandwidth.command import Wish, measure, refuse_when_busy, show_command
from glm53_service.bandwidth.gather import MARK, Gathered, gather
from glm53_service.bandwidth.measure import Result, Verdict, argv, judge, parse, read_kept, remember
from glm53_service.doctor import speed
from glm53_service.engines.base import GpuMode
from glm53_service.errors import BusyError, CommandError, UnavailableError, UsageError
from glm53_service.fabric.links import ARGV
from glm53_service.fabric.rails import Rail
from glm53_service.node import load_node
from tests.unit.doctor_trees import healthy
from tests.unit.plugin_loader import load
from tests.unit.sources import parsed
from tests.unit.trees import Spark

RAIL = Rail(netdev="enp1s0f1np1", address="192.0.2.1", mtu=9000, hca="rocep1s0f1", gid_index=5)
WISH = Wish(rail=1, peer="spark-b", serve=False, seconds=3, buffer_bytes=8192)

STALE = {"at": 1.0, "source": "a", "target": "b", "rail": 0, "hca": "r", "gbits": 13.1}
REPORT = """
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rocep1s0f1
 Number of qps   : 4\t\tTransport type : IB
 Link type       : Ethernet
 GID index       : 5
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0108 PSN 0x63ad7d RKey 0x17eedf VAddr 0x007f760c947000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:192:00:02:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]
 65536      664644           0.00               {average}   \t\t   0.185432
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("unit", "average", "gbits"), [("Gb", "97.28", 97.28), ("MB", "11728.47", 98.38), ("Gb", "13.1", 13.1)]
)
def test_the_average_is_read_in_its_unit(unit: str, average: str, gbits: float) -> None:
    """Prevents a peak of 0.00 (none is measured in a timed run), or megabytes taken for gigabits."""
    assert parse(REPORT.format(unit=unit, average=average)) == pytest.approx(gbits, abs=0.01)


@pytest.mark.parametrize(
    "text", ["", "Couldn't connect to 192.0.2.2:12001", REPORT.format(unit="Gb", average="-nan")]
)
def test_a_report_without_a_figure_is_no_result(text: str) -> None:
    """Prevents a failed run from being stored as 0 Gb/s, or as good."""
    with pytest.raises(UnavailableError, match="printed no result"):
        parse(text)


@pytest.mark.parametrize(
    ("gbits", "verdict"),
    [(92.6, Verdict.HEALTHY), (80.0, Verdict.HEALTHY), (79.9, Verdict.LOW), (25.0, Verdict.STALE),
     (13.1, Verdict.STALE), (8.0, Verdict.STALE), (7.9, Verdict.LOW), (26.0, Verdict.LOW)],
)  # fmt: skip
def test_a_figure_has_one_meaning(gbits: float, verdict: Verdict) -> None:
    """Prevents (report 17) a rail with a tenth of its speed that looks healthy everywhere else."""
    assert judge(gbits) is verdict


def test_the_test_is_small_and_names_device_and_index() -> None:
    """Prevents a default device or index, and a test over something else than the rail."""
    made = argv(RAIL, 1, seconds=3, buffer_bytes=8192, server="192.0.2.2")
    assert made == (
        *("ib_write_bw", "-d", "rocep1s0f1", "-i", "1", "-x", "5", "-p", "12001"),
        *("-q", "4", "-s", "8192", "-D", "3", "-F", "--report_gbits", "192.0.2.2"),
    )


@pytest.mark.parametrize(("seconds", "size"), [(3, 16 * 1024**3), (3, 64 * 1024**2), (600, 8192), (0, 8192)])
def test_a_test_that_could_freeze_the_machine_is_refused(seconds: int, size: int) -> None:
    """Prevents (report 19) 16 GB of buffers in memory that is the system's too, and a test without an end."""
    with pytest.raises(UsageError, match="expected"):
        argv(RAIL, 0, seconds=seconds, buffer_bytes=size)


@pytest.mark.parametrize("state", ["serving", "starting", "checking", "preparing", "running", "ending"])
def test_nothing_is_measured_while_a_rank_is_here(state: str) -> None:
    """Prevents a measurement from taking the link from somebody's request."""
    with pytest.raises(BusyError, match=f"the pair is {state}"):
        refuse_when_busy({"state": state})


@pytest.mark.parametrize("status", [None, {"state": "waiting"}, {"state": "idle"}])
def test_a_stopped_pair_may_be_measured(status: dict[str, str] | None) -> None:
    """Prevents a measurement that nobody can ever make."""
    refuse_when_busy(status)


def measured(tmp_path: Path, wish: Wish, spark: Spark | None = None) -> tuple[Result | None, list[str]]:
    """Return what one side of a measurement on spark-a gives, and the command it ran."""
    source = (spark or healthy()).source(tmp_path)
    ran: list[str] = []

    async def runner(given: Sequence[str]) -> str:
        if given[0] != "ib_write_bw":
            return await source.runner(given)
        ran.extend(given)
        return REPORT.format(unit="Gb", average="91.25")

    node = load_node((source.etc / "node.yaml").read_text(), "node.yaml")
    return asyncio.run(measure(node, wish, runner, root=source.root)), ran


def test_the_sending_side_dials_the_peers_address_of_that_rail(tmp_path: Path) -> None:
    """Prevents a figure of rail 0 under the name of rail 1."""
    result, ran = measured(tmp_path, WISH)
    assert result is not None
    assert (result.source, result.target, result.rail, result.hca, result.gbits) == (
        *("spark-a", "spark-b", 1, "roceP2p1s0f1", 91.25),
    )
    assert ran[-1] == "198.51.100.2"
    assert ran[ran.index("-d") + 1] == "roceP2p1s0f1"


def test_the_receiving_side_dials_nobody_and_keeps_nothing(tmp_path: Path) -> None:
    """Prevents two sides that both dial, or both wait."""
    result, ran = measured(tmp_path, Wish(rail=0, peer="", serve=True, seconds=3, buffer_bytes=8192))
    assert result is None
    assert ran[-1] == "--report_gbits"


def test_a_rail_that_is_not_usable_is_not_measured(tmp_path: Path) -> None:
    """Prevents a figure for a rail that no start would use."""
    with pytest.raises(UnavailableError, match="no usable rail 4: this node has 2"):
        measured(tmp_path, Wish(rail=4, peer="spark-b", serve=False, seconds=3, buffer_bytes=8192))


def test_a_program_that_is_missing_is_named_with_its_package(tmp_path: Path) -> None:
    """Prevents 'no such file' as the whole answer."""
    source = healthy().source(tmp_path)
    node = load_node((source.etc / "node.yaml").read_text(), "node.yaml")
    with pytest.raises(UnavailableError, match="apt install perftest"):
        asyncio.run(measure(node, WISH, source.runner, root=source.root))


def test_a_side_that_fails_says_its_last_line(tmp_path: Path) -> None:
    """Prevents a failed connection from being reported as a missing package."""
    source = healthy().source(tmp_path)

    async def runner(given: Sequence[str]) -> str:
        if tuple(given) == ARGV:
            return await source.runner(given)
        raise CommandError("x", code=1, err="Couldn't connect to 198.51.100.2:12001")

    node = load_node((source.etc / "node.yaml").read_text(), "node.yaml")
    with pytest.raises(UnavailableError, match=r"ended with 1: Couldn't connect to 198\.51\.100\.2:12001"):
        asyncio.run(measure(node, WISH, runner, root=source.root))


def result(rail: int, gbits: float, *, source: str = "spark-a") -> Result:
    """Return a result."""
    target = "spark-b" if source == "spark-a" else "spark-a"
    return Result(at=1_790_000_000, source=source, target=target, rail=rail, hca=f"roce{rail}", gbits=gbits)


def test_the_newest_result_of_a_rail_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents an old bad figure beside the new good one, and a result without its date."""
    path = tmp_path / "state/bandwidth.json"
    for kept in (result(1, 13.1), result(0, 96.4), result(1, 93.5), result(1, 90.1, source="spark-b")):
        remember(path, kept)
    assert [(r.source, r.rail, r.gbits) for r in read_kept(path).results] == [
        ("spark-a", 0, 96.4),
        ("spark-a", 1, 93.5),
        ("spark-b", 1, 90.1),
    ]
    assert show_command(path, as_json=False) == 0
    assert "rail 1 (roce1) spark-a -> spark-b: 93.5 Gb/s, healthy (2026-09-21" in capsys.readouterr().out


@pytest.mark.parametrize(("gbits", "code"), [(13.1, 12), (50.0, 13), (95.0, 0)])
def test_the_exit_code_is_the_verdict(gbits: float, code: int, tmp_path: Path) -> None:
    """Prevents a script that sees success where the card came up wrong."""
    remember(tmp_path / "b.json", result(0, gbits))
    assert show_command(tmp_path / "b.json", as_json=True) == code


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        (json.dumps({"version": 1, "results": [STALE]}), "warning", "13.1 Gb/s, stale (1970-01-01"),
        ("", "info", "never measured"),
        ("{not json", "info", "never measured"),
    ],
)
def test_the_doctor_shows_what_was_measured(text: str, level: str, said: str, tmp_path: Path) -> None:
    """Prevents a figure that was measured once and is forgotten."""
    source = healthy(more={"var/lib/glm53/bandwidth.json": text} if text else {}).source(tmp_path)
    [finding] = speed.check(asyncio.run(speed.read(source)))
    assert finding.level == level
    assert said in finding.measured
    if level == "warning":
        assert "unplug USB-C" in finding.fix


def test_every_rail_is_measured_both_ways() -> None:
    """Prevents a rail that is fast in one direction from being called fast."""
    nodes = [{"node": "a", "fabric": ["1", "2"]}, {"node": "b", "fabric": ["3", "4"]}]
    assert load("filter", "glm53").glm53_measurements(nodes) == [
        {"rail": 0, "server": "b", "client": "a"},
        {"rail": 0, "server": "a", "client": "b"},
        {"rail": 1, "server": "b", "client": "a"},
        {"rail": 1, "server": "a", "client": "b"},
    ]


def test_the_labs_double_is_dialled_as_the_real_one(tmp_path: Path) -> None:
    """Prevents a double that succeeds alone: both sides must come, and with the same test."""
    double = Path(__file__).parents[2] / "lab/files/ib_write_bw"
    rail = Rail(netdev="x", address="127.0.0.1", mtu=9000, hca="roce", gid_index=3)
    number = 20000 + os.getpid() % 20000
    client = argv(rail, number, seconds=2, buffer_bytes=8192, server="127.0.0.1")
    alone = subprocess.run(
        [sys.executable, str(double), *client[1:]], capture_output=True, text=True, check=False
    )
    assert alone.returncode == 1
    assert "Couldn't connect to 127.0.0.1" in alone.stderr
    server = subprocess.Popen(
        [sys.executable, str(double), *client[1:-1]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "Waiting for client" not in server.stdout.readline():
            assert server.poll() is None
        done = subprocess.run(
            [sys.executable, str(double), *client[1:]], capture_output=True, text=True, check=False
        )
        assert parse(done.stdout) == 92.57
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_measurement_of_a_busy_pair_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a command that looks at the gate after it has begun."""
    source = healthy().source(tmp_path)
    node = load_node((source.etc / "node.yaml").read_text(), "node.yaml")
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(BusyError):
        command.measure_command(node, WISH, tmp_path / "b.json", {"state": "serving"})
    assert not (tmp_path / "b.json").exists()


# The all-gather

PRINTED = (
    'NCCL INFO x\nGLM53-ALLGATHER {"rank": 0, "world": 2, "bytes": 33554432, "seconds": 0.0015,'
    ' "right": %s, "gbytes": %s}\n'
)


def gathered(
    tmp_path: Path,
    printed: str,
    *,
    host: int = 1,
    image: str = "",
    cuda: bool = True,
    mode: str = "gpus",
    noted: str = "",
) -> tuple[Gathered, list[str]]:
    """Return one node's part of an all-gather, and the docker command that it ran."""
    source = healthy(host, more={FILE: noted} if noted else {}).source(tmp_path)
    ran: list[str] = []

    async def runner(given: Sequence[str]) -> str:
        if given[:2] != ("docker", "run"):
            return await source.runner(given)
        ran.extend(given)
        return printed

    told = json.loads((source.etc / "node.yaml").read_text())
    node = load_node(json.dumps(told | {"gpu_mode": mode}), "node.yaml")
    found = asyncio.run(gather(node, image=image, cuda=cuda, runner=runner, root=source.root, at=9.0))
    return found, ran


def test_the_all_gather_runs_as_a_rank_does(tmp_path: Path) -> None:
    """Prevents a figure of other devices, of another image, or of a container that pulls or stays."""
    _, ran = gathered(tmp_path, PRINTED % ("true", "17.5"), host=2)
    variables = dict(word.split("=", 1) for word in ran if "=" in word and word.split("=")[0].isupper())
    assert {
        key: variables[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "BACKEND", "NCCL_IB_HCA")
    } == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "192.0.2.1",
        "BACKEND": "nccl",
        "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1",
    }
    assert ran[ran.index("--pull") + 1] == "never"
    assert {"--rm", "memlock=-1:-1", "/dev/infiniband"} <= set(ran)
    assert ran[-3:-1] == ["sha256:77", "-c"]  # the one that came from the head
    _, ran = gathered(tmp_path / "2", PRINTED % ("true", "17.5"), host=2, noted='{"id": "sha256:served"}')
    assert ran[-3] == "sha256:served", "of several that came, the one that its rank had"
    assert int(variables["BYTES"]) <= 64 * 1024 * 1024


@pytest.mark.parametrize("mode", list(GpuMode))
def test_the_all_gather_gets_the_gpu_as_a_rank_does(mode: GpuMode, tmp_path: Path) -> None:
    """Prevents an all-gather that fails where ranks serve: docker there knows another way to the GPU."""
    _, ran = gathered(tmp_path, PRINTED % ("true", "17.5"), mode=mode)
    ways = {GpuMode.GPUS: "--gpus all", GpuMode.CDI: "--device nvidia.com/gpu=all",
            GpuMode.RUNTIME: "--runtime nvidia"}  # fmt: skip
    assert [way for way in ways if ways[way] in " ".join(ran)] == [mode]
    assert ("NVIDIA_VISIBLE_DEVICES=all" in ran) is (mode is GpuMode.RUNTIME)


def test_an_all_gather_without_a_gpu_asks_for_none(tmp_path: Path) -> None:
    """Prevents a CPU pair's all-gather from failing for a GPU that nobody has."""
    _, ran = gathered(tmp_path, PRINTED % ("true", "17.5"), cuda=False, mode="runtime")
    assert {"--runtime", "/dev/infiniband", "NVIDIA_VISIBLE_DEVICES=all"}.isdisjoint(ran)
    assert "BACKEND=gloo" in ran


@pytest.mark.parametrize(
    ("right", "gbytes", "said"),
    [
        ("true", "17.5", ""),
        ("true", "2.9", "NCCL did not take RDMA"),
        ("false", "17.5", "not the one that its node"),
    ],
)
def test_an_all_gather_must_be_right_and_faster_than_tcp(
    right: str, gbytes: str, said: str, tmp_path: Path
) -> None:
    """Prevents (report 18) 3 GB/s, or wrong bytes, from passing as a working pair."""
    found, _ = gathered(tmp_path, PRINTED % (right, gbytes), image="unit/engine:7")
    assert said in found.problem
    assert bool(found.problem) is bool(said)
    remember(tmp_path / "b.json", found)
    remember(tmp_path / "b.json", result(0, 95.0))
    assert show_command(tmp_path / "b.json", as_json=False) == (13 if said else 0)


def test_an_all_gather_without_a_result_says_the_last_line(tmp_path: Path) -> None:
    """Prevents a container that failed from being kept as a measurement."""
    with pytest.raises(UnavailableError, match="no result: ModuleNotFoundError: torch"):
        gathered(tmp_path, "Traceback\nModuleNotFoundError: torch\n", image="unit/engine:7")


def test_the_script_in_the_image_says_what_is_read() -> None:
    """Prevents two marks, in the script that the image runs and in what reads its output."""
    text = (Path(command.__file__).parent / "allgather.py").read_text()
    marks = [
        ast.literal_eval(node.value)
        for node in parsed(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MARK"
    ]
    assert marks == [MARK]
