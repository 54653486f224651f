"""What the module reads of a node: docker's answers, /proc, unit files and cron's files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugin_loader import load

foreign = load("modules", "glm53_foreign")
processes = load("module_utils", "glm53_processes")

TF = "0123456789abcdef" * 4
MARKS = foreign.Marks(["glm53-flash-tf"], ["glm53-flash-tf", "vllm"], ["GLM-5.3-Flash"])
UID = os.getuid()


def inspect(
    host: dict[str, Any] | None = None, env: list[str] | None = None, **labels: str
) -> dict[str, Any]:
    """What docker says of the recipe's container, shortened."""
    return {
        "Id": TF,
        "Name": "/glm53-flash-tf",
        "State": {"Status": "running", "ExitCode": 0},
        "Config": {"Image": "example/tf:1", "Env": env or ["HF_TOKEN=secret"], "Labels": labels or None},
        "HostConfig": {
            "NetworkMode": "host",
            "RestartPolicy": {"Name": "", "MaximumRetryCount": 0},
            **(host or {}),
        },
    }


GPUS_ALL = {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}


@pytest.mark.parametrize(
    ("host", "env", "gpu"),
    [
        ({"DeviceRequests": [GPUS_ALL]}, [], True),
        ({"DeviceRequests": [{"Driver": "nvidia", "Count": 1, "Capabilities": [["compute"]]}]}, [], True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}, [], True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["example.com/nic=0"]}]}, [], False),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, [], True),
        ({"Devices": [{"PathOnHost": "/dev/infiniband"}]}, [], False),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=all"], True),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=void"], False),
        ({"Runtime": "nvidia"}, ["PATH=/bin"], False),
        ({"Runtime": "runc"}, ["NVIDIA_VISIBLE_DEVICES=all"], False),
        ({}, [], False),
    ],
)
def test_every_way_to_give_a_container_the_gpu_is_seen(
    host: dict[str, Any], env: list[str], gpu: bool
) -> None:
    """Prevents overlooking a container by CDI, by device or by NVIDIA's runtime; and naming all others."""
    assert foreign.container_facts(inspect(host, env))["gpu"] is gpu


def test_what_is_told_of_a_container_holds_no_secret() -> None:
    """Prevents an owner's token in the output of a run."""
    facts = foreign.container_facts(
        inspect({"PortBindings": {"8000/tcp": [{"HostIp": "", "HostPort": "8888"}], "9/tcp": None}})
    )
    assert "secret" not in repr(facts)
    assert (facts["name"], facts["policy"], facts["ours"]) == ("glm53-flash-tf", "no", False)
    assert facts["published"] == [{"port": 8888, "address": "0.0.0.0"}]
    assert foreign.container_facts(inspect(None, None, **{"glm53.cluster": "x"}))["ours"] is True


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100000A:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 555 1
   1: 0100000A:22B8 0200000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 556 1
   2: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 557 1
"""
TCP6 = """  sl  local_address remote_address st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:736F 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 600 1
   1: 0000000000000000FFFF00000100000A:22B9 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 601 1
"""


def test_listeners_are_those_of_our_ports() -> None:
    """Prevents taking a connection for a listener, and an address read backwards."""
    assert list(processes.listening(TCP, [8888])) == [(8888, "10.0.0.1", "555")]
    assert list(processes.listening(TCP6, [29551, 8889])) == [
        (29551, "::", "600"),
        (8889, "10.0.0.1", "601"),
    ]


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"0::/system.slice/docker-{TF}.scope\n", (TF, "", "")),
        (f"1:name=systemd:/docker/{TF}\n0::/\n", (TF, "", "")),
        ("0::/system.slice/flash.service\n", ("", "flash.service", "")),
        ("1:name=systemd:/system.slice/system-tf.slice/tf@1.service\n", ("", "tf@1.service", "")),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/tf.service\n",
            ("", "tf.service", "1000"),
        ),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/tmux.scope\n", ("", "", "")),
        ("0::/user.slice/user-1000.slice/session-4.scope\n", ("", "", "")),
        ("4:memory:/system.slice/other.service\n0::/init.scope\n", ("", "", "")),
    ],
)
def test_a_process_is_its_containers_or_its_units(cgroup: str, expected: tuple[str, str, str]) -> None:
    """Prevents killing by process what docker or systemd starts again, and stopping a whole session."""
    found = processes.place_of(cgroup)
    assert (found["container"], found["unit"], found["uid"]) == expected


def process(
    proc: Path, pid: int, parent: int, name: str, *argv: str, cwd: Path, fds: tuple[str, ...] = ()
) -> None:
    """A process in a tree like /proc."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nUid:\t{UID}\t{UID}\t{UID}\t{UID}\n")
    (folder / "cgroup").write_text("0::/user.slice/user-1000.slice/session-4.scope\n")
    (folder / "cmdline").write_bytes("\0".join(argv).encode() + b"\0")
    (folder / "cwd").symlink_to(cwd)
    for number, target in enumerate(fds):
        (folder / "fd" / str(number)).symlink_to(target)


def test_who_listens_is_found_with_the_terminal_that_keeps_it(tmp_path: Path) -> None:
    """Prevents `the port is taken` without saying by whom, in whose tmux."""
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    (proc / "net/tcp").write_text(TCP)
    process(proc, 1, 0, "systemd", "/sbin/init", cwd=tmp_path)
    process(proc, 40, 1, "tmux: server", "tmux", cwd=tmp_path)
    process(proc, 41, 40, "python3", "python3", "-m", "x", cwd=tmp_path, fds=("/dev/null", "socket:[555]"))
    [found] = processes.read_listeners(proc, [8888, 29551])
    assert (found["port"], found["address"]) == (8888, "10.0.0.1")
    who = found["holder"]
    assert (who["pid"], who["command"], who["terminal"], who["unit"]) == (41, "python3", "tmux", "")
    assert processes.read_listeners(proc, [29551]) == []


def test_running_scripts_that_start_the_recipe_are_found(tmp_path: Path) -> None:
    """Prevents overlooking `./watch.sh` in the recipe's folder; and naming our own run, or a benchmark."""
    proc, kit = tmp_path / "proc", tmp_path / "GLM-5.3-Flash-kit"
    kit.mkdir()
    (kit / "watch.sh").write_text('N=glm53-flash-tf\ndocker start "$N"\n')
    (kit / "bench.py").write_text("import requests\n")
    (kit / "start.sh").write_text("docker run x\n")
    process(proc, 50, 1, "bash", "bash", "-x", "watch.sh", cwd=kit)
    process(proc, 51, 1, "sh", "/bin/sh", "-c", "while :; do docker start vllm; done", cwd=tmp_path)
    process(proc, 52, 1, "python3", "python3", "bench.py", cwd=kit)
    process(proc, 53, 1, "bash", "-bash", str(kit / "start.sh"), cwd=tmp_path)
    process(proc, 54, 1, "vim", "vim", str(kit / "watch.sh"), cwd=tmp_path)
    process(proc, 55, 1, "python3", "python3", "/v/bin/ansible-playbook", "glm53-flash-tf", cwd=tmp_path)
    process(proc, 56, 1, "bash", "bash", "watch.sh", cwd=kit)
    found = foreign.read_scripts(proc, MARKS, {56})
    assert [(f["holder"]["pid"], f["mentions"]) for f in found] == [
        (50, ["glm-5.3-flash", "glm53-flash-tf"]),
        (51, ["vllm"]),
        (53, ["glm-5.3-flash"]),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ExecStart=/usr/bin/docker start -a glm53-flash-tf", {"glm53-flash-tf"}),
        ("ExecStart=-/usr/bin/docker run --rm \\\n  --name vllm img", {"vllm"}),
        ("ExecStart=/usr/bin/vllm serve --api-key x", set()),
        ("ExecStart=/usr/bin/docker start glm53-flash-tf-old my-vllm", set()),
        ("# ExecStart=/usr/bin/docker start vllm", set()),
        ("Description=docker vllm", set()),
        ("ExecStart=/bin/bash {kit}/start.sh", {"glm-5.3-flash"}),
        ("WorkingDirectory={kit}\nExecStart=/bin/bash start.sh", {"glm-5.3-flash"}),
        ("ExecStart=%h/start.sh", {"glm-5.3-flash"}),
        ("ExecStart=/usr/bin/rsync {kit} /backup", set()),
    ],
)
def test_a_unit_is_known_by_its_commands_and_their_scripts(
    text: str, expected: set[str], tmp_path: Path
) -> None:
    """Prevents overlooking a unit that runs a script, and disabling one that only speaks of the model."""
    kit = tmp_path / "GLM-5.3-Flash-kit"
    kit.mkdir()
    (kit / "start.sh").write_text("exec ./run\n")
    assert foreign.unit_mentions(text.format(kit=kit), MARKS, str(kit)) == expected


def test_units_are_read_with_their_drop_ins(tmp_path: Path) -> None:
    """Prevents overlooking a command that only a drop-in has; an ELF or a pipe is not read as text."""
    (tmp_path / "a.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "a.service.d").mkdir()
    (tmp_path / "a.service.d/more.conf").write_text("[Service]\nExecStartPost=/usr/bin/docker start vllm\n")
    (tmp_path / "masked.service").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe.service")
    (tmp_path / "elf.service").write_bytes(b"ExecStart=docker vllm\0")
    texts = foreign.unit_texts([tmp_path])
    assert foreign.unit_mentions(texts["a.service"], MARKS, "/root") == {"vllm"}
    assert (texts["masked.service"], texts["pipe.service"], texts["elf.service"]) == ("", "", "")


def test_cron_lines_are_named_by_file_and_line(tmp_path: Path) -> None:
    """Prevents a watchdog that comes from cron; what is commented out does nothing."""
    for path, text in (
        ("etc/cron.d/flash", "SHELL=/bin/sh\n# * * * * * root docker start glm53-flash-tf\n\n"),
        ("var/spool/cron/crontabs/alice", "* * * * * /usr/bin/docker start vllm --token=secret\n"),
        ("etc/rc.local", "#!/bin/sh\nexit 0\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert foreign.read_jobs(MARKS, tmp_path) == [
        {"file": str(tmp_path / "var/spool/cron/crontabs/alice"), "line": 1, "mentions": ["vllm"]}
    ]
    with (tmp_path / "etc/rc.local").open("a") as file:
        file.write("docker start glm53-flash-tf\n")
    assert foreign.read_jobs(MARKS, tmp_path)[0]["line"] == 3


def test_units_and_what_triggers_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prevents stopping a service and leaving the timer that starts it again."""
    (tmp_path / "w.service").write_text("ExecStart=/usr/bin/docker start glm53-flash-tf\n")
    (tmp_path / "other.service").write_text("ExecStart=/bin/true\n")
    (tmp_path / "t@.service").write_text("ExecStart=/usr/bin/docker start vllm\n")
    shown = {
        "w.service": {"Id": "w.service", "ActiveState": "inactive", "TriggeredBy": "w.timer"},
        "w.timer": {"Id": "w.timer", "ActiveState": "active", "UnitFileState": "enabled"},
        "t@*.service": {"Id": "t@1.service", "ActiveState": "activating", "UnitFileState": "static"},
        "j.service": {"Id": "j.service", "ActiveState": "active", "UnitFileState": "enabled-runtime"},
    }
    monkeypatch.setattr(foreign, "show", lambda scope, names: [shown[name] for name in names])
    units = foreign.read_units("", [tmp_path], "/root", MARKS, {"j.service"})
    assert [(u["name"], u["active"], u["enabled"], u["mentions"]) for u in units] == [
        ("j.service", True, True, []),
        ("t@1.service", True, False, ["vllm"]),
        ("w.service", False, False, ["glm53-flash-tf"]),
        ("w.timer", True, True, ["glm53-flash-tf"]),
    ]


def test_enabled_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a second run that disables again: `show` keeps the old state while systemd is not reloaded."""
    systemd = load("module_utils", "glm53_systemd")
    text = "Id=a.service\nLoadState=loaded\nUnitFileState=enabled\n\nId=b.service\nLoadState=not-found\n"

    def systemctl(scope: str, *words: str) -> subprocess.CompletedProcess[str]:
        out = text if words[0] == "show" else "disabled\n"
        return subprocess.CompletedProcess(words, 0, out, "")

    monkeypatch.setattr(systemd, "systemctl", systemctl)
    assert [unit.get("UnitFileState") for unit in systemd.show("", ["a.service", "b.service"])] == [
        "disabled",
        None,
    ]


def test_a_users_units_without_a_running_systemd_are_read_from_their_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prevents overlooking what starts at the owner's next login."""
    monkeypatch.setattr(foreign, "manager_runs", lambda scope: False)
    (tmp_path / "w.service").write_text("ExecStart=/usr/bin/docker start glm53-flash-tf\n")
    (tmp_path / "default.target.wants").mkdir()
    (tmp_path / "default.target.wants/w.service").symlink_to(tmp_path / "w.service")
    [unit] = foreign.read_units("alice", [tmp_path], "/home/alice", MARKS, set())
    assert (unit["scope"], unit["active"], unit["enabled"], unit["managed"]) == ("alice", False, True, False)
