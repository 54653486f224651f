"""The pair on the TensorFold double: site.yml changes the engine, faults are found, load raises none."""

from __future__ import annotations

import asyncio

import pytest

from lab.api import Lab
from tests.faults import hosts, tensorfold
from tests.faults.harness import Drill, row, run
from tests.lab.conftest import HEAD, WORKER, Pair, Run, play
from tests.soak import OnLab, soak

IN_CI = {
    "rank 1 killed",
    "rank 1 frozen, nobody asks",
    "docker restarted, head",
    "hang: an iteration never ends",
    "out-of-step latch",
    "/health wants a key",
    "replies !!!!",
    "window too large: refit",
    "NCCL error 2, until the split is off",
    "peer never loads",
    "false alarm: prefill of 15 minutes, scaled",
    "false alarm: full pool, requests wait",
}
DRILLS = [drill for drill in (*hosts.DRILLS, *tensorfold.DRILLS) if drill.name in IN_CI]


@pytest.fixture(scope="module")
def double(lab: Lab, site: Run) -> Pair:
    """The pair after site.yml has changed its engine from vLLM to the double."""
    assert site.code == 0
    lab.up()
    run = play(lab, "site.yml", "-e", "@lab/tensorfold/variables.yml")
    assert run.code == 0, run.output[-3000:]
    return Pair(lab)


def test_site_changes_the_engine(double: Pair) -> None:
    """Prevents a change of engine that leaves a rank of the old one, or settings that nobody reads."""
    now = double.serving()
    assert now["model"] == "GLM-5.3-Flash-EXL3"
    for host in (HEAD, WORKER):
        name = double.containers(host, running=False)
        assert len(name) == 1
        image = double.sh(host, "docker", "inspect", "-f", "{{index .Config.Cmd 0}}", *name)
        assert image.strip() == "tensorfold"
    assert "this is a double of TensorFold" in double.sh(
        HEAD, "journalctl", "-t", "glm53-rank0", "-o", "cat", "--no-pager", "-n", "200"
    )


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill(double: Pair, drill: Drill) -> None:
    """Prevents a fault that nobody sees, a pair that does not come back, and a fault where there is none."""
    outcome = run(double, drill)
    assert outcome.passed, row(outcome)


def test_mixed_load_raises_no_alarm(double: Pair) -> None:
    """Prevents a supervisor that ends a healthy pair: the short form of `make soak`."""
    seen = asyncio.run(soak(OnLab(double), 75.0))
    assert (seen.alarms, seen.wrong) == ([], [])
    assert seen.requests.total() > 10
    assert seen.looks > 50


def test_all_drills_of_ci_exist() -> None:
    """Prevents a renamed drill from leaving CI in silence."""
    assert {drill.name for drill in DRILLS} == IN_CI
