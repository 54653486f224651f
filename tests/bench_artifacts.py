"""The figures of shipping and verifying in docs/benchmarks.md: our mover beside rsync and a raw TCP pipe.

    python -m tests.bench_artifacts SOURCE TARGET --host spark@10.77.0.2 --rsh "ssh -i KEY" [--gb 1.5]
    python -m tests.bench_artifacts memory SOURCE

SOURCE is a folder here, TARGET one of `--host`, which --rsh reaches: another machine, or this one. The bytes
go to --address (repeatable, one a rail; the host's own without). On the lab: in spark-a's network namespace
(`ip netns exec g5-a`), to spark-b. Every round runs every way once, in turn, so that a busy machine is the
same for all. Timed is the moving: from the first connection to the last file in place, for rsync from its
login on (0.3 s of many). `memory` shows the largest resident size of each verb as a process of its own; it
counts what is shared as well, so its proportional size (PSS) is less. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm53_service.artifacts.hashing import hash_files
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Entry, Manifest, read_manifest, write_manifest
from glm53_service.artifacts.ship import LOADER, Shipment, Target

FILES = 8
BLOCK = 1 << 20
PORT = 29599

TAKE = """
import os, socket, sys, threading
folder, streams, addresses = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
servers = [socket.create_server((address, 29599)) for address in addresses]
print("ready", flush=True)
def one(connection):
    buffer = memoryview(bytearray(1 << 20))
    while head := connection.recv(48, socket.MSG_WAITALL):
        left = int(head[32:])
        with open(os.path.join(folder, head[:32].decode().strip()), "wb", buffering=0) as file:
            while left:
                size = connection.recv_into(buffer[: min(left, 1 << 20)])
                file.write(buffer[:size])
                left -= size
    connection.sendall(b"+")
threads = []
for number in range(streams):
    connection, _ = servers[number % len(servers)].accept()
    threads.append(threading.Thread(target=one, args=(connection,)))
    threads[-1].start()
for thread in threads:
    thread.join()
"""
"""The raw pipe's other end: read and write, no hash."""

PEAK = """
import atexit, sys
def peak():
    text = open("/proc/self/status").read()
    print("peak", text.partition("VmHWM:")[2].split()[0], file=sys.stderr)
atexit.register(peak)
from glm53_service.cli import main
if "download" in sys.argv:
    import encodings.idna, glm53_service.artifacts.download  # nobody may not read this machine's Python
    from glm53_service.artifacts.hub import Hub
    Hub().name
main()
"""


class Bench:
    """One source folder here, one target folder there, and ways from the one to the other."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.source, self.target, self.host = given.source, given.target, given.host
        self.rsh = shlex.split(given.rsh)
        self.addresses = tuple(given.address or [given.host.rpartition("@")[2]])
        self.manifest = make_files(given.source, int(given.gb * 1e9))
        self.names = [entry.path for entry in self.manifest.files]
        self.bytes = self.manifest.bytes
        self.peaks: dict[str, int] = {}

    def there(self, *argv: str) -> list[str]:
        """Return the command that runs `argv` on the host."""
        return [*self.rsh, self.host, "--", shlex.join(argv)]

    def clean(self) -> None:
        """Empty the target."""
        script = 'rm -rf "$1" && mkdir -p "$1" && sync'
        subprocess.run(self.there("sh", "-c", script, "sh", str(self.target)), check=True)
        os.sync()

    def rsync(self) -> float:
        """Copy as `rsync -a` does."""
        return self._rsync(["-a"], shlex.join(self.rsh), f"{self.source}/", f"{self.target}/")

    def parallel(self, count: int) -> float:
        """Copy with several rsyncs at once, the cheapest cipher, no delta."""
        rsh = shlex.join([*self.rsh, "-c", "aes128-gcm@openssh.com"])
        began = time.monotonic()
        flags = ["-a", "--whole-file", "--inplace"]
        with ThreadPoolExecutor(count) as pool:
            list(
                pool.map(
                    lambda name: self._rsync(flags, rsh, str(self.source / name), f"{self.target}/{name}"),
                    self.names,
                )
            )
        return time.monotonic() - began

    def _rsync(self, flags: list[str], rsh: str, source: str, target: str) -> float:
        began = time.monotonic()
        subprocess.run(
            ["rsync", *flags, "-e", rsh, source, f"{self.host}:{target}"], check=True, capture_output=True
        )
        return time.monotonic() - began

    def raw(self, streams: int) -> float:
        """Copy over bare TCP: sendfile on one side, read and write on the other, no hash."""
        argv = self.there("python3", "-I", "-c", TAKE, str(self.target), str(streams), *self.addresses)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            began = time.monotonic()
            names: Iterator[str] = iter(self.names)
            lock = threading.Lock()

            def send(number: int) -> None:
                address = self.addresses[number % len(self.addresses)]
                with socket.create_connection((address, PORT)) as connection:
                    while True:
                        with lock:
                            name = next(names, None)
                        if name is None:
                            break
                        with (self.source / name).open("rb") as file:
                            size = os.fstat(file.fileno()).st_size
                            connection.sendall(f"{name:32}{size:16}".encode())
                            connection.sendfile(file)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)

            threads = [threading.Thread(target=send, args=(number,)) for number in range(streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return time.monotonic() - began

    def ship(self, streams: int) -> float:
        """Copy as `glm53 ship` does, the hash included, in a process of its own."""
        launcher = self.there("/usr/bin/python3", "-I", "-c", LOADER)
        order = {
            "source": str(self.source),
            "target": str(self.target),
            "addresses": self.addresses,
            "launcher": launcher,
            "streams": streams,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench_artifacts", "send", json.dumps(order)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        said = json.loads(done.stdout)
        for end in ("sender", "receiver"):
            self.peaks[end] = max(self.peaks.get(end, 0), said[end])
        return float(said["seconds"])

    def sha256sum(self) -> float:
        """Hash as people do."""
        began = time.monotonic()
        subprocess.run(
            ["sha256sum", *(str(self.source / n) for n in self.names)], check=True, capture_output=True
        )
        return time.monotonic() - began

    def verify(self) -> float:
        """Hash as `glm53 verify --full` does."""
        began = time.monotonic()
        list(hash_files([self.source / name for name in self.names]))
        return time.monotonic() - began


def make_files(folder: Path, size: int) -> Manifest:
    """Write random files with their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"f{number}.bin" for number in range(FILES)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(size // FILES // BLOCK):
                file.write(os.urandom(BLOCK))
    hashes = {path: str(sha) for path, sha in hash_files(paths)}
    files = tuple(Entry(path=p.name, size=p.stat().st_size, sha256=hashes[p]) for p in paths)
    manifest = Manifest(repository="unit/bench", revision="0" * 40, files=files)
    write_manifest(folder, manifest)
    return manifest


class Timed(Shipment):
    """A shipment that knows how long the bytes took."""

    moving = 0.0

    def _send_all(self, *arguments: object) -> None:
        began = time.monotonic()
        super()._send_all(*arguments)  # type: ignore[arg-type]
        self.moving = time.monotonic() - began


def send(order: dict[str, object]) -> None:
    """Ship once, and print what it took."""
    manifest = read_manifest(Path(str(order["source"])))
    assert manifest is not None
    target = Target(
        node="bench",
        launcher=tuple(order["launcher"]),  # type: ignore[arg-type]
        addresses=tuple(order["addresses"]),  # type: ignore[arg-type]
        folder=Path(str(order["target"])),
    )
    layout = layout_of(str(order["source"]))
    limit = float(str(order.get("limit", 0)))
    shipment = Timed(
        layout,
        manifest,
        target,
        streams=int(str(order["streams"])),
        limit=lambda: limit,
        say=lambda _: None,
    )
    done = shipment.run()
    own = Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2].split()[0]
    said = {"seconds": shipment.moving, "receiver": done.peak_kib, "sender": int(own), "bytes": done.bytes}
    print(json.dumps(said))


def measure(bench: Bench, ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return GB/s of each way in each round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            bench.clean()
            rates[name].append(bench.bytes / 1e9 / way())
    bench.clean()
    return rates


def memory(source: Path, size: int) -> None:
    """Print the largest resident size of `glm53 verify --full` and of `glm53 download` with four streams."""
    from tests.unit.doubles import settings_text
    from tests.unit.hub_server import COMMIT, HubServer, Repository, serving
    from tests.unit.snapshots import REPOSITORY, model_files

    make_files(source, size)
    print(f"glm53 verify --full: {_peak({}, 'verify', '--full', str(source))} MiB")
    shutil.rmtree(source)
    files = model_files(6)
    files |= {name: os.urandom(size // 6) for name in files if name.endswith(".safetensors")}
    with (
        serving(HubServer({REPOSITORY: Repository(files=files)})) as hub,
        tempfile.TemporaryDirectory() as etc,
    ):
        model = {"source": {"repository": REPOSITORY, "revision": COMMIT}}
        (Path(etc) / "settings.yaml").write_text(settings_text(source, model=model))
        source.mkdir()
        os.chown(source, 65534, 65534)
        for folder in (source, *source.parents):
            folder.chmod(folder.stat().st_mode | 0o055)
        said = _peak({"HF_ENDPOINT": hub.url}, "--etc", etc, "download", "--user", "nobody")
        print(f"glm53 download, 4 streams: {said} MiB")
    shutil.rmtree(source)


def _peak(environment: dict[str, str], *argv: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *argv],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return round(int(done.stderr.rpartition("peak ")[2]) / 1024)


def main() -> int:
    """Measure and print one table."""
    if sys.argv[1:2] == ["send"]:
        send(json.loads(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["memory"]:
        memory(Path(sys.argv[2]), 900_000_000)
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--address", action="append", default=[])
    parser.add_argument("--rsh", default="ssh")
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="without the ways that many rsyncs take")
    given = parser.parse_args()
    bench = Bench(given)
    streams = (1, 4, 8)
    ways: dict[str, Callable[[], float]] = {"`rsync -a` over ssh": bench.rsync}
    for count in () if given.short else (4, 8):
        ways[f"{count} rsync, aes128-gcm, whole files"] = lambda n=count: bench.parallel(n)  # type: ignore[misc]
    for count in streams:
        ways[f"raw TCP, {count} streams, no hash"] = lambda n=count: bench.raw(n)  # type: ignore[misc]
        ways[f"`glm53 ship`, {count} streams"] = lambda n=count: bench.ship(n)  # type: ignore[misc]
    ways |= {"`sha256sum`": bench.sha256sum, "`glm53 verify --full`": bench.verify}
    rates = measure(bench, ways, given.rounds)
    load = os.getloadavg()[0]
    print(f"{bench.bytes / 1e9:.1f} GB in {FILES} files, {given.rounds} rounds, load {load:.1f}\n")
    print("| | GB/s | range |\n| --- | --- | --- |")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |")
    for count in streams:
        ratios = [
            ours / pipe
            for ours, pipe in zip(
                rates[f"`glm53 ship`, {count} streams"],
                rates[f"raw TCP, {count} streams, no hash"],
                strict=True,
            )
        ]
        print(
            f"of the pipe in the same round, {count} streams: {statistics.median(ratios):.2f}"
            f" ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print("largest resident size:", {end: f"{kib / 1024:.0f} MiB" for end, kib in bench.peaks.items()})
    shutil.rmtree(given.source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
