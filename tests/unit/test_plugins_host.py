"""What the roles change on a host: switches and their record, docker, the GPU's way, the tuning's files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm53_service.engines.base import GpuMode
from tests.unit.plays import render
from tests.unit.plugin_loader import CHECKOUT, load

switches = load("modules", "glm53_switches")
boot_unit = load("modules", "glm53_boot_unit")
gpu = load("modules", "glm53_gpu_probe")
facts = load("modules", "glm53_facts")
filters = load("filter", "glm53_host")


def test_what_was_so_already_is_not_ours() -> None:
    """Defect: uninstall unmasks what the owner had masked long before."""
    plan = switches.plan({"mask:sleep.target": "masked"}, {"mask:sleep.target": "masked"}, {})
    assert (plan.to_set, plan.record, plan.left) == ({}, {}, [])


def test_a_switch_is_recorded_once_and_given_back() -> None:
    """Defect: the second run records our own value as the one of before, and gives that back."""
    first = switches.plan({"sysctl:a": "60"}, {"sysctl:a": "7"}, {})
    assert first.to_set == {"sysctl:a": "7"}
    second = switches.plan({"sysctl:a": "7"}, {"sysctl:a": "9"}, first.record)
    assert second.record == {"sysctl:a": {"before": "60", "set": "9"}}
    back = switches.plan({"sysctl:a": "9"}, {}, second.record)
    assert (back.to_set, back.record, back.left) == ({"sysctl:a": "60"}, {}, [])


def test_what_somebody_changed_since_stays_theirs() -> None:
    """Defect: uninstall overwrites what the owner has set after us."""
    record = {"sysctl:a": {"before": "60", "set": "7"}}
    plan = switches.plan({"sysctl:a": "30"}, {}, record)
    assert (plan.to_set, plan.record) == ({}, {})
    assert plan.left == ["sysctl:a is 30, not the 7 that we had set: left so"]


def test_the_default_target_comes_back_as_the_link_it_was(tmp_path: Path) -> None:
    """Defect: a host without a link of its own has one after uninstall, or one that is spelt otherwise."""
    link = tmp_path / "etc/systemd/system/default.target"
    link.parent.mkdir(parents=True)
    host = switches.Host(tmp_path)
    assert host.get("target:default") == ""
    assert host.wanted("target:default", "multi-user.target", "") == "/lib/systemd/system/multi-user.target"
    host.set("target:default", "/lib/systemd/system/multi-user.target")
    assert str(link.readlink()) == "/lib/systemd/system/multi-user.target"
    host.set("target:default", "")
    assert not link.is_symlink()
    same = "/usr/lib/systemd/system/multi-user.target"
    assert host.wanted("target:default", "multi-user.target", same) == same


def test_kernel_switches_and_masks_are_read_from_their_files(tmp_path: Path) -> None:
    """Defect: a device that is gone ends the uninstall; a unit file is taken for a mask."""
    (tmp_path / "proc/sys/net").mkdir(parents=True)
    (tmp_path / "proc/sys/net/a").write_text("1\t2\n")
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/real.target").write_text("[Unit]\n")
    (tmp_path / "etc/systemd/system/gone.target").symlink_to("/dev/null")
    host = switches.Host(tmp_path)
    assert host.get("sysctl:net/a") == "1 2"
    host.set("sysctl:net/a", "3")
    host.set("sysctl:net/gone", "3")
    assert host.get("sysctl:net/a") == "3"
    assert not (tmp_path / "proc/sys/net/gone").exists()
    assert [host.get(f"mask:{name}.target") for name in ("real", "gone", "none")] == ["", "masked", ""]
    with pytest.raises(RuntimeError, match="found kind 'maks'"):
        host.get("maks:x")


def test_the_record_survives_a_cut_and_ends_empty(tmp_path: Path) -> None:
    """Defect: an empty record stays, or a folder that is missing loses the record."""
    path = tmp_path / "etc/record/a.json"
    switches.save(path, {"hold:x": {"before": "install", "set": "hold"}})
    assert json.loads(path.read_text()) == {"hold:x": {"before": "install", "set": "hold"}}
    switches.save(path, {})
    assert not path.exists()


def test_a_unit_that_ran_before_its_file_changed_has_not_done_its_work(tmp_path: Path) -> None:
    """Defect: another clock cap is written, and the old one stays in force."""
    path = tmp_path / "cap.service"
    path.touch()
    os.utime(path, (1000, 1000))
    state = {"ActiveEnterTimestampMonotonic": "50000000"}  # 50 s after a boot that was at 940
    assert boot_unit.fresh(state, str(path), uptime=100.0, now=1040.0) is False
    assert boot_unit.fresh(state, str(path), uptime=100.0, now=1060.0) is True
    assert boot_unit.fresh(state, "", uptime=100.0, now=1040.0) is True


def node(**changes: Any) -> dict[str, Any]:
    """What glm53_facts finds on a Spark out of the box, but for `changes`."""
    found = {
        "candidates": ["docker-ce", "docker.io", "nvidia-container-toolkit"],
        "docker": {"answers": True, "version": "28.5.1"},
        "packages": {"docker-ce": "5:28.5.1", "nvidia-driver-580-open": "580.95.05"},
        "toolkit": {"version": "1.17.8", "mode": "auto"},
    }
    return {**found, **changes}


TOOLKIT = "nvidia-container-toolkit"
NOTHING: dict[str, Any] = {
    "docker": {"answers": False},
    "packages": {},
    "toolkit": {"version": "", "mode": ""},
}


@pytest.mark.parametrize(
    ("found", "device", "expected"),
    [
        (node(), True, []),
        (node(**NOTHING), True, ["docker-ce", "docker-ce-cli", "containerd.io", TOOLKIT]),
        (
            node(**NOTHING, candidates=["docker.io"]),
            True,
            ["docker.io", f"no source for {TOOLKIT}"],
        ),
        (node(**NOTHING, candidates=[]), False, ["no source for docker"]),
        (node(docker={"answers": False}, packages={"docker.io": "20"}), False, []),
    ],
)
def test_an_engine_that_is_there_is_never_replaced(
    found: dict[str, Any], device: bool, expected: list[str]
) -> None:
    """Defect: docker.io is installed over docker-ce, which removes it and its containers' engine."""
    assert filters.glm53_docker_packages(found, device) == expected


def test_nodes_on_different_versions_are_named() -> None:
    """Defect: one node freezes on another container toolkit, and nobody sees the difference."""
    other = node(toolkit={"version": "1.19.1", "mode": "cdi"})
    assert filters.glm53_parity({"a": node(), "b": node()}) == []
    assert filters.glm53_parity({"a": node(), "b": other}) == [
        "nvidia-container-toolkit: a has 1.17.8, b has 1.19.1",
        "nvidia-container-runtime mode: a has auto, b has cdi",
    ]


def test_what_the_tools_print_is_read() -> None:
    """Defect: a commented mode counts, a removed package counts, `(none)` counts as a candidate."""
    config = (
        '#mode = "legacy"\n[nvidia-container-runtime]\n  mode = "cdi"\n[nvidia-container-runtime.modes.cdi]\n'
    )
    version = "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80\n"
    assert facts.toolkit_facts(version, config) == {"version": "1.17.8", "mode": "cdi"}
    assert facts.toolkit_facts("", "") == {"version": "", "mode": ""}
    shown = "docker-ce\t5:28.5.1\tinstalled\ndocker.io\t20.10\tconfig-files\n"
    assert facts.package_facts(shown) == {"docker-ce": "5:28.5.1"}
    policy = "a:\n  Installed: (none)\n  Candidate: (none)\nb:\n  Installed: (none)\n  Candidate: 1.2\n"
    assert facts.candidate_facts(policy) == ["b"]


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        ("", "", ""),
        ('{"currentContext": "default"}', "PATH=/bin\n", ""),
        ('{"currentContext": "rootless"}', "", "rootless"),
        ("", "DOCKER_HOST=tcp://10.0.0.1:2375\n", "DOCKER_HOST=tcp://10.0.0.1:2375"),
    ],
)
def test_docker_commands_that_go_elsewhere_are_seen(
    tmp_path: Path, config: str, environment: str, expected: str
) -> None:
    """Defect: the image is loaded into another engine than the one that the ranks use."""
    if config:
        (tmp_path / ".docker").mkdir()
        (tmp_path / ".docker/config.json").write_text(config)
    assert facts.docker_context(str(tmp_path), environment) == expected


class Docker:
    """A docker whose containers get the GPU in some ways only, and in one way never answer."""

    def __init__(self, works: Sequence[str], hangs: str = "") -> None:
        self.works, self.hangs, self.calls = works, hangs, []  # type: tuple[Sequence[str], str, list[str]]

    def __call__(self, argv: Sequence[str]) -> tuple[int, str]:
        line = " ".join(argv)
        self.calls.append(line)
        if self.hangs and self.hangs in line:
            return 124, "no answer within 90 s"
        if any(way in line for way in self.works):
            return 0, "GPU 0: NVIDIA GB10 (UUID: GPU-1)"
        return 125, "docker: invoking the NVIDIA Container Runtime Hook directly is not supported"


@pytest.mark.parametrize(
    ("works", "first", "mode", "failed"),
    [
        (["--gpus all"], "", "gpus", 0),
        (["nvidia.com/gpu=all", "--runtime nvidia"], "", "cdi", 1),
        (["nvidia.com/gpu=all", "--runtime nvidia"], "runtime", "runtime", 0),
        (["--gpus all"], "cdi", "gpus", 1),
        ([], "", "", 3),
    ],
)
def test_the_way_that_works_is_taken(works: list[str], first: str, mode: str, failed: int) -> None:
    """Defect: `--gpus all` is taken on a node in CDI mode, where it is refused."""
    docker = Docker(works)
    found, said = gpu.choose(first, "image:1", "probe", docker)
    assert (found, len(said)) == (mode, failed)
    assert all("--pull=never" in call and "--rm" in call for call in docker.calls)


def test_a_container_that_hangs_is_removed_and_the_next_way_tried() -> None:
    """Defect: a probe without an end, or one that leaves its container behind."""
    docker = Docker(["nvidia.com/gpu=all"], hangs="--gpus all")
    assert gpu.choose("", "image:1", "probe", docker)[0] == "cdi"
    assert "docker rm --force probe" in docker.calls


def test_the_nodes_own_way_is_read_from_its_identity() -> None:
    """Defect: each run of a serving pair starts probes beside the model."""
    assert gpu.known_mode("version: 1\ngpu_mode: cdi\nnode: a\n") == "cdi"
    assert gpu.known_mode("version: 1\ngpu_mode: warp\n") == ""


def test_a_rank_asks_in_the_way_that_was_tried() -> None:
    """Defect: a way is tried with one set of arguments, and the ranks are started with another."""
    asked = {
        mode.value: [
            *mode.arguments,
            *(w for k, v in mode.environment.items() for w in ("--env", f"{k}={v}")),
        ]
        for mode in GpuMode
    }
    assert asked == gpu.MODES


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file of the tuning."""
    if os.getuid() != 0:
        pytest.skip("the files belong to root")
    folder = tmp_path_factory.mktemp("tuning")
    variables = {
        "tuning_unattended": True,
        "tuning_clock_cap_mhz": 1850,
        "tuning_swappiness": 11,
        "tuning_found": {"needrestart": True},
        "tuning_templates_dir": str(CHECKOUT / "templates"),
    }
    # No driver here, so the unit's program is missing: the test has systemd check it with another one.
    plain = "(__tuning_files | map('combine', {'kind': 'text'}) | list)"
    render(folder, "tuning", plain, variables)
    return folder


def test_the_clock_cap_follows_persistenced(files: Path) -> None:
    """Defect: the cap is lost when persistenced is restarted, or set before it starts."""
    text = (files / "etc/systemd/system/glm53-clock-cap.service").read_text()
    lines = text.splitlines()
    assert "ExecStart=/usr/bin/nvidia-smi --lock-gpu-clocks=0,1850" in lines
    assert "PartOf=nvidia-persistenced.service" in lines
    assert "After=nvidia-persistenced.service" in lines
    assert "WantedBy=multi-user.target nvidia-persistenced.service" in lines
    assert "RemainAfterExit=yes" in lines
    written = load("modules", "glm53_files")
    there = text.replace("/usr/bin/nvidia-smi", "/bin/true")
    written.check_units([{"path": "/etc/systemd/system/glm53-clock-cap.service", "content": there}])


def test_needrestart_leaves_us_alone(files: Path) -> None:
    """Defect: an upgrade of a library at night restarts docker, and the ranks with it."""
    path = files / "etc/needrestart/conf.d/60-glm53.conf"
    ask = (  # as needrestart itself reads it
        "eval do { local(@ARGV, $/) = $ARGV[0]; <> }; die $@ if $@;"
        ' for my $u ("docker.service", "glm53-head.service", "ssh.service") { print "$u\\n"'
        " if grep { $u =~ $_ && !$nrconf{override_rc}{$_} } keys %{$nrconf{override_rc}}; }"
    )
    done = subprocess.run(["perl", "-e", ask, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["docker.service", "glm53-head.service"]


def test_unattended_upgrades_are_told_in_apts_own_words(files: Path) -> None:
    """Defect: a list that apt does not read, so the driver is replaced under a running model."""
    path = files / "etc/apt/apt.conf.d/60glm53-unattended"
    argv = ["apt-config", "dump", "Unattended-Upgrade::Package-Blacklist"]
    environment = {**os.environ, "APT_CONFIG": str(path)}
    shown = subprocess.run(argv, capture_output=True, text=True, env=environment, check=True).stdout
    assert 'Unattended-Upgrade::Package-Blacklist:: "nvidia-";' in shown
    assert 'Unattended-Upgrade::Package-Blacklist:: "docker";' in shown
