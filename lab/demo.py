"""`make demo`: from nothing to an answer.

Two virtual Sparks, the real site.yml, a real vLLM as two ranks, one question.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request

from lab.api import Lab
from lab.errors import LabError
from lab.playbook import ROOT, playbook
from lab.settings import MODEL, hosts

QUESTION = "What is the capital of France? Answer with one word."
ANSWER_SECONDS = 120


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
    argv, environment = playbook(lab, "site.yml")
    if subprocess.run(argv, cwd=ROOT, env=environment, check=False).returncode:
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
