"""Shipping a snapshot: the real receiver as a process on loopback, started as ssh would start it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glm53_service.artifacts import ship
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import NAME, UNFINISHED, Entry, Manifest, read_manifest, write_manifest
from glm53_service.artifacts.route import Kind, Route, check_route, find_route
from glm53_service.artifacts.ship import LOADER, Pace, Shipment, Shipped, Target, ssh_launcher
from glm53_service.artifacts.snapshot import quick_check
from glm53_service.errors import ArtifactError, BusyError, UnavailableError
from tests.unit.hub_server import COMMIT, sha256
from tests.unit.snapshots import REPOSITORY, cache, contents, flat, hidden, model_files, touch_after

RECEIVER = (sys.executable, "-I", "-c", LOADER)
FILES = model_files(4, size=300_000)
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The head's copy, with its manifest."""
    return with_manifest(flat(tmp_path / "head", FILES), FILES)


def with_manifest(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the manifest of `files` into `folder`."""
    entries = tuple(Entry(path=n, size=len(d), sha256=sha256(d)) for n, d in sorted(files.items()))
    write_manifest(folder, Manifest(repository=REPOSITORY, revision=COMMIT, files=entries))
    return folder


def shipment(
    head: Path,
    worker: Path,
    *,
    launcher: tuple[str, ...] = RECEIVER,
    limit: Callable[[], float] = lambda: 0.0,
    full: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Shipment:
    """Return the copy of `head` to `worker`, over two addresses as two rails are."""
    manifest = read_manifest(head)
    assert manifest is not None
    addresses = ("127.0.0.1", "127.0.0.2")
    return Shipment(
        layout_of(head),
        manifest,
        Target(node="unit-b", launcher=launcher, addresses=addresses, folder=worker),
        streams=3,
        limit=limit,
        full=full,
        say=say,
    )


def send(head: Path, worker: Path, *, full: bool = False) -> Shipped:
    """Copy."""
    return shipment(head, worker, full=full).run()


@pytest.mark.parametrize("kind", ["flat", "model", "hub", "chain"])
def test_every_byte_arrives_whatever_the_layout(tmp_path: Path, kind: str) -> None:
    """Prevents 13 MB of links shipped for a model of 164 GiB: links are followed, the copy is whole."""
    head = flat(tmp_path / "head", FILES) if kind == "flat" else cache(tmp_path / "hub", FILES, kind=kind)
    worker = tmp_path / "srv/models/unit"
    done = send(with_manifest(head, FILES), worker)
    assert contents(worker) == FILES
    assert hidden(worker) == {NAME}
    assert (done.files, done.bytes) == (8, sum(map(len, FILES.values())))
    assert not [p for p in worker.rglob("*") if p.is_symlink()]
    manifest = read_manifest(worker)
    assert manifest is not None
    assert quick_check(layout_of(worker), manifest) == []
    assert done.peak_kib < 100 * 1024


def test_a_second_copy_sends_nothing(head: Path, tmp_path: Path) -> None:
    """Prevents 164 GiB over the cable, or read again, because somebody ran it again: times are equal too."""
    worker = tmp_path / "worker"
    send(head, worker)
    for name in [*FILES, NAME]:
        assert (worker / name).stat().st_mtime_ns == (head / name).stat().st_mtime_ns
    assert (worker / NAME).read_text() == (head / NAME).read_text()
    stamps = {p: p.stat().st_mtime_ns for p in worker.rglob("*.safetensors")}
    assert (send(head, worker).files, send(head, worker).bytes) == (0, 0)
    assert {p: p.stat().st_mtime_ns for p in worker.rglob("*.safetensors")} == stamps


def test_a_copy_by_other_means_is_hashed_and_kept(head: Path, tmp_path: Path) -> None:
    """Prevents a copy made with rsync from being sent anew, and a rotten one from being believed."""
    worker = flat(tmp_path / "worker", FILES)
    rotten = bytearray(FILES[SHARD])
    rotten[-1] ^= 1
    (worker / SHARD).write_bytes(rotten)
    assert send(head, worker).files == 1
    assert contents(worker) == FILES


def test_full_hashes_what_was_proven_before(head: Path, tmp_path: Path) -> None:
    """Prevents a bit that flipped on the worker's disk from staying, and from costing a whole copy."""
    worker = tmp_path / "worker"
    send(head, worker)
    rotten = bytearray(FILES[SHARD])
    rotten[7000] ^= 4
    time = (worker / SHARD).stat().st_mtime_ns
    (worker / SHARD).write_bytes(rotten)
    os.utime(worker / SHARD, ns=(time, time))
    assert send(head, worker).files == 0
    assert send(head, worker, full=True).files == 1
    assert contents(worker) == FILES


def hashed(said: list[str]) -> list[str]:
    """Return the weight files that the worker hashed."""
    names = [line.split()[2].rstrip(",") for line in said if "hashing " in line]
    return [name for name in names if name.endswith(".safetensors")]


def test_a_file_that_was_changed_since_its_proof_is_hashed_again(head: Path, tmp_path: Path) -> None:
    """Prevents a drafter of other bytes that no run ever mends, because its size and manifest are right.

    One that only has another time stays, and is not sent: it is hashed once, whoever owns it.
    """
    worker = tmp_path / "worker"
    send(head, worker)
    other = bytearray(FILES[SHARD])
    other[100] ^= 1
    first, record = worker / "model-00001-of-00004.safetensors", worker / NAME
    touch_after(first, record, lambda: os.utime(first, ns=(2, 2)))
    (worker / SHARD).write_bytes(other)
    os.utime(worker / SHARD, ns=(1, 1))
    said: list[str] = []
    again = shipment(head, worker, say=said.append)
    assert again.run().files == 1
    assert sorted(hashed(said)) == ["model-00001-of-00004.safetensors", SHARD]
    assert contents(worker) == FILES
    said.clear()
    assert shipment(head, worker, say=said.append).run().files == 0
    assert hashed(said) == []
    # The state of an account that may not set times: another one than the head's, from before the proof.
    os.utime(first, ns=(2, 2))
    touch_after(record, first, lambda: os.utime(record))
    assert shipment(head, worker, say=said.append).run().files == 0
    assert hashed(said) == []


def test_a_file_is_never_written_through_a_link(head: Path, tmp_path: Path) -> None:
    """Prevents a copy that destroys another model's file, to which a link in the folder leads."""
    worker = flat(tmp_path / "worker", {})
    worker.mkdir()
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    (worker / SHARD).symlink_to(other)
    part = worker / f".{SHARD}.{sha256(FILES[SHARD])[:16]}.incomplete"
    part.symlink_to(other)
    with pytest.raises(ArtifactError, match="symbolic links"):
        send(head, worker)
    part.unlink()
    send(head, worker)
    assert other.read_bytes() == b"precious"
    assert contents(worker) == FILES


@pytest.mark.parametrize("victim", ["receiver", "sender"])
def test_a_killed_copy_goes_on_where_it_stopped(head: Path, tmp_path: Path, victim: str) -> None:
    """Prevents a copy that begins anew after kill -9, and a receiver that lives on without its sender."""
    worker, pids = tmp_path / "worker", tmp_path / "receiver.pid"
    launcher = ("/bin/sh", "-c", f'echo $$ > {pids}; exec "$0" "$@"', *RECEIVER)
    ship.CHUNK, before = 50_000, ship.CHUNK
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shipment(head, worker, launcher=launcher, limit=lambda: 500_000).run()
        except UnavailableError:
            code = 7
        finally:
            os._exit(code)
    ship.CHUNK = before
    first = worker / "config.json"
    while not (first.exists() or (worker / UNFINISHED).exists()):
        time.sleep(0.01)
    receiver = int(pids.read_text())
    os.kill(receiver if victim == "receiver" else child, 9)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (7 if victim == "receiver" else -9)
    for _ in range(500):
        if not Path(f"/proc/{receiver}/cmdline").exists() or _zombie(receiver):
            break
        time.sleep(0.01)
    else:
        pytest.fail("the receiver outlived its sender")
    assert not (worker / NAME).exists()
    done = send(head, worker)
    assert contents(worker) == FILES
    assert done.bytes < sum(map(len, FILES.values()))
    assert hidden(worker) == {NAME}


def _zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_unfinished_file_is_continued_and_a_rotten_one_sent_anew(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents both: sending again what is there, and a file glued of old and new bytes."""
    worker = tmp_path / "worker"
    worker.mkdir()
    part = worker / f".{SHARD}.{sha256(FILES[SHARD])[:16]}.incomplete"
    part.write_bytes(FILES[SHARD][:100_000])
    total = sum(map(len, FILES.values()))
    assert send(head, worker).bytes == total - 98_304
    assert "arrived wrong" not in capsys.readouterr().err
    (worker / SHARD).unlink()
    part.write_bytes(b"x" * 100_000)
    send(head, worker)
    assert contents(worker) == FILES
    assert f"{SHARD}: arrived wrong; sent again" in capsys.readouterr().err


def test_a_rotten_file_of_the_head_is_not_shipped(head: Path, tmp_path: Path) -> None:
    """Prevents the head's bad disk from being copied to every node as the truth."""
    rotten = bytearray(FILES[SHARD])
    rotten[5] ^= 1
    (head / SHARD).write_bytes(rotten)
    with pytest.raises(ArtifactError, match=rf"{SHARD}: what arrives is not .*, 3 times\n.*verify --full"):
        send(head, tmp_path / "worker")
    assert not (tmp_path / "worker" / SHARD).exists()
    assert not (tmp_path / "worker" / NAME).exists()


def test_an_incomplete_head_ships_nothing(head: Path, tmp_path: Path) -> None:
    """Prevents a worker with less than the whole model that is called done."""
    (head / SHARD).unlink()
    with pytest.raises(ArtifactError, match=f"not complete here:\n  - {SHARD}: not there"):
        send(head, tmp_path / "worker")
    assert not (tmp_path / "worker").exists()


def test_room_is_asked_before_the_first_byte(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a copy that looks hung on a full disk; what is there already needs no room."""
    worker = tmp_path / "worker"
    with monkeypatch.context() as patch:
        patch.setattr(ship, "SPARE_BYTES", 1 << 60)
        with pytest.raises(ArtifactError, match=r"unit-b: .* GB free, but 0\.0 GB are missing"):
            send(head, worker)
        assert contents(worker) == {}
    send(head, worker)
    monkeypatch.setattr(ship, "SPARE_BYTES", 1 << 60)
    assert send(head, worker).files == 0


def test_foreign_weights_and_another_run_are_refused(head: Path, tmp_path: Path) -> None:
    """Prevents an engine that loads a stranger's shard, and two copies into one folder."""
    worker = flat(tmp_path / "worker", {"old-00001.safetensors": b"old"})
    with pytest.raises(ArtifactError, match=r"old-00001\.safetensors is not one of the head's files"):
        send(head, worker)
    (worker / "old-00001.safetensors").unlink()
    descriptor = os.open(worker, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match="is being filled by another run"):
        send(head, worker)
    os.close(descriptor)
    assert send(head, worker).files == 8


def test_a_folder_that_cannot_be_made_names_the_command(head: Path) -> None:
    """Prevents rsync's "mkdir failed" for a parent folder that is missing or of root."""
    with pytest.raises(ArtifactError, match=r"/proc/unit cannot be made by .*\n.*sudo install -d -o "):
        send(head, Path("/proc/unit"))


def test_ssh_that_fails_says_what_ssh_said(head: Path, tmp_path: Path) -> None:
    """Prevents a copy that waits for ever for a login that was refused."""
    launcher = ("/bin/sh", "-c", "echo 'Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(UnavailableError, match=r"other end ended: Permission denied \(publickey\)"):
        shipment(head, tmp_path / "worker", launcher=launcher).run()


def test_a_stranger_on_the_fabric_cannot_write(head: Path, tmp_path: Path) -> None:
    """Prevents whoever can reach the port from putting files on the worker."""
    program = Path(ship.__file__).with_name("receive.py").read_bytes()
    manifest = json.loads((head / NAME).read_text())
    order = {
        "folder": str(tmp_path / "worker"),
        "addresses": ["127.0.0.1"],
        "secret": "ab" * 32,
        "spare": 0,
        "full": False,
        "text": "",
        "times": {},
        "manifest": manifest,
    }
    process = subprocess.Popen(RECEIVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"%d\n" % len(program) + program + json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    ((address, port),) = json.loads(process.stdout.readline())["places"]
    with socket.create_connection((address, port)) as connection:
        assert len(connection.recv(32)) == 32
        connection.sendall(bytes(32))
        assert connection.recv(1) == b""
    process.stdin.close()
    assert process.wait(10) == 1
    assert contents(tmp_path / "worker") == {}


def test_the_worker_gets_one_command_line_of_ssh(tmp_path: Path) -> None:
    """Prevents a login that asks for a password or trusts any host, and quotes that the remote shell eats."""
    argv = ssh_launcher("spark", "10.78.0.2", port=2222, key=Path("/k"), known_hosts=Path("/h"))
    assert argv[:6] == ("ssh", "-F", "/dev/null", "-i", "/k", "-p")
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "UserKnownHostsFile=/h"} <= set(argv)
    remote = " ".join(argv[argv.index("--") + 1 :])
    done = subprocess.run(["sh", "-c", remote], input=b"9\nprint(42)", capture_output=True, check=True)
    assert done.stdout == b"42\n"


def test_a_copy_that_may_not_begin_sends_nothing(head: Path, tmp_path: Path) -> None:
    """Prevents a refused copy that has begun, and a refusal where there is nothing to send."""

    def refuse() -> float:
        raise BusyError("the pair is serving")

    with pytest.raises(BusyError, match="the pair is serving"):
        shipment(head, tmp_path / "worker", limit=refuse).run()
    assert contents(tmp_path / "worker") == {}
    send(head, tmp_path / "worker")
    assert shipment(head, tmp_path / "worker", limit=refuse).run().files == 0


def test_the_limit_holds_for_all_streams_together() -> None:
    """Prevents eight streams that each take the limit while the pair serves."""
    now = [50.0]
    slept: list[float] = []
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    limit = 1000.0
    pace = Pace(lambda: limit, lambda: now[0], sleep)
    for _ in range(4):
        pace.wait(500)
    assert slept == [0.5, 1.0, 1.5]
    now[0] += 10
    pace.wait(500)
    assert slept == [0.5, 1.0, 1.5]
    limit = 100.0
    pace.wait(50)
    assert slept == [0.5, 1.0, 1.5, 0.5]
    limit = 0.0
    pace.wait(10**9)
    assert slept == [0.5, 1.0, 1.5, 0.5]


# Over which network


def tree(root: Path, netdev: str, files: dict[str, str]) -> Path:
    """Write what /sys says of a device."""
    for name, text in {"type": "1", **files}.items():
        path = root / f"sys/class/net/{netdev}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("netdev", "files", "kind"),
    [
        ("wlP9s9", {"wireless/status": ""}, Kind.WIFI),
        ("wlan0", {"phy80211/name": "phy0"}, Kind.WIFI),
        ("wg0", {"type": "65534"}, Kind.VPN),
        ("tun3", {"tun_flags": "0x1"}, Kind.VPN),
        ("tailscale0", {"type": "65534", "tun_flags": "0x1"}, Kind.VPN),
        ("ppp0", {"type": "512"}, Kind.VPN),
        ("enP7s7", {"speed": "10000"}, Kind.WIRE),
    ],
)
def test_weights_do_not_go_over_wifi_or_a_vpn(
    tmp_path: Path, netdev: str, files: dict[str, str], kind: Kind
) -> None:
    """Prevents 22 GB at 20 MB/s over Wi-Fi while the fabric lies idle."""
    answer = json.dumps([{"dst": "10.0.0.2", "dev": netdev, "prefsrc": "10.0.0.1"}])
    route = find_route("10.0.0.2", root=tree(tmp_path, netdev, files), run=lambda _: answer)
    assert (route.netdev, route.kind) == (netdev, kind)
    if kind is Kind.WIRE:
        check_route(route, any_network=False)
        assert str(route) == "10.0.0.2 over enP7s7 (wire, 10 Gb/s)"
        return
    with pytest.raises(BusyError, match=rf"{netdev} \({kind}\): not for weights"):
        check_route(route, any_network=False)
    check_route(route, any_network=True)


def test_the_fabric_is_known_by_its_rdma_device(tmp_path: Path) -> None:
    """Prevents guessing by device names: a Spark's fabric is called enp1s0f1np1."""
    root = tree(tmp_path, "enp1s0f1np1", {"speed": "200000"})
    (root / "sys/class/infiniband/rocep1s0f1/device/net/enp1s0f1np1").mkdir(parents=True)
    answer = json.dumps([{"dev": "enp1s0f1np1"}])
    route = find_route("10.0.0.2", root=root, run=lambda _: answer)
    assert route == Route(address="10.0.0.2", netdev="enp1s0f1np1", kind=Kind.FABRIC, megabits=200000)
    with pytest.raises(UnavailableError, match=r"no route to 10\.0\.0\.2"):
        find_route("10.0.0.2", root=root, run=lambda _: "[]")
