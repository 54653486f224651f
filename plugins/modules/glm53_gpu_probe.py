#!/usr/bin/python
"""Ansible module: how a container gets the GPU on this node. A container of the engine's image says so."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_gpu_probe
short_description: Find the way of asking docker for the GPU that works
description:
  - The node's own way is tried first. While ranks run on the node it is taken as it is; nothing is started.
options:
  images: {description: "Names of the image: the first here.", type: list, elements: str, required: true}
  node_file: {description: "node.yaml, which knows the way.", type: path, default: /etc/glm53/node.yaml}
"""

MODES: dict[str, list[str]] = {
    "gpus": ["--gpus", "all"],
    "cdi": ["--device", "nvidia.com/gpu=all"],
    "runtime": ["--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=all"],
}
"""Each way, by node.yaml's name for it (glm53_service.engines.base.GpuMode), and docker's arguments."""

SECONDS = 90
Runner = Callable[[Sequence[str]], tuple[int, str]]


def run(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its exit code and the last line that it wrote."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {SECONDS} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode, (done.stdout.strip() or lines[-1]) if lines else f"exit {done.returncode}"


def known_mode(text: str) -> str:
    """Return the way that a node.yaml names, empty when it names none."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == "gpu_mode" and value.strip() in MODES:
            return value.strip()
    return ""


def probe(mode: str, image: str, name: str, runner: Runner) -> tuple[bool, str]:
    """Return whether nvidia-smi in a container sees a GPU asked for in this way, and what was said."""
    argv = ["docker", "run", "--rm", "--name", name, "--pull=never", "--network=none", *MODES[mode]]
    code, said = runner([*argv, "--entrypoint", "nvidia-smi", image, "-L"])
    if code == 124:
        runner(["docker", "rm", "--force", name])
    return code == 0 and said.startswith("GPU "), said


def choose(first: str, image: str, name: str, runner: Runner) -> tuple[str, list[str]]:
    """Return the first way that works, empty when none does, and what each one before it said."""
    said: list[str] = []
    for mode in sorted(MODES, key=lambda mode: mode != first):
        works, answer = probe(mode, image, name, runner)
        if works:
            return mode, said
        said.append(f"{mode} ({' '.join(MODES[mode])}): {answer}")
    return "", said


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "images": {"type": "list", "elements": "str", "required": True},
            "node_file": {"type": "path", "default": "/etc/glm53/node.yaml"},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["node_file"])
    first = known_mode(path.read_text(encoding="utf-8")) if path.exists() else ""
    argv = ["docker", "ps", "--quiet", "--filter", "label=glm53.cluster"]
    ranks = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False).stdout.split()
    if module.check_mode or (first and ranks):
        module.exit_json(changed=False, mode=first or next(iter(MODES)), probed=False)
    local = [name for name in module.params["images"] if run(["docker", "image", "inspect", name])[0] == 0]
    if not local:
        module.fail_json(
            msg=f"Found: none of {', '.join(module.params['images'])} in docker here. Expected: the engine's"
            " image, to try the GPU with. Fix: run site.yml, which ships it"
        )
    mode, said = choose(first, local[0], f"glm53-gpu-probe-{os.getpid()}", run)
    result: dict[str, Any] = {"changed": False, "mode": mode, "probed": True, "tried": said}
    if not mode:
        module.fail_json(
            msg="Found: no container gets the GPU. "
            + "; ".join(said)
            + ". Expected: one of these ways works."
            " Fix: install nvidia-container-toolkit (glm53_docker_install: true) and restart docker, or, for"
            " CDI, `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`",
            **result,
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
