"""`python -m tests.faults [WORD ...]`: the drills whose name holds a WORD, or all; the lab must be up."""

from __future__ import annotations

import subprocess
import sys

from lab.api import Lab
from lab.playbook import ROOT, playbook
from tests.faults import hosts, tensorfold
from tests.faults.harness import run_all, stamp
from tests.lab.conftest import Pair

ENGINES = (
    ("the TensorFold double", "@lab/tensorfold/variables.yml", (*hosts.DRILLS, *tensorfold.DRILLS)),
    ("vLLM on the CPU", "@tests/faults/vllm.yml", hosts.DRILLS),
)


def main(words: list[str]) -> int:
    """Set the pair up on each engine and run its drills; 1 when one failed."""
    lab, failed = Lab(), 0
    for name, variables, every in ENGINES:
        drills = [drill for drill in every if not words or any(word in drill.name for word in words)]
        if not drills:
            continue
        argv, environment = playbook(lab, "site.yml", "-e", variables)
        if subprocess.run(argv, cwd=ROOT, env=environment, check=False, stdout=sys.stderr).returncode:
            return 1
        print(f"\n{name}, {stamp()}, times in seconds\n", flush=True)
        failed += run_all(Pair(lab), drills)
    print(f"\n{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
