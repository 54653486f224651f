"""`python -m tests.crowd`: what a lead with three followers costs, as processes of this machine.

No lab has four hosts, so the containers are those of a docker in memory, and rank 0's API is a small server
of this program; the supervisors, their connections and their times are the real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm53_service.node import Node, load_node
from glm53_service.notify import Notifier
from glm53_service.settings import load_settings
from glm53_service.supervisor import service
from glm53_service.supervisor.follow import Follower
from glm53_service.supervisor.lead import Lead
from glm53_service.supervisor.world import World
from tests.unit.doubles import FakeApi, FakeContainer, FakeDocker, free_port, settings_text

SECONDS = 60
NAMES = ("a", "b", "c", "d")
TICKS = os.sysconf("SC_CLK_TCK")
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def node(name: str, port: int) -> Node:
    """Return node.yaml of one of four nodes, all of them on loopback."""
    rows = "".join(
        f"{{node: {n}, management: 127.0.0.{i}, fabric: [127.0.1.{i}]}}," for i, n in enumerate(NAMES, 1)
    )
    text = f"{{version: 1, cluster: unit, node: {name}, supervisor_port: {port}, nodes: [{rows}]}}"
    return load_node(text, "node.yaml")


async def links(argv: Sequence[str]) -> str:
    """Answer for `ip` and `systemctl`."""
    if argv[0] == "systemctl":
        return "active\n"
    device = {"flags": ["LOWER_UP"], "mtu": 9000}
    return json.dumps(
        [
            {
                **device,
                "ifname": f"f{i}",
                "addr_info": [{"family": "inet", "local": f"127.0.1.{i}", "prefixlen": 24}],
            }
            for i in range(1, 5)
        ]
    )


async def supervise(name: str, folder: Path, ports: list[int]) -> None:
    """Run one supervisor with the product's own times."""
    peers, gate, api = ports
    service.LOOPBACK = f"127.0.3.{NAMES.index(name) + 1}"  # every follower's gate has the same port
    world = World(runner=links, notifier=Notifier({}), state=folder / name)
    if name == "a":
        times = {"heartbeat_seconds": 1.0, "lease_seconds": 4.0, "peer_lost_seconds": 8.0}
        text = settings_text(folder / "model", api={"port": api}, gate={"port": gate}, supervision=times)
        settings = load_settings(text, "settings.yaml")
        docker, server = FakeDocker(), Server(api)
        docker.on_start, docker.on_exit = server.start, server.stop
        await Lead(node(name, peers), settings, ("ab" * 32,), "r1", docker, world).run()
    else:
        await Follower(node(name, peers), ("ab" * 32,), "r1", FakeDocker(), world).run()


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
    """Start API, lead and three followers, wait until they serve, and print memory and processor of each."""
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
        wait_until_serving(ports[1])
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


def wait_until_serving(port: int) -> None:
    """Return once the lead's gate says ready; 60 s is the budget."""
    ends, now = time.monotonic() + 60, {}
    while time.monotonic() < ends:
        try:
            now = json.load(OPENER.open(f"http://127.0.3.1:{port}/status", timeout=2))
        except (urllib.error.URLError, OSError):
            now = {}
        if now.get("ready"):
            return
        time.sleep(0.2)
    raise SystemExit(f"crowd: never ready: {now}")


def ticks(pid: int) -> int:
    """Return a process's user and system time in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def pss_mib(pid: int) -> float:
    """Return a process's proportional set size."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


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
        asyncio.run(supervise(given.name, given.folder, given.ports))


if __name__ == "__main__":
    main()
