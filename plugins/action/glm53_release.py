"""Ansible action: the package on a node, installed from wheels that the control host builds for that node."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

OLDEST_GLIBC_MINOR = 17
"""manylinux2014 is glibc 2.17; wheels built for anything up to the node's own glibc run on it."""


def platforms(architecture: str, glibc: str) -> list[str]:
    """Return the wheel platforms that a node takes, newest first."""
    match = re.fullmatch(r"2\.(\d+).*", glibc)
    newest = int(match.group(1)) if match else OLDEST_GLIBC_MINOR
    numbers = range(max(newest, OLDEST_GLIBC_MINOR), OLDEST_GLIBC_MINOR - 1, -1)
    return [f"manylinux_2_{minor}_{architecture}" for minor in numbers] + [f"manylinux2014_{architecture}"]


def download_argv(requirements: Path, folder: Path, node: dict[str, Any]) -> list[str]:
    """Return the pip command that fetches the wheels that `requirements` locks, for such a node."""
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--implementation",
        "cp",
        "--python-version",
        node["python"],
        "--abi",
        "cp" + node["python"].replace(".", ""),
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    for platform in platforms(node["architecture"], node["glibc"]):
        argv += ["--platform", platform]
    return [*argv, "--requirement", str(requirements), "--dest", str(folder)]


def build_wheelhouse(root: Path, build: Path, release: str, node: dict[str, Any]) -> Path:
    """Return the tar of wheels of `release` for a node like `node`, built once however many ask."""
    build.mkdir(parents=True, exist_ok=True)
    archive = build / f"{release}-py{node['python']}-{node['architecture']}-glibc{node['glibc']}.tar"
    with (build / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return archive
        with tempfile.TemporaryDirectory(prefix="wheels-", dir=build) as name:
            folder = Path(name) / "wheels"
            folder.mkdir()
            run(download_argv(root / "requirements/node.txt", folder, node))
            build_package(root, Path(name) / "source", folder)
            half = Path(name) / "wheels.tar"
            with tarfile.open(half, "w") as tar:
                for wheel in sorted(folder.iterdir()):
                    tar.add(wheel, arcname=wheel.name)
            half.rename(archive)
    return archive


def build_package(root: Path, source: Path, folder: Path) -> None:
    """Build this checkout's own wheel from a clean copy: a stale build folder must not get in."""
    source.mkdir()
    shutil.copytree(
        root / "glm53_service", source / "glm53_service", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (root / name).exists():
            shutil.copy2(root / name, source / name)
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--wheel-dir",
            str(folder),
            str(source),
        ]
    )


def run(argv: list[str]) -> None:
    """Run pip on the control host; AnsibleActionFail with its own words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise AnsibleActionFail(
            f"Building the wheels on the control host failed: {' '.join(argv)}\n{done.stderr.strip()}\n"
            "Expected: pip reaches a package index that has the locked versions for it. Fix: `make venv`,"
            " then check the control host's network and pip configuration"
        )


class ActionModule(ActionBase):  # type: ignore[misc]
    """Queries the node; builds, copies, installs and switches only when it must."""

    TRANSFERS_FILES = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ensure that this checkout's release is installed and current on the node."""
        super().run(tmp, task_vars)
        root, build = Path(self._task.args["checkout"]), Path(self._task.args["build_dir"])
        release = self._release_id(root)
        state = self._task.args.get("state", "present")
        node = self._module({"release": release, "state": "query"}, task_vars)
        if node.get("failed") or node["settled"] or (state == "staged" and node["complete"]):
            return {**node, "release": release}
        before = node["current"] or "none"
        change = {
            "changed": True,
            "release": release,
            "diff": {"prepared": f"release {before} -> {release}\n"},
        }
        if self._task.check_mode:
            return {**node, **change, "msg": f"would install release {release} (now: {before})"}
        arguments = {"release": release, "state": state}
        if not node["complete"]:
            archive = build_wheelhouse(root, build / "wheelhouse", release, node)
            remote = self._connection._shell.join_path(self._make_tmp_path(), archive.name)
            self._transfer_file(str(archive), remote)
            self._fixup_perms2([self._connection._shell.tmpdir, remote])
            arguments["wheelhouse"] = remote
        result = self._module(arguments, task_vars)
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result if result.get("failed") else {**result, **change}

    def _release_id(self, root: Path) -> str:
        try:
            from glm53_service.release import release_id
        except ImportError as error:
            raise AnsibleActionFail(
                f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: it runs from the"
                " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
            ) from error
        return release_id(root)

    def _module(self, arguments: dict[str, str], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="glm53_release", module_args=arguments, task_vars=task_vars
        )
        return result
