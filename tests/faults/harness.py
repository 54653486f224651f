"""Runs one drill on a serving pair and says what it showed."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lab.playbook import ROOT
from tests.lab.conftest import HEAD, WORKER, Pair

GATE = "http://10.78.0.1:8889/status"
SERVE_SECONDS = 120.0
CALM_SECONDS = 15.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SERVED = re.compile(r"^serving .* seconds=([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One drill.

    `limit` is how many seconds detection may take, 0 for a false-alarm drill. `said` is a pattern that must
    stand in the reason, in the journal of the start for a `start` drill. `prepare` comes before the pair is
    looked at; `heal` takes the fault away where it does not go by itself.
    """

    name: str
    inject: Callable[[Pair], object]
    limit: float = 0.0
    start: bool = False
    said: str = ""
    prepare: Callable[[Pair], object] | None = None
    heal: Callable[[Pair], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a drill showed; `detected` and `again` in seconds from the injection.

    `load` is what the engine took to start, by the journal. `evidence` counts new folders on both nodes,
    `restarts` those of the units by systemd; negative where a unit was booted anew and counts from 0.
    """

    drill: Drill
    detected: float | None
    again: float | None
    load: float | None
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


def run(pair: Pair, drill: Drill) -> Outcome:
    """Run one drill on a serving pair and bring the pair back."""
    if drill.prepare:
        drill.prepare(pair)
    before = ready()
    if before is None:
        raise SystemExit(f"faults: the pair does not serve before the drill {drill.name!r}: {status()}")
    kept, restarted = evidence(pair), restarts(pair)
    began, since = time.monotonic(), f"@{int(time.time())}"
    drill.inject(pair)
    if drill.start:
        detected, reason = watch_start(pair, began, since, drill)
    else:
        detected, reason = watch(began, before["epoch"], drill)
    if drill.heal:
        drill.heal(pair)
    after = ready(before["epoch"] if drill.limit else -1)
    again = None if after is None else time.monotonic() - began
    if after and drill.limit and not re.search(drill.said, reason):
        reason = after["last_end"]
    right = detected is not None and bool(re.search(drill.said, reason)) if drill.limit else detected is None
    served = SERVED.findall(pair.journal(HEAD, f"--since={since}"))
    return Outcome(
        drill=drill,
        detected=detected,
        again=again if drill.limit else None,
        load=float(served[-1]) if served else None,
        reason=reason,
        evidence=len(evidence(pair) - kept),
        restarts=restarts(pair) - restarted,
        passed=right and after is not None and (bool(drill.limit) or after["epoch"] == before["epoch"]),
    )


def watch_start(pair: Pair, began: float, since: str, drill: Drill) -> tuple[float | None, str]:
    """Return when the story of the start said what it has to, and that line; None when it never did."""
    while time.monotonic() < began + drill.limit:
        for line in pair.journal(HEAD, f"--since={since}").splitlines():
            if re.search(drill.said, line):
                return time.monotonic() - began, line
        time.sleep(0.3)
    return None, ""


def watch(began: float, epoch: int, drill: Drill) -> tuple[float | None, str]:
    """Return when the pair was no longer ready in `epoch`, and the reason it gave; None when it stayed.

    A fault may be over before anybody looks at its reason, so the next epochs' last end is read too.
    """
    end = began + (drill.limit or CALM_SECONDS)
    while time.monotonic() < end:
        now = status()
        if not now["ready"] or now["epoch"] != epoch:
            detected, said = time.monotonic() - began, [*now["reasons"]]
            while now["epoch"] == epoch and time.monotonic() < end:
                said += [reason for reason in now["reasons"] if reason not in said]
                time.sleep(0.1)
                now = status()
            return detected, "; ".join(filter(None, [now["last_end"], *said]))
        time.sleep(0.05)
    return None, ""


def evidence(pair: Pair) -> set[str]:
    """Return the evidence folders of both hosts, by host and name."""
    return {f"{host}/{name}" for host in (HEAD, WORKER) for name in pair.evidence(host)}


def restarts(pair: Pair) -> int:
    """Return how often systemd has restarted the units since they were started by hand."""
    return sum(int(pair.unit(host, "NRestarts").get("NRestarts", 0)) for host in (HEAD, WORKER))


HEADER = (
    "| fault | limit | detected | reason | serving again | of that load | evidence | unit restarts | |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def stamp() -> str:
    """Return when and at which commit this is."""
    argv = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit or 'unknown'}"


def row(o: Outcome) -> str:
    """Return one table row; times in seconds."""

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    verdict = "pass" if o.passed else "FAIL"
    limit = f"{o.drill.limit:g}" if o.drill.limit else "never"
    reason = re.sub(r"[|\n]", " ", o.reason)[:110]
    return (
        f"| {o.drill.name} | {limit} | {seconds(o.detected)} | {reason} | {seconds(o.again)} |"
        f" {seconds(o.load)} | {o.evidence} | {'from 0' if o.restarts < 0 else o.restarts} | {verdict} |"
    )


def run_all(pair: Pair, drills: Iterable[Drill]) -> int:
    """Run `drills`, print the table as it grows, and return how many failed."""
    print(HEADER, flush=True)
    failed = 0
    for drill in drills:
        outcome = run(pair, drill)
        failed += not outcome.passed
        print(row(outcome), flush=True)
    return failed
