"""The doctor against snapshot trees: a healthy Spark, and one change a report that owners sent."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glm53_service import cli
from glm53_service.artifacts.built import built_labels, built_reference
from glm53_service.artifacts.served import FILE
from glm53_service.doctor import artifacts, daemons, kernels, memory, ports, service
from glm53_service.doctor.examination import Examination, compare, examine, exit_code, table
from glm53_service.doctor.finding import Finding, Level
from glm53_service.doctor.registry import FILES
from glm53_service.doctor.snapshot import take
from glm53_service.doctor.source import open_tree
from glm53_service.fabric.probe import KERNEL_LOG
from glm53_service.gpu import QUERY
from tests.unit import trees
from tests.unit.doctor_trees import (
    CMA,
    IMAGE,
    MEMINFO,
    MODEL,
    NVIDIA,
    RANKS,
    RANKS_ALL,
    SETTINGS,
    Commands,
    engine,
    gpu_row,
    healthy,
    info_with,
    rank_with,
    verify_says,
)
from tests.unit.trees import Device, Spark, twins


def examined(spark: Spark, folder: Path) -> Examination:
    """Return what the doctor finds on `spark`."""
    return asyncio.run(examine(spark.source(folder)))


def above_info(found: Examination) -> list[str]:
    """Return the ids of what is above info."""
    return [f"{f.level} {f.id}" for f in found.findings if f.level in (Level.ERROR, Level.WARNING)]


@pytest.mark.parametrize("host", [1, 2])
def test_a_healthy_node_has_nothing_above_info(tmp_path: Path, host: int) -> None:
    """Prevents a doctor that cries on every machine, which nobody reads for long."""
    found = examined(healthy(host), tmp_path)
    assert above_info(found) == []
    assert exit_code(found.findings) == 0
    assert {finding.node for finding in found.findings} == {f"spark-{'ab'[host - 1]}"}
    assert all(finding.measured for finding in found.findings)


LOW = "MemTotal: 127600000 kB\nMemFree: 9100000 kB\nMemAvailable: 5700000 kB\n" + CMA
SERVING: Commands = {RANKS: (0, "c0ffee\n")}


def locked(*ages: float) -> tuple[int, str]:
    """Return find's answer for locks of such ages in seconds."""
    cache = "/var/lib/glm53/cache/0a1b2c3d4e5f-01234567/torch_extensions/k/lock"
    return 0, "".join(f"{trees.TAKEN - age:.4f} {cache}\n" for age in ages)


CHANGED = "glm53: changed since the release was installed: glm53_service/cli.py"
KILLED = "Out of memory: Killed process 4711 (python3) total-vm:1\n"
LISTING = "config.json 1201\nmodel-00001.safetensors 4900000000\n"
LINKS = ("find", MODEL, *artifacts.DANGLING)
WEIGHTS = ("find", "-L", MODEL, *artifacts.FILES[1:])
DOCKER_DISK = ("df", "--output=avail", "-B1", "/var/lib/docker")
VERBS = ("ls", "/dev/infiniband")
CPU = SETTINGS.replace('"tensorfold", ', '"vllm", "device": "cpu", "vllm": {"kv_cache_memory": "1G"}, ', 1)
ACTIVE = ("systemctl", "is-active", *ports.UNITS)
CDI = {"etc/nvidia-container-runtime/config.toml": 'mode = "cdi"\n'}
AER = "pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0\n"
XID = "NVRM: Xid (PCI:000f:01:00): 31, pid=4242, name=python3, MMU Fault\n"
TAKEN = 'LISTEN 0 4096 192.0.2.1:29551 0.0.0.0:* users:(("python3",pid=4242,fd=9))\n'
GNOME = "  700 1887436 gnome-shell\n  911 1258291 dockerd\n"
BARE = "Status: active\n\nTo                         Action      From\n22/tcp    ALLOW       Anywhere\n"
LET_IN = BARE + (
    "Anywhere on enp1s0f1np1    ALLOW IN    192.0.2.2\n"
    "Anywhere on enP2p1s0f1np1  ALLOW IN    198.51.100.2\n"
    "29540/tcp                  ALLOW       203.0.113.2\n"
)
UPGRADES = 'APT::Periodic::Unattended-Upgrade "1";\n'
SPARED = UPGRADES + "".join(
    f'Unattended-Upgrade::Package-Blacklist:: "{name}";\n'
    for name in ("docker", "containerd", "nvidia-", "linux-")
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126\n"
CDI_DEVICE = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]
CDI_FIRST = [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]
SPECIFIED = {"run/cdi/nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n"}
LEGACY = {"etc/nvidia-container-runtime/config.toml": 'mode = "legacy"\n'}
CTK = ("nvidia-ctk", "--version")
SLEEP = ("systemctl", "is-enabled", *daemons.SLEEP)
DEFAULT = ("systemctl", "get-default")
CAP = {"etc/systemd/system/glm53-clock-cap.service": "ExecStart=nvidia-smi --lock-gpu-clocks=0,2000\n"}
UNIT = ("systemctl", "show", "glm53-head.service", "-p", service.SHOWN)
FAILED = "Id=glm53-head.service\nLoadState=loaded\nActiveState=failed\nUnitFileState=enabled\nNRestarts=3\n"
WARNED = {"state": "serving", "ready": True, "ranks": [{"rank": 1, "warnings": ["NCCL took NET/Socket"]}]}
SAME = [
    Device("rocep1s0f1", "enp1s0f1np1", "192.0.2.1"),
    Device("roceP2p1s0f1", "enP2p1s0f1np1", "192.0.2.9"),
]
ARP = {"proc/sys/net/ipv4/conf/all/arp_ignore": "0\n", "proc/sys/net/ipv4/conf/enp1s0f1np1/arp_ignore": "0\n"}

CASES = [
    ("110 kho", healthy(more={"proc/meminfo": MEMINFO + "CmaTotal: 32768 kB\nCmaFree: 940604 kB\n"}),
     "error kernel.kho", "CmaFree 940604 kB > CmaTotal 32768 kB"),
    ("64k pages", healthy(says={("getconf", "PAGESIZE"): (0, "65536\n")}),
     "warning kernel.page_size", "65536"),
    ("61 reboot required", healthy(more={"run/reboot-required": "*** System restart required ***\n"}),
     "warning kernel.reboot", "/run/reboot-required"),
    ("42 AER", healthy(says={KERNEL_LOG: (0, AER)}), "error kernel.pcie", "Uncorrectable (Fatal)"),
    ("Xid", healthy(says={KERNEL_LOG: (0, XID)}), "warning kernel.xid", "Xid 31 (1 times)"),
    ("101 killed", healthy(says={KERNEL_LOG: (0, KILLED)}),
     "warning kernel.oom", "the kernel killed python3"),
    ("111 driver 590", healthy(more={"proc/driver/nvidia/version": NVIDIA.format("590.48.01")},
                               says={QUERY: (0, gpu_row(version="590.48.01"))}),
     "error driver.branch", "590.48.01"),
    ("other driver", healthy(more={"proc/driver/nvidia/version": NVIDIA.format("575.51.03")}),
     "warning driver.branch", "575.51.03"),
    ("closed module", healthy(more={"proc/driver/nvidia/version":
                                    "NVRM version: NVIDIA UNIX aarch64 Kernel Module  580.95.05  Release\n"}),
     "error driver.open", "closed"),
    ("61 mismatch", healthy(more={"proc/driver/nvidia/version": NVIDIA.format("580.95")},
                            says={QUERY: (18, MISMATCH)}), "error driver.mismatch", "library 580.126"),
    ("no driver", healthy(more={"proc/driver/nvidia/version": ""}),
     "warning driver.loaded", "no /proc/driver"),
    ("113 clamp", healthy(says={QUERY: (0, gpu_row(695, 17.0, 96))}), "warning gpu.clamped", "695 MHz"),
    ("129 spin", healthy(says={QUERY: (0, gpu_row(2398, 21.0, 95))}), "warning gpu.spins", "21 W"),
    ("114 cap lost", healthy(more=CAP), "warning gpu.cap", "2398 MHz"),
    ("95 page cache", healthy(more={"proc/meminfo": "MemTotal: 127600000 kB\nMemFree: 43537000 kB\n"
                                    "MemAvailable: 121270000 kB\n" + CMA}),
                                    "warning memory.free", "41.5 GiB"),
    ("106 low while serving", healthy(more={"proc/meminfo": LOW}, says=SERVING),
     "warning memory.low", "5.4 GiB"),
    ("58 cdi without a specification", healthy(more=CDI),
     "error docker.gpu", "mode cdi, runtimes nvidia, runc, CDI: none"),
    ("58 asks by CDI without one", healthy(gpu_mode="cdi"), "error docker.gpu", "ask by cdi, toolkit 1.17.8"),
    ("58 asks by CDI, one GPU named", healthy(gpu_mode="cdi", says=info_with(DiscoveredDevices=CDI_FIRST)),
     "error docker.gpu", "CDI: nvidia.com/gpu=0"),
    ("58 asks by the runtime", healthy(gpu_mode="runtime", says=info_with(
        Runtimes={"runc": {}, "nvidia-cdi": {}}, DiscoveredDevices=CDI_DEVICE)),
     "error docker.gpu", "ask by runtime"),
    ("59 asks by CDI", healthy(gpu_mode="cdi", more=LEGACY | SPECIFIED, says={CTK: (0, "version 1.19.1\n")}),
     "warning docker.gpu", "CDI: specification"),
    ("58 no runtime", healthy(says=info_with(Runtimes={"runc": {}})), "error docker.gpu", "runtimes runc,"),
    ("59 toolkit", healthy(more=CDI,
                           says={**info_with(DiscoveredDevices=CDI_DEVICE), CTK: (0, "version 1.19.1\n")}),
     "warning docker.gpu", "toolkit 1.19.1"),
    ("silent logs", healthy(says=engine("24.0.7", "systemd 255 (255.4-1ubuntu8.10)\n")),
     "warning docker.follow", "Docker Engine 24.0.7 with systemd 255"),
    ("silent logs of 25.0.2", healthy(says=engine("25.0.2-1", "systemd 257\n")),
     "warning docker.follow", "25.0.2"),
    ("rootless", healthy(says=info_with(SecurityOptions=["name=rootless"])),
     "error docker.flavour", "rootless"),
    ("snap", healthy(says=info_with(DockerRootDir="/var/snap/docker/common")),
     "error docker.flavour", "snap"),
    ("docker away", healthy(says={("docker", "info", "--format", "{{json .}}"): (1, "Cannot connect")}),
     "error docker.answers", "Cannot connect"),
    ("63 memlock", healthy(says=rank_with(Ulimits=[{"Name": "memlock", "Hard": 8388608}])),
     "error docker.memlock", "memlock 8388608"),
    ("63 shm", healthy(says=rank_with(ShmSize=64 * 1024**3)), "warning docker.shm", "64 GiB of shared"),
    ("117 restart policy", healthy(says=rank_with(RestartPolicy={"Name": "unless-stopped"})),
     "error docker.restart", "unless-stopped"),
    ("138 a lock that nobody holds", healthy(says={kernels.LOCKS: locked(960.0), **SERVING}),
     "warning kernels.lock", "/torch_extensions/k/lock, for 16 min"),
    ("138 the older of two", healthy(says={kernels.LOCKS: locked(5.0, 1800.0), **SERVING}),
     "warning kernels.lock", "lock and 1 more, for 30 min"),
    ("62 architecture", healthy(says={("uname", "-m"): (0, "x86_64\n")}),
     "error artifacts.architecture", "the image is for arm64"),
    ("79 dangling", healthy(says={LINKS: (0, "model-00001.safetensors\n")}),
     "error artifacts.links", "1 links in /srv/models/glm"),
    ("no weights", healthy(says={WEIGHTS: (1, "")}),
     "warning artifacts.weights", "nothing in /srv/models/glm"),
    ("a short shard", healthy(says=verify_says(short="12 bytes, expected 4900000000")),
     "error artifacts.manifest", "f: 12 bytes, expected"),
    ("weights of another model", healthy(2, says=verify_says(extra="is not part of unit/glm@444444444444")),
     "warning artifacts.manifest", "is not part of"),
    ("64 port", healthy(says={ports.LISTENING: (0, TAKEN)}), "error ports.free", "python3 (pid 4242) has it"),
    ("ufw", healthy(says={("ufw", "status"): (0, BARE)}), "warning firewall.ufw", "no rule for the peers"),
    ("earlyoom", healthy(says={daemons.RUNNING: (0, "earlyoom.service loaded active running x\n")}),
     "warning daemons.oom", "earlyoom.service"),
    ("time", healthy(says={("timedatectl", "show"): (0, "NTP=no\nNTPSynchronized=no\n")}),
     "warning daemons.time", "NTPSynchronized=no"),
    ("61 unattended", healthy(says={daemons.APT: (0, UPGRADES), daemons.HELD: (0, "linux-nvidia\n")}),
     "warning daemons.upgrades", "containerd, docker*"),
    ("needrestart", healthy(more={"etc/needrestart/conf.d/60-glm53.conf": "# empty\n"}),
     "warning daemons.needrestart", "may restart docker"),
    ("sleep", healthy(says={SLEEP: (0, "static\n" * 5), DEFAULT: (0, "graphical.target\n")}),
     "warning daemons.sleep", "sleep.target, suspend.target"),
    ("own name", healthy(says={("getent", "ahosts", "spark-a"): (2, "")}),
     "warning host.name", "resolves to nothing"),
    ("80 disk", healthy(says={DOCKER_DISK: (0, f"Avail\n{9 * 1024**3}\n")}),
     "warning host.disk", "9.0 GiB free at /var/lib/docker"),
    ("76 a changed release", healthy(says={service.VERSION: (65, f"{CHANGED}\n  Fix: x\n")}),
     "error service.release", CHANGED),
    ("failed unit", healthy(says={UNIT: (0, FAILED)}), "error service.unit", "failed"),
    ("18 NET/Socket", healthy(says={service.STATUS: (0, json.dumps(WARNED))}),
     "warning service.rank", "NET/Socket"),
    ("wrong settings", healthy(more={"etc/glm53/settings.yaml": SETTINGS.replace("18888", "0")}),
     "error service.files", "api.port: found 0"),
    ("10 silent twin", healthy(silent={"198.51.100.2"}), "warning fabric.peer_silent", "198.51.100.2"),
    ("15 MTU", healthy(short={"192.0.2.2"}), "error fabric.mtu_differs", "none of 8972 bytes"),
    ("no verbs", healthy(says={VERBS: (2, "")}), "error fabric.verbs", "no uverbs"),
    ("no verbs on a worker", healthy(2, says={VERBS: (2, "")}), "warning fabric.verbs", "no uverbs"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "spark", "expected", "measured"), CASES, ids=[case[0] for case in CASES])
def test_each_report_is_found(
    report: str, spark: Spark, expected: str, measured: str, tmp_path: Path
) -> None:
    """Prevents a trap that owners met from being looked at and called well."""
    found = examined(spark, tmp_path)
    level, id_ = expected.split()
    match = [finding for finding in found.findings if finding.id == id_ and finding.level == level]
    assert match, (report, above_info(found))
    assert measured in match[0].measured
    assert match[0].expected
    assert match[0].fix
    assert exit_code(found.findings) == (11 if any(f.level is Level.ERROR for f in found.findings) else 10)


@pytest.mark.parametrize(
    "spark",
    [
        healthy(says={("ufw", "status"): (0, LET_IN)}),
        healthy(says={daemons.APT: (0, SPARED)}),
        healthy(says={QUERY: (0, gpu_row(1980, 41.0, 96))}, more=CAP),
        healthy(more={"proc/meminfo": LOW.replace("5700000", "8400000")}, says=SERVING),
        healthy(says={kernels.LOCKS: locked(840.0), **SERVING}),
        healthy(says={kernels.LOCKS: locked(9000.0)}),
        healthy(says={SLEEP: (0, "static\n" * 5)}),
        healthy(says={VERBS: (2, "")}, more={"etc/glm53/settings.yaml": CPU}),
        healthy(says={ports.LISTENING: (0, TAKEN), ACTIVE: (0, "active\ninactive\n")}),
        healthy(says={daemons.RUNNING: (0, "systemd-timesyncd.service loaded active running x\n")}),
        healthy(more=CDI, says=info_with(DiscoveredDevices=CDI_DEVICE, Runtimes={"runc": {}})),
        healthy(gpu_mode="cdi", more=CDI | SPECIFIED),
        healthy(gpu_mode="runtime"),
        healthy(says=engine("25.0.3", "systemd 255 (255.4-1ubuntu8.10)\n")),
        healthy(says=engine("24.0.9", "systemd 254 (254.16-1)\n")),
        healthy(says=engine("dev", "no systemd here\n")),
        healthy(more=LEGACY | SPECIFIED, says={CTK: (0, "version 1.19.1\n")}),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_trap_is_none(spark: Spark, tmp_path: Path) -> None:
    """Prevents a false alarm: capped clocks, idle memory of a serving node, our own ports, CDI that works."""
    assert above_info(examined(spark, tmp_path)) == []


def test_ufws_own_commands_are_printed(tmp_path: Path) -> None:
    """Prevents 'the peer is silent' beside an accept of ours that ufw's drop undoes."""
    found = examined(healthy(says={("ufw", "status"): (0, BARE)}), tmp_path)
    [finding] = [finding for finding in found.findings if finding.id == "firewall.ufw"]
    assert finding.fix.split("; ") == [
        "ufw allow in on enp1s0f1np1 from 192.0.2.2",
        "ufw allow in on enP2p1s0f1np1 from 198.51.100.2",
        "ufw allow from 203.0.113.2 to any port 29540 proto tcp",
    ]


def test_who_holds_the_memory_is_named(tmp_path: Path) -> None:
    """Prevents (report 107) a head that is short of memory for a desktop that nobody named."""
    found = examined(healthy(says={memory.PROCESSES: (0, GNOME)}), tmp_path)
    [finding] = [finding for finding in found.findings if finding.id == "memory.desktop"]
    assert (finding.level, finding.measured) == (Level.INFO, "gnome-shell 1.8 GiB")


def test_twins_in_one_subnet_must_answer_for_themselves(tmp_path: Path) -> None:
    """Prevents (report 13) a rail whose packets arrive on its twin."""
    wishes = {"fabric": ["192.0.2.1", "192.0.2.9"]}
    loose = examined(healthy(devices=SAME, wishes=wishes, more=ARP), tmp_path / "loose")
    strict = examined(
        healthy(devices=SAME, wishes=wishes, more=ARP | {"proc/sys/net/ipv4/conf/all/arp_ignore": "1\n"}),
        tmp_path / "strict",
    )
    assert "warning fabric.arp" in above_info(loose)
    assert "warning fabric.arp" not in above_info(strict)


def test_a_machine_without_anything_is_not_called_broken(tmp_path: Path) -> None:
    """Prevents (report 31) a fabric fault on a machine that has no pair yet."""
    lan = [Device("", "enP7s8", "192.0.2.1")]
    found = examined(Spark(devices=lan, installed=False), tmp_path)
    assert [finding.id for finding in found.findings if finding.id.startswith("fabric.")] == ["fabric.rails"]


# Two nodes side by side


def pair(tmp_path: Path, first: Spark, second: Spark) -> list[Examination]:
    """Return what the doctor finds on both."""
    return [examined(first, tmp_path / "a"), examined(second, tmp_path / "b")]


def test_two_healthy_nodes_fit(tmp_path: Path) -> None:
    """Prevents a difference that is none (names, addresses, GID indices) from being called one."""
    devices = twins(2)
    for device in devices:
        device.index = 5
    [finding] = compare(pair(tmp_path, healthy(1), healthy(2, devices=devices)))
    assert (finding.level, finding.id) == (Level.OK, "fabric.pair")
    assert finding.measured == "rails=2: 192.0.2.1 - 192.0.2.2, 198.51.100.1 - 198.51.100.2"


HUB = "/srv/hub/models--unit--glm/snapshots/" + "4" * 40


def test_an_image_that_was_built_of_something_else(tmp_path: Path) -> None:
    """Prevents a patch that everybody believes to be in the image that serves."""
    now = {"base": "sha256:" + "5" * 64, "patches/0003-x.patch": "1"}
    reference = built_reference(now)
    more = {"etc/glm53/settings.yaml": json.dumps(
        {**json.loads(SETTINGS), "image": reference, "image_inputs": now}
    )}  # fmt: skip
    inspect = ("docker", "image", "inspect", reference)
    for folder, was, level, said in (
        ("same", now, Level.OK, "built here of what the settings say"),
        ("other", {**now, "patches/0003-x.patch": "0"}, Level.ERROR, "patches: 0003-x.patch changed since"),
    ):
        image = {**IMAGE, "Config": {"Labels": built_labels(was)}}
        spark = healthy(more=more, says={inspect: (0, json.dumps([image]))})
        found = examined(spark, tmp_path / folder)
        [finding] = [finding for finding in found.findings if finding.id == "artifacts.built"]
        assert finding.level is level
        assert said in finding.measured
    assert "artifacts.built" not in {f.id for f in examined(healthy(), tmp_path / "none").findings}


DRAFT = "/srv/models/draft"
NO_RANK = {RANKS_ALL: (0, "")}


@pytest.mark.parametrize(
    ("says", "weights", "expected"),
    [
        ({}, (), {"weights.manifest": "c0de12345678"}),
        (NO_RANK, (), {}),
        (NO_RANK, (MODEL, DRAFT), {"weights.manifest": "c0de12345678", "drafter.manifest": "d4af7"}),
        (
            rank_with({"Cmd": ["serve", HUB, "--speculative", DRAFT, "--log", "/cache/log"]},
                      Binds=["/srv/hub:/srv/hub:ro", f"{DRAFT}:{DRAFT}:ro", "/c:/cache:rw"]),
            (), {"weights.manifest": "4ub", "drafter.manifest": "d4af7"},
        ),
    ],
    ids=["of the rank", "nothing said", "told by the playbook", "a hub's cache"],
)  # fmt: skip
def test_a_workers_weights_are_known_without_a_rank(
    says: Commands, weights: tuple[str, ...], expected: dict[str, str], tmp_path: Path
) -> None:
    """Prevents a stopped pair of two checkpoints that is called equal, and a cache taken for a checkpoint."""
    more = {**verify_says(DRAFT, content="d4af7"), **verify_says(HUB, content="4ub")}
    source = replace(healthy(2, says={**more, **says}).source(tmp_path), weights=weights)
    found = asyncio.run(examine(source))
    assert {key: value for key, value in found.parity.items() if key.endswith(".manifest")} == expected


def test_a_folder_that_verify_cannot_judge_is_no_error(tmp_path: Path) -> None:
    """Prevents a release without the verb, or a manifest that cannot be read, from ending the examination."""
    found = examined(healthy(says={(*artifacts.VERIFY, MODEL): (76, "glm53: it is no manifest")}), tmp_path)
    [finding] = [finding for finding in found.findings if finding.id == "artifacts.manifest"]
    assert (finding.level, finding.measured) == (Level.INFO, f"{MODEL}: glm53: it is no manifest")


NOTED = {FILE: '{"id": "sha256:77"}\n'}
NEXT_CAME: Commands = {
    ("docker", "image", "ls", "--quiet", "--no-trunc", "glm53/engine"): (0, "sha256:88\nsha256:77\n"),
    ("docker", "image", "inspect", "sha256:88"): (0, json.dumps([{"RootFS": {"Layers": ["sha256:l2"]}}])),
}
"""A worker that has the next release's image besides the one that its rank runs with."""

SMALL = [Device(d.hca, d.netdev, d.address, mtu=1500) for d in twins(2)]


@pytest.mark.parametrize(
    ("second", "expected", "measured"),
    [
        (healthy(2, more={"proc/driver/nvidia/version": NVIDIA.format("580.126.09")}),
         "error parity.driver", "spark-a has 580.95.05, spark-b has 580.126.09"),
        (healthy(2, more={"proc/sys/kernel/osrelease": "7.0.0-1019-nvidia\n"}),
         "warning parity.kernel", "7.0.0-1019"),
        (healthy(2, says={CTK: (0, "version 1.18.0\n")}),
         "warning parity.docker.toolkit", "1.17.8, spark-b has 1.18.0"),
        (healthy(2, more={"sys/class/infiniband/rocep1s0f1/fw_ver": "28.45.4028\n"}), None, ""),
        (healthy(2, more={"proc/sys/vm/min_free_kbytes": "1024\n"}),
         "warning parity.sysctl.vm.min_free_kbytes", "67584, spark-b has 1024"),
        (healthy(2, says={("docker", "image", "inspect", "sha256:77"):
                          (0, json.dumps([{"Architecture": "arm64", "RootFS": {"Layers": ["sha256:l2"]}}]))}),
         "error parity.image", "spark-b has"),
        (healthy(2, more=NOTED, says=NEXT_CAME), None, ""),
        (healthy(2, says=NEXT_CAME), "error parity.image", "spark-b has"),
        (healthy(2, says={WEIGHTS: (0, "config.json 1201\n")}),
         "error parity.weights", "spark-b has"),
        (healthy(2, says=verify_says(content="0ther0000000")),
         "error parity.weights.manifest", "spark-a has c0de12345678, spark-b has 0ther0000000"),
        (healthy(2, says=verify_says(content=None)), None, ""),
        (healthy(2, says={WEIGHTS: (0, LISTING + ".glm53-manifest.json 77000\n")}), None, ""),
        (healthy(2, says={service.VERSION: (0, "glm53 0.1.0, release 000000000000\n")}),
         "error parity.release", "0000"),
        (healthy(2, devices=SMALL),
         "error fabric.mtu_differs", "1500 on spark-b's enp1s0f1np1, 9000 on spark-a's"),
        (healthy(2, silent={"198.51.100.1"}),
         "warning fabric.peer_silent", "spark-b: 198.51.100.1 does not answer"),
    ],
)  # fmt: skip
def test_a_difference_names_both_nodes(
    second: Spark, expected: str | None, measured: str, tmp_path: Path
) -> None:
    """Prevents a pair of two kinds: driver, kernel, toolkit, image, weights, release, MTU, sysctls."""
    found = [f for f in compare(pair(tmp_path, healthy(1), second)) if f.level is not Level.OK]
    if expected is None:  # one node does not say: nothing to compare
        assert found == []
        return
    [finding] = found
    assert f"{finding.level} {finding.id}" == expected
    assert measured in finding.measured


def test_the_table_has_the_worst_first() -> None:
    """Prevents an error that scrolls away above forty lines of good news."""
    found = [
        Finding(id="x.good", level=Level.OK, measured="fine", node="a"),
        Finding(id="x.bad", level=Level.ERROR, measured="m", expected="e", fix="f", node="bb"),
        Finding(id="x.so", level=Level.WARNING, measured="m", expected="e", fix="f", node="a"),
    ]
    lines = table(found)
    assert [line.split()[0] for line in lines] == [
        "error",
        "expected:",
        "fix:",
        "warning",
        "expected:",
        "fix:",
        "ok",
        "1",
    ]
    assert lines[-1] == "1 error, 1 warning, 0 info, 1 ok"


# The commands


def run(*argv: str) -> int:
    """Run the command line and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    return int(str(ended.value.code))


def test_one_node_then_two_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a comparison that cannot read what the doctor of each node wrote."""
    written = []
    for host, spark in ((1, healthy(1)), (2, healthy(2, says={service.VERSION: (0, "another\n")}))):
        folder = spark.write(tmp_path / str(host))
        assert run("doctor", "--json", "--from", str(folder)) == 0
        (tmp_path / f"{host}.json").write_text(capsys.readouterr().out)
        written.append(str(tmp_path / f"{host}.json"))
    assert run("doctor", "--compare", *written) == 11
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split()[:3] == ["error", "pair", "parity.release"]


@pytest.mark.parametrize(
    ("spark", "code"),
    [
        (healthy(), 0),
        (healthy(silent={"198.51.100.2"}), 10),
        (healthy(silent={"192.0.2.2"}), 11),
    ],
)
def test_the_exit_code_is_the_worst_level(
    spark: Spark, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a script that takes a warning for an error, or an error for health."""
    assert run("doctor", "--from", str(spark.write(tmp_path))) == code
    assert "spark-a" in capsys.readouterr().out


def test_a_snapshot_gives_the_doctors_own_answer(tmp_path: Path) -> None:
    """Prevents a check that reads what no snapshot brings: whoever gets the tree would be told it is well."""
    spark = healthy(more={**CAP, **ARP, "run/reboot-required": "x\n"}, silent={"198.51.100.2"})
    machine = spark.source(tmp_path / "machine")
    asyncio.run(take(machine, tmp_path / "copy", files=FILES, check=examine, node="spark-a"))
    assert asyncio.run(examine(open_tree(tmp_path / "copy"))) == asyncio.run(examine(machine))


def test_the_supervisors_do_not_load_the_doctor() -> None:
    """Prevents checks that nobody runs from taking memory that the model needs."""
    code = (
        "import sys, glm53_service.cli, glm53_service.supervisor.lead, glm53_service.supervisor.follow;"
        "glm53_service.cli._parser();"
        "heavy = ('glm53_service.doctor', 'glm53_service.bandwidth');"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
