"""`make faults`: every fault drill on the lab against the TensorFold double, as one table.

The lab must be up and bare or set up (make up). A drill injects one fault into a serving pair, or into its
next start, and watches the gate: what was detected after how long, when the pair served again, in which
epoch, with which evidence. In a false-alarm drill nothing may happen. The double is a program built from
TensorFold's published interface (lab/tensorfold); what a real GB10 does under these faults is not shown here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.api import Lab
from lab.playbook import ROOT, playbook
from tests.lab.conftest import HEAD, UNIT, WORKER, Pair

GATE = "http://10.78.0.1:8889/status"
API = "http://10.78.0.1:8888/v1/chat/completions"
VARIABLES = "@lab/tensorfold/variables.yml"
SERVE_SECONDS = 90.0
CALM_SECONDS = 15.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One drill.

    `limit` is how many seconds detection may take, 0 for a false-alarm drill; `said` must stand in the
    reason, in the journal of the start for a `start` drill; `heal` takes the fault away where it does not go
    by itself.
    """

    name: str
    inject: Callable[[Pair], object]
    limit: float = 0.0
    start: bool = False
    said: str = ""
    heal: Callable[[Pair], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a drill showed; times in seconds from the injection."""

    drill: Drill
    detected: float | None
    again: float | None
    reason: str
    evidence: int
    restarts: int
    passed: bool


def status() -> dict[str, Any]:
    """Return the head's status from the gate; `gone` while it does not answer."""
    try:
        with OPENER.open(GATE, timeout=2) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except (OSError, ValueError):
        return {"state": "gone", "ready": False, "epoch": -1, "last_end": "", "reasons": []}


def ready(after: int = -1, budget: float = SERVE_SECONDS) -> dict[str, Any] | None:
    """Return the status once the pair serves in a later epoch than `after`, None when the budget is spent."""
    end = time.monotonic() + budget
    while time.monotonic() < end:
        now = status()
        if now["ready"] and now["epoch"] > after:
            return now
        time.sleep(0.1)
    return None


# Ways to hurt a pair


def folder(pair: Pair, host: str) -> str:
    """Return the double's folder in the cache of the image that runs, as the host sees it."""
    return pair.sh(host, "sh", "-c", "ls -dt /var/lib/glm53/cache/*/tf-double | head -1").strip()


def live(fault: str, host: str = HEAD, *, request: bool = False) -> Callable[[Pair], object]:
    """Return an injection of a fault that begins while the pair serves, with a request running if wanted."""

    def inject(pair: Pair) -> None:
        path = folder(pair, host)
        pair.sh(host, "sh", "-c", f"echo '{fault}' > {path}/control")
        if request:
            time.sleep(0.3)  # the double reads the file every 0.1 s
            threading.Thread(target=ask, daemon=True).start()

    return inject


def ask() -> None:
    """Send one long request and forget its answer."""
    body = {
        "model": "GLM-5.3-Flash-EXL3",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Write 300 words."}],
    }
    request = urllib.request.Request(API, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        OPENER.open(request, timeout=60).read()
    except OSError:
        return


def starting(lines: str, host: str = HEAD) -> Callable[[Pair], object]:
    """Return an injection into the next start: the double's switches on one host, then a restart."""

    def inject(pair: Pair) -> None:
        path = folder(pair, host)
        pair.sh(host, "sh", "-c", f"printf '{lines}\\n' > {path}/env; chmod 644 {path}/env")
        pair.sh(
            HEAD, "systemctl", "reset-failed", UNIT[HEAD], check=False
        )  # its start limit counts our restarts
        pair.sh(HEAD, "systemctl", "restart", "--no-block", UNIT[HEAD])

    return inject


def healed(pair: Pair) -> None:
    """Take every switch of the double away."""
    for host in (HEAD, WORKER):
        pair.sh(
            host,
            "sh",
            "-c",
            "rm -f /var/lib/glm53/cache/*/tf-double/env /var/lib/glm53/cache/*/tf-double/nccl*",
        )


def sh(host: str, *argv: str) -> Callable[[Pair], object]:
    """Return an injection that runs a command on a host."""
    return lambda pair: pair.sh(host, *argv, check=False)


def kill_rank(host: str) -> Callable[[Pair], object]:
    """Return an injection that kills a rank's container."""
    return lambda pair: pair.sh(host, "docker", "kill", pair.containers(host)[0])


def kill_supervisor(host: str) -> Callable[[Pair], object]:
    """Return an injection that ends a supervisor as the OOM killer does."""
    return lambda pair: pair.sh(host, "systemctl", "kill", "-s", "KILL", UNIT[host])


def power_on(host: str) -> Callable[[Pair], object]:
    """Return a cure: power."""
    return lambda pair: pair.lab.power_on(host)


def pause(host: str, seconds: float) -> Callable[[Pair], object]:
    """Return an injection that stops a supervisor's process for less than a lease."""
    script = f"p=$(systemctl show -P MainPID {UNIT[host]}); kill -STOP $p; sleep {seconds}; kill -CONT $p"
    return sh(host, "sh", "-c", script)


def burn(pair: Pair) -> None:
    """Keep both cores busy for the time that is watched."""
    del pair
    for _ in range(2):
        subprocess.Popen(["timeout", str(int(CALM_SECONDS)), "sh", "-c", "while :; do :; done"])


DRILLS = (
    Drill(name="rank 0 killed", inject=kill_rank(HEAD), limit=1.5, said="rank 0 exited with code 137"),
    Drill(name="rank 1 killed", inject=kill_rank(WORKER), limit=1.5, said="exited with code"),
    Drill(name="rank 0 exits 0 unasked", inject=live("crash=0"), limit=2.0, said="rank 0 exited with code 0"),
    Drill(name="rank 1 exits 1", inject=live("crash=1", WORKER), limit=2.0, said="exited with code"),
    Drill(name="lead's supervisor killed", inject=kill_supervisor(HEAD), limit=5.0),
    Drill(name="worker's supervisor killed", inject=kill_supervisor(WORKER), limit=2.0, said="spark-b"),
    Drill(
        name="worker's unit restarted",
        inject=sh(WORKER, "systemctl", "restart", UNIT[WORKER]),
        limit=5.0,
        said="its supervisor was stopped",
    ),
    Drill(name="docker restarted, head", inject=sh(HEAD, "systemctl", "restart", "docker"), limit=15.0),
    Drill(name="docker restarted, worker", inject=sh(WORKER, "systemctl", "restart", "docker"), limit=15.0),
    Drill(
        name="power cut, worker",
        inject=lambda pair: pair.lab.power_cut(WORKER),
        limit=10.0,
        said="spark-b",
        heal=power_on(WORKER),
    ),
    Drill(
        name="power cut, head", inject=lambda pair: pair.lab.power_cut(HEAD), limit=10.0, heal=power_on(HEAD)
    ),
    Drill(
        name="fabric unplugged",
        inject=lambda pair: pair.lab.unplug(WORKER),
        limit=10.0,
        said="fabric is silent",
        heal=lambda pair: pair.lab.plug(WORKER),
    ),
    Drill(
        name="hang: nothing moves under a request",
        inject=live("hang", request=True),
        limit=22.0,
        said="no counter of the engine",
    ),
    Drill(
        name="silent peer",
        inject=live("silent", WORKER, request=True),
        limit=22.0,
        said="no counter of the engine",
    ),
    Drill(
        name="frozen tokens", inject=live("frozen", request=True), limit=22.0, said="no counter of the engine"
    ),
    Drill(name="out-of-step latch", inject=live("out_of_step", request=True), limit=5.0, said="out of step"),
    Drill(
        name="a message is skipped",
        inject=live("skip_message", request=True),
        limit=5.0,
        said="out of step",
    ),
    Drill(name="/health wants a key", inject=live("health_401"), limit=8.0, said="wants a key"),
    Drill(name="/health is reduced", inject=live("health_reduced"), limit=8.0, said="says no more than"),
    Drill(
        name="replies !!!!",
        inject=starting("TF_DOUBLE_FAULT=bangs"),
        start=True,
        limit=20.0,
        said="over and over",
        heal=healed,
    ),
    Drill(
        name="empty replies",
        inject=starting("TF_DOUBLE_FAULT=empty"),
        start=True,
        limit=20.0,
        said="answered nothing",
        heal=healed,
    ),
    Drill(
        name="one word repeated",
        inject=starting("TF_DOUBLE_FAULT=repeated"),
        start=True,
        limit=20.0,
        said="over and over",
        heal=healed,
    ),
    Drill(
        name="wrong model id",
        inject=starting("TF_DOUBLE_FAULT=model_id=other"),
        start=True,
        limit=20.0,
        said="/v1/models lists",
        heal=healed,
    ),
    Drill(
        name="window too large: refit",
        inject=starting("TF_DOUBLE_LARGEST_WINDOW=393216"),
        start=True,
        limit=20.0,
        said="start 2: the window is 393216 tokens",
    ),
    Drill(
        name="NCCL error 2, once",
        inject=starting("TF_DOUBLE_NCCL_ERROR_2=1"),
        start=True,
        limit=20.0,
        said="start 2: ",
        heal=healed,
    ),
    Drill(
        name="NCCL error 2, until the split is off",
        inject=starting("TF_DOUBLE_NCCL_ERROR_2=9"),
        start=True,
        limit=20.0,
        said="start 3: ",
        heal=healed,
    ),
    Drill(
        name="peer never loads",
        inject=starting("TF_DOUBLE_NEVER_LOADS=1\\nTF_DOUBLE_LOAD_CPU=0", WORKER),
        start=True,
        limit=40.0,
        said="no rank showed a sign of life",
        heal=healed,
    ),
    Drill(
        name="API port taken",
        inject=lambda pair: (
            pair.sh(
                HEAD,
                "sh",
                "-c",
                "systemd-run --unit g5-taken nc -lk 10.78.0.1 8888 >/dev/null 2>&1; sleep 0.3",
            ),
            kill_rank(HEAD)(pair),
        ),
        limit=15.0,
        heal=sh(HEAD, "systemctl", "stop", "g5-taken"),
    ),
    Drill(name="false alarm: prefill of 15 minutes, scaled", inject=live("slow_prefill=10", request=True)),
    Drill(
        name="false alarm: full pool, requests wait",
        inject=live("full_pool", request=True),
        heal=live("clear"),
    ),
    Drill(name="false alarm: busy machine", inject=burn),
    Drill(name="false alarm: heartbeats missed for 2 s", inject=pause(WORKER, 2)),
    Drill(
        name="false alarm: management network away",
        inject=lambda pair: pair.lab.unplug(WORKER, management=True),
        heal=lambda pair: pair.lab.plug(WORKER, management=True),
    ),
)


def run(pair: Pair, drill: Drill) -> Outcome:
    """Run one drill on a serving pair and bring the pair back."""
    before = ready()
    if before is None:
        raise SystemExit(f"faults: the pair does not serve before the drill {drill.name!r}: {status()}")
    kept = evidence(pair)
    began = time.monotonic()
    drill.inject(pair)
    if drill.start:
        detected, reason = watch_start(pair, began, drill)
    else:
        detected, reason = watch(began, before["epoch"], drill.limit or CALM_SECONDS)
    if drill.heal:
        drill.heal(pair)
    after = ready(before["epoch"] if drill.limit else -1)
    again = None if after is None else time.monotonic() - began
    reason = (after or {}).get("last_end", "") if drill.limit and drill.said not in reason else reason
    right = detected is not None and drill.said in reason if drill.limit else detected is None
    restarts = sum(int(pair.unit(host, "NRestarts").get("NRestarts", 0)) for host in (HEAD, WORKER))
    return Outcome(
        drill=drill,
        detected=detected,
        again=again,
        reason=reason or "",
        evidence=evidence(pair) - kept,
        restarts=restarts,
        passed=right and after is not None,
    )


def watch_start(pair: Pair, began: float, drill: Drill) -> tuple[float | None, str]:
    """Return when the story of the start said what it has to, and that line; None when it never did."""
    since = f"@{int(time.time() - (time.monotonic() - began))}"
    while time.monotonic() < began + drill.limit:
        for line in pair.journal(HEAD, f"--since={since}").splitlines():
            if drill.said in line:
                return time.monotonic() - began, line
        time.sleep(0.3)
    return None, ""


def watch(began: float, epoch: int, seconds: float) -> tuple[float | None, str]:
    """Return when the pair was no longer ready in `epoch`, and the reason it gave; None when it stayed."""
    end = began + seconds
    while time.monotonic() < end:
        now = status()
        if not now["ready"] or now["epoch"] != epoch:
            detected = time.monotonic() - began
            while not now["last_end"] and time.monotonic() < end and now["state"] in ("serving", "gone"):
                time.sleep(0.1)
                now = status()
            return detected, "; ".join([now["last_end"], *now["reasons"]])
        time.sleep(0.05)
    return None, ""


def evidence(pair: Pair) -> int:
    """Return how many evidence folders both hosts have."""
    return sum(len(pair.evidence(host)) for host in (HEAD, WORKER))


def row(number: int, o: Outcome) -> str:
    """Return one table row."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    verdict = "pass" if o.passed else "FAIL"
    limit = f"{o.drill.limit:g}" if o.drill.limit else "never"
    reason = o.reason.replace("|", "/").replace("\n", " ")[:90]
    return (
        f"| {number} | {o.drill.name} | {limit} | {seconds(o.detected)} | {reason} | {seconds(o.again)} |"
        f" {o.evidence} | {o.restarts} | {verdict} |"
    )


def main(names: list[str]) -> int:
    """Set the pair up on the double, run the drills (all, or those whose name holds a given word), print
    the table.
    """
    lab = Lab()
    argv, environment = playbook(lab, "site.yml", "-e", VARIABLES)
    if subprocess.run(argv, cwd=ROOT, env=environment, check=False, stdout=sys.stderr).returncode:
        return 1
    pair = Pair(lab)
    drills = [drill for drill in DRILLS if not names or any(name in drill.name for name in names)]
    print(
        "| | fault | limit s | detected s | reason | serving again s | evidence | unit restarts | |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    outcomes = []
    for number, drill in enumerate(drills, 1):
        outcomes.append(run(pair, drill))
        print(row(number, outcomes[-1]), flush=True)
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"\n{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
