"""vLLM's command line and container per rank, and what its log lines mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from glm53_service.engines import engine_for
from glm53_service.engines.base import ContainerSpec, GpuMode, Launch, LineKind, Place
from glm53_service.fabric.rails import Fabric, Rail
from tests.unit.doubles import make_settings

BY_DIGEST = "unit/engine@sha256:" + "7" * 64


def spec(rank: int, *, gpu_mode: GpuMode = GpuMode.GPUS, **changes: Any) -> ContainerSpec:
    """Return the container of `rank`."""
    settings = make_settings(Path("/srv/models/unit"), **changes)
    rail = Rail(
        netdev=f"f{rank}", address=f"192.0.2.{rank + 1}", mtu=9000, hca=f"roce{rank}", gid_index=3 + rank
    )
    place = Place(
        rank=rank,
        management="203.0.113.5",
        fabric=Fabric(rails=(rail,)),
        uid=991,
        gid=992,
        cache="/var/lib/glm53/cache/abc",
        gpu_mode=gpu_mode,
    )
    launch = Launch(epoch=12, settings=settings, image_content="sha256:x", master="192.0.2.1", world=2)
    return engine_for(settings).container(launch, place, "sha256:local")


def value(command: tuple[str, ...], flag: str) -> str:
    """Return the value after `flag`."""
    return command[command.index(flag) + 1]


def test_rank_0_serves_and_rank_1_is_headless() -> None:
    """Prevents --headless on rank 0 (it hangs) and a rank 1 without it (it dies)."""
    head, worker = spec(0).command, spec(1).command
    assert "--headless" not in head
    assert (value(head, "--host"), value(head, "--port")) == ("127.0.0.1", "18888")
    assert "--headless" in worker
    assert "--host" not in worker
    assert "--port" not in worker


def test_ranks_differ_in_rank_and_place_only() -> None:
    """Prevents ranks of different settings."""
    head, worker = spec(0), spec(1)
    own = {
        "--node-rank",
        "0",
        "1",
        "--headless",
        "--host",
        "127.0.0.1",
        "--port",
        "18888",
        "--shutdown-timeout",
        "2",
    }
    assert set(head.command) ^ set(worker.command) <= own
    assert value(worker.command, "--master-addr") == value(head.command, "--master-addr") == "192.0.2.1"
    assert value(worker.command, "--master-port") == "29777"
    differing = {key for key in head.environment if head.environment[key] != worker.environment[key]}
    assert differing == {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def test_nothing_is_pulled_restarted_or_privileged() -> None:
    """Prevents docker from resurrecting one rank, a tag that moved, and a root engine."""
    body = spec(0).api()
    host = body["HostConfig"]
    assert body["Image"] == "sha256:local"
    assert body["User"] == "991:992"
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["IpcMode"] == "private"
    assert host["CapDrop"] == ["ALL"]
    assert "CapAdd" not in host
    assert body["Labels"] == {"glm53.cluster": "unit", "glm53.epoch": "12", "glm53.rank": "0"}
    assert "--pull=never" in spec(0).shell()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_images_own_health_check_is_off(rank: int) -> None:
    """Prevents a headless rank that docker calls unhealthy for ever, because its image asks for a port."""
    assert spec(rank).api()["Healthcheck"] == {"Test": ["NONE"]}
    assert "--no-healthcheck" in spec(rank).shell()


def test_cuda_asks_for_gpus_and_rdma_with_each_nodes_own_index() -> None:
    """Prevents one global GID index, and memory registration that fails for want of IPC_LOCK."""
    changes: dict[str, Any] = {
        "device": "cuda",
        "image": BY_DIGEST,
        "vllm": {
            "quantization": "exl3",
            "reasoning_parser": "glm45",
            "tool_call_parser": "glm47",
        },
    }
    head, worker = spec(0, **changes), spec(1, **changes)
    assert [s.environment["NCCL_IB_GID_INDEX"] for s in (head, worker)] == ["3", "4"]
    assert [s.environment["NCCL_IB_HCA"] for s in (head, worker)] == ["=roce0", "=roce1"]
    host = worker.api()["HostConfig"]
    assert host["CapAdd"] == ["IPC_LOCK"]
    assert host["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert value(worker.command, "--gpu-memory-utilization") == "0.87"
    assert "--enable-auto-tool-choice" in worker.command


def test_extra_arguments_come_last() -> None:
    """Prevents a user's own flag from losing against a default."""
    assert spec(0, vllm={"extra_args": ["--max-model-len", "99"]}).command[-2:] == ("--max-model-len", "99")


def test_the_engines_drain_ends_before_dockers_kill() -> None:
    """Prevents a stream that is cut by SIGKILL although there was time to finish it."""
    made = spec(0, supervision={"stop_grace_seconds": 40})
    assert (value(made.command, "--shutdown-timeout"), made.stop_seconds) == ("35", 40)


WAITS = "INFO 11-29 [shm_broadcast.py:5] No available shared memory broadcast block found in 60 s"


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (
            "(Worker_TP0 pid=88) INFO 11-29 16:00:00 [cpu_worker.py:1] Loading weights took 2.31 seconds",
            LineKind.PROGRESS,
            "weights loaded in 2.31 s",
        ),
        ("(APIServer pid=1) INFO:     Application startup complete.", LineKind.PROGRESS, "API is up"),
        (
            "(EngineCore pid=70) ERROR 11-29 16:00:00 [core.py:9] EngineCore failed to start.",
            LineKind.ERROR,
            "(EngineCore pid=70) ERROR 11-29 16:00:00 [core.py:9] EngineCore failed to start.",
        ),
        (
            WAITS,
            LineKind.WAITING,
            WAITS,
        ),
        (
            "ValueError: Available memory on node 0 is less than desired",
            LineKind.ERROR,
            "ValueError: Available memory on node 0 is less than desired",
        ),
        (
            "(APIServer pid=1) INFO 11-29 [x.py:1] no ERROR here",
            LineKind.DETAIL,
            "(APIServer pid=1) INFO 11-29 [x.py:1] no ERROR here",
        ),
    ],
)
def test_log_lines(line: str, kind: LineKind, text: str) -> None:
    """Prevents a story that hides the engine's own error, or drowns it."""
    read = engine_for(make_settings(Path("/m"))).read_line(line)
    assert (read.kind, read.text) == (kind, text)


def test_running_requests_are_summed_over_engines() -> None:
    """Prevents a busy engine from being called idle."""
    engine = engine_for(make_settings(Path("/m")))
    text = (
        '# HELP x\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 4.0\n'
    )
    assert engine.read_health(200, "", text).running == 7
    assert engine.read_health(200, "", "nothing").running is None


@pytest.mark.parametrize(
    ("mode", "host", "words"),
    [
        (
            GpuMode.GPUS,
            {"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]},
            "--gpus all",
        ),
        (
            GpuMode.CDI,
            {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]},
            "--device nvidia.com/gpu=all",
        ),
        (GpuMode.RUNTIME, {"Runtime": "nvidia"}, "--runtime nvidia"),
    ],
)
def test_the_gpu_is_asked_for_in_the_nodes_own_way(mode: GpuMode, host: dict[str, Any], words: str) -> None:
    """Prevents `--gpus all` on a node in CDI mode, where docker refuses it."""
    made = msgspec.structs.replace(spec(0, device="cuda", image=BY_DIGEST), gpus=mode)
    body = made.api()
    assert {key: body["HostConfig"].get(key) for key in ("DeviceRequests", "Runtime")} == {
        "DeviceRequests": host.get("DeviceRequests"),
        "Runtime": host.get("Runtime"),
    }
    assert words in made.shell()
    told = "NVIDIA_VISIBLE_DEVICES=all" in body["Env"]
    assert told == (mode is GpuMode.RUNTIME)
    assert told == ("-e NVIDIA_VISIBLE_DEVICES=all" in made.shell())


@pytest.mark.parametrize(("device", "expected"), [("cuda", GpuMode.CDI), ("cpu", None)])
def test_the_nodes_way_reaches_the_rank_on_cuda_only(device: str, expected: GpuMode | None) -> None:
    """Prevents a way that is found by the playbook and then not used, or a GPU asked for on a CPU."""
    assert spec(0, gpu_mode=GpuMode.CDI, device=device, image=BY_DIGEST).gpus is expected
