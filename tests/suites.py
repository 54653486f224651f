"""`make test`: every suite in order, each with its budget and what it took; the lab is down afterwards in
any case.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One suite.

    `budget_minutes` is what it may take on two cores with nothing cached.
    """

    name: str
    argv: Sequence[str]
    budget_minutes: float


SUITES = (
    Suite(name="lint", argv=("make", "--no-print-directory", "lint"), budget_minutes=5),
    Suite(name="unit", argv=(PYTHON, "-m", "pytest", "tests/unit"), budget_minutes=7),
    Suite(name="lab build", argv=(PYTHON, "-m", "lab", "build"), budget_minutes=10),
    Suite(name="lab", argv=(PYTHON, "-m", "pytest", "tests/lab", "-vv"), budget_minutes=52),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a suite went; `seconds` is wall time.

    `passed` and `failed` count tests, and a suite without any as one.
    """

    suite: Suite
    seconds: float
    passed: int
    failed: int


def run(suite: Suite) -> Result:
    """Run one suite with its output passed through."""
    print(f"\n==> {suite.name} (budget {suite.budget_minutes:g} min)", flush=True)
    began = time.monotonic()
    with subprocess.Popen(suite.argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line if line.strip() else last
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if process.returncode and not failed:
        failed = 1
    passed = counts.get("passed", 0 if failed else 1)
    return Result(suite=suite, seconds=time.monotonic() - began, passed=passed, failed=failed)


def main() -> int:
    """Run all suites; a suite that failed does not hide the next ones, but a lab that cannot be built ends
    it.
    """
    results: list[Result] = []
    try:
        for suite in SUITES:
            results.append(run(suite))
            if results[-1].failed and suite.name == "lab build":
                break
    finally:
        subprocess.run([PYTHON, "-m", "lab", "down"], cwd=ROOT, check=True)
    print(f"\n{'suite':<12}{'took':>10}{'budget':>10}{'passed':>8}{'failed':>8}")
    for r in results:
        budget = f"{r.suite.budget_minutes:g} min"
        print(f"{r.suite.name:<12}{r.seconds / 60:>6.1f} min{budget:>10}{r.passed:>8}{r.failed:>8}")
    passed, failed = sum(r.passed for r in results), sum(r.failed for r in results)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
