"""For our Ansible modules on a node: systemctl, for the system's units and for a user's own."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROPERTIES = ("Id", "LoadState", "ActiveState", "UnitFileState", "FragmentPath", "TriggeredBy")


def manager_runs(scope: str) -> bool:
    """Say whether the systemd of `scope` runs: "" is the system's, else an account's own."""
    return not scope or Path(f"/run/user/{pwd.getpwnam(scope).pw_uid}/systemd/private").exists()


def systemctl(scope: str, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run systemctl; for an account's own units as that account."""
    if not scope:
        argv = ["systemctl", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    user = pwd.getpwnam(scope)
    return subprocess.run(
        ["systemctl", "--user", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd="/",
        env={"PATH": os.defpath, "HOME": user.pw_dir, "XDG_RUNTIME_DIR": f"/run/user/{user.pw_uid}"},
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=os.getgrouplist(scope, user.pw_gid),
    )


def show(scope: str, names: Iterable[str]) -> list[dict[str, str]]:
    """Return the PROPERTIES of each unit; a name may be a pattern, which finds loaded units only.

    UnitFileState is asked for by itself: systemd remembers the one that it shows until it is reloaded.
    """
    wanted = list(names)
    if not wanted:
        return []
    done = systemctl(scope, "show", "--property=" + ",".join(PROPERTIES), "--", *wanted)
    units = [parse(block) for block in done.stdout.split("\n\n") if block.strip()]
    for unit in units:
        if unit.get("LoadState") == "loaded":
            unit["UnitFileState"] = systemctl(scope, "is-enabled", "--", unit["Id"]).stdout.strip()
    return units


def parse(text: str) -> dict[str, str]:
    """Return the properties that `systemctl show` printed for one unit."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
