"""A host's disk: an overlay over the shared tree, with what makes this host itself written into it."""

import os
import shutil
import uuid
from pathlib import Path

from lab import roce
from lab.run import run
from lab.settings import ACCOUNT, ACCOUNT_UID, MANAGEMENT_NETDEV, Host, Paths

FILES = Path(__file__).parent / "files"
SYS_INSIDE = "/usr/lib/glm53-lab/sys"


def create(paths: Paths, host: Host, tree: Path) -> None:
    """Mount the host's overlay and write its identity, ssh keys (made before), network and doubles."""
    base = paths.host(host)
    for name in ("upper", "work", "root", "docker", "sys"):
        (base / name).mkdir(parents=True)
    (base / "docker").chmod(0o710)
    options = f"lowerdir={tree},upperdir={base / 'upper'},workdir={base / 'work'}"
    run(["mount", "-t", "overlay", "-o", options, f"glm53-lab-{host.letter}", str(paths.root(host))])
    root = paths.root(host)
    for name, content in text_files(host).items():
        put(root / name, content)
    for name in ("nvidia-smi", "ib_write_bw"):
        put(root / "usr/bin" / name, (FILES / name).read_text(), 0o755)
    for name, target in (("daemon.json", "etc/docker"), ("glm53-lab-sysfs.service", "etc/systemd/system")):
        put(root / target / name, (FILES / name).read_text(), 0o644)
    wants = root / "etc/systemd/system/sysinit.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "glm53-lab-sysfs.service").symlink_to("/etc/systemd/system/glm53-lab-sysfs.service")
    (root / SYS_INSIDE.lstrip("/")).mkdir(parents=True)
    roce.write_tree(paths.infiniband(host), roce.spark_devices(host))
    _keys(paths, host, root)


def text_files(host: Host) -> dict[str, str]:
    """The small files that tell this host from the others: path in the root -> content."""
    return {
        "etc/hostname": f"{host.name}\n",
        "etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 ip6-localhost ip6-loopback\n",
        "etc/machine-id": f"{uuid.uuid4().hex}\n",
        "etc/resolv.conf": "# The lab's hosts reach no name server.\n",
        # A Spark is on its owner's network before this project comes; only the fabric is bare.
        "etc/systemd/network/10-management.network": (
            f"[Match]\nName={MANAGEMENT_NETDEV}\n\n"
            f"[Network]\nAddress={host.management}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
        ),
    }


def put(path: Path, content: str, mode: int = 0o644, uid: int = 0) -> None:
    """Write a file with this mode and owner, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    os.chown(path, uid, uid)
    path.chmod(mode)


def _keys(paths: Paths, host: Host, root: Path) -> None:
    public = (paths.ssh / "id_ed25519.pub").read_text()
    for home, uid in (("root", 0), (f"home/{ACCOUNT}", ACCOUNT_UID)):
        folder = root / home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, uid, uid)
        put(folder / "authorized_keys", public, 0o600, uid)
    key = paths.ssh / "hosts" / f"{host.name}"
    put(root / "etc/ssh/ssh_host_ed25519_key", key.read_text(), 0o600)
    put(root / "etc/ssh/ssh_host_ed25519_key.pub", key.with_suffix(".pub").read_text())


def make_keys(paths: Paths, hosts: tuple[Host, ...]) -> None:
    """The lab's client key, a host key for each host, and the known hosts file that names them."""
    (paths.ssh / "hosts").mkdir(parents=True)
    paths.ssh.chmod(0o700)
    _keygen(paths.ssh / "id_ed25519", "glm53-lab")
    lines = []
    for host in hosts:
        key = paths.ssh / "hosts" / host.name
        _keygen(key, host.name)
        kind, blob, _ = key.with_suffix(".pub").read_text().split(maxsplit=2)
        lines.append(f"{host.name},{host.management} {kind} {blob}\n")
    (paths.ssh / "known_hosts").write_text("".join(lines))


def _keygen(path: Path, comment: str) -> None:
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def copy_model(source: Path, target: Path) -> None:
    """Copy the model into a host's disk, readable by everyone, as an owner's download would lie there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target)
