"""`make bench`: the figures of docs/benchmarks.md, measured on the lab, as one Markdown table a question.

The lab must be up with a serving pair (make demo). Ratios come from runs that alternate on the same machine;
medians of RUNS runs are shown, with the smallest and the largest beside them. Nothing here passes or fails.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from lab.api import Lab
from lab.errors import LabError
from tests.lab.conftest import API, HEAD, UNIT, WORKER, Pair

RUNS = 5
EVENTS = 2
CPU_SECONDS = 60
PLAIN = {HEAD: "g5-plain-rank0", WORKER: "g5-plain-rank1"}


def main(names: list[str]) -> int:
    """Measure and print all parts, or those that are named."""
    pair = Pair(Lab())
    try:
        pair.serving()
    except LabError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    print(f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {RUNS} starts, {EVENTS} of each event, in s\n")
    for part in (resources, starts, detection):
        if not names or part.__name__ in names:
            part(pair)
    return 0


def row(name: str, values: Sequence[float]) -> str:
    """Return a table row: median and range."""
    return f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} |"


# Memory and processor


def resources(pair: Pair) -> None:
    """Print what the supervisor's unit costs while the pair serves: idle, then with requests."""
    print("| unit | processes | PSS MiB | % of a core, idle | ... under requests |\n|---|---|---|---|---|")
    idle = {host: cpu_share(pair, host, lambda: time.sleep(CPU_SECONDS)) for host in (HEAD, WORKER)}
    busy = {host: cpu_share(pair, host, lambda: requests(pair, CPU_SECONDS)) for host in (HEAD, WORKER)}
    for host in (HEAD, WORKER):
        pids = unit_pids(pair, host)
        pss = sum(
            int(pair.sh(host, "awk", "/^Pss:/ {print $2}", f"/proc/{pid}/smaps_rollup")) for pid in pids
        )
        print(f"| {UNIT[host]} | {len(pids)} | {pss / 1024:.1f} | {idle[host]:.2f} | {busy[host]:.2f} |")
    print()


def unit_pids(pair: Pair, host: str) -> list[str]:
    """Return the processes of this node's unit."""
    group = pair.unit(host, "ControlGroup")["ControlGroup"]
    text = pair.sh(
        host,
        "sh",
        "-c",
        f"cat /sys/fs/cgroup{group}/cgroup.procs /sys/fs/cgroup/*{group}/cgroup.procs 2>/dev/null || true",
    )
    return sorted(set(text.split()) - {"0"})


def cpu_share(pair: Pair, host: str, work: Callable[[], None]) -> float:
    """Return the unit's processor time while `work` runs, in per cent of one core."""
    began, before = time.monotonic(), cpu_ticks(pair, host)
    work()
    return (cpu_ticks(pair, host) - before) / 100 / (time.monotonic() - began) * 100


def cpu_ticks(pair: Pair, host: str) -> int:
    """Return user and system time of the unit's processes in ticks of 10 ms (proc(5), USER_HZ 100)."""
    total = 0
    for pid in unit_pids(pair, host):
        fields = pair.sh(host, "cat", f"/proc/{pid}/stat").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def requests(pair: Pair, seconds: float) -> None:
    """Ask one question after the other for `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pair.ask()


# From container start to the first right answer


def starts(pair: Pair) -> None:
    """Print how long a start takes under the supervisor and under a plain script, alternating."""
    commands = {}
    for who, line in json.loads(pair.sh(HEAD, "glm53", "command", "--json")).items():
        commands[who.rpartition(" ")[2]] = line
    ours, plain, stops, canaries = [], [], [], []
    for _ in range(RUNS):
        stop, ready, canary = supervised_start(pair)
        stops.append(stop)
        ours.append(ready)
        canaries.append(canary)
        pair.sh(HEAD, "systemctl", "stop", UNIT[HEAD])
        plain.append(plain_start(pair, commands))
        pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=300)
    print("| rank 0's container start to the first right answer | median | range |\n|---|---|---|")
    print(row("supervisor, to READY=1", ours))
    print(row("plain script, the same containers in the same order", plain))
    print(row("of the supervisor's: its canary question", canaries))
    print(row("systemctl stop of a serving, idle pair", stops))
    more = statistics.median(ours) - statistics.median(plain)
    print(f"\nThe supervisor takes {more:+.2f} s against the plain script.\n")


def supervised_start(pair: Pair) -> tuple[float, float, float]:
    """Return (stop, container start to READY, canary) of one stop and start."""
    began = time.monotonic()
    pair.sh(HEAD, "systemctl", "stop", UNIT[HEAD])
    stop = time.monotonic() - began
    pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=300)
    ready = pair.sh(HEAD, "systemctl", "show", UNIT[HEAD], "-p", "ActiveEnterTimestampMonotonic").partition(
        "="
    )[2]
    now = float(pair.sh(HEAD, "cut", "-d ", "-f1", "/proc/uptime"))
    ready_at = time.time() - now + int(ready) / 1e6
    started = started_at(pair, HEAD, pair.containers(HEAD)[0])
    lines = pair.sh(
        HEAD, "journalctl", "-u", UNIT[HEAD], "-o", "short-unix", "--no-pager", "-n", "12"
    ).splitlines()
    asked = next(float(line.split()[0]) for line in reversed(lines) if "asking the canary" in line)
    served = next(float(line.split()[0]) for line in reversed(lines) if ": serving " in line)
    return stop, ready_at - started, served - asked


def started_at(pair: Pair, host: str, container: str) -> float:
    """Return when a container was started, in Unix seconds."""
    text = pair.sh(host, "docker", "inspect", "-f", "{{.State.StartedAt}}", container).strip()
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z", r"\1+00:00", text)).timestamp()


def plain_start(pair: Pair, commands: dict[str, str]) -> float:
    """Start the same containers by hand, rank 0 first, and return the time to the first right answer."""
    for host, name in PLAIN.items():
        argv = shlex.split(commands[host])
        argv[1:4] = ["create", "--name", name]
        pair.sh(host, "docker", "rm", "-f", name, check=False)
        pair.sh(host, *[a if not a.startswith("glm53.cluster=") else "g5.plain=1" for a in argv])
    for host, name in PLAIN.items():
        pair.sh(host, "docker", "start", name)
    body = json.dumps(
        {
            "model": "SmolLM2-135M-Instruct",
            "temperature": 0,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
        }
    )
    script = (
        f"until curl -s -m 60 -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        f" {API}/v1/chat/completions | grep -q Paris; do sleep 0.25; done; date +%s.%N"
    )
    answered = float(pair.sh(HEAD, "sh", "-c", script, timeout=300))
    took = answered - started_at(pair, HEAD, PLAIN[HEAD])
    for host, name in PLAIN.items():
        pair.sh(host, "docker", "rm", "-f", name)
    return took


# How fast the other rank ends


def detection(pair: Pair) -> None:
    """Print how long the other rank lives on after a rank was killed, a host's power cut, a fabric pulled."""
    killed = [
        other_gone(pair, WORKER, HEAD, lambda: pair.sh(WORKER, "docker", "kill", pair.containers(WORKER)[0]))
        for _ in range(EVENTS)
    ]
    killed0 = [
        other_gone(pair, HEAD, WORKER, lambda: pair.sh(HEAD, "docker", "kill", pair.containers(HEAD)[0]))
        for _ in range(EVENTS)
    ]
    cut = []
    for _ in range(EVENTS):
        cut.append(other_gone(pair, WORKER, HEAD, lambda: pair.lab.power_cut(WORKER)))
        pair.lab.power_on(WORKER)
    pulled = []
    for _ in range(EVENTS):
        pulled.append(other_gone(pair, WORKER, HEAD, lambda: pair.lab.unplug(WORKER)))
        pair.lab.plug(WORKER)
    pair.serving()
    print("| event to the end of the other host's container | median | range |\n|---|---|---|")
    print(row("rank 1 killed: rank 0 ended", killed))
    print(row("rank 0 killed: rank 1 ended", killed0))
    print(row("the worker's power cut: rank 0 ended", cut))
    print(row("the fabric unplugged: rank 0 ended", pulled))


def other_gone(pair: Pair, _: str, other: str, event: Callable[[], object]) -> float:
    """Return the time from just before `event` until the rank on `other` is no process any more."""
    pair.sh(HEAD, "systemctl", "restart", UNIT[HEAD], timeout=300)  # a clean count of faults
    pair.serving()
    name = pair.containers(other)[0]
    pid = pair.sh(other, "docker", "inspect", "-f", "{{.State.Pid}}", name).strip()
    began = time.monotonic()
    event()
    pair.sh(other, "sh", "-c", f"while [ -d /proc/{pid} ]; do sleep 0.05; done", timeout=60)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
