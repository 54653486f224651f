"""An all-gather in the engine's image, over the rails and with the environment that a rank gets."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import msgspec

from glm53_service.artifacts.content import LOCAL_REPOSITORY
from glm53_service.artifacts.served import FILE, noted_image
from glm53_service.engines.base import GpuMode
from glm53_service.errors import CommandError, UnavailableError
from glm53_service.fabric.environment import rank_environment
from glm53_service.fabric.probe import probe
from glm53_service.fabric.rails import Fabric
from glm53_service.node import Node
from glm53_service.run import Runner

MARK = "GLM53-ALLGATHER "
BYTES = 32 * 1024 * 1024
"""Of the whole result on each node: what a prompt chunk gathers is of that size, and it freezes nothing."""

ROUNDS = 20
PORT = 29560
TCP_GBYTES = 5.0
"""GB/s of bus bandwidth. Over TCP owners saw 3, over one rail 12.8, over both 20 to 24 (large buffers)."""


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """One all-gather. `gbytes` is bus bandwidth in GB/s (10^9); `right`: every part was the right node's."""

    rank: int
    world: int
    bytes: int
    seconds: float
    gbytes: float
    right: bool
    at: float = 0.0
    backend: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it, empty when nothing is. gloo's figure says nothing of RDMA."""
        if not self.right:
            return "a part of the result was not the one that its node sent"
        if self.backend == "nccl" and self.gbytes < TCP_GBYTES:
            return f"{self.gbytes:.1f} GB/s is what TCP gives: NCCL did not take RDMA"
        return ""


def container(
    fabric: Fabric, *, image: str, rank: int, world: int, master: str, gpus: GpuMode | None
) -> tuple[str, ...]:
    """Return the docker command of one node's part; it removes itself, and pulls nothing.

    `gpus` is how the node's ranks get the GPU; None: without GPU and RDMA.
    """
    environment = rank_environment(fabric, rdma=gpus is not None) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "BACKEND": "nccl" if gpus else "gloo",
        "BYTES": str(BYTES),
        "ROUNDS": str(ROUNDS),
        "HOME": "/tmp",
        **(gpus.environment if gpus else {}),
    }
    variables = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    rdma = ("--device", "/dev/infiniband", "--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1:-1")
    script = importlib.resources.files(__package__).joinpath("allgather.py").read_text(encoding="utf-8")
    return (
        *("docker", "run", "--rm", "--name", f"glm53-gather{rank}", "--pull", "never", "--network", "host"),
        *("--ipc", "private", "--shm-size", "1g", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *((*gpus.arguments, *rdma) if gpus else ()),
        *variables,
        *("--entrypoint", "python3", image, "-c", script),
    )


def read(output: str, *, at: float, cuda: bool) -> Gathered:
    """Return what a node's part printed; UnavailableError when it printed no result."""
    line = next((text for text in output.splitlines() if text.startswith(MARK)), "")
    try:
        found = msgspec.convert(json.loads(line.removeprefix(MARK)), Gathered)
    except (ValueError, msgspec.ValidationError):
        said = output.strip().splitlines()[-1:] or ["nothing"]
        raise UnavailableError(f"the all-gather printed no result: {said[0]}") from None
    return msgspec.structs.replace(found, at=at, backend="nccl" if cuda else "gloo")


async def gather(node: Node, *, image: str, cuda: bool, runner: Runner, root: Path, at: float) -> Gathered:
    """Run this node's part of an all-gather of all nodes, which have to be asked within a minute."""
    fabric = await probe(node.me.fabric, rdma=cuda, runner=runner, root=root, wishes=node.me.wishes)
    if fabric.trouble:
        raise UnavailableError(fabric.trouble.text, hint=fabric.trouble.fix)
    reference = image or noted_image(root / FILE) or await _shipped(runner)
    master = node.lead.fabric[0]
    gpus = node.gpu_mode if cuda else None
    made = container(fabric, image=reference, rank=node.rank, world=len(node.nodes), master=master, gpus=gpus)
    try:
        said = await runner(made)
    except CommandError as error:
        last = [line for line in (error.err or error.out).splitlines() if line.strip()][-1:] or ["nothing"]
        raise UnavailableError(
            f"the all-gather's container ended with {error.code}: {last[0]}",
            hint="does the other node run its part, is the image here, does a firewall drop the rails?",
        ) from None
    return read(said, at=at, cuda=cuda)


async def _shipped(runner: Runner) -> str:
    """Return the newest image that came from the head: a worker keeps no settings."""
    listed = (await runner(("docker", "image", "ls", "--quiet", "--no-trunc", LOCAL_REPOSITORY))).split()
    if not listed:
        raise UnavailableError(f"no image {LOCAL_REPOSITORY} here", hint="run site.yml: it ships the head's")
    return listed[0]
