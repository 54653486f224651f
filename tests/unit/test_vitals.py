"""A container's usage from its cgroup, and what of it is a sign of life."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from glm53_service.cgroup import Cgroup, Usage, find_cgroup, kill_container, read_usage
from glm53_service.system import GIB
from glm53_service.vitals import Sign, Signs, Vitals, look

ID = "7f3a" * 16


def write(root: Path, files: dict[str, str]) -> Path:
    """Write `files` below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def version_2(root: Path) -> Path:
    """Return a tree with the container's cgroup as systemd's driver makes it."""
    folder = f"sys/fs/cgroup/system.slice/docker-{ID}.scope"
    return write(
        root,
        {
            "proc/4711/cgroup": f"0::/system.slice/docker-{ID}.scope\n",
            f"{folder}/cpu.stat": "usage_usec 12500000\nuser_usec 9000000\nsystem_usec 3500000\n",
            f"{folder}/io.stat": "259:0 rbytes=3221225472 wbytes=4096 rios=9 wios=1 dbytes=0 dios=0\n"
            "253:0 rbytes=3221220000 wbytes=8192 rios=9 wios=1 dbytes=0 dios=0\n",
        },
    )


def version_1(root: Path) -> Path:
    """Return a tree with the container's cgroups in version 1's hierarchies, beside an empty unified one."""
    return write(
        root,
        {
            "proc/4711/cgroup": f"5:cpu,cpuacct:/docker/{ID}\n3:blkio:/docker/{ID}\n0::/docker/{ID}\n",
            f"sys/fs/cgroup/cpuacct/docker/{ID}/cpuacct.usage": "12500000000\n",
            f"sys/fs/cgroup/blkio/docker/{ID}/blkio.throttle.io_service_bytes": "259:0 Read 3221225472\n"
            "259:0 Write 4096\n259:0 Total 3221229568\n253:0 Read 9\n253:0 Write 8192\nTotal 3221237769\n",
        },
    )


@pytest.mark.parametrize("tree", [version_1, version_2])
def test_both_cgroup_versions_say_the_same(tmp_path: Path, tree: object) -> None:
    """Prevents a supervisor that is blind on one of them, and bytes counted once more for each disk layer."""
    assert callable(tree)
    found = find_cgroup(tree(tmp_path), 4711)
    assert found is not None
    assert read_usage(found) == Usage(cpu_seconds=12.5, read_bytes=3 * GIB, written_bytes=8192)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/4711/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": "usage_usec 1\n"},
        {"proc/4711/cgroup": "4:cpuacct:/\n", "sys/fs/cgroup/cpuacct/cpuacct.usage": "1\n"},
    ],
)
def test_the_whole_machine_is_no_container(tmp_path: Path, files: dict[str, str]) -> None:
    """Prevents other programs' CPU time and bytes from keeping a dead start alive."""
    assert find_cgroup(write(tmp_path, files), 4711) is None


def test_a_container_that_is_gone_has_no_figures(tmp_path: Path) -> None:
    """Prevents the end of a container, seen in between, from ending the supervisor."""
    gone = Cgroup(version=2, cpu=tmp_path / "cpu.stat", io=tmp_path / "io.stat")
    assert read_usage(gone) == Usage()


def test_only_the_containers_own_process_is_killed(tmp_path: Path) -> None:
    """Prevents a SIGKILL into whatever got the process number of a container that has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        write(tmp_path, {f"proc/{process.pid}/cgroup": "0::/user.slice/session-2.scope\n"})
        assert not kill_container(tmp_path, process.pid, ID)
        assert process.poll() is None
        write(tmp_path, {f"proc/{process.pid}/cgroup": f"0::/system.slice/docker-{ID}.scope\n"})
        assert kill_container(tmp_path, process.pid, ID)
        assert process.wait(10) == -signal.SIGKILL
    assert not kill_container(tmp_path, process.pid, ID)


FIRST = Signs.first(100.0, Usage(cpu_seconds=50.0, read_bytes=GIB, written_bytes=0), 60 * GIB)
MIB = 1024**2


@pytest.mark.parametrize(
    ("usage", "available", "sign"),
    [
        (Usage(cpu_seconds=50.1, read_bytes=GIB, written_bytes=0), 60 * GIB, Sign.NONE),
        (Usage(cpu_seconds=55.0, read_bytes=GIB, written_bytes=0), 60 * GIB, Sign.BUSY),
        (Usage(cpu_seconds=50.1, read_bytes=GIB + 16 * MIB, written_bytes=0), 60 * GIB, Sign.MOVED),
        (Usage(cpu_seconds=50.1, read_bytes=GIB, written_bytes=16 * MIB), 60 * GIB, Sign.MOVED),
        (Usage(cpu_seconds=55.0, read_bytes=GIB + 15 * MIB, written_bytes=0), 60 * GIB, Sign.BUSY),
        (Usage(cpu_seconds=50.1, read_bytes=GIB, written_bytes=0), 60 * GIB - 256 * MIB, Sign.MOVED),
        (Usage(cpu_seconds=50.1, read_bytes=GIB, written_bytes=0), 60 * GIB - 255 * MIB, Sign.NONE),
        (Usage(cpu_seconds=50.1, read_bytes=GIB, written_bytes=0), 70 * GIB, Sign.NONE),
        (Usage(), 60 * GIB, Sign.NONE),
    ],
)
def test_what_is_a_sign_of_life(usage: Usage, available: int, sign: Sign) -> None:
    """Prevents the end of a silent load, and a dead start kept alive by a rank that polls or spins."""
    assert FIRST.after(105.0, usage, available)[1] is sign


def test_small_steps_add_up_and_are_counted_once() -> None:
    """Prevents a slow disk from looking dead, and one step from counting at every look."""
    signs, found = FIRST, []
    for step in (10, 20, 20, 30, 36):
        usage = Usage(cpu_seconds=50.0, read_bytes=GIB + step * MIB, written_bytes=0)
        signs, sign = signs.after(signs.at + 5, usage, 60 * GIB)
        found.append(sign)
    assert found == [Sign.NONE, Sign.MOVED, Sign.NONE, Sign.NONE, Sign.MOVED]


def test_memory_that_comes_and_goes_is_no_life() -> None:
    """Prevents another program that takes and gives back a GiB from keeping a dead start alive for ever."""
    signs, found = FIRST, []
    for available in (59, 60, 59, 60, 59, 58):
        signs, sign = signs.after(signs.at + 5, Usage(), available * GIB)
        found.append(sign is Sign.MOVED)
    assert found == [True, False, False, False, False, True]


def test_a_look_is_shown_in_words() -> None:
    """Prevents a silent load that shows nothing in `systemctl status`."""
    usage = Usage(cpu_seconds=59.5, read_bytes=int(43.2 * GIB), written_bytes=0)
    shown = look(FIRST, 105.0, usage, 31 * GIB, ())
    assert shown.line() == "43.2 GiB read, CPU busy (1.9 cores), 31.0 GiB available"
    assert Vitals(available_gib=7.04, cpu_cores=0.04).line() == "CPU idle, 7.0 GiB available"


def test_the_kernel_here_keeps_these_accounts() -> None:
    """Prevents a reader of files that no kernel has: this process's own entry is read as it is."""
    text = Path(f"/proc/{os.getpid()}/cgroup").read_text(encoding="ascii")
    assert all(line.count(":") >= 2 for line in text.splitlines())
    assert find_cgroup(Path("/"), 2**22 + 1) is None
