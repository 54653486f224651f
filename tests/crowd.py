"""`python -m tests.crowd`: what a lead with three followers costs, as processes of this machine.

No lab has four hosts, so the containers are those of a docker in memory, and rank 0's API is a small server
of this program; the supervisors, their connections and their times are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.here import TICKS, gate_host, pss_mib, supervise, ticks
from tests.unit.doubles import FakeApi, FakeContainer, FakeDocker, free_port, settings_text

SECONDS = 60
NAMES = ("a", "b", "c", "d")
TIMES = {"heartbeat_seconds": 1.0, "lease_seconds": 4.0, "peer_lost_seconds": 8.0}
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


async def run(name: str, folder: Path, ports: list[int]) -> None:
    """Run one supervisor with the product's own times."""
    peers, gate, api = ports
    docker, server = FakeDocker(), Server(api)
    if name == NAMES[0]:
        docker.on_start, docker.on_exit = server.start, server.stop
    settings = settings_text(folder / "model", api={"port": api}, gate={"port": gate}, supervision=TIMES)
    await supervise(name, NAMES, peers, folder, settings, docker)


class Server:
    """Rank 0's API as a process, so that the lead's own figures stay its own."""

    def __init__(self, port: int) -> None:
        self._argv = [sys.executable, "-m", "tests.crowd", "api", ".", "0", "0", str(port)]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, _: FakeContainer) -> None:
        """Start it; the lead asks until it answers."""
        self._process = await asyncio.create_subprocess_exec(*self._argv)

    async def stop(self, _: FakeContainer) -> None:
        """End it."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def serve_api(port: int) -> None:
    """Be rank 0's API until killed."""
    api = FakeApi(port, model="unit-model", reply="It is Paris.")
    api.requests = 0
    await api.start(None)  # type: ignore[arg-type]
    await asyncio.Event().wait()


def measure(folder: Path) -> None:
    """Start a lead and three followers, wait until they serve, and print memory and processor of each."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    ports = [free_port() for _ in range(3)]
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-m", "tests.crowd", name, str(folder), *map(str, ports)],
            stderr=subprocess.DEVNULL,
        )
        for name in NAMES
    }
    try:
        wait_until_serving(f"http://{gate_host(1)}:{ports[1]}/status")
        before = {name: ticks(processes[name].pid) for name in NAMES}
        time.sleep(SECONDS)
        print("| supervisor | PSS MiB | % of a core |\n|---|---|---|")
        for number, name in enumerate(NAMES):
            share = (ticks(processes[name].pid) - before[name]) / TICKS / SECONDS * 100
            who = "lead, three followers" if not number else f"follower, rank {number}"
            print(f"| {who} | {pss_mib(processes[name].pid):.1f} | {share:.2f} |")
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


def wait_until_serving(gate: str) -> dict[str, Any]:
    """Return the lead's status once its gate says ready; 60 s is the budget."""
    ends = time.monotonic() + 60
    now: dict[str, Any] = {}
    while time.monotonic() < ends:
        try:
            now = json.load(OPENER.open(gate, timeout=2))
        except (urllib.error.URLError, OSError):
            now = {}
        if now.get("ready"):
            return now
        time.sleep(0.2)
    raise SystemExit(f"never ready: {now}")


def main() -> None:
    """Be one of the processes, or measure them all."""
    parser = argparse.ArgumentParser(description="memory and processor of a lead with three followers")
    parser.add_argument("name", nargs="?", choices=("api", *NAMES))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("ports", nargs="*", type=int)
    given: Any = parser.parse_args()
    if given.name is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder))
    elif given.name == "api":
        asyncio.run(serve_api(given.ports[2]))
    else:
        asyncio.run(run(given.name, given.folder, given.ports))


if __name__ == "__main__":
    main()
