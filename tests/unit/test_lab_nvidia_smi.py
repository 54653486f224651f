"""The nvidia-smi double, run."""

import subprocess
from pathlib import Path

from glm53_service.gpu import QUERY, Gpu, parse

SMI = Path(__file__).parents[2] / "lab" / "files" / "nvidia-smi"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(SMI), *arguments], capture_output=True, text=True, check=False)


def test_it_answers_in_the_order_asked_and_says_what_it_is() -> None:
    """Prevents a double that is taken for a GPU, or whose columns do not follow the question."""
    done = ask("--query-gpu=power.draw,name,utilization.gpu", "--format=csv,noheader")
    assert (done.returncode, done.stdout) == (0, "4.10 W, NVIDIA GB10, 0 %\n")
    assert "lab double" in done.stderr.splitlines()[0]


def test_a_cap_that_is_no_cap_is_refused() -> None:
    """Prevents a misspelt option of the clock cap that the double would take."""
    assert ask("--lock-gpu-clock=0,1900").returncode == 2
    assert ask("-lgc", "0,1900").returncode == 2


def test_it_refuses_what_it_does_not_know() -> None:
    """Prevents an invented answer to a field or format that nobody checked."""
    assert ask("--query-gpu=ecc.mode.current", "--format=csv,noheader").returncode == 2
    assert ask("--query-gpu=name", "--format=csv").returncode == 2
    assert ask().returncode == 2


def test_the_supervisors_question_is_answered() -> None:
    """Prevents a lab in which the supervisor never sees a GPU."""
    assert parse(ask(*QUERY[1:]).stdout) == (
        Gpu(
            index=0,
            name="NVIDIA GB10",
            sm_clock_mhz=208,
            max_sm_clock_mhz=3003,
            power_watts=4.1,
            utilisation_percent=0,
            driver="580.95.05",
        ),
    )
