"""The head's Docker folder with the engine images, kept ready so that a lab starts without an import."""

from collections.abc import Sequence
from pathlib import Path

from lab import cache
from lab.debian import host_tree
from lab.errors import LabError
from lab.image import CHANGES, HERE, image_tree
from lab.run import run
from lab.settings import IMAGE, Paths, Suite
from lab.tensorfold.image import IMAGE as DOUBLE_IMAGE
from lab.tensorfold.image import double_changes, double_tree
from lab.tree import Bind, run_in

DAEMON_JSON = HERE / "files" / "daemon.json"
SCRIPT = HERE / "files" / "seed-build.sh"


def seed_folder(paths: Paths, suite: Suite) -> Path:
    """A /var/lib/docker with only the engine image, made by the suite's own Docker on first use."""
    host, image = host_tree(paths, suite), image_tree(paths)
    inputs = [host.name, image.name, IMAGE, CHANGES, SCRIPT.read_text(), DAEMON_JSON.read_text()]

    def build(part: Path) -> None:
        part.chmod(0o710)
        _import(host, part, image, IMAGE, CHANGES)

    target = cache.entry(paths.cache, f"docker-seed-{suite}", inputs)
    return cache.ensure(target, "import of the engine image", build)


def seed_with_double(paths: Paths, suite: Suite) -> Path:
    """`seed_folder` and the image of the TensorFold double: when that changes, vLLM is not imported again."""
    host, first, image = host_tree(paths, suite), seed_folder(paths, suite), double_tree(paths)
    changes = double_changes()
    inputs = [first.name, image.name, DOUBLE_IMAGE, changes]

    def build(part: Path) -> None:
        part.chmod(0o710)
        plant(first, part)
        _import(host, part, image, DOUBLE_IMAGE, changes)

    target = cache.entry(paths.cache, f"docker-seed-{suite}-double", inputs)
    return cache.ensure(target, "import of the TensorFold double", build)


def _import(host: Path, docker: Path, tree: Path, image: str, changes: Sequence[str]) -> None:
    """Import a root tree into a Docker folder that no daemon uses, by the host tree's own Docker."""
    run_in(
        host,
        SCRIPT.read_text(),
        binds=[
            Bind(docker, "/var/lib/docker", writable=True),
            Bind(tree, "/lab/image"),
            Bind(DAEMON_JSON, "/lab/daemon.json"),
        ],
        env={"IMAGE": image, "CHANGES": "\n".join(changes)},
        throw_away=True,
        timeout=900,
    )


def plant(seed: Path, docker: Path) -> None:
    """Make `docker` a copy of the seed: layers as hard links (Docker never writes into one), the rest copied.

    Raises LabError when the two folders are not on one file system.
    """
    if seed.stat().st_dev != docker.stat().st_dev:
        raise LabError(
            f"{seed} and {docker} are on different file systems, so layers cannot be linked. "
            "Do: set GLM53_LAB_CACHE and GLM53_LAB_STATE to folders on the same one"
        )
    for entry in sorted(seed.iterdir()):
        run(
            ["cp", "-al" if entry.name == "overlay2" else "-a", str(entry), str(docker)],
            timeout=300,
            contained=True,
        )
