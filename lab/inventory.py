"""The inventory that `up` writes: the lab's hosts as a user's inventory would describe two Sparks."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from lab.settings import ACCOUNT, IMAGE, MACHINE_ADDRESS, MODEL, MODEL_DIR, RAILS, Host

Yaml = str | int | float | bool | None | list["Yaml"] | dict[str, "Yaml"]

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./:-]*[A-Za-z0-9_./-]|[A-Za-z]")
WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump(value: Yaml, indent: int = 0) -> str:
    """`value` as YAML in block style; strings that YAML could read as something else are quoted."""
    pad = "  " * indent
    lines = []
    if isinstance(value, dict) and value:
        for name, item in value.items():
            nested = isinstance(item, dict | list) and item
            text = f"\n{dump(item, indent + 1)}" if nested else f" {_scalar(item)}"
            lines.append(f"{pad}{_scalar(name)}:{text}")
        return "\n".join(lines)
    if isinstance(value, list) and value:
        for item in value:
            nested = isinstance(item, dict | list) and item
            lines.append(f"{pad}- {dump(item, indent + 1).lstrip() if nested else _scalar(item)}")
        return "\n".join(lines)
    return f"{pad}{_scalar(value)}"


def _scalar(value: Yaml) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in WORDS and ": " not in value:
        return value
    return json.dumps(value)


def host_variables(host: Host) -> dict[str, Yaml]:
    """What an owner states for one Spark."""
    return {
        "ansible_host": host.management,
        "glm53_fabric_rails": [
            {"netdev": rail.netdev, "address": f"{host.fabric(rail.number)}/24"} for rail in RAILS
        ],
    }


def hosts_file(hosts: Iterable[Host]) -> dict[str, Yaml]:
    """hosts.yml: the first host is the head, the others are the workers, in rank order."""
    head, *workers = hosts
    return {
        "head": {"hosts": {head.name: host_variables(head)}},
        "workers": {"hosts": {worker.name: host_variables(worker) for worker in workers}},
    }


def group_variables(ssh: Path) -> dict[str, Yaml]:
    """group_vars/all.yml; `ssh` is the folder of the lab's key and known hosts."""
    return {
        "ansible_user": ACCOUNT,
        "ansible_ssh_private_key_file": str(ssh / "id_ed25519"),
        "ansible_ssh_common_args": (
            f"-o UserKnownHostsFile={ssh / 'known_hosts'} -o GlobalKnownHostsFile=/dev/null"
            " -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
        ),
        "glm53_cluster": "lab",
        "glm53_engine": "vllm",
        "glm53_device": "cpu",
        "glm53_image": IMAGE,
        "glm53_model_dir": MODEL_DIR,
        "glm53_model_name": MODEL,
        "glm53_api_bind": "management",
        "glm53_api_without_key": True,
        "glm53_api_open_from": [MACHINE_ADDRESS],
        "glm53_canary": {
            "prompt": "What is the capital of France? Answer with one word.",
            "expect": "Paris",
            "max_tokens": 24,
        },
        "glm53_vllm": {
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_dtype": "auto",
            "kv_cache_memory": "128M",
            "extra_env": {"TORCHDYNAMO_DISABLE": "1"},
        },
        "glm53_supervision": {"load_guard_gib": 0.5, "steady_guard_gib": 0.25},
    }


COMMENTS = {
    "glm53_api_without_key": "The lab's networks end on this machine, so its API may be open without a key.",
    "glm53_supervision": "Both hosts share one small machine: the guard is there, and lets them use it up.",
    "glm53_vllm": "Float32 and eager: quick to start on two cores, and greedy answers never differ.",
}


def write(folder: Path, hosts: Iterable[Host], ssh: Path) -> None:
    """Write hosts.yml and group_vars/all.yml below `folder`."""
    (folder / "group_vars").mkdir(parents=True, exist_ok=True)
    first = "# Written by `lab up`; changed again by the next one.\n---\n"
    (folder / "hosts.yml").write_text(f"{first}{dump(hosts_file(hosts))}\n")
    text = first
    for name, value in group_variables(ssh).items():
        if name in COMMENTS:
            text += f"# {COMMENTS[name]}\n"
        text += dump({name: value}) + "\n"
    (folder / "group_vars" / "all.yml").write_text(text)
