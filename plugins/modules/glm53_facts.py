#!/usr/bin/python
"""Ansible module: everything the playbooks must know about a node, read in one go, nothing changed."""

from __future__ import annotations

import fnmatch
import http.client
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_docker import DOCKER_SOCKET, docker_get
from ansible.module_utils.glm53_host import (
    CANDIDATES,
    PACKAGE_LINE,
    PACKAGES,
    candidate_facts,
    docker_context,
    networkmanager_devices,
    package_facts,
    ssh_facts,
    text_of,
    toolkit_facts,
    ufw_facts,
)

DOCUMENTATION = """
module: glm53_facts
short_description: Read what a GLM-5.3 node is and has
description: Reads only. Needs root for the docker socket and for netplan's files.
options:
  image: {description: "Image reference to look up in docker.", type: str, default: ""}
  netdevs: {description: "Devices to look for in netplan's files.", type: list, elements: str, default: []}
  own_netplan: {description: "Our own netplan file, which is left out of the search.", type: str, default: ""}
"""

SHIPPED = "glm53/engine"
"""The repository of images that came from the head (glm53_service.artifacts.content.LOCAL_REPOSITORY)."""
NETPLAN_FOLDERS = ("/run/netplan", "/etc/netplan", "/lib/netplan")
TOOLS = ("zstd", "ssh", "ping", "netplan", "networkctl", "systemctl", "nft", "nmcli", "nvidia-smi")


def docker_facts(image: str) -> dict[str, Any]:
    """Return what docker says of itself and of `image`; `{"answers": False, "why": ...}` without one."""
    try:
        _, version = docker_get("/version")
        _, info = docker_get("/info")
        inspect = None
        if image:
            status, found = docker_get("/images/" + urllib.parse.quote(image, safe="/:@") + "/json")
            inspect = found if status == 200 else None
        shipped = {tag: docker_get("/images/" + tag + "/json")[1] for tag in shipped_tags()}
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"answers": False, "why": f"{DOCKER_SOCKET}: {error}", "image": None}
    return {
        "answers": True,
        "version": version.get("Version", "unknown"),
        "api": version.get("ApiVersion", "0"),
        "flavour": docker_flavour(version, info),
        "root": info.get("DockerRootDir", ""),
        "free_bytes": free_bytes(info.get("DockerRootDir", "/")),
        "running": info.get("ContainersRunning", 0),
        "image": inspect,
        "shipped": shipped,
    }


def shipped_tags() -> list[str]:
    """Return the tags of images that came from the head."""
    filters = urllib.parse.quote(json.dumps({"reference": [SHIPPED]}))
    _, images = docker_get(f"/images/json?filters={filters}")
    return [
        tag for image in images or [] for tag in image.get("RepoTags") or [] if tag.startswith(SHIPPED + ":")
    ]


def docker_flavour(version: dict[str, Any], info: dict[str, Any]) -> str:
    """Return `engine`, or which other thing answers on the socket: `podman`, `rootless`, `snap`."""
    names = " ".join(str(part.get("Name", "")) for part in version.get("Components") or [])
    if "podman" in names.lower():
        return "podman"
    if any("rootless" in option for option in info.get("SecurityOptions") or []):
        return "rootless"
    return "snap" if str(info.get("DockerRootDir", "")).startswith("/var/snap/") else "engine"


def free_bytes(path: str) -> int:
    """Return the bytes an ordinary user may still write where `path` is or would be."""
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


def os_release(text: str) -> dict[str, str]:
    """Return the keys of an os-release file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip().strip('"') for key, value in pairs}


def netdev_facts(addresses: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `{netdev: {mtu, carrier, addresses}}` from `ip -j address`; IPv4 with prefix length."""
    return {
        entry["ifname"]: {
            "mtu": entry.get("mtu", 0),
            "carrier": "LOWER_UP" in entry.get("flags", []),
            "addresses": [
                f"{address['local']}/{address['prefixlen']}"
                for address in entry.get("addr_info", [])
                if address.get("family") == "inet"
            ],
        }
        for entry in addresses
        if "ifname" in entry
    }


def netplan_definitions(files: dict[str, Any], netdevs: list[str]) -> list[dict[str, Any]]:
    """Return each definition in `files` (path to parsed YAML) that configures one of `netdevs`."""
    found = []
    for path, document in files.items():
        network = (document or {}).get("network") if isinstance(document, dict) else None
        for kind, definitions in (network or {}).items():
            for name, definition in (definitions or {}).items() if isinstance(definitions, dict) else ():
                for netdev in _touched(name, definition or {}, netdevs):
                    found.append(
                        {
                            "file": path,
                            "kind": kind,
                            "netdev": netdev,
                            "mtu": (definition or {}).get("mtu") or 1500,
                            "addresses": [_address(a) for a in (definition or {}).get("addresses") or []],
                        }
                    )
    return found


def _touched(name: str, definition: Any, netdevs: list[str]) -> list[str]:
    if not isinstance(definition, dict):
        return []
    pattern = (definition.get("match") or {}).get("name")
    names = definition.get("interfaces") or ([pattern] if pattern else [definition.get("set-name", name)])
    patterns = [p for n in names for p in (n if isinstance(n, list) else [n])]
    return [netdev for netdev in netdevs if any(fnmatch.fnmatch(netdev, str(p)) for p in patterns)]


def _address(address: Any) -> str:
    return str(next(iter(address)) if isinstance(address, dict) else address)


def read_netplan(own: str) -> dict[str, Any]:
    """Return netplan's files, parsed, without `own`. Wi-Fi passwords in them never leave this node."""
    paths = [
        p for folder in NETPLAN_FOLDERS for p in sorted(map(str, Path(folder).glob("*.yaml"))) if p != own
    ]
    if not paths:
        return {}
    import yaml  # netplan itself needs it, so it is there wherever such a file is used

    return {path: yaml.safe_load(Path(path).read_text(encoding="utf-8")) for path in paths}


def output(*argv: str) -> str:
    """Return the standard output of a command, empty when it is missing or fails."""
    environment = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "LC_ALL": "C"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def account_facts() -> dict[str, str]:
    """Return the account that Ansible logged in with (through sudo), and its home."""
    name = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    return {"name": name, "home": pwd.getpwnam(name).pw_dir}


def collect(image: str, netdevs: list[str], own_netplan: str) -> dict[str, Any]:
    """Return the fact."""
    release = os_release(Path("/etc/os-release").read_text(encoding="utf-8"))
    systemd = output("systemctl", "--version").split()
    key = Path("/etc/ssh/ssh_host_ed25519_key.pub")
    account = account_facts()
    return {
        "account": account,
        "candidates": candidate_facts(output("apt-cache", "policy", *CANDIDATES)),
        "docker_context": docker_context(account["home"], text_of("/etc/environment")),
        "needrestart": Path("/etc/needrestart/conf.d").is_dir(),
        "networkmanager": networkmanager_devices(
            output("nmcli", "--terse", "--fields", "DEVICE,STATE", "device")
        ),
        "packages": package_facts(output("dpkg-query", "--show", PACKAGE_LINE, *PACKAGES)),
        "ssh": ssh_facts(Path("/proc"), os.getpid()),
        "toolkit": toolkit_facts(
            output("nvidia-ctk", "--version"), text_of("/etc/nvidia-container-runtime/config.toml")
        ),
        "ufw": ufw_facts(Path("/"), output("ufw", "show", "added")),
        "architecture": platform.machine(),
        "docker": docker_facts(image),
        "host_key": " ".join(key.read_text(encoding="utf-8").split()[:2]) if key.exists() else "",
        "netdevs": netdev_facts(json.loads(output("ip", "-j", "address", "show") or "[]")),
        "netplan": netplan_definitions(read_netplan(own_netplan), netdevs),
        "opt_free_bytes": free_bytes("/opt"),
        "os": {
            "id": release.get("ID", ""),
            "version": release.get("VERSION_ID", ""),
            "name": release.get("PRETTY_NAME", "unknown"),
        },
        "python": [sys.version_info.major, sys.version_info.minor],
        "root": os.geteuid() == 0,
        "systemd": {
            "runs": Path("/run/systemd/system").is_dir(),
            "version": int(systemd[1]) if len(systemd) > 1 and systemd[1].isdigit() else 0,
        },
        "tools": [
            tool for tool in TOOLS if shutil.which(tool, path=os.defpath + ":/usr/sbin:/sbin:/usr/local/bin")
        ],
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str", "default": ""},
            "netdevs": {"type": "list", "elements": "str", "default": []},
            "own_netplan": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, found=collect(**module.params))


if __name__ == "__main__":
    main()
