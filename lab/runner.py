"""The process that keeps one host running: starts systemd-nspawn, again after a reboot, and minds its links.

Usage: python3 -m lab.runner LETTER HOSTS (started by `power-on`, in the host's own cgroup).
"""

import subprocess
import sys

from lab.cables import Cables
from lab.cgroups import Group, hierarchy
from lab.root import SYS_INSIDE
from lab.run import say
from lab.settings import Host, Paths, find_host, hosts
from lab.tree import nspawn_environment

REBOOT = 133  # nspawn's exit code when the host asked for a reboot and --keep-unit is given


def nspawn(paths: Paths, host: Host) -> list[str]:
    """The command that boots the host in the foreground."""
    base = paths.host(host)
    return [
        "systemd-nspawn",
        "--quiet",
        "--directory",
        str(paths.root(host)),
        "--boot",
        "--register=no",
        "--keep-unit",
        "--console=pipe",
        f"--network-namespace-path=/run/netns/{host.machine}",
        f"--bind={base / 'docker'}:/var/lib/docker",
        f"--bind-ro={base / 'sys'}:{SYS_INSIDE}",
        "--capability=all",
        "--system-call-filter=@keyring bpf",
        f"--hostname={host.name}",
        f"--machine={host.machine}",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
    ]


def main(letter: str, count: int) -> int:
    """Boot the host until it ends for another reason than a reboot; returns nspawn's exit code."""
    paths = Paths()
    host = find_host(letter, count)
    cables = Cables(paths, hosts(count))
    group = Group(hierarchy(), host.machine)
    while True:
        with cables.locked():
            cables.attach(host)
            cables.set_power(host, True)
        done = subprocess.run(
            nspawn(paths, host),
            stdin=subprocess.DEVNULL,
            env=nspawn_environment(),
            preexec_fn=lambda: group.join("host"),
            check=False,
        )
        with cables.locked():
            cables.set_power(host, False)
        say(f"{host.name} ended, exit code {done.returncode}")
        if done.returncode != REBOOT:
            return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
