"""The head's Docker folder with the engine image in it, kept ready so that a lab starts without an import."""

from pathlib import Path

from lab import cache
from lab.debian import host_tree
from lab.errors import LabError
from lab.image import CHANGES, HERE, image_tree
from lab.run import run
from lab.settings import IMAGE, Paths, Suite
from lab.tree import Bind, run_in

DAEMON_JSON = HERE / "files" / "daemon.json"
SCRIPT = HERE / "files" / "seed-build.sh"


def seed_folder(paths: Paths, suite: Suite) -> Path:
    """A /var/lib/docker with only the engine image, made by the suite's own Docker on first use."""
    host, image = host_tree(paths, suite), image_tree(paths)
    script = SCRIPT.read_text()
    inputs = [host.name, image.name, IMAGE, CHANGES, script, DAEMON_JSON.read_text()]

    def build(part: Path) -> None:
        part.chmod(0o710)
        run_in(
            host,
            script,
            binds=[
                Bind(part, "/var/lib/docker", writable=True),
                Bind(image, "/lab/image"),
                Bind(DAEMON_JSON, "/lab/daemon.json"),
            ],
            env={"IMAGE": IMAGE, "CHANGES": "\n".join(CHANGES)},
            throw_away=True,
            timeout=900,
        )

    target = cache.entry(paths.cache, f"docker-seed-{suite}", inputs)
    return cache.ensure(target, "import of the engine image", build)


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
