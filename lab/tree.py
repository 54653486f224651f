"""Run a script inside a root file system tree, and nothing of it on the machine around it."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.run import PASSED_ON, WORK_GROUP, Completed, environment, exit_code, failed, work_group


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the machine shown in the tree at `inside`."""

    outside: Path
    inside: str
    writable: bool = False


def nspawn_environment() -> dict[str, str]:
    """What systemd-nspawn reads from its environment: cgroup v2 inside, /sys writable for the network."""
    return environment(
        {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}
    )


def run_in(
    tree: Path,
    script: str,
    *,
    binds: Sequence[Bind] = (),
    env: Mapping[str, str] | None = None,
    network: bool = False,
    throw_away: bool = False,
    timeout: float = 3600.0,
) -> Completed:
    """Run a shell script as root in `tree`, with the machine's network if `network`.

    With `throw_away` what it writes outside writable binds is dropped. Raises CommandError when it fails. All
    its processes are in the lab's build cgroup and are gone when this returns.
    """
    inside = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(env or {})
    argv = [
        "systemd-nspawn",
        "--quiet",
        "--directory",
        str(tree),
        "--as-pid2",
        "--register=no",
        "--keep-unit",
        "--console=pipe",
        "--link-journal=no",
        "--timezone=off",
        f"--machine={WORK_GROUP}",
        "--capability=all",
        "--system-call-filter=@keyring bpf",
        f"--resolv-conf={'replace-host' if network else 'off'}",
        *([] if network else ["--private-network"]),
        *(["--volatile=overlay"] if throw_away else []),
        *(f"--bind{'' if b.writable else '-ro'}={b.outside}:{b.inside}" for b in binds),
        *(f"--setenv={name}={value}" for name, value in inside.items()),
        "/bin/sh",
        "-euc",
        script,
    ]
    group = work_group()
    group.create()
    try:
        # preexec_fn: the lab's process has no threads, and nspawn must be in its cgroup before it begins.
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=nspawn_environment(),
            timeout=timeout,
            preexec_fn=lambda: group.join("host"),
            check=False,
        )
    finally:
        group.kill()
        group.remove()
    result = Completed(returncode=exit_code(done.returncode), stdout=done.stdout, stderr=done.stderr)
    if result.returncode != 0:
        raise failed(["in", str(tree), "sh", "-euc", script.strip().splitlines()[0] + " ..."], result)
    return result
