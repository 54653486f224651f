#!/usr/bin/python
"""Ansible module: what else on this node could hold the ports or the GPU that the pair needs. Reads only."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_docker import docker_get
from ansible.module_utils.glm53_processes import ancestors, holder_of, pids, read_listeners, script_of
from ansible.module_utils.glm53_systemd import manager_runs, show

DOCUMENTATION = """
module: glm53_foreign
short_description: Read containers, units, jobs and processes that are not the pair's
description:
  - Reads only, and returns no command lines, environments or file contents, for those may hold secrets.
  - What is in the way is decided by glm53_service.foreign on the control host.
options:
  ports: {description: "TCP ports whose listeners are wanted.", type: list, elements: int, default: []}
  recipes: {description: "Names of other recipes' containers.", type: list, elements: str, default: []}
  recipe_paths: {description: "Parts of their scripts' paths.", type: list, elements: str, default: []}
"""

LABEL = "glm53.cluster"
"""On every container of ours (glm53_service.engines.base.LABEL)."""
UNIT_FOLDERS = ("/etc/systemd/system", "/usr/local/lib/systemd/system")
USER_FOLDER = ".config/systemd/user"
JOB_FILES = ("/etc/crontab", "/etc/rc.local", "/etc/cron.*/*", "/var/spool/cron/crontabs/*")
EXEC = re.compile(r"^\s*(Exec\w+|WorkingDirectory)\s*=\s*(.*)$", re.MULTILINE)
TEXT_BYTES = 65536
"""A script is shorter; of a longer file only so much is looked at."""


class Marks:
    """Words by which a text is known to start a container that may be in the way."""

    def __init__(self, recipes: Iterable[str], containers: Iterable[str], paths: Iterable[str]) -> None:
        self.recipes = list(recipes)
        self.containers = [name for name in containers if name not in self.recipes]
        self.paths = [path.lower() for path in paths]

    def of(self, text: str) -> set[str]:
        """Return what `text` names; any other container only where it speaks of docker as well."""
        names = self.recipes + (self.containers if "docker" in text else [])
        return {n for n in names if re.search(rf"(?<![\w.-]){re.escape(n)}(?![\w-])", text)}

    def of_script(self, path: Path) -> set[str]:
        """Return what the script `path` names: by its own place or by what it holds."""
        text = script_text(path)
        places = {mark for mark in self.paths if mark in str(path).lower()} if text else set()
        return places | self.of(text)


def script_text(path: Path) -> str:
    """Return the beginning of a text file, empty for anything else (a program, a folder, a pipe)."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as handle:
            head = handle.read(TEXT_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in head else head.decode("utf-8", "replace")


# Containers


def container_facts(inspect: dict[str, Any]) -> dict[str, Any]:
    """Return what counts of `docker inspect`; nothing of its environment or command."""
    config, host, state = inspect["Config"], inspect["HostConfig"], inspect["State"]
    labels = config.get("Labels") or {}
    policy = host.get("RestartPolicy") or {}
    return {
        "id": inspect["Id"],
        "name": inspect["Name"].lstrip("/"),
        "image": config.get("Image", ""),
        "state": state.get("Status", ""),
        "exit_code": state.get("ExitCode", 0),
        "policy": policy.get("Name") or "no",
        "ours": LABEL in labels,
        "gpu": wants_gpu(host, config.get("Env") or []),
        "published": [
            {"port": int(binding["HostPort"]), "address": binding.get("HostIp") or "0.0.0.0"}
            for bindings in (host.get("PortBindings") or {}).values()
            for binding in bindings or []
            if str(binding.get("HostPort", "")).isdigit()
        ],
        "auto_remove": bool(host.get("AutoRemove")),
        "swarm": labels.get("com.docker.swarm.service.name", ""),
    }


def wants_gpu(host: dict[str, Any], environment: list[str]) -> bool:
    """Say whether a container was made with a GPU: by request, by CDI, by device, or by NVIDIA's runtime."""
    for request in host.get("DeviceRequests") or []:
        words = [
            request.get("Driver") or "",
            *(w for group in request.get("Capabilities") or [] for w in group),
        ]
        words += [d for d in request.get("DeviceIDs") or [] if "nvidia.com/gpu" in d]
        if any(w in ("nvidia", "gpu") or "nvidia.com/gpu" in w for w in words):
            return True
    devices = [str(device.get("PathOnHost", "")) for device in host.get("Devices") or []]
    if any(re.match(r"/dev/nvidia\d|/dev/nvidia-uvm", device) for device in devices):
        return True
    visible = next((e.partition("=")[2] for e in environment if e.startswith("NVIDIA_VISIBLE_DEVICES=")), "")
    return host.get("Runtime") == "nvidia" and visible not in ("", "void", "none")


def read_containers() -> list[dict[str, Any]]:
    """Return every container of this node; OSError when docker does not answer."""
    _, listed = docker_get("/containers/json?all=true")
    found = []
    for entry in listed or []:
        status, inspect = docker_get("/containers/" + urllib.parse.quote(entry["Id"]) + "/json")
        if status == 200:
            found.append(container_facts(inspect))
    return found


# Processes


def read_scripts(proc: Path, marks: Marks, own: set[int]) -> list[dict[str, Any]]:
    """Return running scripts that name a container in `marks`; not this run's own nor a container's.

    A recipe's folder is not enough here: its benchmark may run, and starts nothing.
    """
    found = []
    for pid in pids(proc):
        path, text = script_of(proc, pid)
        text = script_text(path) if path else text
        mentions = marks.of_script(path) if path and "docker" in text else marks.of(text)
        if mentions and pid not in own:
            holder = holder_of(proc, pid)
            if not holder["container"]:
                found.append({"script": str(path or "sh -c"), "mentions": sorted(mentions), "holder": holder})
    return found


# Units and jobs


def unit_mentions(text: str, marks: Marks, home: str) -> set[str]:
    """Return what a unit file names, by its commands or by the scripts that they run."""
    lines = EXEC.findall(re.sub(r"\\\n", " ", text))
    folder = next((value for key, value in lines if key == "WorkingDirectory"), "/").lstrip("-")
    found: set[str] = set()
    for _, value in lines:
        words = [word.strip("'\"").lstrip("-@:+!").replace("%h", home) for word in value.split()]
        found |= marks.of(value)
        for word in words:
            found |= marks.of_script(Path(folder.replace("%h", home)) / word) if word else set()
    return found


def unit_texts(folders: Iterable[Path]) -> dict[str, str]:
    """Return the text of each service file, with its drop-ins."""
    texts: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.service")):
            parts = [path, *sorted(folder.glob(f"{path.name}.d/*.conf"))]
            texts.setdefault(path.name, "\n".join(script_text(part) for part in parts))
    return texts


def read_units(
    scope: str, folders: list[Path], home: str, marks: Marks, also: set[str]
) -> list[dict[str, Any]]:
    """Return the units that name a container in `marks`, those in `also`, and what triggers them."""
    mentions = {name: unit_mentions(text, marks, home) for name, text in unit_texts(folders).items()}
    wanted = {name for name, found in mentions.items() if found} | also
    if not manager_runs(scope):
        enabled = {link.name for folder in folders for link in folder.glob("*.wants/*")}
        return [_unit(scope, {"Id": n}, mentions.get(n, set()), n in enabled, False) for n in sorted(wanted)]
    shown = show(scope, (name.replace("@.", "@*.") for name in sorted(wanted)))
    found = []
    for unit in shown:
        named = mentions.get(re.sub(r"@[^.]*", "@", unit["Id"]), mentions.get(unit["Id"], set()))
        found.append(_unit(scope, unit, named))
        found += [_unit(scope, t, named) for t in show(scope, unit.get("TriggeredBy", "").split())]
    return found


def _unit(
    scope: str, shown: dict[str, str], mentions: set[str], enabled: bool = False, managed: bool = True
) -> dict[str, Any]:
    return {
        "name": shown["Id"],
        "scope": scope,
        "active": shown.get("ActiveState") in ("active", "activating", "reloading"),
        "enabled": enabled or shown.get("UnitFileState", "").startswith("enabled"),
        "managed": managed,
        "mentions": sorted(mentions),
    }


def read_jobs(marks: Marks, root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the lines of cron's files and of rc.local that name a container in `marks`."""
    found = []
    for pattern in JOB_FILES:
        for path in sorted(root.glob(pattern.lstrip("/"))):
            for number, line in enumerate(script_text(path).splitlines(), 1):
                if line.lstrip().startswith("#"):
                    continue
                mentions = marks.of(line).union(
                    *(marks.of_script(Path(w)) for w in line.split() if w[0] == "/")
                )
                if mentions:
                    found.append({"file": str(path), "line": number, "mentions": sorted(mentions)})
    return found


def collect(params: dict[str, Any], proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return all of it."""
    try:
        containers = read_containers()
    except (OSError, ValueError):
        containers = []  # preflight says what is wrong with docker
    others = [c["name"] for c in containers if not c["ours"]]
    marks = Marks(params["recipes"], others, params["recipe_paths"])
    listeners = read_listeners(proc, params["ports"])
    scripts = read_scripts(proc, marks, {pid for pid, _ in ancestors(proc, os.getpid())})
    holders = [entry["holder"] for entry in listeners + scripts]
    places = [("", [Path(folder) for folder in UNIT_FOLDERS], "/root")]
    for user in pwd.getpwall():
        folder = Path(user.pw_dir) / USER_FOLDER
        with contextlib.suppress(OSError):
            if folder.is_dir() and folder not in [p for _, known, _ in places for p in known]:
                places.append((user.pw_name, [folder], user.pw_dir))
    units = []
    for scope, folders, home in places:
        also = {h["unit"] for h in holders if h["unit"] and h["scope"] == scope}
        units += read_units(scope, folders, home, marks, also)
    return {
        "containers": containers,
        "listeners": listeners,
        "scripts": scripts,
        "units": units,
        "jobs": read_jobs(marks),
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "default": []},
            "recipes": {"type": "list", "elements": "str", "default": []},
            "recipe_paths": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, seen=json.loads(json.dumps(collect(module.params))))


if __name__ == "__main__":
    main()
