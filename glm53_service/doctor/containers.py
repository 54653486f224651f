"""Docker and the NVIDIA container toolkit: which docker, how a rank gets the GPU, what limits ours have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glm53_service.doctor.finding import Finding, Noun, error, good, info, warning
from glm53_service.doctor.source import Ran, Source
from glm53_service.engines.base import CDI_DEVICES, GpuMode
from glm53_service.errors import ConfigError
from glm53_service.node import read_node

MODE = re.compile(r'^\s*mode\s*=\s*"([a-z-]+)"', re.MULTILINE)
TOOLKIT = re.compile(r"version (\d+\.\d+\.\d+)")
FREEZES = "1.19.1"
"""Hosts froze on CDI with this toolkit, and not in legacy mode (NVIDIA/nvidia-container-toolkit #1910)."""

RELEASE = re.compile(r"^(\d+)\.(\d+)\.(\d+)")
SYSTEMD = re.compile(r"^systemd (\d+)")
SILENT_SYSTEMD = 255
FOLLOWS = (25, 0, 3)
"""Engines before this one may follow journald's logs in vain under that systemd and later ones (moby/moby
#46983, reported of 24.0; its fix is #47243, in the notes of 25.0.3).
"""

SPECIFICATIONS = ("etc/cdi/*.yaml", "etc/cdi/*.json", "run/cdi/*.yaml", "run/cdi/*.json")
"""Where docker looks for CDI's devices; `docker info` names them only since 28.2."""

AGAIN = "stop the pair and run site.yml: it tries every way, and writes the one that works into node.yaml"
SHM_GIB = 16
FORMAT = "{{json .}}"
OTHERS = "{{.Names}} {{.Image}}"
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Containers:
    """`mode` is the toolkit's (auto, legacy, cdi; empty: no config.toml), `ours` the ranks' inspects.

    `systemd` is its version, 0 where it does not tell. `asks` is how this node's ranks ask for the GPU (None:
    no node.yaml), `cdi` the names of NVIDIA's devices that docker tells, or `specification` when it tells
    none and there is a file of them.
    """

    problem: str
    version: dict[str, Any]
    info: dict[str, Any]
    mode: str
    asks: GpuMode | None
    cdi: tuple[str, ...]
    toolkit: str
    daemon: dict[str, Any]
    systemd: int
    ours: tuple[dict[str, Any], ...]
    others: tuple[str, ...]


async def read(source: Source) -> Containers:
    """Gather."""
    version = await source.run("docker", "version", "--format", FORMAT)
    about = await source.run("docker", "info", "--format", FORMAT)
    listed = await source.run("docker", "ps", "--all", "--quiet", "--filter", "label=glm53.rank")
    ids = listed.out.split()
    inspects = await source.run("docker", "inspect", *ids) if ids else Ran(code=0, out="[]")
    running = await source.run("docker", "ps", "--format", OTHERS)
    config = source.read("etc/nvidia-container-runtime/config.toml")
    mode = MODE.search(config)
    toolkit = TOOLKIT.search((await source.run("nvidia-ctk", "--version")).out)
    told = _mapping(about.out)
    systemd = SYSTEMD.search((await source.run("systemctl", "--version")).out)
    names = [line for line in running.out.splitlines() if not line.startswith("glm53-")]
    return Containers(
        problem="" if version.ok and about.ok else (version.err or about.err or "docker says nothing"),
        version=_mapping(version.out),
        info=told,
        mode=mode[1] if mode else "auto" if config else "",
        asks=_asks(source),
        cdi=_devices(told, source),
        toolkit=toolkit[1] if toolkit else "",
        daemon=_mapping(source.read("etc/docker/daemon.json")),
        systemd=int(systemd[1]) if systemd else 0,
        ours=tuple(_list(inspects.out)),
        others=tuple(names),
    )


def _asks(source: Source) -> GpuMode | None:
    try:
        return read_node(source.etc).gpu_mode
    except ConfigError:
        return None


def _devices(told: dict[str, Any], source: Source) -> tuple[str, ...]:
    names = [str(device.get("ID")) for device in told.get("DiscoveredDevices") or []]
    ours = tuple(name for name in names if name.startswith("nvidia.com/gpu"))
    files = [path for pattern in SPECIFICATIONS for path in source.names(pattern)]
    return ours or tuple("specification" for path in files if "nvidia.com/gpu" in source.read(path))[:1]


def check(found: Containers) -> Iterator[Finding]:
    """Judge."""
    if found.problem:
        yield error(
            "docker.answers",
            found.problem.strip()[:200],
            "docker answers (this account is root or in group docker)",
            "systemctl status docker; run the doctor as root",
        )
        return
    yield from _flavour(found)
    yield from _following(found)
    yield from _gpu(found)
    driver = found.info.get("LoggingDriver", "")
    if driver == "json-file" and "max-size" not in (found.daemon.get("log-opts") or {}):
        yield info(
            "docker.logs",
            "json-file without a limit for other containers (ours log to journald)",
            'a limit: {"log-opts": {"max-size": "50m", "max-file": "3"}} in /etc/docker/daemon.json',
            "set it while the pair is stopped: docker has to be restarted",
        )
    for inspect in found.ours:
        yield from _limits(inspect)
    if found.others:
        yield info(
            "docker.others",
            ", ".join(found.others[:6]),
            "no container beside the ranks that uses the GPU or its memory",
            "docker stop what is not needed",
        )


def _flavour(found: Containers) -> Iterator[Finding]:
    engine = (found.version.get("Server") or {}).get("Version", "?")
    options = found.info.get("SecurityOptions") or []
    root = str(found.info.get("DockerRootDir", ""))
    wrong = (
        "rootless docker"
        if any("rootless" in option for option in options)
        else "docker from a snap"
        if root.startswith("/var/snap/")
        else ""
    )
    if wrong:
        yield error(
            "docker.flavour",
            wrong,
            "Docker Engine of the system: the ranks need the GPU and locked memory",
            "install docker-ce (or what DGX OS has), and make its context the default",
        )
    else:
        yield good("docker.flavour", f"Docker Engine {engine}, {found.info.get('Driver', '?')}")


def _following(found: Containers) -> Iterator[Finding]:
    """The supervisors follow their ranks' logs through docker, which reads them back from journald."""
    engine = str((found.version.get("Server") or {}).get("Version", ""))
    release = RELEASE.search(engine)
    if release and tuple(map(int, release.groups())) < FOLLOWS and found.systemd >= SILENT_SYSTEMD:
        yield warning(
            "docker.follow",
            f"Docker Engine {engine} with systemd {found.systemd}",
            f"{'.'.join(map(str, FOLLOWS))} or later, unless your distribution has mended it: before,"
            " following journald's logs can stay silent, and milestones and errors of a rank are missed",
            "upgrade docker on both nodes while the pair is stopped; until then look with"
            " journalctl -t glm53-rank0 (and -rank1)",
        )


def _gpu(found: Containers) -> Iterator[Finding]:
    runtimes, cdi = sorted(found.info.get("Runtimes") or {}), found.cdi
    asked = f"ranks ask by {found.asks}, " if found.asks else ""
    measured = (
        f"{asked}toolkit {found.toolkit or 'none'}, mode {found.mode or 'none'}, "
        f"runtimes {', '.join(runtimes)}, CDI: {', '.join(cdi[:2]) or 'none'}"
    )
    nvidia = any(name.startswith("nvidia") for name in runtimes)
    if found.asks is GpuMode.RUNTIME and "nvidia" not in runtimes:
        yield error("docker.gpu", measured, "the runtime `nvidia`: this node's ranks ask for it", AGAIN)
    elif found.asks is GpuMode.CDI and not {CDI_DEVICES, "specification"} & set(cdi):
        yield error(
            "docker.gpu",
            measured,
            f"the CDI device {CDI_DEVICES}: this node's ranks ask for it",
            f"nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; or {AGAIN}",
        )
    elif not found.toolkit and not nvidia and not cdi:
        yield warning(
            "docker.gpu",
            measured,
            "NVIDIA's container toolkit (a machine without a GPU serves only with glm53_device: cpu)",
            "glm53_docker_install: true and playbooks/host.yml; or install nvidia-container-toolkit, then"
            " `nvidia-ctk runtime configure --runtime=docker`",
        )
    elif found.mode == "cdi" and not cdi:
        yield error(
            "docker.gpu",
            measured,
            "mode cdi needs a specification: else --gpus fails ('invoking the runtime hook directly')",
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; restart docker while the pair is stopped",
        )
    elif not nvidia and not cdi:
        yield error(
            "docker.gpu",
            measured,
            "the runtime `nvidia`, or CDI devices: else no container gets the GPU",
            "nvidia-ctk runtime configure --runtime=docker; restart docker while the pair is stopped",
        )
    elif found.toolkit == FREEZES and _by_cdi(found):
        yield warning(
            "docker.gpu",
            measured,
            f"hosts froze on CDI with toolkit {FREEZES}; in legacy mode they did not",
            "another toolkit version, the same on both nodes; do not change the mode on the way",
        )
    else:
        yield good("docker.gpu", measured)


def _by_cdi(found: Containers) -> bool:
    """Return whether a rank here gets the GPU by CDI; `auto` takes it where there is a device."""
    by_mode = found.mode == "cdi" or (found.mode != "legacy" and bool(found.cdi))
    return found.asks is GpuMode.CDI or by_mode


def _limits(inspect: dict[str, Any]) -> Iterator[Finding]:
    host = inspect.get("HostConfig") or {}
    name = str(inspect.get("Name", "?")).lstrip("/")
    devices = [str(device.get("PathOnHost")) for device in host.get("Devices") or []]
    locked = [limit for limit in host.get("Ulimits") or [] if limit.get("Name") == "memlock"]
    if "/dev/infiniband" in devices and not any(limit.get("Hard") == -1 for limit in locked):
        yield error(
            "docker.memlock",
            f"{name}: memlock {locked[0].get('Hard') if locked else 'as docker has it'}",
            "unlimited: RDMA pins memory, and registering it fails",
            "is that container of this release? systemctl restart glm53-head",
        )
    shm = int(host.get("ShmSize") or 0)
    if shm > SHM_GIB * GIB:
        yield warning(
            "docker.shm",
            f"{name}: {shm / GIB:.0f} GiB of shared memory",
            f"at most {SHM_GIB} GiB: it is the same memory that the model needs",
            "is that container of this release? systemctl restart glm53-head",
        )
    policy = (host.get("RestartPolicy") or {}).get("Name") or "no"
    if policy != "no":
        yield error(
            "docker.restart",
            f"{name}: restart policy {policy}",
            "no: a rank that docker restores alone hangs beside the other",
            f"docker update --restart=no {name}",
        )


def _mapping(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _list(text: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(text)
    except ValueError:
        return []
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def parity(found: Containers) -> dict[str, str]:
    """Return what has to be equal on all nodes."""
    server = found.version.get("Server") or {}
    return {
        "docker": str(server.get("Version", "")),
        "docker.toolkit": found.toolkit,
        "docker.mode": found.mode,
    }


NOUN = Noun(
    name="docker",
    read=read,
    check=check,
    files=("etc/docker/daemon.json", "etc/nvidia-container-runtime/config.toml", *SPECIFICATIONS),
    parity=parity,
)
