"""Debian trees: the hosts' root file system and the root of the engine image."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from lab import cache
from lab.run import run
from lab.settings import ACCOUNT, ACCOUNT_UID, Paths, Suite
from lab.tree import run_in

# No python3-venv: what the product installs on a node must work without it.
HOST_PACKAGES = [
    "ca-certificates",
    "curl",
    "dbus",
    "docker.io",
    "ethtool",
    "iproute2",
    "iptables",
    "iputils-ping",
    "jq",
    "kmod",
    "less",
    "netplan.io",
    "network-manager",
    "nftables",
    "openssh-server",
    "procps",
    "python3",
    "rsync",
    "sudo",
    "systemd",
    "systemd-sysv",
    "tcpdump",
    "udev",
    "zstd",
]

# What a suite has in a package of its own: the docker command line since trixie.
SUITE_PACKAGES: dict[Suite, list[str]] = {Suite.BOOKWORM: [], Suite.TRIXIE: ["docker-cli"]}

IMAGE_PACKAGES = [
    "ca-certificates",
    "iproute2",
    "libgomp1",
    "libnuma1",
    "procps",
    "python3",
    "python3-venv",
    "util-linux",
]

# Timers and NetworkManager go: a lab host begins no work of its own, and networkd has the management link.
HOST_SCRIPT = f"""
useradd --create-home --uid {ACCOUNT_UID} --user-group --groups adm,sudo --shell /bin/bash {ACCOUNT}
printf '%s ALL=(ALL:ALL) NOPASSWD: ALL\\n' {ACCOUNT} >/etc/sudoers.d/90-{ACCOUNT}
chmod 0440 /etc/sudoers.d/90-{ACCOUNT}
rm -f /etc/systemd/system/timers.target.wants/* /etc/ssh/ssh_host_*
rm -f /etc/systemd/system/multi-user.target.wants/NetworkManager.service
rm -f /etc/systemd/system/dbus-org.freedesktop.nm-dispatcher.service
rm -f /etc/systemd/system/network-online.target.wants/NetworkManager-wait-online.service
rm -f /etc/systemd/system/multi-user.target.wants/e2scrub_reap.service
systemctl enable systemd-networkd.service docker.service ssh.service
systemctl set-default multi-user.target
mkdir -p /var/log/journal /etc/docker /etc/netplan
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/hostname /etc/resolv.conf
"""


def _mmdebstrap(paths: Paths, target: Path, suite: Suite, packages: Sequence[str], slim: bool) -> None:
    """Make a tree of the suite's default mirror; downloaded packages are kept for the next time."""
    debs = paths.cache / "downloads" / f"debs-{suite}"
    debs.mkdir(parents=True, exist_ok=True)
    leave_out = [f"/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info")] if slim else []
    archives = '"$1"/var/cache/apt/archives/'
    run(
        [
            # A mount namespace of its own: what it mounts in the tree goes away with it, however it ends.
            "unshare",
            "--mount",
            "--propagation=private",
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            f"--include={','.join(packages)}",
            "--skip=essential/unlink,download/empty",
            f"--setup-hook=mkdir -p {archives} && cp -al {debs}/. {archives}",
            f"--customize-hook=cp -aun {archives}*.deb {debs}/",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in leave_out),
            str(suite),
            str(target),
        ],
        timeout=1800,
        contained=True,
    )


def host_tree(paths: Paths, suite: Suite) -> Path:
    """The hosts' root tree (read-only below their overlays), built on first use."""
    packages = HOST_PACKAGES + SUITE_PACKAGES[suite]
    inputs = [suite, packages, HOST_SCRIPT, 1]

    def build(part: Path) -> None:
        _mmdebstrap(paths, part, suite, packages, slim=False)
        run_in(part, HOST_SCRIPT)

    target = cache.entry(paths.cache, f"host-tree-{suite}", inputs)
    return cache.ensure(target, f"host tree ({suite})", build)


def image_base(paths: Paths, suite: Suite) -> Path:
    """The engine image's root without the engine, built on first use."""
    inputs = [suite, IMAGE_PACKAGES, 1]

    def build(part: Path) -> None:
        _mmdebstrap(paths, part, suite, IMAGE_PACKAGES, slim=True)
        for junk in ("var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man"):
            shutil.rmtree(part / junk, ignore_errors=True)
            (part / junk).mkdir()

    return cache.ensure(
        cache.entry(paths.cache, f"image-base-{suite}", inputs), f"image base ({suite})", build
    )
