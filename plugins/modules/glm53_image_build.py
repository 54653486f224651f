#!/usr/bin/python
"""Ansible module: the engine's image, built by the head's own docker from what the control host planned."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import http.client
import io
import os
import shlex
import subprocess
import tarfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_docker import DOCKER_SOCKET, docker_get

DOCUMENTATION = """
module: glm53_image_build
short_description: Build the engine's image
description:
  - C(planned) reads what is there and what is in the way; C(built) builds.
  - The name is given once all went well, so a build that fails or is killed leaves the images as they were.
options:
  build: {description: "glm53_service.artifacts.build.Build, files as base64.", type: dict, required: true}
  state: {description: "planned or built.", type: str, choices: [planned, built], default: planned}
  log: {description: "File for all that docker says.", type: path, default: /var/log/glm53-image-build.log}
  room_gb: {description: "GB that the layers may need.", type: int, default: 5}
"""

BUILT = "glm53/built"
BASE = "glm53/base"
"""The repository of built images (glm53_service.artifacts.built), and that of names for their bases."""

LABEL = "glm53.inputs"
LOCK = Path("/run/glm53-image-build.lock")
SHOWN_LINES = 15
BUILDER = {"BUILDX_BUILDER": "default", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDKIT_PROGRESS": "plain"}
"""Where docker has BuildKit: this docker's own one, which sees its images and adds none beside the image."""

FOLDERS = ("wheels", "source", "patches", "overlay")


class BuildError(Exception):
    """Why there is no new image: what was found, what was expected, what to do."""


def inspect(reference: str) -> dict[str, Any] | None:
    """Return docker's word on an image, None when it has none of this name."""
    status, found = docker_get("/images/" + urllib.parse.quote(reference, safe="/:@") + "/json")
    return found if status == 200 else None


def labels(image: dict[str, Any] | None) -> dict[str, str]:
    """Return an image's labels."""
    return ((image or {}).get("Config") or {}).get("Labels") or {}


def is_built(image: dict[str, Any] | None, build: dict[str, Any]) -> bool:
    """Say whether an image is the one that this build makes."""
    return bool(labels(image).get(LABEL) == build["labels"][LABEL])


def newest_built() -> dict[str, Any]:
    """Return the image that was built here last, with its `labels`; {} without any."""
    filters = urllib.parse.quote('{"reference": ["' + BUILT + '"]}')
    _, found = docker_get(f"/images/json?filters={filters}")
    images = sorted(found or [], key=lambda image: int(image.get("Created") or 0))
    if not images:
        return {}
    return {"reference": (images[-1].get("RepoTags") or [""])[0], "labels": images[-1].get("Labels") or {}}


# The package and the wheels on this node


def files_below(root: Path) -> list[Path]:
    """Return the files of a folder, or the file itself, in the order of `find . -type f | LC_ALL=C sort`."""
    if not root.is_dir():
        return [root]
    return sorted(
        (path for path in root.rglob("*") if path.is_file() and not path.is_symlink()),
        key=lambda path: os.fsencode(path.relative_to(root)),
    )


def sha256_of(root: Path) -> str:
    """Return the SHA-256 of a file; of a folder that of the lines that sha256sum prints for its files."""
    if not root.is_dir():
        with root.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    lines = [f"{sha256_of(path)}  ./{path.relative_to(root)}\n" for path in files_below(root)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def problems(build: dict[str, Any]) -> list[str]:
    """Return what is wrong with the files that this node is to have."""
    found = []
    source, wheels = build["source"], build["wheels"]
    if source and not Path(source["path"]).exists():
        found.append(f"Found: no {source['path']} here. Expected: the package. Fix: glm53_image_build.source")
    elif source and (real := sha256_of(Path(source["path"]))) != source["sha256"]:
        found.append(
            f"Found: {source['path']} has SHA-256 {real}. Expected: {source['sha256']}. Fix: the right"
            " file, or the right glm53_image_build.source.sha256"
        )
    if wheels and not Path(wheels).is_dir():
        found.append(f"Found: no folder {wheels} here. Expected: wheels. Fix: glm53_image_build.wheels")
    return found


def room_problem(build: dict[str, Any], *, free: int, room_gb: int) -> str:
    """Return why the disk is too small for the build, empty when it is not."""
    roots = [Path(name) for name in (build["source"].get("path"), build["wheels"]) if name]
    carried = sum(path.stat().st_size for root in roots if root.exists() for path in files_below(root))
    need = room_gb * 10**9 + 3 * carried
    if free >= need:
        return ""
    return (
        f"Found: {free / 1e9:.1f} GB free for docker. Expected: {need / 1e9:.1f} GB for the new layers. Fix:"
        " make room (`sudo glm53 prune`, `docker system df`)"
    )


# The build


def context(build: dict[str, Any], target: IO[bytes]) -> None:
    """Write the build's context as a tar: same bytes for same content, whatever times and owners are."""
    with tarfile.open(fileobj=target, mode="w|") as tar:
        for name in FOLDERS:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name, text in sorted(build["files"].items()):
            content = base64.b64decode(text)
            _add(tar, name, len(content), 0o644, io.BytesIO(content))
        for folder_name, root in (("source", build["source"].get("path")), ("wheels", build["wheels"])):
            for path in files_below(Path(root)) if root else ():
                below = Path(root).parent if folder_name == "source" else Path(root)
                mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    _add(tar, f"{folder_name}/{path.relative_to(below)}", size, mode, file)


def _add(tar: tarfile.TarFile, name: str, size: int, mode: int, content: IO[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, mode
    tar.addfile(entry, content)


def argv_of(build: dict[str, Any], base: str) -> list[str]:
    """Return the command; the context comes by its standard input."""
    argv = ["docker", "build", "--force-rm", "--tag", build["reference"]]
    if not build["network"]:
        argv += ["--network", "none"]
    for key, value in sorted({**build["arguments"], "BASE": base}.items()):
        argv += ["--build-arg", f"{key}={value}"]
    for key, value in sorted(build["labels"].items()):
        argv += ["--label", f"{key}={value}"]
    return [*argv, "-"]


@contextlib.contextmanager
def locked(log: Path) -> Iterator[int]:
    """Keep two builds of this machine apart, also from the docker client of one that was killed."""
    with LOCK.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise BuildError(
                f"Found: another build runs here (process {lock.read().strip()}, log {log}). Expected: one at"
                " a time. Fix: wait for it, or end that process"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock.fileno()


def call(argv: list[str], log: IO[bytes], lock: int, build: dict[str, Any] | None = None) -> int:
    """Run docker with its output in the log and return its exit code; with `build`, feed it the context."""
    log.write(f"+ {shlex.join(argv)}\n".encode())
    log.flush()
    fed = subprocess.PIPE if build else subprocess.DEVNULL
    with subprocess.Popen(
        argv,
        stdin=fed,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        env={**os.environ, **BUILDER},
    ) as process:
        # A pipe that breaks: docker has ended, and its code and words say why.
        with contextlib.suppress(BrokenPipeError), process.stdin or contextlib.nullcontext() as stdin:
            if build and stdin:
                context(build, stdin)
        return process.wait()


def last_lines(path: Path) -> str:
    """Return the end of the log, for a person."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-SHOWN_LINES:])


def make(build: dict[str, Any], log: Path, room_gb: int) -> tuple[bool, dict[str, Any]]:
    """Return whether anything was built, and docker's word on the image; BuildError when there is none."""
    with locked(log) as lock:
        if is_built(image := inspect(build["reference"]), build):
            return False, image or {}
        if found := in_the_way(build, room_gb):
            raise BuildError("; ".join(found))
        if not inspect(build["base"]):
            raise BuildError(
                f"Found: no base image {build['base']} in docker here. Expected: it was pulled, or"
                " loaded. Fix: run this again, or correct glm53_image_build.base"
            )
        with log.open("wb") as file:
            log.chmod(0o600)
            # By a name of our own: BuildKit takes no id, and neither builder then asks a registry for it.
            base = f"{BASE}:{build['base'].rpartition(':')[2][:12]}"
            code = call(["docker", "tag", build["base"], base], file, lock)
            code = code or call(argv_of(build, base), file, lock, build)
        image = inspect(build["reference"])
        if code or not is_built(image, build):
            raise BuildError(
                f"Found: the build of {build['reference']} ended with {code}:\n{last_lines(log)}\nThe whole"
                f" log: {log}. Expected: an image. The images of before and the pair are as they were. Fix:"
                " what the log names, in glm53_image_build, and run this again"
            )
        return True, image or {}


def in_the_way(build: dict[str, Any], room_gb: int) -> list[str]:
    """Return why a build would fail here before it began."""
    _, info = docker_get("/info")
    status = os.statvfs(info.get("DockerRootDir") or "/var/lib/docker")
    room = room_problem(build, free=status.f_bavail * status.f_frsize, room_gb=room_gb)
    return [*problems(build), *([room] if room else [])]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "build": {"type": "dict", "required": True},
            "state": {"type": "str", "choices": ["planned", "built"], "default": "planned"},
            "log": {"type": "path", "default": "/var/log/glm53-image-build.log"},
            "room_gb": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    build, room_gb = module.params["build"], module.params["room_gb"]
    said: dict[str, Any] = {"invocation": {"module_args": {"reference": build["reference"]}}}
    try:
        if module.params["state"] == "built" and not module.check_mode:
            changed, image = make(build, Path(module.params["log"]), room_gb)
            module.exit_json(changed=changed, image=image, **said)
        image_now = inspect(build["reference"])
        built = is_built(image_now, build)
        module.exit_json(
            changed=False,
            built=built,
            base=inspect(build["base"]) is not None,
            image=image_now,
            newest=newest_built(),
            problems=[] if built else in_the_way(build, room_gb),
            **said,
        )
    except BuildError as error:
        module.fail_json(msg=str(error), **said)
    except (OSError, ValueError, http.client.HTTPException) as error:
        module.fail_json(
            msg=f"Found: {DOCKER_SOCKET}: {error}. Expected: docker and the files of the build. Fix: that",
            **said,
        )


if __name__ == "__main__":
    main()
