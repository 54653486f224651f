"""Image identity, release id, ledger, evidence, durable files, journal lines, the gate's text, canary
replies.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import logging
import mmap
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glm53_service import evidence
from glm53_service.artifacts.cache import give_back
from glm53_service.artifacts.content import image_content
from glm53_service.canary import reply_text
from glm53_service.errors import ArtifactError, ConfigError
from glm53_service.evidence import save_evidence
from glm53_service.files import read_json, write_durably
from glm53_service.gate import metrics_text
from glm53_service.ledger import Ledger
from glm53_service.notify import Notifier
from glm53_service.release import changed_files, check_files, release_id, running_release
from glm53_service.status import RankStatus, Status
from glm53_service.story import ErrorLines, event, set_up_logging
from glm53_service.system import largest_processes, read_boot_id, read_memory
from glm53_service.vitals import Vitals

INSPECT: dict[str, Any] = {
    "Id": "sha256:aaa",
    "Architecture": "arm64",
    "RootFS": {"Layers": ["sha256:1", "sha256:2"]},
    "Config": {"Entrypoint": ["vllm"], "Env": ["A=1"]},
    "Created": "then",
}


def test_two_stores_of_one_image_are_equal() -> None:
    """Prevents 25 GB from being shipped again because overlay2 and containerd name an image differently."""
    other = {
        **INSPECT,
        "Id": "sha256:bbb",
        "Created": "now",
        "Config": {**INSPECT["Config"], "Cmd": [], "User": ""},
    }
    assert image_content(INSPECT) == image_content(other)


@pytest.mark.parametrize(
    "change",
    [
        {"Architecture": "amd64"},
        {"RootFS": {"Layers": ["sha256:2", "sha256:1"]}},
        {"Config": {"Entrypoint": ["vllm"], "Env": ["A=2"]}},
    ],
)
def test_what_would_run_differently_differs(change: dict[str, Any]) -> None:
    """Prevents an image of the wrong architecture or with other patches from counting as the same."""
    assert image_content(INSPECT) != image_content({**INSPECT, **change})


def test_cached_weights_are_given_back(tmp_path: Path) -> None:
    """Prevents a memory gate that waits for ever for page cache which nobody drops."""
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.safetensors", "deep/b.safetensors"):
        with (folder / name).open("wb") as file:
            file.write(b"x" * 65536)
            file.flush()
            os.fsync(file.fileno())
    assert cached_pages(folder / "a.safetensors") == 16
    assert give_back(folder) == 2
    assert cached_pages(folder / "a.safetensors") == 0


def cached_pages(path: Path) -> int:
    """Return how many 4 KiB pages of a file the kernel has cached (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as area,
    ):
        pages = (ctypes.c_ubyte * (size // 4096))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages)


def checkout(root: Path) -> Path:
    """Return a small checkout below `root`."""
    for name, text in (
        ("glm53_service/a.py", "x = 1\n"),
        ("pyproject.toml", "[p]\n"),
        ("requirements/node.txt", "a\n"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_changed_file_of_a_release_is_named(tmp_path: Path) -> None:
    """Prevents a release that was edited on the node from being taken for the one that its name says."""
    site = tmp_path / "lib/python3.12/site-packages"
    files = {"pack/a.py": b"a = 1\n", "pack/b,c.py": b"b = 2\n", "../../../bin/pack": b"#!/x\n"}
    rows = []
    for name, content in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f'"{name}",sha256={digest},{len(content)}')
    record = site / "pack-1.dist-info/RECORD"
    record.parent.mkdir()
    record.write_text("\n".join([*rows, "pack/__pycache__/a.pyc,,", "pack-1.dist-info/RECORD,,"]))
    assert changed_files(tmp_path) == []
    (site / "pack/a.py").write_bytes(b"a = 2\n")
    (site / "pack/b,c.py").unlink()
    (tmp_path / "bin/pack").write_bytes(b"#!/y\n")
    assert changed_files(tmp_path) == ["../../../bin/pack", "pack/a.py", "pack/b,c.py"]
    with pytest.raises(ArtifactError, match=r"pack/a\.py") as caught:
        check_files(tmp_path)
    assert str(tmp_path) in caught.value.hint


def test_pips_own_records_are_read() -> None:
    """Prevents a check that finds every real installation changed, or that finds nothing to look at."""
    assert changed_files(Path(sys.prefix)) == []
    assert list(Path(sys.prefix).glob("lib/python3*/site-packages/*.dist-info/RECORD"))


def test_the_release_id_is_the_contents(tmp_path: Path) -> None:
    """Prevents two nodes with one release id and different code."""
    first = release_id(checkout(tmp_path / "x"))
    assert first == release_id(checkout(tmp_path / "y"))
    (tmp_path / "y/glm53_service/a.py").write_text("x = 2\n")
    assert first != release_id(tmp_path / "y")
    assert len(first) == 12
    (tmp_path / "x/requirements/node.txt").unlink()
    with pytest.raises(ConfigError, match=r"requirements/node.txt cannot be read"):
        release_id(tmp_path / "x")


def test_the_running_release_is_its_folder() -> None:
    """Prevents a status that names a release that is not the one running."""
    assert running_release(Path("/opt/glm53/releases/0123456789ab")) == "0123456789ab"
    assert running_release(Path("/work/.venv")) == "unreleased"


def test_the_ledger_survives_and_forgets_after_giving_up(tmp_path: Path) -> None:
    """Prevents a restart of the supervisor from hiding faults, and a manual restart from giving up at
    once.
    """
    now = [1000.0]
    path = tmp_path / "state/ledger.json"
    ledger = Ledger(path, lambda: now[0])
    assert (ledger.next_epoch(), ledger.next_epoch()) == (1, 2)
    ledger.record_fault("rank 0 exited")
    now[0] = 1100.0
    ledger.record_fault("rank 1 exited")
    again = Ledger(path, lambda: now[0])
    assert (again.epoch, again.faults_within(50), again.faults_within(150)) == (2, 1, 2)
    again.give_up()
    fresh = Ledger(path, lambda: now[0])
    assert (fresh.epoch, fresh.faults_within(150), fresh.last_fault) == (2, 0, "rank 1 exited")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"epoch": '])
def test_a_half_written_ledger_is_an_empty_one(tmp_path: Path, content: str) -> None:
    """Prevents a supervisor that cannot start after a power cut."""
    (tmp_path / "ledger.json").write_text(content)
    assert Ledger(tmp_path / "ledger.json", lambda: 1.0).next_epoch() == 1


def test_durable_writes_replace_whole(tmp_path: Path) -> None:
    """Prevents a temporary file that stays behind, and a part of a file."""
    write_durably(tmp_path / "d/x.json", '{"a": 1}')
    write_durably(tmp_path / "d/x.json", '{"a": 2}')
    assert read_json(tmp_path / "d/x.json") == {"a": 2}
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["x.json"]


def test_evidence_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a disk full of crash logs, and a crash log that is removed by the next start."""
    monkeypatch.setattr(evidence, "KEEP", 2)
    for second in range(4):
        save_evidence(
            tmp_path, f"epoch {second} rank 0", {"reason.txt": f"r{second}"}, wall=1_700_000_000.0 + second
        )
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "20231114T221322Z-epoch-2-rank-0",
        "20231114T221323Z-epoch-3-rank-0",
    ]
    assert (tmp_path / "20231114T221323Z-epoch-3-rank-0/reason.txt").read_text() == "r3"


def test_journal_lines_carry_their_priority(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents an error that `journalctl -p err` does not find, also on its second line."""
    set_up_logging(debug=False)
    logging.getLogger("unit").error("one\ntwo")
    logging.getLogger("unit").info(event("it began", epoch=3, why="a cable", nothing=""))
    assert capsys.readouterr().err.splitlines() == ["<3>one", "<3>two", '<6>it began epoch=3 why="a cable"']


def test_a_traceback_does_not_drown_the_story(caplog: pytest.LogCaptureFixture) -> None:
    """Prevents a hundred lines of an engine's traceback in the pair's journal."""
    errors = ErrorLines(1, limit=2)
    for number in range(50):
        errors.tell(logging.getLogger("unit"), f"line {number}")
    assert caplog.messages == ["line 0", "line 1", "more errors of rank 1: journalctl -t glm53-rank1"]


def test_systemd_is_told_once_a_change(tmp_path: Path) -> None:
    """Prevents a STATUS= datagram every tick."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(2)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"})
        assert notifier.watchdog_seconds == 10.0
        for text in ("waiting\nfor b", "waiting\nfor b", "serving"):
            notifier.status(text)
        notifier.ready()
        got = [manager.recv(200).decode() for _ in range(3)]
    assert got == ["STATUS=waiting for b", "STATUS=serving", "READY=1"]


STATUS = Status(
    role="lead",
    node="a",
    cluster="unit",
    release="r",
    state="serving",
    ready=True,
    epoch=5,
    since=1.0,
    endpoint="http://127.0.0.1:18888/v1",
    model="m",
    faults=2,
    epochs_ended=4,
    ranks=(
        RankStatus(
            rank=0,
            node="a",
            state="running",
            connected=True,
            vitals=Vitals(available_gib=5.5, read_gib=80.1, cpu_cores=1.2, warnings=("little memory",)),
        ),
        RankStatus(rank=1, node="b", state="exited", connected=True),
    ),
)


def test_metrics_say_what_status_says() -> None:
    """Prevents a dashboard that disagrees with the gate."""
    lines = metrics_text(STATUS).splitlines()
    for line in (
        "glm53_ready 1",
        "glm53_epoch 5",
        "glm53_epochs_ended_total 4",
        "glm53_engine_faults 2",
        'glm53_state{state="serving"} 1',
        'glm53_state{state="waiting"} 0',
        'glm53_rank_up{rank="0",node="a"} 1',
        'glm53_rank_up{rank="1",node="b"} 0',
        'glm53_memory_available_bytes{rank="0",node="a"} 5905580032',
        'glm53_warnings{rank="0",node="a"} 1',
    ):
        assert line in lines


def test_the_status_line_names_endpoint_or_reason() -> None:
    """Prevents a `systemctl status` that says 'running' and nothing else."""
    assert STATUS.line() == (
        "serving, epoch 5: m at http://127.0.0.1:18888/v1 (warning: rank 0: little memory)"
    )
    starting = msgspec.structs.replace(STATUS, state="starting", progress="rank 0: startup estimate 88 GiB")
    assert starting.line() == (
        "starting, epoch 5: rank 0: startup estimate 88 GiB; rank 0: 80.1 GiB read, CPU busy (1.2 cores),"
        " 5.5 GiB available (warning: rank 0: little memory)"
    )
    assert (
        msgspec.structs.replace(STATUS, state="running", ranks=STATUS.ranks[1:]).line() == "running, epoch 5"
    )


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "4"}, "4"),
        ({"content": None, "reasoning": "2+2=4"}, "2+2=4"),
        ({"content": "a", "reasoning_content": "b"}, "a\nb"),
        ({"content": None}, ""),
    ],
)
def test_a_reply_is_content_and_reasoning(message: dict[str, Any], text: str) -> None:
    """Prevents a right answer that a reasoning parser moved from counting as silence."""
    assert reply_text({"choices": [{"message": message}]}) == text


def test_memory_and_its_holders_come_from_proc(tmp_path: Path) -> None:
    """Prevents MemAvailable from being taken for what CUDA can have, and a refusal that names nobody."""
    proc = tmp_path / "proc"
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("boot-7\n")
    (proc / "meminfo").write_text(
        "MemTotal: 127535032 kB\nMemFree:  43536875 kB\nMemAvailable: 121267814 kB\n"
    )
    for pid, name, kib in ((7, "gnome-shell", 1887436), (8, "sshd", 9000)):
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "status").write_text(f"Name:\t{name}\nVmRSS:\t{kib} kB\n")
    memory = read_memory(tmp_path)
    assert (memory.free, memory.available) == (43536875 * 1024, 121267814 * 1024)
    assert read_boot_id(tmp_path) == "boot-7"
    assert largest_processes(tmp_path, 1) == ("gnome-shell (pid 7, 1.8 GiB)",)
