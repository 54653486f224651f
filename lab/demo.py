"""`make demo`: from nothing to an answer.

Two virtual Sparks, the real site.yml, a real vLLM as two ranks, one question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from lab.api import Lab
from lab.errors import LabError
from lab.settings import MODEL, hosts

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France? Answer with one word."
ANSWER_SECONDS = 120


def playbook(lab: Lab, name: str, *arguments: str) -> int:
    """Run one of the project's playbooks against the lab with its output passed through, and return its
    exit code.
    """
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"}
    argv = ["ansible-playbook", name, "-i", str(lab.inventory), *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode


def ask(endpoint: str, question: str) -> str:
    """Return the model's answer to `question` through the API at `endpoint`."""
    body = {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": question}],
    }
    request = urllib.request.Request(
        f"{endpoint}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_SECONDS) as response:
        return str(json.load(response)["choices"][0]["message"]["content"]).strip()


def main() -> int:
    """Run the demo; the lab stays up afterwards, to be looked at."""
    began = time.monotonic()
    lab = Lab()
    try:
        lab.up()
    except LabError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    up = time.monotonic()
    if playbook(lab, "site.yml"):
        print("demo: site.yml failed; the lab is still up: python3 -m lab status", file=sys.stderr)
        return 1
    served = time.monotonic()
    endpoint = f"http://{hosts(2)[0].management}:8888/v1"
    print(f"\nQuestion   {QUESTION}\nAnswer     {ask(endpoint, QUESTION)}\nEndpoint   {endpoint}")
    print(
        f"Checked on two network namespaces of this machine, vLLM on its CPU, model {MODEL}: no GPU, no RoCE."
    )
    took = (up - began, served - up, time.monotonic() - began)
    print("Time       lab {:.0f} s, site.yml {:.0f} s, in all {:.0f} s".format(*took))
    print("Look round python3 -m lab exec spark-a -- glm53 status      (or: -- journalctl -u glm53-head)")
    print("Take down  make down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
