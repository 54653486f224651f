"""The image of the TensorFold double: the engine image's Debian base, aiohttp, and the program."""

import re
from pathlib import Path

from lab import cache
from lab.debian import image_base
from lab.errors import LabError
from lab.image import SUITE, local_wheels, pip_binds, pip_environment, tidy, wheel_folder
from lab.run import run
from lab.settings import Paths
from lab.tree import Bind, run_in

IMAGE = "glm53-lab/tensorfold-double:0.6.0"
PROGRAM = Path(__file__).parent / "double"
FILES = Path(__file__).parent / "files"
LOCK = Path(__file__).parents[2] / "requirements" / "node.txt"

# aiohttp and what it needs, of the lock that the product's own environment on a node is made of.
PACKAGES = (
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "attrs",
    "frozenlist",
    "idna",
    "multidict",
    "propcache",
    "typing-extensions",
    "yarl",
)


def locked(lock: str, packages: tuple[str, ...]) -> str:
    """The entries of `packages`, with their hashes, of a lock file's text; LabError when one is not in it."""
    entry = re.compile(r"^([a-z0-9-]+)==.*(?:\n +--hash=.*)*", re.MULTILINE)
    entries = {match[1]: match[0] for match in entry.finditer(lock)}
    missing = [name for name in packages if name not in entries]
    if missing:
        raise LabError(f"{LOCK}: no line {missing[0]}==VERSION; expected one")
    return "\n".join(entries[name] for name in packages) + "\n"


def sources() -> dict[str, str]:
    """The files that the image is made of besides its base and its packages, by name."""
    found = [*sorted(PROGRAM.rglob("*.py")), *sorted(FILES.iterdir())]
    return {str(path.relative_to(PROGRAM.parent)): path.read_text() for path in found}


def double_changes() -> tuple[str, ...]:
    """The image's configuration, as `docker import --change` takes it: what the recipe's image has."""
    return (
        "ENV PATH=/opt/tensorfold/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "ENV HF_HOME=/root/.cache/huggingface",
        "ENV TORCH_EXTENSIONS_DIR=/cache/torch_extensions",
        "ENV TRITON_CACHE_DIR=/cache/triton",
        "WORKDIR /workspace",
        f"LABEL tf.patches={cache.key(sources())}",
        "LABEL glm53.lab=double",
        'ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]',
    )


def double_tree(paths: Paths) -> Path:
    """The image's root tree, built on first use (seconds, once the base is there)."""
    base = image_base(paths, SUITE)
    requirements = locked(LOCK.read_text(), PACKAGES)
    inputs = [base.name, requirements, sources()]

    def build(part: Path) -> None:
        run(["cp", "-a", f"{base}/.", str(part)], timeout=600, contained=True)
        (part / "lab").mkdir()
        (part / "lab/requirements.txt").write_text(requirements)
        folders = local_wheels()
        run_in(
            part,
            (FILES / "install.sh").read_text(),
            binds=[
                Bind(wheel_folder(paths), "/lab/wheels", writable=True),
                Bind(PROGRAM, "/lab/program"),
                Bind(FILES, "/lab/files"),
                *pip_binds(folders),
            ],
            env=pip_environment(folders),
            network=True,
        )
        tidy(part, folders)

    target = cache.entry(paths.cache, "image-tree-double", inputs)
    return cache.ensure(target, "image tree of the TensorFold double", build)
