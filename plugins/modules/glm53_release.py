#!/usr/bin/python
"""Ansible module: install a release of the package beside the others and switch to it, without internet."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_release
short_description: Query, install and switch releases under /opt/glm53
description: Use it through its action plugin, which builds the wheels on the control host.
options:
  root: {description: "Folder of the releases.", type: path, default: /opt/glm53}
  release: {description: "The release id.", type: str, required: true}
  wheelhouse: {description: "Tar file of wheels on this node; empty only switches.", type: path, default: ""}
  link: {description: "Link to the command.", type: path, default: /usr/local/bin/glm53}
  state:
    description: "staged installs without making it current: what runs goes on with what it has."
    choices: [query, staged, present]
    default: query
"""


def python_tag() -> str:
    """Return the Python that a venv here depends on: 3.12, not 3.12.1, which replaces 3.12.0 in place."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def marker(folder: Path) -> dict[str, Any]:
    """Return what a release's marker says, empty for one that was never finished."""
    try:
        data = json.loads((folder / ".complete").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def is_complete(folder: Path) -> bool:
    """Say whether the release was installed to its end, for the Python that this node has now."""
    return marker(folder).get("python") == python_tag() and (folder / "bin/glm53").exists()


def query(root: Path, release: str, link: Path) -> dict[str, Any]:
    """Return what is installed, and what a wheelhouse must fit."""
    current = root / "current"
    return {
        "complete": is_complete(root / "releases" / release),
        "current": current.readlink().name if current.is_symlink() else "",
        "linked": link.is_symlink() and str(link.readlink()) == str(current / "bin/glm53"),
        "python": python_tag(),
        "architecture": platform.machine(),
        "glibc": platform.libc_ver()[1],
    }


def run(argv: list[str]) -> None:
    """Run one installation step; RuntimeError with its own words when it fails."""
    # A PYTHONPATH would make pip take what lies there for installed.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))
    }
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(argv)} failed ({done.returncode}):\n{(done.stderr + done.stdout).strip()}"
        )


def install(folder: Path, release: str, wheelhouse: Path) -> None:
    """Build the venv under its final name (venvs cannot be moved); the marker is written last."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glm53-wheels-") as name:
        wheels = Path(name)
        with tarfile.open(wheelhouse) as archive:
            # One flat folder of wheels. (extractall's filter is newer than Debian 12's Python.)
            for member in archive:
                if member.isfile() and "/" not in member.name:
                    archive.extract(member, wheels)
        installer = next(wheels.glob("pip-*.whl"))
        package = next(wheels.glob("glm53_service-*.whl"))
        # Debian's venv without ensurepip is all that a node without python3-venv has.
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        run(
            [
                sys.executable,
                f"{installer}/pip",
                "--python",
                str(folder / "bin/python"),
                "--isolated",
                "--disable-pip-version-check",
                "install",
                "--no-index",
                "--no-cache-dir",
                "--no-compile",
                "--find-links",
                str(wheels),
                str(package),
            ]
        )
    run([str(folder / "bin/python"), "-m", "compileall", "-q", str(folder / "lib")])
    run([str(folder / "bin/glm53"), "version"])
    with (folder / ".complete").open("w", encoding="utf-8") as handle:
        json.dump({"release": release, "python": python_tag()}, handle)
        handle.flush()
        os.fsync(handle.fileno())


def point(link: Path, target: Path) -> None:
    """Make `link` lead to `target` in one step: at no moment is there no link."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(link)


def in_use(releases: Path, proc: Path = Path("/proc")) -> set[str]:
    """Return the releases whose Python some process runs: a supervisor that is not restarted yet still
    imports.
    """
    found = set()
    for arguments in proc.glob("[0-9]*/cmdline"):
        try:
            first = arguments.read_bytes().split(b"\0", 1)[0].decode(errors="replace")
        except OSError:
            continue
        if first.startswith(f"{releases}/"):
            found.add(Path(first).relative_to(releases).parts[0])
    return found


def switch(root: Path, release: str, link: Path) -> None:
    """Make `release` the current one, keep the one before, remove the rest."""
    current = root / "current"
    before = current.readlink().name if current.is_symlink() else ""
    if before != release:
        point(current, Path("releases") / release)
        if before:
            (root / "previous").write_text(before + "\n", encoding="utf-8")
    if not (link.is_symlink() and str(link.readlink()) == str(current / "bin/glm53")):
        point(link, current / "bin/glm53")
    previous = root / "previous"
    keep = {release, previous.read_text(encoding="utf-8").strip() if previous.exists() else ""}
    keep |= in_use(root / "releases")
    for folder in (root / "releases").iterdir():
        if folder.name not in keep:
            shutil.rmtree(folder)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/glm53"},
            "release": {"type": "str", "required": True},
            "wheelhouse": {"type": "path", "default": ""},
            "link": {"type": "path", "default": "/usr/local/bin/glm53"},
            "state": {"type": "str", "choices": ["query", "staged", "present"], "default": "query"},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    root, release, link = (Path(module.params["root"]), module.params["release"], Path(module.params["link"]))
    found = query(root, release, link)
    settled = found["complete"] and found["current"] == release and found["linked"]
    if module.params["state"] == "staged":
        settled = found["complete"]
    if module.params["state"] == "query" or module.check_mode or settled:
        module.exit_json(changed=False, settled=settled, **found)
    try:
        if not found["complete"]:
            install(root / "releases" / release, release, Path(module.params["wheelhouse"]))
        if module.params["state"] == "present":
            switch(root, release, link)
    except (RuntimeError, OSError, StopIteration, tarfile.TarError) as error:
        module.fail_json(msg=f"The release {release} could not be installed: {error or 'a wheel is missing'}")
    module.exit_json(changed=True, settled=True, **query(root, release, link))


if __name__ == "__main__":
    main()
