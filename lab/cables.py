"""The lab's cables: where each end is plugged in, which ends carry a signal, and the links that do so.

Every netdev of a host is one end of a veth pair. The other ends live in the namespace `g5-cables`, in one
bridge a network, so a cable is pulled without any administrative change in a host: it just loses carrier.
Only one link of the lab is in the machine's own namespace: its firewall never sees traffic between hosts.
"""

import fcntl
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.roce import write_state
from lab.run import run
from lab.settings import (
    CABLES,
    FABRIC_MTU,
    MACHINE_ADDRESS,
    MACHINE_LINK,
    MANAGEMENT_NETDEV,
    RAILS,
    Host,
    Paths,
)

MANAGEMENT = 255


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """One netdev of a host; `medium` is the rail's number, or MANAGEMENT."""

    host: int
    medium: int

    @property
    def link(self) -> str:
        """The name of its middle end in the cables namespace."""
        return f"{Host(self.host).letter}-{'m' if self.medium == MANAGEMENT else self.medium}"


MEDIA = {MANAGEMENT: MANAGEMENT_NETDEV} | {rail.number: rail.netdev for rail in RAILS}


def ports(hosts: Iterable[Host]) -> list[Port]:
    """Every port of these hosts."""
    return [Port(host.index, medium) for host in hosts for medium in MEDIA]


def with_carrier(hosts: Iterable[Host], powered: Iterable[Host], unplugged: Iterable[Port]) -> set[Port]:
    """The ports whose hosts see a carrier.

    Two hosts share one cable a rail, so a pulled end or a host without power darkens both ends. More hosts,
    and the management network, hang on a switch: each port is on its own.
    """
    everyone = list(hosts)
    on = {host.index for host in powered}
    pulled = set(unplugged)
    live = {port for port in ports(everyone) if port.host in on and port not in pulled}
    if len(everyone) == 2:
        for rail in RAILS:
            pair = {Port(host.index, rail.number) for host in everyone}
            if not pair <= live:
                live -= pair
    return live


class Cables:
    """The plugged state, kept in a file, and the links that follow it."""

    def __init__(self, paths: Paths, hosts: tuple[Host, ...]) -> None:
        self.paths = paths
        self.hosts = hosts

    def create(self) -> None:
        """The cables namespace with a bridge a network, and the machine's own management link."""
        run(["ip", "netns", "add", CABLES])
        run(["ip", "netns", "exec", CABLES, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"])
        run(["ip", "netns", "exec", CABLES, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1"])
        lines = []
        for medium in MEDIA:
            lines += [f"link add {_bridge(medium)} type bridge", f"link set {_bridge(medium)} up"]
        _batch(lines, CABLES)
        run(["ip", "link", "add", MACHINE_LINK, "type", "veth", "peer", "name", "machine", "netns", CABLES])
        _batch([f"link set machine master {_bridge(MANAGEMENT)}", "link set machine up"], CABLES)
        _batch([f"address add {MACHINE_ADDRESS}/24 dev {MACHINE_LINK}", f"link set {MACHINE_LINK} up"])

    def attach(self, host: Host) -> None:
        """A fresh network namespace for the host, with its bare netdevs on their cables (no carrier yet).

        Addresses, MTUs and firewall rules of an earlier boot are gone, as after a real one.
        """
        self.detach(host)
        run(["ip", "netns", "add", host.machine])
        lines = []
        for port in ports([host]):
            mtu = 1500 if port.medium == MANAGEMENT else FABRIC_MTU
            lines += [
                f"link add {port.link} mtu {mtu} type veth"
                f" peer name {MEDIA[port.medium]} mtu 1500 address {host.mac(port.medium)}"
                f" netns {host.machine}",
                f"link set {port.link} master {_bridge(port.medium)}",
            ]
        _batch(lines, CABLES)

    def detach(self, host: Host) -> None:
        """Remove the host's links and its namespace, whatever of them exists."""
        for port in ports([host]):
            run(["ip", "-n", CABLES, "link", "del", port.link], check=False)
        run(["ip", "netns", "del", host.machine], check=False)

    def remove(self) -> None:
        """Remove every link and namespace that the lab makes, whatever of them exists."""
        for host in self.hosts:
            self.detach(host)
        run(["ip", "link", "del", MACHINE_LINK], check=False)
        run(["ip", "netns", "del", CABLES], check=False)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time changes links (the verbs and the hosts' runners do)."""
        with (self.paths.state / "cables.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def unplugged(self) -> set[Port]:
        """The ports whose plug is pulled."""
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return set()
        return {Port(host, medium) for host, medium in json.loads(text)}

    def set_plugged(self, changed: Iterable[Port], plugged: bool) -> None:
        """Plug or pull these ports and let the links follow."""
        with self.locked():
            pulled = self.unplugged()
            pulled = pulled - set(changed) if plugged else pulled | set(changed)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(sorted([port.host, port.medium] for port in pulled)))
            part.rename(self._file)
            self.follow()

    def powered(self) -> list[Host]:
        """The hosts that have power."""
        return [host for host in self.hosts if self._power(host).exists()]

    def set_power(self, host: Host, on: bool) -> None:
        """Note that the host has power or not, and let the links follow; call it with the lock held."""
        if on:
            self._power(host).touch()
        else:
            self._power(host).unlink(missing_ok=True)
        self.follow()

    def live(self) -> set[Port]:
        """The ports that have a carrier."""
        return with_carrier(self.hosts, self.powered(), self.unplugged())

    def follow(self) -> None:
        """Set every middle end up or down as power and plugs say, and the RoCE ports' state with them."""
        live = self.live()
        shown = run(["ip", "-n", CABLES, "-o", "link"]).stdout.splitlines()
        there = {line.split()[1].rstrip(":").partition("@")[0] for line in shown}
        _batch(
            [
                f"link set {port.link} {'up' if port in live else 'down'}"
                for port in ports(self.hosts)
                if port.link in there
            ],
            CABLES,
        )
        for host in self.hosts:
            devices = self.paths.infiniband(host)
            for rail in RAILS if devices.is_dir() else ():
                write_state(devices, rail.rdma, Port(host.index, rail.number) in live)

    @property
    def _file(self) -> Path:
        return self.paths.state / "unplugged.json"

    def _power(self, host: Host) -> Path:
        return self.paths.host(host) / "powered"


def _bridge(medium: int) -> str:
    return "management" if medium == MANAGEMENT else f"rail{medium}"


def _batch(lines: Iterable[str], namespace: str = "") -> None:
    where = ["-n", namespace] if namespace else []
    run(["ip", *where, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))
