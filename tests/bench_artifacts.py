"""The figures of shipping and verifying in docs/benchmarks.md: our mover beside rsync and a raw TCP pipe.

    python -m tests.bench_artifacts SOURCE TARGET --rsh "ssh -p 22977" [--gb 2] [--rounds 3]

SOURCE and TARGET are folders of one machine (tmpfs, disk); random files are made in SOURCE. --rsh reaches
an sshd of this machine, for rsync. Every round runs every way once, in turn, so that a busy machine is the
same for all; medians are shown, and the processor's seconds a GB (both ends; of rsync only the sender's).
Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm53_service.artifacts.hashing import hash_files
from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Entry, Manifest, write_manifest
from glm53_service.artifacts.ship import LOADER, Shipment, Target

FILES = 8
BLOCK = 1 << 20


class Bench:
    """One source folder, one target folder, and ways from the one to the other."""

    def __init__(self, source: Path, target: Path, host: str, rsh: str, size: int) -> None:
        self.source, self.target, self.host, self.rsh = source, target, host, rsh
        source.mkdir(parents=True, exist_ok=True)
        self.names = [f"f{number}" for number in range(FILES)]
        for name in self.names:
            with (source / name).open("wb") as file:
                for _ in range(size // FILES // BLOCK):
                    file.write(os.urandom(BLOCK))
        self.bytes = sum((source / name).stat().st_size for name in self.names)
        hashes = {path.name: str(sha) for path, sha in hash_files([source / n for n in self.names])}
        files = tuple(Entry(path=n, size=(source / n).stat().st_size, sha256=hashes[n]) for n in self.names)
        self.manifest = Manifest(repository="unit/bench", revision="0" * 40, files=files)
        self.peak_kib = 0

    def rsync(self) -> None:
        """Copy as `rsync -a` does."""
        self._rsync(["-a"], self.rsh, f"{self.source}/", f"{self.target}/")

    def parallel(self, count: int) -> None:
        """Copy with several rsyncs at once, the cheapest cipher, no delta."""
        rsh = f"{self.rsh} -c aes128-gcm@openssh.com"
        with ThreadPoolExecutor(count) as pool:
            list(
                pool.map(
                    lambda name: self._rsync(
                        ["-a", "--whole-file", "--inplace"],
                        rsh,
                        str(self.source / name),
                        f"{self.target}/{name}",
                    ),
                    self.names,
                )
            )

    def _rsync(self, flags: list[str], rsh: str, source: str, target: str) -> None:
        subprocess.run(
            ["rsync", *flags, "-e", rsh, source, f"{self.host}:{target}"], check=True, capture_output=True
        )

    def raw(self, streams: int) -> None:
        """Copy over bare TCP: sendfile on one side, read and write on the other, no hash."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            child = os.fork()
            if child == 0:
                self._take(server, streams)
                os._exit(0)
            names: Iterator[str] = iter(self.names)
            lock = threading.Lock()

            def send() -> None:
                with socket.create_connection(server.getsockname()) as connection:
                    while True:
                        with lock:
                            name = next(names, None)
                        if name is None:
                            return
                        with (self.source / name).open("rb") as file:
                            size = os.fstat(file.fileno()).st_size
                            connection.sendall(f"{name:32}{size:16}".encode())
                            connection.sendfile(file)

            threads = [threading.Thread(target=send) for _ in range(streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.waitpid(child, 0)

    def _take(self, server: socket.socket, streams: int) -> None:
        def one(connection: socket.socket) -> None:
            buffer = memoryview(bytearray(BLOCK))
            while head := connection.recv(48, socket.MSG_WAITALL):
                left = int(head[32:])
                with (self.target / head[:32].decode().strip()).open("wb", buffering=0) as file:
                    while left:
                        size = connection.recv_into(buffer[: min(left, BLOCK)])
                        file.write(buffer[:size])
                        left -= size

        threads = [threading.Thread(target=one, args=(server.accept()[0],)) for _ in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ship(self, streams: int) -> None:
        """Copy as `glm53 ship` does, the hash included; the receiver is started without ssh."""
        receiver = (sys.executable, "-I", "-c", LOADER)
        target = Target(node="bench", launcher=receiver, addresses=("127.0.0.1",), folder=self.target)
        shipment = Shipment(
            layout_of(self.source), self.manifest, target, streams=streams, say=lambda _: None
        )
        done = shipment.run()
        self.peak_kib = max(self.peak_kib, done.peak_kib)

    def sha256sum(self) -> None:
        """Hash as people do."""
        subprocess.run(
            ["sha256sum", *(str(self.source / n) for n in self.names)], check=True, capture_output=True
        )

    def verify(self) -> None:
        """Hash as `glm53 verify --full` does."""
        list(hash_files([self.source / name for name in self.names]))


def measure(
    bench: Bench, ways: dict[str, Callable[[], None]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return GB/s, and processor seconds a GB, of each way in each round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            shutil.rmtree(bench.target, ignore_errors=True)
            bench.target.mkdir(parents=True)
            os.sync()
            began, before = time.monotonic(), sum(os.times()[:4])
            way()
            rates[name].append(bench.bytes / 1e9 / (time.monotonic() - began))
            costs[name].append((sum(os.times()[:4]) - before) / (bench.bytes / 1e9))
    shutil.rmtree(bench.target, ignore_errors=True)
    return rates, costs


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rsh", default="ssh")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    bench = Bench(
        given.source, given.target, given.host, shlex.join(shlex.split(given.rsh)), int(given.gb * 1e9)
    )
    write_manifest(given.source, bench.manifest)
    ways: dict[str, Callable[[], None]] = {
        "rsync -a over ssh": bench.rsync,
        "4 rsync, aes128-gcm, whole files": lambda: bench.parallel(4),
        "8 rsync, aes128-gcm, whole files": lambda: bench.parallel(8),
        **{f"raw TCP, {n} streams, no hash": (lambda n=n: bench.raw(n)) for n in (1, 4, 8)},  # type: ignore[misc]
        **{f"glm53 ship, {n} streams": (lambda n=n: bench.ship(n)) for n in (1, 4, 8)},  # type: ignore[misc]
        "sha256sum": bench.sha256sum,
        "glm53 verify --full": bench.verify,
    }
    rates, costs = measure(bench, ways, given.rounds)
    print(
        f"{bench.bytes / 1e9:.1f} GB in {FILES} files, {given.rounds} rounds, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| | GB/s | range | processor, s a GB |\n| --- | --- | --- | --- |")
    for name, values in rates.items():
        print(
            f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |"
            f" {statistics.median(costs[name]):.2f} |"
        )
    print(f"\nreceiver's peak: {bench.peak_kib / 1024:.0f} MiB")
    shutil.rmtree(given.source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
