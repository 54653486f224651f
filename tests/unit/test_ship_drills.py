"""Shipping broken on purpose: kill -9 of either end and of ssh at every step, full disks, bad wires."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts import ship
from glm53_service.artifacts.disk import held
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import NAME, UNFINISHED, read_manifest
from glm53_service.artifacts.ship import LOADER, Shipment, Shipped, Target
from glm53_service.artifacts.verify import verify
from glm53_service.errors import ArtifactError, Glm53Error, UnavailableError
from tests.unit.drills import apart, as_root, await_free, cutter, fill, is_free, read_only, small_disk
from tests.unit.hub_server import sha256
from tests.unit.snapshots import contents, flat, hidden, model_files
from tests.unit.test_download_drills import NO_FILES
from tests.unit.test_ship import with_manifest

SHARD = "model-00002-of-00002.safetensors"
FILES = {n: d for n, d in model_files(2, size=20_000).items() if n.endswith((".safetensors", "source.json"))}
TOTAL = sum(map(len, FILES.values()))
PROGRAM = Path(ship.__file__).with_name("receive.py").read_text()
RELAY = """
import subprocess, sys, threading
other = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def feed():
    while data := sys.stdin.buffer.raw.read(65536):
        other.stdin.write(data); other.stdin.flush()
    other.stdin.close()
threading.Thread(target=feed, daemon=True).start()
while data := other.stdout.raw.read(65536) if hasattr(other.stdout, "raw") else other.stdout.read(65536):
    sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
"""
"""What ssh does for the copy, without a network: when it is killed, the other end sees its stdin end."""


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The head's copy, with its manifest."""
    return with_manifest(flat(tmp_path / "head", FILES), FILES)


def shipment(
    head: Path,
    worker: Path,
    *,
    code: str = LOADER,
    relay: bool = False,
    streams: int = 1,
    kind: Any = Shipment,
) -> Shipment:
    """Return a copy whose other end runs `code`."""
    manifest = read_manifest(head)
    assert manifest is not None
    launcher = (sys.executable, "-I", "-c", code)
    target = Target(
        node="unit-b",
        launcher=(sys.executable, "-I", "-c", RELAY, *launcher) if relay else launcher,
        addresses=("127.0.0.1",),
        folder=worker,
    )
    made: Shipment = kind(layout_of(head), manifest, target, streams=streams, say=lambda _: None)
    return made


def send(head: Path, worker: Path, *, streams: int = 3) -> Shipped:
    """Copy, as it should go."""
    return shipment(head, worker, streams=streams).run()


def leftovers(folder: Path) -> set[str]:
    """Return what a finished copy has no use for."""
    return hidden(folder) - {NAME}


# kill -9


@pytest.mark.parametrize("victim", ["receiver", "sender", "ssh"])
def test_killed_at_any_step_nothing_is_worse_and_it_goes_on(head: Path, tmp_path: Path, victim: str) -> None:
    """Prevents every state that only a kill in an unlucky moment leaves, also between "the hash is right" and
    "in place": a wrong file, a half that nobody continues, a receiver that holds the folder for ever.
    """
    for cut in range(1, 100, 2 if victim == "ssh" else 1):
        worker = flat(tmp_path / str(cut), {SHARD: FILES[SHARD]})
        code = cutter(cut, "getpid" if victim == "receiver" else "getppid") + LOADER
        died = run_apart(shipment(head, worker, code=code, relay=victim == "ssh"), killed=victim == "sender")
        await_free(worker)  # the receiver ends with its sender, by itself
        after = contents(worker)
        assert {name for name, data in after.items() if FILES[name] != data} == set()
        assert SHARD in after
        parts = halves(worker)
        done = send(head, worker)
        assert (contents(worker), leftovers(worker)) == (FILES, set())
        assert done.bytes == TOTAL - sum(map(len, after.values())) - parts
        assert (worker / NAME).read_text() == (head / NAME).read_text()
        assert verify(layout_of(worker), full=True).right
        if not died:
            break
    assert cut > 15


def halves(worker: Path) -> int:
    """Return how many bytes of unfinished files are of use; their last page is written whole, then cut."""
    found = 0
    for name, data in FILES.items():
        path = worker / name
        half = path.with_name(f".{path.name}.{sha256(data)[:16]}.incomplete")
        found += min(half.stat().st_size, len(data)) // 4096 * 4096 if half.exists() else 0
    return found


def run_apart(copy: Shipment, *, killed: bool) -> bool:
    """Run it in a process of its own; return whether it was broken off."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 1
        try:
            copy.run()
            code = 0
        except UnavailableError:
            code = 69
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9 if killed else 69)
    return code != 0


def test_a_sender_that_dies_while_the_worker_hashes_leaves_no_process(head: Path, tmp_path: Path) -> None:
    """Prevents "is being filled by another run" for as long as hashing 164 GiB takes."""
    worker = flat(tmp_path / "worker", {SHARD: FILES[SHARD]})
    slow = PROGRAM.replace(
        "    digest = hashlib.sha256()\n    buffer",
        "    sys.stdin = open('/dev/null')\n    threading.Event().wait()\n    buffer",
        1,
    )
    assert slow != PROGRAM
    process = receiver(head, worker, program=slow)
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["event"] == "checking"
    assert not is_free(worker)
    process.stdin.close()
    assert process.wait(20) == 1
    assert is_free(worker)


def test_a_head_without_power_does_not_hold_the_worker(head: Path, tmp_path: Path) -> None:
    """Prevents two hours (TCP's own patience) of "being filled by another run" after the head went dark: ssh
    says nothing then, nor does it end.
    """
    impatient = PROGRAM.replace("SILENCE_SECONDS = 60.0", "SILENCE_SECONDS = 0.2")
    assert impatient != PROGRAM
    process = receiver(head, tmp_path / "worker", program=impatient)
    assert process.wait(20) == 1
    assert is_free(tmp_path / "worker")


def test_a_head_that_lives_says_so(head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a copy that the worker breaks off since one file takes longer than its patience."""
    monkeypatch.setattr(ship, "STILL_HERE_SECONDS", 0.02)
    heard = PROGRAM.replace(
        "            self._heard.set()\n", "            self._heard.set()\n            COUNT.append(line)\n"
    )
    heard = heard.replace(
        "        wanted = receiver.prepare()\n",
        "        wanted = receiver.prepare()\n        while len(COUNT) < 4:\n            pass\n",
    )
    heard = heard.replace("class Orders:", "COUNT: list[bytes] = []\n\n\nclass Orders:")
    monkeypatch.setattr(
        Path,
        "read_bytes",
        lambda self: heard.encode() if self.name == "receive.py" else self.open("rb").read(),
    )
    send(head, tmp_path / "worker")
    assert contents(tmp_path / "worker") == FILES


def receiver(head: Path, worker: Path, *, program: str = PROGRAM, **order: Any) -> subprocess.Popen[bytes]:
    """Start the worker's end by hand, as a sender would."""
    text = (head / NAME).read_text()
    whole = {
        "folder": str(worker),
        "addresses": ["127.0.0.1"],
        "secret": "ab" * 32,
        "spare": 0,
        "full": False,
        "look": False,
        "text": text,
        "times": {},
        "manifest": json.loads(text),
        **order,
    }
    process = subprocess.Popen(
        (sys.executable, "-I", "-c", LOADER), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    data = program.encode()
    process.stdin.write(b"%d\n" % len(data) + data + json.dumps(whole).encode() + b"\n")
    process.stdin.flush()
    return process


# A full disk


@as_root
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_full_disk_there_is_named_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Prevents a traceback from the worker, a lost half, or a copy that begins anew."""
    files = model_files(2, size=600_000)
    head = with_manifest(flat(tmp_path / "head", files), files)
    monkeypatch.setattr(ship, "SPARE_BYTES", 0 if when == "before" else -(1 << 30))

    def drill() -> None:
        disk = small_disk(tmp_path / "disk", 3 << 20)
        worker = disk / "m"
        other = fill(disk, 900_000)
        said = (
            r"unit-b: .*/m: 0\.0 GB free, but 0\.0 GB are"
            if when == "before"
            else (r"unit-b: .*/m: the disk is full; 0\.\d+ GB of model-.* are missing\n.*make room there")
        )
        with pytest.raises(ArtifactError, match=said):
            send(head, worker, streams=1)
        await_free(worker)
        there = contents(worker)
        assert all(files[name] == data for name, data in there.items())
        have = sum(p.stat().st_size // 4096 * 4096 for p in worker.rglob(".*.incomplete"))
        assert (have > 100_000) is (when == "during")
        other.unlink()
        done = send(head, worker)
        assert done.bytes == sum(map(len, files.values())) - sum(map(len, there.values())) - have
        assert (contents(worker), leftovers(worker)) == (files, set())

    apart(drill)


@as_root
@pytest.mark.parametrize("leave", range(0, 22 * 4096, 3 * 4096))
def test_a_worker_without_a_page_left_is_an_error_not_a_traceback(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: int
) -> None:
    """Prevents an empty manifest or record there, and ssh blamed for it."""
    monkeypatch.setattr(ship, "SPARE_BYTES", -(1 << 30))

    def drill() -> None:
        disk = small_disk(tmp_path / "disk", 1 << 20)
        worker = disk / "m"
        worker.mkdir()
        other = fill(disk, leave)
        said = ""
        try:
            send(head, worker, streams=1)
        except ArtifactError as error:
            said = error.message
        assert not said or "the disk is full" in said
        assert bool(said) is not (worker / NAME).exists()
        await_free(worker)
        assert all(FILES[name] == data for name, data in contents(worker).items())
        other.unlink()
        send(head, worker)
        assert (contents(worker), leftovers(worker)) == (FILES, set())

    apart(drill)


@as_root
def test_a_worker_that_cannot_be_written_is_named(head: Path, tmp_path: Path) -> None:
    """Prevents advice to chown what is mounted read-only."""
    (tmp_path / "worker").mkdir()

    def drill() -> None:
        read_only(tmp_path / "worker")
        with pytest.raises(ArtifactError, match=r"is mounted read-only\n  Fix: mount it writable"):
            send(head, tmp_path / "worker")

    apart(drill)


# A bad wire


class Wire:
    """A cable between sender and receiver: `change` gets each piece of the first connection with its offset,
    and returns what goes on; None swallows it and all that follows, and closes the far end.
    """

    def __init__(self, change: Callable[[int, bytes], bytes | None]) -> None:
        self.change: Callable[[int, bytes], bytes | None] | None = change
        self.back: Callable[[int, bytes], bytes | None] | None = None
        self.linger = 0.0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.far: tuple[str, int] = ("", 0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(self.far)
                change, self.change = self.change, None
                threading.Thread(target=self._pump, args=(near, far, change), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, self.back), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, change: Any) -> None:
        offset, swallowed = 0, False
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                passed = change(offset, data) if change else data
                offset += len(data)
                if passed is None and not swallowed:
                    other.shutdown(socket.SHUT_WR)
                    swallowed = True
                elif not swallowed:
                    other.sendall(passed)
            threading.Event().wait(self.linger)
            other.shutdown(socket.SHUT_WR)


def over(wire: Wire) -> type[Shipment]:
    """Return a copy that goes over this wire."""

    class Wired(Shipment):
        def _ask_what_is_wanted(self) -> tuple[dict[str, int], list[tuple[str, int]]]:
            wanted, places = super()._ask_what_is_wanted()
            wire.far = places[0]
            return wanted, [wire.server.getsockname()]

    return Wired


def flip(at: int) -> Callable[[int, bytes], bytes]:
    """Return a change of one bit, `at` bytes from the start."""

    def change(offset: int, data: bytes) -> bytes:
        if offset <= at < offset + len(data):
            changed = bytearray(data)
            changed[at - offset] ^= 16
            return bytes(changed)
        return data

    return change


@pytest.mark.parametrize("at", [*range(0, 110, 13), 5_000])
def test_a_bit_that_flips_on_the_wire_is_never_in_a_file(head: Path, tmp_path: Path, at: int) -> None:
    """Prevents wrong weights that TCP let through, and a copy that waits for ever for what a flipped length
    promised: in the proof, in a length, in a name, in an offset, in the weights.
    """
    worker = tmp_path / "worker"
    wire = Wire(flip(at))
    said = ""
    try:
        shipment(head, worker, streams=2, kind=over(wire)).run()
    except Glm53Error as error:
        said = error.message
    wire.server.close()
    assert not said or at < 110
    assert all(FILES[name] == data for name, data in contents(worker).items())
    await_free(worker)
    send(head, worker)
    assert (contents(worker), leftovers(worker)) == (FILES, set())


@pytest.mark.parametrize("upto", [40, 19_000])
def test_what_a_broken_connection_swallowed_is_sent_again(head: Path, tmp_path: Path, upto: int) -> None:
    """Prevents a copy that waits for ever: the kernel took the whole file, the connection broke, and neither
    end had the file in hand any more.
    """
    wire = Wire(lambda offset, data: data if offset + len(data) <= upto else None)
    shipment(head, tmp_path / "worker", streams=2, kind=over(wire)).run()
    wire.server.close()
    assert (contents(tmp_path / "worker"), leftovers(tmp_path / "worker")) == (FILES, set())


def test_a_stream_that_has_nothing_to_send_is_not_given_up(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a copy that ends with all but one file there: when the rail of the last one went, the worker
    had already closed the connections that were waiting for something to do.
    """
    impatient(monkeypatch, "IDLE_SECONDS = 120.0", "IDLE_SECONDS = 0.2")

    wire = Wire(lambda offset, data: data if offset < 32 else None)
    wire.linger = 0.8
    shipment(head, tmp_path / "worker", streams=2, kind=over(wire)).run()
    wire.server.close()
    assert contents(tmp_path / "worker") == FILES


def test_a_half_is_hashed_before_more_is_sent(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a stream that is given up while a slow disk hashes the half of 5 GB that is there."""
    impatient(monkeypatch, "TICK_BLOCKS = 16", "TICK_BLOCKS = 1")
    worker = tmp_path / "worker"
    worker.mkdir()
    half = worker / f".{SHARD}.{sha256(FILES[SHARD])[:16]}.incomplete"
    half.write_bytes(FILES[SHARD][:16384])
    said = bytearray()

    def heard(_: int, data: bytes) -> bytes:
        said.extend(data)
        return data

    wire = Wire(lambda _, data: data)
    wire.back = heard
    assert shipment(head, worker, kind=over(wire)).run().bytes == TOTAL - 16384
    wire.server.close()
    assert contents(worker) == FILES
    assert b".!+" in said[32:]


def impatient(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Change a limit of the worker's program."""
    assert old in PROGRAM
    text = PROGRAM.replace(old, new).encode()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: text if self.name == "receive.py" else read(self))


# What is there on the worker


@as_root
@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("where", ["file", "half"])
def test_what_is_no_file_there_is_named_and_left(head: Path, tmp_path: Path, what: str, where: str) -> None:
    """Prevents a copy that waits for a pipe, or that replaces a folder, a socket or a device."""
    worker = tmp_path / "worker"
    worker.mkdir()
    half = f".{SHARD}.{sha256(FILES[SHARD])[:16]}.incomplete"
    path = worker / (SHARD if where == "file" else half)
    NO_FILES[what](path)
    with pytest.raises(ArtifactError, match=rf"unit-b: {path}"):
        send(head, worker)
    assert path.exists()
    assert not path.is_file()


def test_a_link_in_a_folders_place_is_not_followed_out(head: Path, tmp_path: Path) -> None:
    """Prevents a copy that writes into somebody else's folder, to which a link in ours leads."""
    worker, elsewhere = tmp_path / "worker", tmp_path / "elsewhere"
    elsewhere.mkdir()
    worker.mkdir()
    (worker / "provenance").symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match=rf"provenance leads to {elsewhere}, outside {worker}"):
        send(head, worker)
    assert list(elsewhere.iterdir()) == []


def test_a_rotten_manifest_or_record_there_is_replaced(head: Path, tmp_path: Path) -> None:
    """Prevents a worker that no copy mends, since what it wrote down about itself is wrong."""
    for text in (b"", b"\xff", b"{}", b'{"files": [1]}', (head / NAME).read_bytes().replace(b"a", b"b")):
        worker = flat(tmp_path / str(len(text)), FILES)
        (worker / NAME).write_bytes(text)
        (worker / UNFINISHED).write_bytes(text)
        assert send(head, worker).files == 0
        assert (worker / NAME).read_bytes() == (head / NAME).read_bytes()
        assert leftovers(worker) == set()


def test_a_half_that_is_longer_than_its_file_by_a_page_is_used(head: Path, tmp_path: Path) -> None:
    """Prevents sending gigabytes again after a kill between the last page and its cut."""
    worker = tmp_path / "worker"
    worker.mkdir()
    half = worker / f".{SHARD}.{sha256(FILES[SHARD])[:16]}.incomplete"
    half.write_bytes(FILES[SHARD] + bytes(-len(FILES[SHARD]) % 4096))
    assert send(head, worker).bytes == TOTAL - len(FILES[SHARD]) // 4096 * 4096
    assert contents(worker) == FILES


def test_a_clock_that_was_wrong_and_a_folder_that_is_held_change_nothing(head: Path, tmp_path: Path) -> None:
    """Prevents a copy by times, and a head that cannot be read while a check or a download looks at it."""
    worker = tmp_path / "worker"
    for when in (0, 4_000_000_000):
        for path in (head, worker):
            for file in path.rglob("*"):
                os.utime(file, (when, when))
        with held(head):
            send(head, worker)
        assert contents(worker) == FILES
        assert verify(layout_of(worker), full=True).right
        assert (worker / SHARD).stat().st_mtime == when
    assert send(head, worker).files == 0


# Names


def test_unusual_names_and_many_small_files_arrive(tmp_path: Path) -> None:
    """Prevents a name that becomes an option or too long once ours are added, and a line of talk a file."""
    strange = [" a b ", "-rf", "Ünï ✓ 模型", "*?[x]", "%s{}", "x" * 251 + ".txt", "é" * 126, "'\"$(x)`"]
    files = {**FILES, **{f"{name}/{name}": name.encode() for name in strange}}
    files |= {f"many/{n}": b"%d" % n for n in range(1000)}
    head, worker = with_manifest(flat(tmp_path / "head", files), files), tmp_path / "worker"
    send(head, worker, streams=8)
    assert (contents(worker), leftovers(worker)) == (files, set())
    said: list[str] = []
    again = shipment(head, worker)
    again._say = said.append
    assert (again.run().files, said) == (0, [])


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "a\nb", "\x1b[2J", "", "a//b", ".glm53-x", NAME]
)
def test_a_hostile_sender_writes_nowhere_else(head: Path, tmp_path: Path, name: str) -> None:
    """Prevents whoever may copy here from writing elsewhere: by a file's name, or by a name in the times."""
    manifest = json.loads((head / NAME).read_text())
    manifest["files"].append({"path": name, "size": 1, "sha256": sha256(b"x")})
    orders: list[dict[str, Any]] = [{"manifest": manifest}, {"times": {name: 1}}]
    for order in orders[:1] if name == NAME else orders:
        process = receiver(head, tmp_path / "worker", **order)
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["text"] == f"the sender names {name!r}, which is no path inside the folder"
        assert process.wait(10) == 1
        assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize(
    ("head_of_file", "said"),
    [
        (b'{"path": "../x", "offset": 0}', "'../x'"),
        (b'{"path": "%s", "offset": -4096}' % SHARD.encode(), "from -4096"),
        (b'{"path": "%s", "offset": 9999999999}' % SHARD.encode(), "from 9999999999"),
        (b"[]", "TypeError"),
        (None, "4294967295 bytes to name a file"),
    ],
)
def test_a_sender_that_says_what_cannot_be_is_refused(
    head: Path, tmp_path: Path, head_of_file: bytes | None, said: str
) -> None:
    """Prevents a file of holes, and four gigabytes of memory, for one wrong number."""
    process = receiver(head, tmp_path / "worker")
    assert process.stdin is not None
    assert process.stdout is not None
    ((address, port),) = json.loads(process.stdout.readline())["places"]
    with socket.create_connection((address, port)) as connection:
        nonce = connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(hmac.new(bytes.fromhex("ab" * 32), nonce, hashlib.sha256).digest())
        assert connection.recv(1) == b"+"
        if head_of_file is None:
            connection.sendall(b"\xff" * 4)
        else:
            connection.sendall(len(head_of_file).to_bytes(4, "big") + head_of_file)
        answer = json.loads(process.stdout.readline())
    assert answer["event"] == "error"
    assert said in answer["text"]
    process.stdin.close()
    assert process.wait(10) == 1
    assert contents(tmp_path / "worker") == {}
    shutil.rmtree(tmp_path / "worker")
