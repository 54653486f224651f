"""For glm53_facts: what a host's tools and files say of its network, its packages and its docker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CANDIDATES = ("docker-ce", "docker.io", "nvidia-container-toolkit")
PACKAGES = (
    "docker-ce*",
    "docker.io",
    "containerd*",
    "runc",
    "nvidia-container-toolkit*",
    "libnvidia-container*",
    "nvidia-driver-*",
    "nvidia-dkms-*",
    "nvidia-kernel-*",
    "nvidia-utils-*",
    "libnvidia-compute-*",
    "linux-modules-nvidia-*",
)
"""What a night's upgrade must not change under the ranks: engine, container toolkit, driver."""

PACKAGE_LINE = "--showformat=${Package}\\t${Version}\\t${db:Status-Status}\\n"


def networkmanager_devices(text: str) -> list[str]:
    """Return the devices that NetworkManager manages, from `nmcli --terse --fields DEVICE,STATE device`."""
    pairs = (line.rsplit(":", 1) for line in text.splitlines() if ":" in line)
    foreign = ("unmanaged", "unknown", "connected (externally)")
    return [name for name, state in pairs if state not in foreign]


def ssh_facts(proc: Path, pid: int) -> dict[str, str]:
    """Return client and server address of the login that process `pid` came by, empty without one.

    sudo drops SSH_CONNECTION from the environment, so the ancestors' are read (/proc/PID/environ, proc(5)).
    """
    while pid > 1:
        try:
            environ = (proc / str(pid) / "environ").read_bytes().split(b"\0")
            status = (proc / str(pid) / "status").read_text(encoding="utf-8")
        except OSError:
            break
        for entry in environ:
            name, _, value = entry.decode(errors="replace").partition("=")
            if name == "SSH_CONNECTION" and len(value.split()) == 4:
                return {"client": value.split()[0], "server": value.split()[2]}
        pid = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    return {"client": "", "server": ""}


def ufw_facts(root: Path, added: str) -> dict[str, Any]:
    """Return whether ufw is switched on (its own ufw.conf), and the rules that `ufw show added` prints."""
    path = root / "etc/ufw/ufw.conf"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rules = [line.strip() for line in added.splitlines() if line.strip().startswith("ufw ")]
    return {"active": "ENABLED=yes" in [line.strip() for line in lines], "added": rules}


def toolkit_facts(version: str, config: str) -> dict[str, str]:
    """Return NVIDIA's container toolkit: its version (`nvidia-ctk --version`) and config.toml's mode."""
    words = version.split("\n", 1)[0].split()
    modes = [
        line.split("=", 1)[1].strip().strip('"')
        for line in config.splitlines()
        if line.split("=", 1)[0].strip() == "mode" and "=" in line
    ]
    return {"version": words[-1] if words else "", "mode": modes[0] if modes else ""}


def package_facts(shown: str) -> dict[str, str]:
    """Return the installed packages and their versions, from dpkg-query's lines of name, version, status."""
    rows = (line.split("\t") for line in shown.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3 and row[2] == "installed"}


def candidate_facts(policy: str) -> list[str]:
    """Return the packages that apt could install, from `apt-cache policy NAME ...`."""
    found, name = [], ""
    for line in policy.splitlines():
        if not line.startswith(" "):
            name = line.rstrip(":")
        elif line.strip().startswith("Candidate:") and not line.endswith("(none)"):
            found.append(name)
    return found


def docker_context(home: str, environment: str) -> str:
    """Return the docker context that the account's commands use, empty for the machine's own engine."""
    for line in environment.splitlines():
        if line.strip().startswith(("DOCKER_HOST=", "DOCKER_CONTEXT=")):
            return line.strip()
    try:
        config = json.loads((Path(home) / ".docker/config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    context = config.get("currentContext", "") if isinstance(config, dict) else ""
    return "" if context == "default" else str(context)


def text_of(path: str) -> str:
    """Return a file's text, empty when there is none."""
    return Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
