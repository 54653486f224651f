"""A healthy, serving Spark as a snapshot tree, all that the doctor reads of it; tests change one thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm53_service.doctor import artifacts, containers, daemons, driver, memory, ports, service
from glm53_service.gpu import QUERY
from tests.unit.fixtures import merged
from tests.unit.trees import Spark

Commands = Mapping[tuple[str, ...], tuple[int | None, str]]

MODEL = "/srv/models/glm"
IMAGE_NAME = "unit/tensorfold@sha256:" + "7" * 64
IMAGE = {"Id": "sha256:77", "Architecture": "arm64", "RootFS": {"Layers": ["sha256:l1"]}, "Config": {}}
UNITS = "docker.service loaded active running Docker\nssh.service loaded active running OpenSSH\n"
INFO: dict[str, Any] = {
    "LoggingDriver": "json-file",
    "Driver": "overlay2",
    "Runtimes": {"runc": {}, "nvidia": {}},
    "SecurityOptions": ["name=seccomp,profile=builtin"],
    "DockerRootDir": "/var/lib/docker",
}
RANK: dict[str, Any] = {
    "Name": "/glm53-rank0",
    "HostConfig": {
        "Devices": [{"PathOnHost": "/dev/infiniband"}],
        "Ulimits": [{"Name": "memlock", "Hard": -1}],
        "ShmSize": 8 * 1024**3,
        "RestartPolicy": {"Name": "no"},
        "Binds": [f"{MODEL}:{MODEL}:ro", "/var/lib/glm53/cache/1:/cache:rw"],
    },
    "Config": {"Cmd": ["serve", MODEL, "--rank", "1"]},
}
MEMINFO = "MemTotal: 127600000 kB\nMemFree: 118000000 kB\nMemAvailable: 120000000 kB\n"
CMA = "CmaTotal: 32768 kB\nCmaFree: 11000 kB\n"
SETTINGS = json.dumps(
    {
        "version": 1,
        "cluster": "unit",
        "engine": "tensorfold",
        "image": IMAGE_NAME,
        "model": {"path": MODEL, "name": "unit-glm"},
        "api": {"port": 18888},
        "supervision": {"min_free_gib": 103},
    }
)
RANKS = ("docker", "ps", "--quiet", "--filter", "label=glm53.rank")
RANKS_ALL = ("docker", "ps", "--all", "--quiet", "--filter", "label=glm53.rank")
NVIDIA = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build  (dvs-builder)\n"
    "GCC version:  gcc version 13.3.0\n"
)


def gpu_row(clock: int = 2398, watts: float = 44.5, used: int = 97, version: str = "580.95.05") -> str:
    """Return what nvidia-smi says to the question of glm53_service.gpu."""
    return f"0, NVIDIA GB10, {clock}, 3003, {watts}, {used}, {version}\n"


def verify_says(folder: str = MODEL, *, content: str | None = "c0de12345678", **problems: str) -> Commands:
    """Return the answer of `glm53 verify`; each of `problems` is a kind and its words."""
    said = {
        "event": "result",
        "folder": folder,
        "right": not problems,
        "repository": "unit/glm" if content else None,
        "revision": "4" * 40 if content else None,
        "content": content,
        "problems": [{"path": "f", "kind": kind, "text": text} for kind, text in problems.items()],
    }
    return {(*artifacts.VERIFY, folder): (76 if problems else 0, json.dumps(said) + "\n")}


def files(host: int) -> dict[str, str]:
    """Return the files of a healthy node."""
    head = {"etc/glm53/settings.yaml": SETTINGS} if host == 1 else {}
    return head | {
        "proc/meminfo": MEMINFO + CMA,
        "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro quiet\n",
        "proc/sys/kernel/osrelease": "6.17.0-1014-nvidia\n",
        "proc/sys/kernel/hostname": f"spark-{'ab'[host - 1]}\n",
        "proc/sys/vm/swappiness": "60\n",
        "proc/sys/vm/min_free_kbytes": "67584\n",
        "proc/driver/nvidia/version": NVIDIA.format("580.95.05"),
        "sys/class/dmi/id/bios_version": "5.36_0ACUM018\n",
        "etc/nvidia-container-runtime/config.toml": '[nvidia-container-runtime]\nmode = "auto"\n',
        "etc/docker/daemon.json": json.dumps({"log-opts": {"max-size": "50m", "max-file": "3"}}),
        "etc/needrestart/needrestart.conf": "$nrconf{restart} = 'a';\n",
        "etc/needrestart/conf.d/60-glm53.conf": "$nrconf{override_rc}{qr(^(docker|containerd|glm53))} = 0;\n",
    }


def commands(host: int) -> dict[tuple[str, ...], tuple[int | None, str]]:
    """Return what the commands of a healthy node that does not serve at the moment say."""
    unit = "glm53-head.service" if host == 1 else "glm53-worker.service"
    shown = f"Id={unit}\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNRestarts=0\n"
    image = IMAGE_NAME if host == 1 else "sha256:77"
    df = {place: f"Avail\n{free * 1024**3}\n" for place, free in (("/", 900), ("/opt", 900))}
    df |= {place: f"Avail\n{700 * 1024**3}\n" for place in ("/var/lib/docker", "/var/lib/glm53")}
    listing = "config.json 1201\nmodel-00001.safetensors 4900000000\n"
    return {
        ("getconf", "PAGESIZE"): (0, "4096\n"),
        ("systemctl", "--version"): (0, "systemd 257 (257.9-1~deb13u1)\n+PAM +AUDIT\n"),
        ("uname", "-m"): (0, "aarch64\n"),
        ("ls", "/dev/infiniband"): (0, "rdma_cm\nuverbs0\nuverbs1\n"),
        QUERY: (0, gpu_row()),
        driver.PACKAGES: (0, "libnvidia-compute-580 580.95.05-0ubuntu1 installed\n"),
        memory.PROCESSES: (0, "  911 1258291 dockerd\n    1 14336 systemd\n"),
        RANKS: (0, ""),
        RANKS_ALL: (0, "c0ffee\n"),
        ("docker", "inspect", "c0ffee"): (0, json.dumps([RANK])),
        ("docker", "version", "--format", containers.FORMAT): (
            0,
            json.dumps({"Server": {"Version": "28.3.3"}}),
        ),
        ("docker", "info", "--format", containers.FORMAT): (0, json.dumps(INFO)),
        ("docker", "ps", "--format", containers.OTHERS): (0, "glm53-rank0 sha256:77\n"),
        ("docker", "image", "ls", "--quiet", "--no-trunc", "glm53/engine"): (0, "sha256:77\n"),
        ("docker", "image", "inspect", image): (0, json.dumps([IMAGE])),
        ("nvidia-ctk", "--version"): (0, "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80a\n"),
        ("find", "-L", MODEL, *artifacts.FILES[1:]): (0, listing),
        ("find", MODEL, *artifacts.DANGLING): (0, ""),
        **verify_says(),
        ports.LISTENING: (0, 'LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=811,fd=3))\n'),
        ("systemctl", "is-active", *ports.UNITS): (3, "inactive\ninactive\n"),
        ("systemctl", "show", unit, "-p", service.SHOWN): (0, shown),
        service.STATUS: (3, json.dumps({"state": "waiting", "ready": False, "reasons": ["waiting for b"]})),
        service.VERSION: (0, "glm53 0.1.0, release 5e1ec7ed0123\n"),
        ("ufw", "status"): (None, "`ufw status` cannot be run: No such file or directory"),
        ("nft", "list", "table", "inet", "glm53"): (0, "table inet glm53 {\n}\n"),
        daemons.RUNNING: (0, UNITS),
        ("timedatectl", "show"): (0, "Timezone=Etc/UTC\nNTP=yes\nNTPSynchronized=yes\n"),
        ("systemctl", "is-enabled", *daemons.SLEEP): (1, "masked\n" * len(daemons.SLEEP)),
        ("systemctl", "get-default"): (0, "multi-user.target\n"),
        daemons.APT: (0, 'APT::Periodic::Unattended-Upgrade "0";\n'),
        daemons.HELD: (0, ""),
        ("getent", "ahosts", f"spark-{'ab'[host - 1]}"): (0, "127.0.1.1 STREAM spark\n127.0.1.1 DGRAM\n"),
        **{("df", "--output=avail", "-B1", place): (0, out) for place, out in df.items()},
    }


def healthy(
    host: int = 1, *, more: Mapping[str, str] | None = None, says: Commands | None = None, **rest: Any
) -> Spark:
    """Return a healthy node, with the files in `more` and the answers in `says` in place of its own."""
    return Spark(
        name=f"spark-{'ab'[host - 1]}",
        host=host,
        files=files(host) | dict(more or {}),
        commands=commands(host) | dict(says or {}),
        **rest,
    )


def info_with(**changes: Any) -> Commands:
    """Return the answer of docker info with `changes`."""
    return {("docker", "info", "--format", containers.FORMAT): (0, json.dumps({**INFO, **changes}))}


def engine(version: str, systemd: str) -> Commands:
    """Return the answers of a node with another Docker Engine and another systemd."""
    return {
        ("docker", "version", "--format", containers.FORMAT): (
            0,
            json.dumps({"Server": {"Version": version}}),
        ),
        ("systemctl", "--version"): (0, systemd),
    }


def rank_with(config: Mapping[str, Any] | None = None, **changes: Any) -> Commands:
    """Return the answer of docker inspect with `changes` of the rank's HostConfig, and of its Config."""
    made = merged(RANK, {"HostConfig": changes, "Config": dict(config or {})})
    return {("docker", "inspect", "c0ffee"): (0, json.dumps([made]))}
