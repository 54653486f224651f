"""The lab for the behaviours: fresh hosts, then one pair set up by the real site.yml and kept for all tests.

The files are numbered because they build on each other: bare hosts, site.yml, day two, faults, giving the
nodes back.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab.api import Lab
from lab.playbook import ROOT, playbook

HEAD, WORKER = "spark-a", "spark-b"
UNIT = {HEAD: "glm53-head", WORKER: "glm53-worker"}
API = "http://10.78.0.1:8888"
MODEL = "SmolLM2-135M-Instruct"
FORM_SECONDS = 180.0
"""Budget for the ranks to come up on a busy two-core machine; how long it takes is measured by `make
bench`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A playbook run: its exit code, all that it printed, and the tasks counted as changed on all nodes."""

    code: int
    output: str

    @property
    def changed(self) -> int:
        """How many tasks changed something, over all nodes."""
        return sum(map(int, re.findall(r"changed=(\d+)", self.output)))


def play(lab: Lab, name: str, *arguments: str, budget_seconds: float = 900.0) -> Run:
    """Run a playbook against the lab."""
    argv, environment = playbook(lab, name, *arguments)
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=budget_seconds
    )
    return Run(code=done.returncode, output=done.stdout + done.stderr)


def until(condition: Callable[[], Any], what: str, budget_seconds: float = FORM_SECONDS) -> Any:
    """Return the first true value of `condition`; the budget is no measure."""
    deadline = time.monotonic() + budget_seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"never within {budget_seconds:g} s: {what}; last: {found!r}")
        time.sleep(0.2)


class Pair:
    """The pair on the lab's hosts, as its owner sees it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def sh(self, host: str, *argv: str, check: bool = True, timeout: float = 120.0) -> str:
        """Return what `argv`, run as root on `host`, printed."""
        return self.lab.exec(host, argv, check=check, timeout=timeout).stdout

    def status(self, host: str = HEAD) -> dict[str, Any]:
        """Return `glm53 status --json`; the state is `unreachable` when the host does not answer."""
        done = self.lab.exec(host, ["glm53", "status", "--json"], check=False)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return {"state": "unreachable", "ready": False, "epoch": 0, "reasons": [done.stderr]}
        return found

    def unit(self, host: str, *properties: str) -> dict[str, str]:
        """Return properties of this node's unit."""
        out = self.sh(host, "systemctl", "show", UNIT[host], "-p", ",".join(properties))
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    def containers(self, host: str, *, running: bool = True) -> list[str]:
        """Return the names of rank containers on `host`."""
        every = () if running else ("-a",)
        out = self.sh(
            host, "docker", "ps", *every, "--filter", "label=glm53.cluster", "--format", "{{.Names}}"
        )
        return out.split()

    def epoch(self) -> int:
        """Return the current epoch, waiting until the pair serves."""
        return int(self.serving()["epoch"])

    def serving(self, after: int = -1, budget_seconds: float = FORM_SECONDS) -> dict[str, Any]:
        """Return the head's status once the pair serves in an epoch later than `after`."""

        def now() -> dict[str, Any] | None:
            status = self.status()
            return status if status["ready"] and status["epoch"] > after else None

        found: dict[str, Any] = until(
            now, f"serving after epoch {after}; now {self.status()}", budget_seconds
        )
        return found

    def ask(self, prompt: str = "What is the capital of France? Answer with one word.") -> str:
        """Return the model's answer."""
        body = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": prompt}],
        }
        request = urllib.request.Request(
            f"{API}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def journal(self, host: str, *arguments: str) -> str:
        """Return the journal of this node's unit."""
        return self.sh(host, "journalctl", "-u", UNIT[host], "-o", "cat", "--no-pager", *arguments)

    def evidence(self, host: str) -> set[str]:
        """Return the names of the evidence folders on `host`."""
        return set(self.sh(host, "ls", "/var/lib/glm53/evidence", check=False).split())


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab with fresh hosts; it is taken down at the end."""
    lab = Lab()
    lab.down()
    lab.up()
    yield lab
    lab.down()


LISTING = r"""cd /etc
names() { find . -xdev ! -name '*-' ! -name .pwd.lock ! -name resolv.conf "$@"; }
names ! -type f -printf '%y %m %u:%g %p %l\n' | sort
names -type f -printf '%m %u:%g %p ' -exec sh -c 'sha256sum <"$1"' - {} \; | sort
"""


def etc_of(lab: Lab, host: str) -> str:
    """Return every file below a host's /etc with mode, owner and hash, but for the account files' backups."""
    return lab.exec(host, ["sh", "-euc", LISTING]).stdout


@pytest.fixture(scope="session")
def bare(lab: Lab) -> dict[str, str]:
    """What is below /etc of each host before anything was done to it."""
    return {host: etc_of(lab, host) for host in (HEAD, WORKER)}


@pytest.fixture(scope="session")
def site(lab: Lab, bare: dict[str, str]) -> Run:
    """The first run of site.yml on fresh hosts, whose /etc is known from before."""
    del bare
    return play(lab, "site.yml")


@pytest.fixture
def pair(lab: Lab, site: Run) -> Pair:
    """The serving pair, with every host on and every cable plugged, whatever the test before left."""
    if site.code:
        pytest.fail(f"site.yml failed:\n{site.output[-4000:]}")
    lab.up()
    for host in (HEAD, WORKER):
        lab.plug(host)
        lab.plug(host, management=True)
    pair = Pair(lab)
    pair.serving()
    return pair
