"""Names, addresses and paths of the lab: one place, so that tests, inventory and network agree."""

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from lab.errors import UsageError

PREFIX = "g5"
LETTERS = "abcd"
MIN_HOSTS = 2
MAX_HOSTS = len(LETTERS)
ACCOUNT = "spark"
ACCOUNT_UID = 1000
FABRIC_MTU = 9000
MANAGEMENT_NETDEV = "enP7s7"
MACHINE_LINK = "g5br"
MACHINE_ADDRESS = "10.78.0.254"
CABLES = "g5-cables"
IMAGE = "glm53-lab/vllm-cpu:0.32.0"
MODEL = "SmolLM2-135M-Instruct"
MODEL_DIR = f"/srv/glm53/models/{MODEL}"


@dataclass(frozen=True, slots=True)
class Rail:
    """One fabric network: its number, and the netdev and RDMA device names that it has on every host."""

    number: int
    netdev: str
    rdma: str


# The two PCIe functions behind the first QSFP port of a DGX Spark, by the names its driver gives them.
RAILS = (
    Rail(0, "enp1s0f0np0", "rocep1s0f0"),
    Rail(1, "enP2p1s0f0np0", "roceP2p1s0f0"),
)


class Suite(StrEnum):
    """Debian suites that the host tree can be made of."""

    BOOKWORM = "bookworm"
    TRIXIE = "trixie"


@dataclass(frozen=True, slots=True)
class Host:
    """One virtual Spark; `index` counts from 0 and is its rank."""

    index: int

    @property
    def letter(self) -> str:
        return LETTERS[self.index]

    @property
    def name(self) -> str:
        """Its host name, and its name in the inventory."""
        return f"spark-{self.letter}"

    @property
    def machine(self) -> str:
        """Name of its network namespace, of its cgroup and of the nspawn machine."""
        return f"{PREFIX}-{self.letter}"

    @property
    def management(self) -> str:
        return f"10.78.0.{self.index + 1}"

    def fabric(self, rail: int) -> str:
        """Its planned address on a rail (/24); the lab does not set it, site.yml does."""
        return f"10.77.{rail}.{self.index + 1}"

    @property
    def gid_index(self) -> int:
        """Where its RoCE v2 IPv4 GID sits: 3 on the first host, 5 on the second (both occur)."""
        return 3 + 2 * self.index

    def mac(self, medium: int) -> str:
        """A stable, locally administered address; `medium` is the rail's number, or 255 for management."""
        return f"02:67:35:00:{medium:02x}:{self.index + 1:02x}"


def hosts(count: int) -> tuple[Host, ...]:
    """The first `count` hosts; raises UsageError outside 2..4."""
    if not MIN_HOSTS <= count <= MAX_HOSTS:
        raise UsageError(f"{count} hosts: the lab has {MIN_HOSTS} to {MAX_HOSTS}. Do: lab up --hosts 2")
    return tuple(Host(index) for index in range(count))


def find_host(name: str, count: int) -> Host:
    """The host called `name` (`spark-a`, or just `a`) among the first `count`; raises UsageError."""
    for host in hosts(count):
        if name in (host.name, host.letter):
            return host
    raise UsageError(f"no host {name!r}: this lab has {', '.join(h.name for h in hosts(count))}")


def find_rail(number: int) -> Rail:
    """Rail `number`; raises UsageError when there is none."""
    for rail in RAILS:
        if rail.number == number:
            return rail
    raise UsageError(f"no rail {number}: each host has rails {', '.join(str(r.number) for r in RAILS)}")


def _folder(variable: str, default: str) -> Path:
    path = Path(os.environ.get(variable) or default)
    if not path.is_absolute():
        raise UsageError(f"{variable}={path}: expected an absolute path, as in {default}")
    return path


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the lab keeps things. State goes away with `down`; the cache stays until `clean-cache`."""

    cache: Path = field(default_factory=lambda: _folder("GLM53_LAB_CACHE", "/var/cache/glm53-lab"))
    state: Path = field(default_factory=lambda: _folder("GLM53_LAB_STATE", "/var/lib/glm53-lab"))

    def host(self, host: Host) -> Path:
        return self.state / "hosts" / host.letter

    def root(self, host: Host) -> Path:
        return self.host(host) / "root"

    def infiniband(self, host: Host) -> Path:
        """The folder that its /sys/class/infiniband shows."""
        return self.host(host) / "sys" / "class" / "infiniband"

    def log(self, host: Host) -> Path:
        return self.state / "log" / f"{host.name}.log"

    @property
    def ssh(self) -> Path:
        return self.state / "ssh"

    @property
    def inventory(self) -> Path:
        return self.state / "inventory"
