"""The lab as a Python object: every verb of the command line, and what tests need besides."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lab import cache, inventory, root
from lab.cables import MANAGEMENT, Cables, Port
from lab.cgroups import Group, hierarchy
from lab.debian import host_tree
from lab.errors import LabError, UsageError
from lab.image import image_tree
from lab.machine import DOCKER_SECONDS, SSH_SECONDS, Machine
from lab.model import model_folder
from lab.run import Completed, check_tools, run, say, step, work_group
from lab.seed import plant, seed_folder, seed_with_double
from lab.settings import MAX_HOSTS, MODEL_DIR, PREFIX, RAILS, Host, Paths, Suite, find_host, find_rail, hosts
from lab.tensorfold.checkpoint import CHECKPOINT_DIR, DRAFTER_DIR, write_checkpoint, write_drafter
from lab.tensorfold.image import double_tree

# Names like g5-a exist once a machine: which state folder they belong to.
OWNER = Path("/run/glm53-lab")


# What the cache holds: how the names of its entries begin.
KINDS = ("host-tree-", "image-base-", "image-tree-", "docker-seed-", "model-", "registry-", "downloads")


@dataclass(frozen=True, slots=True)
class Record:
    """What `up` made; `complete` is false while it is at it, and stays so when it dies half way."""

    hosts: int
    suite: Suite
    complete: bool


class Lab:
    """The lab of one state folder. Methods raise LabError; hosts are named `spark-a` or just `a`."""

    def __init__(self, paths: Paths | None = None) -> None:
        self.paths = paths or Paths()

    # -- what there is -------------------------------------------------------------------------------------

    def record(self) -> Record | None:
        """What `up` made, or None when there is no lab."""
        try:
            found = json.loads((self.paths.state / "lab.json").read_text())
        except FileNotFoundError:
            return None
        return Record(found["hosts"], Suite(found["suite"]), found["complete"])

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the lab that is up; raises LabError when none is."""
        record = self.record()
        if record is None or not record.complete:
            raise LabError("the lab is not up. Do: python3 -m lab up")
        return hosts(record.hosts)

    def host(self, name: str) -> Host:
        """A host by name; raises UsageError when there is none of that name."""
        return find_host(name, len(self.hosts))

    def machine(self, name: str) -> Machine:
        """The machine behind a host's name."""
        return Machine(self.paths, self.host(name), self.cables)

    @property
    def cables(self) -> Cables:
        return Cables(self.paths, self.hosts)

    @property
    def inventory(self) -> Path:
        """The inventory that `up` wrote, for ansible-playbook's -i."""
        return self.paths.inventory / "hosts.yml"

    # -- the whole lab -------------------------------------------------------------------------------------

    def build(self, suite: Suite = Suite.BOOKWORM) -> None:
        """Fill the cache: host tree, engine images, their import into Docker, model. Nothing is started."""
        _need_root()
        check_tools()
        with self._locked():
            self._build(suite)

    def up(self, count: int = 2, suite: Suite = Suite.BOOKWORM) -> None:
        """Bring the lab up and return when every host answers ssh and Docker.

        On a lab that is up already it only powers on hosts that are off; another number of hosts or another
        suite is an error. What an earlier lab left when it died is cleaned away first.
        """
        everyone = hosts(count)
        _need_root()
        check_tools()
        with self._locked():
            record = self.record()
            if record and record.complete:
                if (record.hosts, record.suite) != (count, suite):
                    raise LabError(
                        f"a lab of {record.hosts} hosts ({record.suite}) is up, not of {count} ({suite}). "
                        "Do: python3 -m lab down, then up again"
                    )
                for host in everyone:
                    Machine(self.paths, host, self.cables).power_on()
                self._wait_ready(everyone)
                return
            self._claim()
            self._clean()
            cache.prune(self._build(suite))
            with step(f"lab of {count} hosts"):
                self._create(everyone, suite)
            self._wait_ready(everyone)
            self._note(Record(count, suite, True))

    def down(self) -> None:
        """End every host and remove everything the lab made, except the cache. Nothing to do is fine."""
        _need_root()
        with self._locked():
            self._claim()
            self._clean()

    def reset(self) -> None:
        """`down`, then `up` with the same hosts and suite (two and bookworm when there was no lab)."""
        record = self.record() or Record(2, Suite.BOOKWORM, False)
        self.down()
        self.up(record.hosts, record.suite)

    def clean_cache(self) -> None:
        """Remove the cache; raises LabError while a lab is up, since its hosts' disks rest on it."""
        _need_root()
        with self._locked():
            if self.record() is not None:
                raise LabError("a lab is up and its disks rest on the cache. Do: python3 -m lab down")
            cache.clear(self.paths.cache, KINDS)

    def status(self) -> dict[str, object]:
        """The state of the lab and of each host, as data (what `status --json` prints)."""
        record = self.record()
        if record is None or not record.complete:
            return {"up": False, "hosts": []}
        live, pulled = self.cables.live(), self.cables.unplugged()
        return {
            "up": True,
            "suite": str(record.suite),
            "inventory": str(self.inventory),
            "hosts": [self._host_status(host, live, pulled) for host in self.hosts],
        }

    # -- one host ------------------------------------------------------------------------------------------

    def exec(
        self,
        host: str,
        argv: Sequence[str],
        *,
        timeout: float = 120.0,
        check: bool = True,
        stdin: str | None = None,
    ) -> Completed:
        """Run `argv` as root in the host (see Machine.run)."""
        return self.machine(host).run(argv, timeout=timeout, check=check, stdin=stdin)

    def docker(
        self, host: str, argv: Sequence[str], *, timeout: float = 120.0, check: bool = True
    ) -> Completed:
        """Run `docker ARGV` in the host."""
        return self.exec(host, ["docker", *argv], timeout=timeout, check=check)

    def power_on(self, host: str) -> None:
        """Start the host; returns when its init runs."""
        with self._locked():
            if not self.machine(host).power_on():
                say(f"{host} is on already")

    def power_off(self, host: str) -> None:
        """Shut the host down cleanly; returns when it is off."""
        with self._locked():
            if not self.machine(host).power_off():
                say(f"{host} is off already")

    def power_cut(self, host: str) -> None:
        """Take the host's power: links dark first, then everything of it killed at once."""
        with self._locked():
            if not self.machine(host).power_cut():
                say(f"{host} is off already")

    def reboot(self, host: str) -> None:
        """Restart the host cleanly; returns when its new init runs."""
        with self._locked():
            self.machine(host).reboot()

    def wait_ssh(self, host: str, timeout: float = SSH_SECONDS) -> None:
        """Return when the host's sshd answers on the management network."""
        self.machine(host).wait_ssh(timeout)

    def wait_docker(self, host: str, timeout: float = DOCKER_SECONDS) -> None:
        """Return when the host's Docker answers."""
        self.machine(host).wait_docker(timeout)

    # -- cables --------------------------------------------------------------------------------------------

    def unplug(self, host: str, rail: int | None = None, *, management: bool = False) -> None:
        """Pull the host's plug out of one rail, of all rails (`rail` None), or of the management network."""
        self._plug(host, rail, management, plugged=False)

    def plug(self, host: str, rail: int | None = None, *, management: bool = False) -> None:
        """Put back what `unplug` pulled."""
        self._plug(host, rail, management, plugged=True)

    def _plug(self, name: str, rail: int | None, management: bool, *, plugged: bool) -> None:
        if management and rail is not None:
            raise UsageError("a rail and the management network were both asked for: name one of them")
        host = self.host(name)
        if management:
            media = [MANAGEMENT]
        else:
            media = [r.number for r in RAILS] if rail is None else [find_rail(rail).number]
        self.cables.set_plugged([Port(host.index, medium) for medium in media], plugged)

    # -- inner works ---------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One verb at a time on this machine; waits for the other one."""
        OWNER.with_suffix(".lock").touch()
        with OWNER.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another lab command is at work; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._end_work()
            try:
                yield
            finally:
                self._end_work()

    def _end_work(self) -> None:
        """End what a verb that was killed left running, and drop the cgroup of the verbs' own work."""
        group = work_group()
        group.kill()
        group.remove()
        with contextlib.suppress(OSError):
            Path("/run/systemd/nspawn/propagate", group.name).rmdir()

    def _claim(self) -> None:
        """Take the lab's names on this machine for this state folder; LabError when another lab has them."""
        with contextlib.suppress(FileNotFoundError):
            other = Path(OWNER.read_text().strip())
            if other != self.paths.state and other.is_dir():
                hint = f"Do: GLM53_LAB_STATE={other} python3 -m lab down"
                raise LabError(f"another lab is on this machine: {other}. {hint}")
        OWNER.write_text(f"{self.paths.state}\n")

    def _build(self, suite: Suite) -> tuple[Path, ...]:
        """What the cache holds: host tree, Docker seed with both images and model first, then the rest."""
        self.paths.cache.mkdir(parents=True, exist_ok=True)
        tree, image = host_tree(self.paths, suite), image_tree(self.paths)
        first, double = seed_folder(self.paths, suite), double_tree(self.paths)
        seed, model = seed_with_double(self.paths, suite), model_folder(self.paths)
        return tree, seed, model, image, first, double

    def _create(self, everyone: tuple[Host, ...], suite: Suite) -> None:
        self.paths.state.mkdir(parents=True, exist_ok=True)
        self._note(Record(len(everyone), suite, False))
        tree, seed, model, *_ = self._build(suite)
        root.make_keys(self.paths, everyone)
        for host in everyone:
            root.create(self.paths, host, tree)
        head = everyone[0]
        plant(seed, self.paths.host(head) / "docker")
        root.copy_model(model, self.paths.root(head) / MODEL_DIR.lstrip("/"))
        write_checkpoint(self.paths.root(head) / CHECKPOINT_DIR.lstrip("/"))
        write_drafter(self.paths.root(head) / DRAFTER_DIR.lstrip("/"))
        cables = Cables(self.paths, everyone)
        cables.create()
        for host in everyone:
            Machine(self.paths, host, cables).power_on()
        inventory.write(self.paths.inventory, everyone, self.paths.ssh)

    def _wait_ready(self, everyone: tuple[Host, ...]) -> None:
        cables = Cables(self.paths, everyone)
        machines = [Machine(self.paths, host, cables) for host in everyone]
        with step("ssh and Docker on every host"):
            for machine in machines:
                machine.wait_ssh()
            for machine in machines:
                machine.wait_docker()

    def _note(self, record: Record) -> None:
        path = self.paths.state / "lab.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(record)) + "\n")
        part.rename(path)

    def _clean(self) -> None:
        """Take away everything with the lab's own names, whatever state it is in."""
        state = self.paths.state
        if state.is_dir() and any(state.iterdir()) and not (state / "lab.json").exists():
            raise LabError(
                f"{state} holds something else than a lab. Do: set GLM53_LAB_STATE to a folder of its own"
            )
        groups = [Group(hierarchy(), f"{PREFIX}-{host.letter}") for host in hosts(MAX_HOSTS)]
        for group in groups:
            group.kill()
            group.remove()
            with contextlib.suppress(OSError):
                Path("/run/systemd/nspawn/propagate", group.name).rmdir()
        for point in cache.mounts_below(state):
            run(["umount", str(point)])
        Cables(self.paths, hosts(MAX_HOSTS)).remove()
        cache.remove_tree(state)
        OWNER.unlink(missing_ok=True)

    def _host_status(self, host: Host, live: set[Port], pulled: set[Port]) -> dict[str, object]:
        machine = Machine(self.paths, host, self.cables)
        return {
            "name": host.name,
            "power": "on" if machine.on else "off",
            "system": machine.system_state(),
            "management": host.management,
            "ssh": machine.ssh_answers(),
            "docker": machine.docker_answers(),
            "rails": [
                {
                    "netdev": rail.netdev,
                    "plugged": Port(host.index, rail.number) not in pulled,
                    "carrier": Port(host.index, rail.number) in live,
                }
                for rail in RAILS
            ],
            "management_plugged": Port(host.index, MANAGEMENT) not in pulled,
        }


def _need_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab makes namespaces, mounts and cgroups: run it as root")
