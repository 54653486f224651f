"""TensorFold's command line and container per rank, the argument check, ports and memory."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.drafter import Choice
from glm53_service.engines import engine_for
from glm53_service.engines.base import ContainerSpec
from glm53_service.settings import choose_drafter
from glm53_service.system import GIB, Memory
from tests.unit.fixtures import (
    DRAFTER_DIR,
    launch_of,
    place,
    settings_of,
    tensorfold_data,
    value,
    with_dflash2,
)

ENGINE = engine_for(settings_of(tensorfold_data()))
PLAIN = settings_of(tensorfold_data())


def spec(rank: int, data: dict[str, Any] | None = None, **more: Any) -> ContainerSpec:
    """Return the container of `rank`."""
    return ENGINE.container(
        launch_of(settings_of(data or with_dflash2()), **more), place(rank), "sha256:local"
    )


def test_the_followers_start_first_and_no_request_is_drained() -> None:
    """Prevents vLLM's order and vLLM's drain from being taken for TensorFold's."""
    vllm = engine_for(settings_of(tensorfold_data(engine="vllm")))
    assert (ENGINE.followers_first, ENGINE.drains, ENGINE.attempts) == (True, False, 4)
    assert (vllm.followers_first, vllm.drains, vllm.attempts) == (False, True, 2)


def test_rank_0_alone_has_a_name_and_a_port() -> None:
    """Prevents a follower that is told to serve, and a rank 0 on all addresses."""
    head, worker = spec(0).command, spec(1).command
    assert head[:3] == ("tensorfold", "serve", "/srv/models/glm")
    assert (value(head, "--name"), value(head, "--host"), value(head, "--port")) == (
        "unit-glm",
        "127.0.0.1",
        "18888",
    )
    assert not {"--name", "--host", "--port"} & set(worker)
    assert [value(c, "--rank") for c in (head, worker)] == ["0", "1"]
    assert {value(c, "--tp") for c in (head, worker)} == {"2"}
    assert {value(c, "--master") for c in (head, worker)} == {"192.0.0.1"}
    assert {value(c, "--master-port") for c in (head, worker)} == {"29551"}


def test_the_ranks_differ_in_rank_and_place_only() -> None:
    """Prevents ranks of different settings, which the engine refuses after a rendezvous of minutes."""
    head, worker = spec(0), spec(1)
    own = {"--rank", "0", "1", "--name", "unit-glm", "--host", "127.0.0.1", "--port", "18888"}
    assert set(head.command) ^ set(worker.command) <= own
    differing = {key for key in head.environment if head.environment[key] != worker.environment[key]}
    assert differing == {
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
        "TF_ROCE_HCA",
        "TF_ROCE_GID_INDEX",
    }


def test_each_rank_gets_its_own_devices_in_rail_order() -> None:
    """Prevents names and a GID index copied between nodes, and NCCL's exact match read as a device's name."""
    worker = spec(1).environment
    assert (worker["NCCL_IB_HCA"], worker["TF_ROCE_HCA"]) == ("=roce10,roce11", "roce10,roce11")
    assert (worker["NCCL_IB_GID_INDEX"], worker["TF_ROCE_GID_INDEX"]) == ("4", "4")
    assert worker["NCCL_SOCKET_IFNAME"] == "f10"
    assert (worker["NCCL_MIN_NCHANNELS"], worker["NCCL_MAX_NCHANNELS"]) == ("4", "4")
    assert not [name for name in worker if name.startswith("VLLM")]


def test_the_recipes_defaults_reach_the_engine() -> None:
    """Prevents a server of 2,051 tokens and one request: the engine's own, when it is told nothing."""
    made = spec(0)
    flags = {
        flag: value(made.command, flag) for flag in ("--context", "--parallel", "--max-tokens", "--drafter")
    }
    assert flags == {
        "--context": "1048576",
        "--parallel": "4",
        "--max-tokens": "32768",
        "--drafter": DRAFTER_DIR,
    }
    assert {"--thinking", "--vision"} <= set(made.command)
    assert "--vision-urls" not in made.command
    expected = {
        "TENSORFOLD_MEMORY_RESERVE_GIB": "14.5",
        "TF_GLM_KV": "fp8",
        "TF_GLM_DENSE": "q4",
        "TF_GLM_COMM": "roce",
        "TF_GLM_SHARED_PREFIX": "1",
        "TF_GLM_HC_SPLIT": "1",
        "TF_GLM_PREFILL_OVERLAP": "2",
        "TF_GLM_MULTI_WINDOW": "32",
        "TF_ROCE_MAX_KB": "512",
        "TF_GLM_CACHE_GIB": "12.5",
        "TENSORFOLD_GLM_MAX_IMAGES": "50",
        "TENSORFOLD_GLM_MAX_VIDEOS": "4",
        "TF_ROCE_WAIT_S": "300",
        "HF_HUB_OFFLINE": "1",
        "TENSORFOLD_NO_UPDATE_CHECK": "1",
        "HOME": "/cache",
        "TORCH_EXTENSIONS_DIR": "/cache/torch_extensions",
    }
    assert {name: made.environment.get(name) for name in expected} == expected


def test_settings_reach_the_engine() -> None:
    """Prevents a setting that is read, checked, shown, and never passed on."""
    made = spec(
        1,
        with_dflash2(
            tensorfold={
                "parallel": 6,
                "context": 70_000,
                "max_tokens": 99,
                "kv": "bf16",
                "dense": "fp8",
                "vision": True,
                "vision_urls": True,
                "thinking": False,
                "shared_prefix": False,
                "split": False,
                "memory_reserve_gib": 21.5,
                "pool_gib": 3,
                "comm": "nccl",
                "rendezvous_port": 29777,
                "shm_gib": 7,
                "media": {"max_images": 9, "max_videos": 2, "video_frames": 64},
                "extra_args": ["--max-tokens", "100"],
                "extra_env": {"TF_ROCE_WAIT_S": "60", "TF_GLM_L2PF": "0"},
            }
        ),
    )
    flags = ("--parallel", "--context", "--master-port")
    assert [value(made.command, flag) for flag in flags] == ["6", "70000", "29777"]
    assert made.command[-2:] == ("--max-tokens", "100")
    assert {"--no-thinking", "--vision-urls"} <= set(made.command)
    expected = {
        "TENSORFOLD_MEMORY_RESERVE_GIB": "21.5",
        "TF_GLM_KV": "bf16",
        "TF_GLM_DENSE": "fp8",
        "TF_GLM_COMM": "nccl",
        "TF_GLM_SHARED_PREFIX": "0",
        "TF_GLM_HC_SPLIT": "0",
        "TF_GLM_PREFILL_OVERLAP": "0",
        "TF_GLM_MULTI_WINDOW": "64",
        "TF_ROCE_MAX_KB": "1024",
        "TF_GLM_CACHE_GIB": "3",
        "TENSORFOLD_GLM_MAX_IMAGES": "9",
        "TENSORFOLD_GLM_MAX_VIDEOS": "2",
        "TENSORFOLD_GLM_VIDEO_FRAMES": "64",
        "TF_ROCE_WAIT_S": "60",
        "TF_GLM_L2PF": "0",
    }
    assert {name: made.environment.get(name) for name in expected} == expected
    assert made.shm_bytes == 7 * GIB


@pytest.mark.parametrize(
    ("data", "drafter", "no_drafts", "mounted"),
    [
        (with_dflash2(), DRAFTER_DIR, False, True),
        (tensorfold_data(), "none", False, False),
        (tensorfold_data(drafter={"request": "none"}), "none", True, False),
    ],
)
def test_the_drafter_of_each_choice(
    data: dict[str, Any], drafter: str, no_drafts: bool, mounted: bool
) -> None:
    """Prevents DFlash2 out of some cache without leave, and a drafter's folder that the rank cannot see."""
    made = spec(0, data)
    assert value(made.command, "--drafter") == drafter
    assert ("--no-drafts" in made.command) == no_drafts
    mounts = [(m.source, m.target, m.read_only) for m in made.mounts]
    assert ((DRAFTER_DIR, DRAFTER_DIR, True) in mounts) == mounted
    assert mounts[0] == ("/srv/models/glm", "/srv/models/glm", True)
    assert mounts[-1] == ("/var/lib/glm53/cache/abc", "/cache", False)


def test_the_container_is_ours_alone_without_init() -> None:
    """Prevents a resurrected rank, a root engine, and an init that ends a follower before rank 0 is done."""
    body = spec(1).api()
    host = body["HostConfig"]
    assert (host["Init"], host["RestartPolicy"], host["IpcMode"]) == (False, {"Name": "no"}, "private")
    assert (body["User"], host["CapDrop"], host["CapAdd"]) == ("991:992", ["ALL"], ["IPC_LOCK"])
    assert host["Ulimits"] == [
        {"Name": "memlock", "Soft": -1, "Hard": -1},
        {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
    ]
    assert body["Labels"] == {"glm53.cluster": "unit", "glm53.epoch": "12", "glm53.rank": "1"}
    assert "Entrypoint" not in body
    shell = spec(1).shell()
    assert "--ulimit memlock=-1 --ulimit stack=67108864" in shell
    assert "--init" not in shell


def test_no_gpu_and_no_rdma_on_a_cpu() -> None:
    """Prevents a double in the lab that asks docker for GPUs."""
    made = spec(1, with_dflash2(device="cpu"))
    host = made.api()["HostConfig"]
    assert "DeviceRequests" not in host
    assert "Devices" not in host
    assert not [name for name in made.environment if name.startswith("NCCL") or name == "TF_ROCE_HCA"]


# The argument check


def test_the_arguments_are_read_by_the_images_own_parser() -> None:
    """Prevents `--no-such-flag` from being found out after the old pair was stopped."""
    data = with_dflash2(tensorfold={"extra_args": ["--no-such-flag"]})
    made = ENGINE.argument_check(launch_of(settings_of(data)), place(1), "sha256:local")
    body, host = made.api(), made.api()["HostConfig"]
    assert body["Entrypoint"][:2] == ["python3", "-c"]
    assert "build_parser" in body["Entrypoint"][2]
    assert ["tensorfold", *body["Cmd"]] == list(spec(1, data).command)
    assert (host["NetworkMode"], host["Binds"]) == ("none", [])
    assert "DeviceRequests" not in host
    assert made.name == "glm53-check1"
    assert "--entrypoint python3" in made.shell()
    assert " sha256:local -c " in made.shell()


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (0, "arguments are right\n", ""),
        (
            2,
            "usage: tensorfold ...\ntensorfold: error: unrecognized arguments: --no-such-flag\n",
            "the image refuses the arguments: tensorfold: error: unrecognized arguments: --no-such-flag",
        ),
        (
            1,
            "Traceback\nModuleNotFoundError: No module named 'tensorfold'\n",
            "the image's parser cannot be used, it failed (exit 1); it said: ModuleNotFoundError:"
            " No module named 'tensorfold'. Is it a TensorFold image?",
        ),
        (
            137,
            "",
            "the image's parser cannot be used, it was killed (SIGKILL): by the kernel for want of memory, or"
            " by hand; it said: nothing. Is it a TensorFold image?",
        ),
    ],
)
def test_what_the_argument_check_says(code: int, output: str, said: str) -> None:
    """Prevents a check that passes because it could not be made."""
    assert ENGINE.read_argument_check(code, output) == said


def test_rank_0_names_the_ports_it_will_bind() -> None:
    """Prevents a port that is taken from being found out after the weights were loaded."""
    launch = launch_of(settings_of(with_dflash2()))
    assert ENGINE.listens(launch, place(0)) == ("127.0.0.1:18888", "192.0.0.1:29551")
    assert ENGINE.listens(launch, place(1)) == ()


# Memory


def gib(free: float, available: float) -> Memory:
    """Return a Spark's memory."""
    return Memory(free=int(free * GIB), available=int(available * GIB), total=int(121.69 * GIB))


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (gib(103.25, 115.85), ""),
        (
            gib(41.52, 115.65),
            "41.5 GiB are free, 74.1 GiB more are page cache; the weights take 80 GiB, and 14.5 GiB stay"
            " in reserve",
        ),
        (gib(103.30, 115.87), ""),
        (gib(94.4, 94.6), "94.4 GiB are free; the weights take 80 GiB, and 14.5 GiB stay in reserve"),
    ],
)
def test_page_cache_is_no_free_memory(memory: Memory, said: str) -> None:
    """Prevents a start right after 60 GB were copied: CUDA counts the page cache as used."""
    assert ENGINE.memory_problem(PLAIN, memory) == said
    assert ENGINE.memory_problem(settings_of(tensorfold_data(device="cpu")), memory) == ""


def test_the_reserve_of_many_requests_counts() -> None:
    """Prevents eight requests on a node that has memory for four."""
    assert ENGINE.memory_problem(settings_of(with_dflash2(tensorfold={"parallel": 8})), gib(98, 98))
    assert not ENGINE.memory_problem(settings_of(with_dflash2(tensorfold={"parallel": 4})), gib(98, 98))


def test_a_launch_without_a_choice_has_the_settings_own() -> None:
    """Prevents a start without drafts only because nobody looked at the drafter's files."""
    launch = launch_of(settings_of(with_dflash2()))
    assert launch.choice == choose_drafter(launch.settings)
    assert isinstance(launch.choice, Choice)
