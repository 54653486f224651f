"""A copy between the lab's hosts broken for real: ssh killed, the head dark, a rail pulled.

    python -m tests.ship_drills [DRILL...]        (the lab must be up; a few minutes)

The sender runs in the network of spark-a, the worker's end in spark-b through its own sshd. Prints a line
a drill and ends with 1 when one went wrong. What ends within a second is in tests/unit/test_ship_drills.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from glm53_service.artifacts.manifest import NAME
from glm53_service.artifacts.ship import LOADER
from lab.api import Lab
from lab.settings import ACCOUNT, RAILS, hosts
from tests.bench_artifacts import make_files

SOURCE = Path("/dev/shm/glm53-ship-drills")
TARGET = f"/home/{ACCOUNT}/ship-drills"
LIMIT = 20e6
SSH_OPTIONS = (
    "-q",
    "-F",
    "/dev/null",
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
)


class Copy:
    """One copy that takes about a minute, and what is known of its other end."""

    def __init__(self, lab: Lab, key: Path) -> None:
        self.lab = lab
        self.head, worker = hosts(2)
        address = worker.fabric(0)
        ssh = ["ssh", *SSH_OPTIONS, "-i", str(key), "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
        self.order = {
            "source": str(SOURCE),
            "target": TARGET,
            "addresses": [worker.fabric(rail.number) for rail in RAILS],
            "launcher": [
                *(*ssh, f"{ACCOUNT}@{address}", "--", "/usr/bin/python3", "-I", "-c", shlex.quote(LOADER)),
            ],
            "streams": 4,
        }

    def there(self, script: str) -> bool:
        """Return whether the script ends well on the worker."""
        done = self.lab.exec(hosts(2)[1].name, ["sh", "-c", script], check=False)
        return done.returncode == 0

    def start(self, limit: float) -> subprocess.Popen[bytes]:
        """Start a sender in the head's network."""
        argv = [
            "ip",
            "netns",
            "exec",
            self.head.machine,
            sys.executable,
            "-m",
            "tests.bench_artifacts",
            "send",
        ]
        return subprocess.Popen(
            [*argv, json.dumps({**self.order, "limit": limit})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def under_way(self) -> subprocess.Popen[bytes]:
        """Return a sender of which some bytes have arrived."""
        self.there(f"rm -rf {TARGET}")
        sender = self.start(LIMIT)
        await_true(60, lambda: self.there(f"[ $(du -sm {TARGET} | cut -f1) -gt 30 ]"))
        return sender

    def seconds_until_free(self) -> float:
        """Return how long the worker's end still holds the folder."""
        began = time.monotonic()
        await_true(200, lambda: self.there(f"flock -n {TARGET} true"))
        return time.monotonic() - began

    def goes_on(self) -> str:
        """Run it again at full speed; return how much that had to send."""
        out, err = (sender := self.start(0)).communicate()
        if sender.returncode:
            raise RuntimeError(err.decode())
        whole = self.there(f"cd {TARGET} && test -f {NAME} && ! ls -A | grep incomplete")
        return f"then {json.loads(out)['bytes'] / 1e6:.0f} MB sent, {'complete' if whole else 'NOT COMPLETE'}"


def await_true(seconds: float, check: Callable[[], bool]) -> None:
    """Return once `check` is; RuntimeError after so many seconds."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds:.0f} s")
        time.sleep(0.3)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in text.split()]


def ssh_killed(copy: Copy) -> str:
    """kill -9 of the ssh that carries the orders."""
    sender = copy.under_way()
    for child in children(sender.pid):
        os.kill(child, 9)
    _, err = sender.communicate(timeout=60)
    said = err.decode().strip().splitlines()
    text = next((line for line in said if line.startswith("glm53_service.errors")), "NO MESSAGE")
    return (
        f"sender ended with {sender.returncode}: {text}; folder free after {copy.seconds_until_free():.1f} s"
    )


def head_dark(copy: Copy) -> str:
    """The head's links go down and its process with them: nothing is closed on the wire."""
    sender = copy.under_way()
    copy.lab.unplug(copy.head.name)
    for child in children(sender.pid):
        os.kill(child, 9)
    sender.kill()
    sender.wait()
    seconds = copy.seconds_until_free()
    copy.lab.plug(copy.head.name)
    return f"folder free after {seconds:.0f} s"


def rail_pulled(copy: Copy) -> str:
    """One of two rails is pulled for good: the copy ends over the other."""
    sender = copy.under_way()
    copy.lab.unplug(copy.head.name, RAILS[1].number)
    began = time.monotonic()
    _, err = sender.communicate(timeout=400)
    text = f"sender ended with {sender.returncode} after {time.monotonic() - began:.0f} s"
    copy.lab.plug(copy.head.name, RAILS[1].number)
    if sender.returncode:
        raise RuntimeError(err.decode())
    return text


def main() -> int:
    """Run the drills on the lab that is up."""
    lab = Lab()
    copy = Copy(lab, lab.paths.ssh / "id_ed25519")
    size = make_files(SOURCE, 800_000_000).bytes
    failed = 0
    try:
        for drill in (ssh_killed, head_dark, rail_pulled):
            if sys.argv[1:] and drill.__name__ not in sys.argv[1:]:
                continue
            try:
                print(f"{drill.__name__}: {drill(copy)}; {copy.goes_on()} of {size / 1e6:.0f}", flush=True)
            except RuntimeError as error:
                failed = 1
                print(f"{drill.__name__}: FAILED: {error}", flush=True)
    finally:
        copy.there(f"rm -rf {TARGET}")
        shutil.rmtree(SOURCE)
    return failed


if __name__ == "__main__":
    sys.exit(main())
