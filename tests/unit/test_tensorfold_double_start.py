"""Starts of the TensorFold double as two ranks: how they meet, what they refuse, how a start fails."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.double_ranks import Ranks, until

TF = r"\[tensorfold\] "
TRACEBACK = "Traceback (most recent call last)"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks that are not started yet."""
    found = Ranks(tmp_path)
    yield found
    found.close()


def test_lines_of_a_start_in_order(ranks: Ranks) -> None:
    """Prevents progress from being read out of lines that no start prints, and a hidden double."""
    ranks.serve("--vision", env={"TF_GLM_MTP": "auto", "TF_GLM_KV": "fp8"})
    patterns = [
        r"\[tensorfold-double\] this is a double of TensorFold 0\.6\.0 for tests",
        TF + r"EXL3 support is experimental: replies are exact, but ",
        TF + r"GLM-5\.3-Flash runs on two NVIDIA GPUs with 128 GB each",
        TF + r"loading \S+: GLM-5\.3-Flash \(glm5_next\) on CUDA, rank \d of 2",
        TF + r"building CUDA extension \S+ \(first start after an install or update;",
        TF + r"CUDA rank \d startup estimate [\d.]+ GiB within [\d.]+ GiB; native 1048576, allocated"
        r" prompt/reply window 65536, cache slots 8$",
    ]
    head = [
        TF + r"the checkpoint's MTP head is not loaded \(TF_GLM_MTP=auto\): DFlash2 drafts every request",
        TF + r"verify windows up to 32 rows",
        TF + r"TF_GLM_KV=fp8: ",
        TF + r"prompt chunks and kept prompt states on a 2048-token grid",
        TF + r"shared-prefix prompt states: ",
        TF + r"drafter timings \(ms, fastest of 7\): ",
        TF + r"drafter costs \(ms\): verify ",
        TF + r"vision: image and video input, a 1\.05 GiB tower",
        TF + r"--parallel 3: up to 3 requests decode together, their caches in one pool of \d+ tokens",
        TF + rf"serving unit-glm at http://127\.0\.0\.1:{ranks.port}/v1 on CUDA, rank 0 of 2 \(.*"
        r"context: 65536; loaded in [\d.]+s\)",
    ]
    follower = [TF + r"rank 1 ready in [\d.]+s, following rank 0"]
    for rank, last in ((0, head), (1, follower)):
        lines = ranks.log(rank).splitlines()
        assert len(lines) == len(patterns + last)
        for pattern, line in zip(patterns + last, lines, strict=True):
            assert re.match(pattern, line)


def test_either_rank_may_be_first_and_a_second_start_builds_nothing(ranks: Ranks) -> None:
    """Prevents an order of starts from being needed that TensorFold does not need."""
    ranks.start(0)
    ranks.wait_line(0, "rank 0 of 2")
    ranks.start(1)
    ranks.wait_ready()
    assert "building CUDA extension" in ranks.log(1)
    ranks.close()
    ranks.serve()
    assert "building CUDA extension" not in ranks.log(0) + ranks.log(1)


def test_three_ranks(ranks: Ranks) -> None:
    """Prevents two from being built into the rendezvous or into an iteration."""
    for rank in (2, 0, 1):
        ranks.start(rank, "--tp", "3")
    ranks.wait_ready()
    ranks.wait_line(2, "rank 2 ready in .*, following rank 0")
    assert ranks.said() == "Paris"
    ranks.signal(2, signal.SIGSTOP)
    ranks.begin("2+2")
    until(lambda: ranks.health()["iteration_s"] > 0.3, "every rank is needed")


def test_a_peer_that_never_comes_ends_the_start(ranks: Ranks) -> None:
    """Prevents the wait of 600 s from being endless."""
    ranks.start(0, env={"TF_DOUBLE_TIME_SCALE": "0.0005"})
    assert ranks.code(0) == 1
    assert "Timed out after 600 seconds waiting for clients. 1/2 clients joined." in ranks.log(0)
    ranks.start(1, env={"TF_DOUBLE_TIME_SCALE": "0.0005"})
    assert ranks.code(1) == 1
    assert "The client socket has timed out after 600000ms" in ranks.log(1)


def test_a_window_that_does_not_fit_is_refused_on_every_rank(ranks: Ranks) -> None:
    """Prevents the refit to the named window from being tested against another line than TensorFold's."""
    ranks.start_both(env={"TF_DOUBLE_LARGEST_WINDOW_RANK1": "24576"})
    assert (ranks.code(0), ranks.code(1)) == (1, 1)
    line = (
        "tensorfold: CUDA startup memory budget cannot fit requested context 65536; estimated largest fitting"
        " prompt-plus-reply window: 24576 tokens across the ranks. Use --context 24576"
    )
    assert line in ranks.log(0)
    assert line in ranks.log(1)
    assert "startup estimate" not in ranks.log(0)
    ranks.serve("--context", "24576", env={"TF_DOUBLE_LARGEST_WINDOW_RANK1": "24576"})
    assert ranks.health()["context_length"] == 24576


def test_a_small_memory_gives_a_small_window(ranks: Ranks) -> None:
    """Prevents --context 0 from meaning anything but the largest that fits the poorer rank."""
    env = {
        "TF_DOUBLE_MEM_AVAILABLE_GIB_RANK1": "99.64",
        "TF_GLM_KV": "fp8",
        "TENSORFOLD_MEMORY_RESERVE_GIB": "12",
    }
    ranks.serve("--context", "0", env=env)
    found = int(ranks.wait_line(1, r"allocated prompt/reply window (\d+)")[1])
    assert found == ranks.health()["context_length"]
    assert 30_000 < found < 40_000


@pytest.mark.parametrize(
    ("extra", "env", "told"),
    [
        (("--context", "32768"), {}, "tensorfold: CUDA ranks have different native windows or context flags"),
        (
            (),
            {"TF_GLM_DENSE": "q4"},
            r"different settings \(TF_GLM_DENSE\): rank 0 \[\], rank 1 \[TF_GLM_DENSE=q4\]",
        ),
        (
            ("--drafter", "none", "--parallel", "1"),
            {},
            r"different settings \(drafter, parallel\): rank 0 \[drafter=",
        ),
    ],
    ids=["window", "environment", "drafter"],
)
def test_ranks_with_different_settings_refuse(
    ranks: Ranks, extra: tuple[str, ...], env: dict[str, str], told: str
) -> None:
    """Prevents two ranks that would compute different things from serving."""
    ranks.start(1, *extra, env=env)
    ranks.start(0)
    assert (ranks.code(0), ranks.code(1)) == (1, 1)
    for rank in (0, 1):
        assert re.search(told, ranks.log(rank))
        assert (TRACEBACK in ranks.log(rank)) == told.startswith("different")


def test_settings_that_are_not_computed_with_may_differ(ranks: Ranks) -> None:
    """Prevents a harmless difference between the nodes from being refused."""
    ranks.start(1, env={"TENSORFOLD_MEMORY_RESERVE_GIB": "9", "TF_GLM_MULTI_WATCHDOG_S": "100"})
    ranks.start(0)
    ranks.wait_ready()


def test_an_incomplete_checkpoint_on_one_rank_ends_both(ranks: Ranks) -> None:
    """Prevents the rank with sound files from being blamed."""
    copy = ranks.folder / "copy"
    ranks.model.rename(copy)
    ranks.start(1, str(copy), env={})  # the last MODEL does not win: two are an error
    assert ranks.code(1) == 2
    copy.rename(ranks.model)
    ranks.start(0)
    ranks.wait_line(0, "rank 0 of 2")
    (ranks.model / "model-00003-of-00003.safetensors").unlink()
    ranks.start(1)
    assert (ranks.code(0), ranks.code(1)) == (1, 1)
    assert "geometry could not be established on every rank: " in ranks.log(1)


def test_nccl_error_2_so_many_times(ranks: Ranks) -> None:
    """Prevents the retry as is, and the one with the split off, from being tested on something else."""
    env = {"TF_DOUBLE_NCCL_ERROR_2_RANK1": "1"}
    ranks.start_both(env=env)
    assert ranks.code(1) == 1
    assert re.search(
        r"Traceback.*RuntimeError: NCCL error 2: unhandled system error\n$", ranks.log(1), re.DOTALL
    )
    assert ranks.running(0)
    until(lambda: any(ranks.cache(0).rglob("*.so")), "rank 0 has built its kernels")  # else its lock stays
    ranks.close()
    ranks.serve(env=env)
    ranks.close()
    ranks.serve(env={"TF_DOUBLE_NCCL_ERROR_2_RANK1": "9", "TF_GLM_HC_SPLIT": "0"})


def test_a_peer_that_never_loads(ranks: Ranks) -> None:
    """Prevents a wait for the other rank's load from being silent or endless."""
    ranks.start(1, env={"TF_DOUBLE_NEVER_LOADS_RANK1": "1"})
    ranks.wait_line(1, "rank 1 of 2")
    ranks.start(0, env={"TF_DOUBLE_TIME_SCALE": "0.0008"})
    ranks.wait_line(0, r"^\[tensorfold\] rank 0 finished loading; waiting for rank 1 \(60 s\)$")
    assert ranks.code(0) == 1
    assert "RuntimeError: rank 0 finished loading but rank 1 has not after 60 min" in ranks.log(0)
    assert ranks.running(1)


def test_a_killed_build_leaves_a_lock_that_hangs_the_next_start(ranks: Ranks) -> None:
    """Prevents stale build locks in the kernel cache from going unnoticed."""
    ranks.serve()
    ranks.close()
    built = next(ranks.cache(1).rglob("*.so"))
    built.unlink()
    ranks.start_both(env={"TF_DOUBLE_BUILD_SECONDS": "60"})
    ranks.wait_line(1, "building CUDA extension")
    ranks.close()
    ranks.start_both(env={"TF_DOUBLE_TIME_SCALE_RANK1": "0.02"})
    lock = Path(ranks.wait_line(1, r"CUDA extension \S+ waits on the build lock (\S+); if no other build")[1])
    ranks.wait_line(1, f"still waiting after 60 s on the build lock {lock}")
    assert (lock.exists(), built.exists(), ranks.up()) == (True, False, False)
    lock.unlink()
    ranks.wait_ready()
    assert built.exists()


def test_a_cache_that_cannot_be_written_ends_the_start(ranks: Ranks) -> None:
    """Prevents a root-owned kernel cache from being found out only on real machines."""
    ranks.cache(1).write_text("not a folder")
    ranks.start_both(env={"TF_DOUBLE_DIR": str(ranks.folder)})
    assert ranks.code(1) == 1
    assert "NotADirectoryError" in ranks.log(1)


def test_a_taken_port_is_found_after_the_load(ranks: Ranks) -> None:
    """Prevents the port check before a start from looking needless."""
    with socket.create_server(("127.0.0.1", ranks.port)):
        ranks.start_both()
        assert ranks.code(0) == 1
    assert re.search(r"serving unit-glm.*Traceback.*OSError.*address already in use", ranks.log(0), re.DOTALL)
    assert ranks.code(1) == 1
    ranks.start_both(env={"TF_DOUBLE_PORT_TAKEN": "1"})
    assert (ranks.code(0), ranks.code(1)) == (1, 1)
    assert "address already in use" in ranks.log(0)


def test_a_drafter_fails_in_its_own_way_and_only_when_there_is_one(ranks: Ranks) -> None:
    """Prevents a fallback to MTP from being taken for other faults than the drafter's."""
    env = {"TF_DOUBLE_DRAFTER_FAILS": "1"}
    ranks.start_both(env=env)
    assert (ranks.code(0), ranks.code(1)) == (1, 1)
    own = r"Traceback.*glm5_next/cuda/dflash2\.py.*RuntimeError: DFlash2 draft model "
    assert re.search(own, ranks.log(0), re.DOTALL)
    ranks.serve("--drafter", "none", "--parallel", "auto", env=env)
    assert "iteration_s" not in ranks.health()


def test_crash_at_a_second_with_a_code(ranks: Ranks) -> None:
    """Prevents exit code 0 of a rank that nobody stopped from being taken for a clean end."""
    ranks.start_both(env={"TF_DOUBLE_CRASH_RANK1": "0.1:0", "TF_DOUBLE_LOAD_SECONDS": "30"})
    assert ranks.code(1) == 0
    assert ranks.running(0)


def test_fewer_slots_than_asked(ranks: Ranks) -> None:
    """Prevents a server with fewer slots than asked for from being called ready."""
    ranks.serve(env={"TF_DOUBLE_SLOTS": "2"})
    assert ranks.health()["streams"]["max"] == 2
    assert "--parallel 2: up to 2 requests decode together" in ranks.log(0)


def test_a_silent_load_shows_in_cpu_time_only(ranks: Ranks) -> None:
    """Prevents a stall verdict by log lines alone: loading prints nothing for minutes."""
    ranks.start_both(
        env={"TF_DOUBLE_LOAD_SECONDS": "60", "TF_DOUBLE_LOAD_CPU": "0.5", "TF_DOUBLE_LOAD_CPU_RANK1": "0"}
    )
    for rank in (0, 1):
        ranks.wait_line(rank, "startup estimate")
    printed = ranks.log(0)
    used = cpu_ticks(ranks, 0), cpu_ticks(ranks, 1)
    until(lambda: cpu_ticks(ranks, 0) - used[0] >= 20, "rank 0 uses CPU")
    assert cpu_ticks(ranks, 1) - used[1] <= 3
    assert ranks.log(0) == printed


def test_a_leak_while_loading(ranks: Ranks) -> None:
    """Prevents the memory guard from being tried only once a pair serves."""
    ranks.start_both(env={"TF_DOUBLE_LOAD_SECONDS": "60", "TF_DOUBLE_LEAK_RANK1": "400:80"})
    for rank in (0, 1):
        ranks.wait_line(rank, "startup estimate")
    until(lambda: ranks.resident_mb(1) - ranks.resident_mb(0) >= 75, "80 MB more are used")


def cpu_ticks(ranks: Ranks, rank: int) -> int:
    """User and system time of a rank, in clock ticks."""
    fields = Path(f"/proc/{ranks.processes[rank].pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_loading_rank_has_no_handler_for_sigterm(ranks: Ranks) -> None:
    """Prevents a polite stop of a loading rank: as PID 1 it gets no signal, elsewhere it dies of it."""
    ranks.start(1, env={"TF_DOUBLE_PID1": "1"})
    ranks.start(0, env={"TF_DOUBLE_LOAD_SECONDS": "60"})
    ranks.wait_line(0, "startup estimate")
    ranks.signal(1, signal.SIGTERM)
    ranks.signal(0, signal.SIGTERM)
    assert ranks.code(0) == -signal.SIGTERM
    assert ranks.code(1) == 1  # of the store's end, not of the signal
    assert "ConnectionError: the rendezvous store closed the connection" in ranks.log(1)
