"""A lead and a follower that look at their machines: memory, signs of life, GPU, boot id, on both nodes."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

from glm53_service.system import GIB
from tests.unit.doubles import FakeContainer
from tests.unit.pair import Pair, quick, run_pair

__all__ = ["quick"]

NODES = {"a": "rank 0", "b": "b (rank 1)"}
TIMES = {"load_guard_gib": 5, "steady_guard_gib": 2, "start_stall_seconds": 0.6, "start_busy_seconds": 1.5}
PATIENT = TIMES | {"start_stall_seconds": 60, "start_busy_seconds": 60}
CLAMPED = "0, NVIDIA GB10, 695, 3003, 17.0, 96, 580.95.05\n"
HEALTHY = "0, NVIDIA GB10, 2411, 3003, 45.0, 96, 580.95.05\n"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    """Look so often that a test need not wait."""
    for name, seconds in (("GUARD", 0.02), ("NEAR", 0.02), ("SIGNS", 0.05), ("GPU", 0.05)):
        monkeypatch.setattr(f"glm53_service.supervisor.watch.{name}_SECONDS", seconds)


class Machine:
    """The files of one node that its supervisor reads, in a tree of its own."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.pair, self.name, self.root = pair, name, pair.folder / f"root-{name}"
        pair.roots[name] = self.root
        self.write("proc/1/status", "Name:\tsystemd\nVmRSS:\t9000 kB\n")
        self.write("proc/77/status", f"Name:\tpython3\nVmRSS:\t{6 * 1024**2} kB\n")
        self.memory(60.0)
        self.boot("first-boot")

    def write(self, name: str, text: str) -> None:
        """Write a file below the root, whole."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / f".{path.name}").write_text(text)
        (path.parent / f".{path.name}").rename(path)

    def memory(self, available: float) -> None:
        """Let so many GiB be available."""
        kib = int(available * 1024**2)
        self.write(
            "proc/meminfo", f"MemTotal: {128 * 1024**2} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"
        )

    def boot(self, boot_id: str) -> None:
        """Be in this boot."""
        self.write("proc/sys/kernel/random/boot_id", boot_id + "\n")

    def container(self, pid: int = 4711) -> str:
        """Give the node's running container a cgroup, and return its id."""
        docker = self.pair.docker[self.name]
        name = docker.running()[0]
        docker.containers[name].pid = pid
        self.write(f"proc/{pid}/cgroup", f"0::/system.slice/docker-{name}.scope\n")
        return name

    def used(self, *, cpu: float, read: int) -> None:
        """Let the container have used so much since it started: seconds, bytes."""
        folder = f"sys/fs/cgroup/system.slice/docker-{self.pair.docker[self.name].running()[0]}.scope"
        self.write(f"{folder}/io.stat", f"259:0 rbytes={read} wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n")
        self.write(f"{folder}/cpu.stat", f"usage_usec {int(cpu * 1e6)}\n")


def machines(pair: Pair) -> dict[str, Machine]:
    """Return the machines of both nodes."""
    return {name: Machine(pair, name) for name in "ab"}


async def loading(pair: Pair) -> None:
    """Start a pair whose API does not come up, and return once both ranks run."""
    pair.docker["a"].on_start = None
    pair.start("a")
    pair.start("b")
    await pair.until(lambda: pair.running() == (1, 1), "both ranks load")
    await pair.until(lambda: pair.service["b"]._dialler.beat.loading, "the follower knows that they load")


@pytest.mark.parametrize("where", ["a", "b"])
def test_both_ranks_end_when_a_loading_node_runs_out_of_memory(tmp_path: Path, where: str) -> None:
    """Prevents a Spark that freezes while it loads (it kills nothing), and one rank that lives on alone; the
    evidence has what was seen before the kill.
    """

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await loading(pair)
        nodes[where].memory(5.1)
        first = {name: pair.docker[name].running()[0] for name in "ab"}
        await pair.until(lambda: bool(pair.service[where]._watch.vitals), "a look")
        assert pair.running() == (1, 1)
        nodes[where].memory(4.5)
        await pair.until(
            lambda: all(first[name] not in pair.docker[name].running() for name in "ab"),
            "both ranks are gone",
        )
        said = (
            f"{NODES[where]}: memory guard: MemAvailable is 4.5 GiB on {where} while loading, limit 5"
            " (supervision.load_guard_gib); the largest processes: python3 (pid 77, 6.0 GiB),"
        )
        await pair.until(lambda: pair.service["a"].status().last_end.startswith(said), said)
        assert pair.service["a"].status().faults == 1
        await pair.until(lambda: bool(pair.evidence(where)), "evidence")
        folder = pair.evidence(where)[0]
        assert "memory guard: MemAvailable is 4.5 GiB" in (folder / "reason.txt").read_text()
        assert "python3 (pid 77, 6.0 GiB)" in (folder / "guard.txt").read_text()
        assert f"MemAvailable: {int(4.5 * 1024**2)} kB" in (folder / "guard-meminfo.txt").read_text()

    run_pair(tmp_path, story, supervision=PATIENT)


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_serving_node_has_another_limit_and_is_warned_of_first(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents the end of a healthy engine, which takes more than a load leaves, and a warning that nobody
    sees; below its own limit both ranks end.
    """
    caplog.set_level(logging.INFO)

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await pair.both_serve()
        await pair.until(lambda: not pair.service["b"]._dialler.beat.loading, "the follower knows it, too")
        nodes[where].memory(4.5)
        said = (
            f"warning: rank {'ab'.index(where)}: only 4.5 GiB are available while serving (a warning below 6)"
        )
        await pair.until(lambda: said in pair.service["a"].status().line(), said)
        assert pair.service["a"].status().ready
        nodes[where].memory(30.0)
        await pair.until(lambda: "warning" not in pair.service["a"].status().line(), "the warning is over")
        nodes[where].memory(1.9)
        await pair.until(
            lambda: "on " + where + " while serving, limit 2" in pair.service["a"].status().last_end, "end"
        )
        nodes[where].memory(30.0)
        await pair.serving(2)

    run_pair(tmp_path, story, supervision=PATIENT)
    assert caplog.text.count("warning: only 4.5 GiB are available") == 1
    assert caplog.text.count("the warning is over: memory") == 1


def test_the_follower_knows_at_once_what_the_ranks_do(tmp_path: Path) -> None:
    """Prevents the end of a ready engine by the limit of a loading one, in the second before a heartbeat."""

    async def story(pair: Pair) -> None:
        machines(pair)
        await loading(pair)
        await pair.api.start(FakeContainer(pair.docker["a"].containers[pair.docker["a"].running()[0]].spec))
        await pair.serving(1)
        await pair.until(lambda: not pair.service["b"]._dialler.beat.loading, "the follower knows it")

    slow = {"heartbeat_seconds": 30, "lease_seconds": 90, "peer_lost_seconds": 90}
    run_pair(tmp_path, story, supervision=PATIENT | slow)


def test_a_rank_that_finishes_its_last_requests_is_guarded(tmp_path: Path) -> None:
    """Prevents a Spark that freezes in the seconds between a planned stop and the end of the last request."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await pair.both_serve()
        docker, ended = pair.docker["a"], asyncio.Event()
        pair.api.requests = 1
        await pair.until(lambda: bool(pair.service["a"].status().running_requests), "a request runs")
        killed = docker.kill

        async def stop(container: str, grace_seconds: int) -> None:
            await asyncio.wait_for(ended.wait(), grace_seconds)

        async def kill(container: str) -> None:
            ended.set()
            await killed(container)

        docker.stop, docker.kill = stop, kill  # type: ignore[method-assign]
        stopping = asyncio.create_task(pair.stop("a"))
        await pair.until(lambda: pair.service["a"].status().state == "ending", "it drains")
        await asyncio.sleep(0.1)
        assert not ended.is_set(), "enough memory: the request may finish"
        nodes["a"].memory(1.9)
        await stopping
        (folder,) = pair.evidence("a")
        assert "memory guard: MemAvailable is 1.9 GiB" in (folder / "reason.txt").read_text()

    run_pair(tmp_path, story, supervision=PATIENT | {"stop_grace_seconds": 9})


def test_the_guard_kills_without_docker(tmp_path: Path) -> None:
    """Prevents a machine that freezes because dockerd, short of memory itself, does not come to the kill."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await loading(pair)
        with subprocess.Popen(["sleep", "60"]) as process:
            nodes["b"].container(process.pid)
            await pair.until(lambda: pair.service["b"]._watch._pid == process.pid, "its process is known")
            pair.docker["b"].problem = "docker does not answer"
            nodes["b"].memory(1.0)
            await pair.until(lambda: process.poll() is not None, "the rank is dead")
            pair.docker["b"].problem = ""
        await pair.until(lambda: "b (rank 1): memory guard" in pair.service["a"].status().last_end, "told")

    run_pair(tmp_path, story, supervision=PATIENT)


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_silent_load_lives_by_what_it_reads_and_shows_it(tmp_path: Path, where: str) -> None:
    """Prevents the end of an engine that loads 80 GiB without a word, and a status that does not move."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await loading(pair)
        nodes[where].container()
        lead = pair.service["a"]
        for step in range(1, 13):
            nodes[where].used(cpu=1.0, read=step * GIB)
            line = f"rank {'ab'.index(where)}: {step:.1f} GiB read"
            await pair.until(lambda line=line: line in lead.status().line(), line)  # type: ignore[misc]
            until = lead._world.clock() + 0.1
            await pair.until(lambda until=until: lead._world.clock() > until, "time passes")  # type: ignore[misc]
        assert (lead.status().state, lead.status().epoch) == ("starting", 1)
        assert f"{step:.1f} GiB read" in pair.service[where].status().line() or where == "a"
        await pair.until(lambda: "no rank showed a sign of life" in lead.status().last_end, "it hangs now")

    run_pair(tmp_path, story, supervision=TIMES)


def test_a_start_that_spins_for_ever_is_ended_later_than_a_silent_one(tmp_path: Path) -> None:
    """Prevents a wait in ncclCommInitRank, which burns a core, from holding the pair till morning."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await loading(pair)
        nodes["b"].container()
        lead, cpu = pair.service["a"], 0.0
        began = lead._phase_since

        def over() -> bool:
            nonlocal cpu
            cpu += 5.0
            if pair.docker["b"].running():
                nodes["b"].used(cpu=cpu, read=GIB)
            return "as by a wait that spins" in lead.status().last_end

        await pair.until(over, "the end of a wait that spins")
        assert lead._world.clock() - began > TIMES["start_busy_seconds"]

    run_pair(tmp_path, story, supervision=TIMES)


@pytest.mark.parametrize("where", ["a", "b"])
def test_a_clamped_gpu_is_a_warning_while_requests_run(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a pair that is ten times as slow without a word, and one that is restarted for it."""
    caplog.set_level(logging.INFO)

    async def story(pair: Pair) -> None:
        machines(pair)
        pair.smi[where] = CLAMPED
        await pair.both_serve()
        said = f"warning: rank {'ab'.index(where)}: GPU 0 is clamped: 695 MHz and 17 W"
        await pair.until(lambda: said in pair.service["a"].status().line(), said)
        assert pair.service["a"].status().ready
        pair.smi[where] = HEALTHY
        await pair.until(lambda: "GPU" not in pair.service["a"].status().line(), "the warning is over")
        assert pair.service["a"].status().epoch == 1

    run_pair(tmp_path, story, supervision=PATIENT)
    assert caplog.text.count("warning: GPU 0 is clamped") == 1
    assert caplog.text.count("the warning is over: GPU 0") == 1


def test_a_clock_that_is_low_once_is_nothing(tmp_path: Path) -> None:
    """Prevents an alarm for a clock that was just rising when it was looked at."""

    async def story(pair: Pair) -> None:
        machines(pair)
        looks = {"a": 0, "b": 0}

        class Alternately(dict[str, str]):
            def get(self, key: str, default: Any = "") -> Any:
                looks[key] += 1
                return CLAMPED if looks[key] % 2 else HEALTHY

        pair.smi = Alternately()
        await pair.both_serve()
        for enough in range(3, 9):
            await pair.until(lambda n=enough: min(looks.values()) > n, "looks at the GPU")  # type: ignore[misc]
            assert "GPU" not in pair.service["a"].status().line()

    run_pair(tmp_path, story, supervision=PATIENT)


def test_an_idle_pair_asks_no_gpu(tmp_path: Path) -> None:
    """Prevents a program that is run every minute, all night, on a machine that does nothing."""

    async def story(pair: Pair) -> None:
        machines(pair)
        pair.smi = {"a": CLAMPED, "b": CLAMPED}
        pair.api.requests = 0
        await pair.both_serve()
        looks = [pair.service[name]._watch for name in "ab"]
        await pair.until(lambda: all(watch.vitals for watch in looks), "both look")
        until = pair.service["a"]._world.clock() + 0.5
        await pair.until(lambda: pair.service["a"]._world.clock() > until, "ten more looks")
        assert "GPU" not in pair.service["a"].status().line()

    run_pair(tmp_path, story, supervision=PATIENT)


@pytest.mark.parametrize("where", ["a", "b"])
def test_the_lead_waits_for_the_memory_of_every_node(tmp_path: Path, where: str) -> None:
    """Prevents a start on a node whose memory the last engine still holds; the refusal has its name."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        nodes[where].memory(4.0)
        pair.start("a")
        pair.start("b")
        found = "MemAvailable is 4.0 GiB, and a loading rank is stopped below 5"
        await pair.until(lambda: found in pair.service["a"].status().last_end, found)
        by = {"a": ("rank 0: MemAvailable",), "b": ("b (rank 1): MemAvailable", "rank 0: b: MemAvailable")}
        assert pair.service["a"].status().last_end.startswith(by[where])
        assert pair.service["a"].status().faults == 0
        nodes[where].memory(60.0)
        await pair.until(lambda: pair.service["a"].status().ready, "it starts")

    run_pair(tmp_path, story, supervision=TIMES | {"min_free_wait_seconds": 0})


def test_the_heads_refusal_names_the_other_node(tmp_path: Path) -> None:
    """Prevents a head that knows its own memory only: a share that fits it need not fit the pair."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        nodes["b"].memory(4.0)
        pair.start("b")

        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        pair.service["b"]._rank.prepare = never
        pair.start("a")
        said = "rank 0: b: MemAvailable is 4.0 GiB, and a loading rank is stopped below 5"
        await pair.until(lambda: pair.service["a"].status().last_end.startswith(said), said)

    run_pair(tmp_path, story, supervision=TIMES | {"min_free_wait_seconds": 0})


def test_the_guard_keeps_its_evidence_without_the_lead(tmp_path: Path) -> None:
    """Prevents a rank that was killed to save its machine, and a lead that was lost at that moment, from
    leaving nothing that says so.
    """

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await loading(pair)
        pair.service["a"]._act = lambda decision: None
        nodes["b"].memory(1.0)
        await pair.until(lambda: bool(pair.service["b"]._rank.report.guard), "the guard")
        await pair.kill("a")
        await pair.until(lambda: not pair.docker["b"].containers, "its container is gone")
        assert "memory guard: MemAvailable is 1.0 GiB" in (pair.evidence("b")[0] / "reason.txt").read_text()

    run_pair(tmp_path, story, supervision=PATIENT)


def test_a_worker_whose_host_went_down_is_told_as_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevents a power cut that looks like a restart by hand: what is left of the rank says 255 and nothing
    else. The node keeps it as evidence, and the lead says whose host it was.
    """
    caplog.set_level(logging.INFO)

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await pair.both_serve()
        rank = pair.docker["b"].running()[0]
        await pair.kill("b")
        await pair.docker["b"].exit(rank, 255)
        pair.docker["b"].containers[rank].more = {"OOMKilled": False}
        nodes["b"].boot("second-boot")
        pair.start("b")
        await pair.serving(2)
        assert (
            "b (rank 1): its host went down and came back (boot id changed)"
            in pair.service["a"].status().last_end
        )
        (folder,) = pair.evidence("b")
        assert folder.name.endswith("host-went-down")
        assert (folder / "reason.txt").read_text().startswith("the host went down under it (exit 255)")
        assert json.loads((folder / "inspect.json").read_text())["State"]["ExitCode"] == 255
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story, supervision=PATIENT)
    assert "b: its host went down and came back (boot id changed)" in caplog.text


@pytest.mark.parametrize(
    ("boot", "code", "kept"),
    [
        ("second-boot", 255, "host-went-down"),
        ("first-boot", 137, "ended-without-its-supervisor"),
        ("first-boot", None, ""),
    ],
)
def test_the_heads_own_leftovers_say_how_they_ended(
    tmp_path: Path, boot: str, code: int | None, kept: str
) -> None:
    """Prevents evidence of a power cut after a mere restart, none after a power cut of the head, and docker's
    word on a rank that had ended (137) from going with its container at the next start.
    """

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await pair.both_serve()
        rank = pair.docker["a"].running()[0]
        await pair.kill("a")
        if code is not None:
            await pair.docker["a"].exit(rank, code)
        nodes["a"].boot(boot)
        pair.start("a")
        await pair.serving(2)
        folders = pair.evidence("a")
        assert [folder.name.partition("Z-")[2] for folder in folders] == ([kept] if kept else [])
        for folder in folders:
            assert json.loads((folder / "inspect.json").read_text())["State"]["ExitCode"] == code

    run_pair(tmp_path, story, supervision=PATIENT)


def test_a_reboot_is_remembered_over_another_restart(tmp_path: Path) -> None:
    """Prevents a host that went down from being forgotten because its supervisor was restarted after it."""

    async def story(pair: Pair) -> None:
        nodes = machines(pair)
        await pair.both_serve()
        await pair.kill("b")
        await pair.until(lambda: pair.service["a"].status().state == "waiting", "the lead waits")
        nodes["b"].boot("second-boot")
        pair.release["b"] = "r0"
        pair.start("b")
        await pair.until(
            lambda: "it runs release r0" in str(pair.service["a"].status().reasons), "turned away"
        )
        await pair.kill("b")
        pair.release["b"] = "r1"
        pair.start("b")
        await pair.serving(2)
        assert "its host went down and came back" in pair.service["a"].status().last_end

    run_pair(tmp_path, story, supervision=PATIENT)


def test_a_rank_that_somebody_restarts_alone_ends_both(tmp_path: Path) -> None:
    """Prevents `docker restart` of rank 1 by hand: rank 0 would answer /v1/models and hang on requests."""

    async def story(pair: Pair) -> None:
        machines(pair)
        await pair.both_serve()
        docker = pair.docker["b"]
        rank = docker.running()[0]
        await docker.exit(rank, 0)
        docker.containers[rank].state = "running"
        await pair.serving(2)
        assert rank not in docker.containers
        assert "b (rank 1) exited with code 0: it ended with 0" in pair.service["a"].status().last_end

    run_pair(tmp_path, story, supervision=PATIENT)


def test_docker_knows_how_a_rank_ended(tmp_path: Path) -> None:
    """Prevents `exited with code 137` where docker's State says that the kernel killed it for memory."""

    async def story(pair: Pair) -> None:
        machines(pair)
        await pair.both_serve()
        rank = pair.docker["b"].running()[0]
        pair.docker["b"].containers[rank].more = {"OOMKilled": True}
        await pair.docker["b"].exit(rank, 137)
        said = "b (rank 1) exited with code 137: it was killed by the kernel for want of memory (OOM)"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        await pair.until(lambda: bool(pair.evidence("b")), "evidence")
        kept = json.loads((pair.evidence("b")[0] / "report.json").read_text())
        assert kept["exit"] == "was killed by the kernel for want of memory (OOM)"

    run_pair(tmp_path, story, supervision=PATIENT)
