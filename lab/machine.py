"""One host's life: power on, run something inside, power off, and the power cut."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.cables import Cables
from lab.cgroups import Group, hierarchy
from lab.errors import CommandError, LabError
from lab.run import PATH, Completed, environment, exit_code, failed, run
from lab.settings import Host, Paths

BOOT_SECONDS = 20.0
POWER_OFF_SECONDS = 120.0
SSH_SECONDS = 60.0
DOCKER_SECONDS = 120.0
POLL_SECONDS = 0.05


def wait_until(what: str, budget: float, check: Callable[[], bool], hint: str = "") -> None:
    """Return as soon as `check` is true; raises LabError, naming `what`, after `budget` seconds."""
    deadline = time.monotonic() + budget
    while not check():
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {budget:g} s. {hint}".rstrip())
        time.sleep(POLL_SECONDS)


def _number_inside(pid: int) -> int | None:
    """A process's id in its own pid namespace, or None when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:")), None)


class Machine:
    """One host. Its processes, its runner's and those started by `run` are all in its own cgroup."""

    def __init__(self, paths: Paths, host: Host, cables: Cables) -> None:
        self.paths = paths
        self.host = host
        self.cables = cables
        self.group = Group(hierarchy(), host.machine)

    @property
    def on(self) -> bool:
        """Whether it runs (a booting or ending host counts)."""
        return self.group.populated()

    def pid1(self) -> int | None:
        """The process id of its init on this machine, or None when it is off or only beginning to boot."""
        # Its scope also shows processes that it has just forked for units: the number inside tells.
        found = self.group.processes("host/payload/init.scope")
        return next((pid for pid in found if _number_inside(pid) == 1), None)

    def power_on(self) -> bool:
        """Press its power button; returns once its init runs. False when it was on already."""
        if self.on:
            return False
        self.group.create()
        log = self.paths.log(self.host)
        log.parent.mkdir(parents=True, exist_ok=True)
        here = Path(__file__).resolve().parent.parent
        with log.open("ab") as file:
            subprocess.Popen(
                [sys.executable, "-m", "lab.runner", self.host.letter, str(len(self.cables.hosts))],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd="/",
                env=environment(
                    {
                        "PYTHONPATH": str(here),
                        "PYTHONDONTWRITEBYTECODE": "1",
                        "GLM53_LAB_STATE": str(self.paths.state),
                        "GLM53_LAB_CACHE": str(self.paths.cache),
                    }
                ),
                start_new_session=True,
                preexec_fn=lambda: self.group.join("runner"),
            )
        hint = f"Its console: {log}"
        wait_until(f"{self.host.name}: init", BOOT_SECONDS, lambda: self.pid1() is not None, hint)
        return True

    def power_off(self) -> bool:
        """Shut it down cleanly and wait until it is off. False when it was off already."""
        if not self.on:
            return False
        self.run(["systemctl", "poweroff"], check=False)
        wait_until(
            f"{self.host.name}: power off",
            POWER_OFF_SECONDS,
            lambda: not self.on,
            f"Do: lab power-cut {self.host.name}",
        )
        self.sweep()
        return True

    def power_cut(self) -> bool:
        """Take its power: every link goes dark first, then every process dies at once. False when it was off.

        What it had written stays, unlike on a real machine, which may lose its unwritten cache too.
        """
        was_on = self.on
        with self.cables.locked():
            self.cables.set_power(self.host, False)
        self.group.kill()
        with self.cables.locked():
            self.cables.set_power(self.host, False)
        self.sweep()
        return was_on

    def reboot(self) -> None:
        """Restart it cleanly and return once the new init runs; raises LabError when it is off."""
        before = self._pid1()
        self.run(["systemctl", "reboot"], check=False)
        wait_until(
            f"{self.host.name}: reboot",
            POWER_OFF_SECONDS,
            lambda: self.pid1() not in (None, before),
            f"Do: lab power-cut {self.host.name}; lab power-on {self.host.name}",
        )

    def sweep(self) -> None:
        """Remove what an ended host leaves on the machine: empty cgroups and nspawn's own folder."""
        self.group.remove()
        with contextlib.suppress(OSError):
            Path("/run/systemd/nspawn/propagate", self.host.machine).rmdir()

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` as root inside; raises LabError when the host is off."""
        pid = str(self._pid1())
        return ["nsenter", "--target", pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--", *argv]

    def run(
        self, argv: Sequence[str], *, timeout: float = 120.0, check: bool = True, stdin: str | None = None
    ) -> Completed:
        """Run `argv` as root inside, independent of its networks; exit code and output are the command's own.

        Raises CommandError when it fails (unless `check` is false) or runs longer than `timeout` seconds;
        then it and all it started are killed. What it leaves in the background lives on until the host dies.
        """
        process = self._popen(argv, capture=True, stdin=stdin)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            self._kill_child(process.pid)
            process.communicate()
            message = f"{self.host.name}: still running after {timeout:g} s, ended: {shlex.join(argv)}"
            raise CommandError(message, 124) from error
        finally:
            self._drop_child(process.pid)
        result = Completed(returncode=exit_code(process.returncode), stdout=stdout, stderr=stderr)
        if check and result.returncode != 0:
            raise failed([f"{self.host.name}:", *argv], result)
        return result

    def attach(self, argv: Sequence[str]) -> int:
        """Run `argv` as root inside with this process's own input and output; returns its exit code."""
        process = self._popen(argv, capture=False)
        try:
            return exit_code(process.wait())
        finally:
            self._drop_child(process.pid)

    def ssh_answers(self) -> bool:
        """Whether its sshd says hello on the management address."""
        try:
            with socket.create_connection((self.host.management, 22), timeout=1.0) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def docker_answers(self) -> bool:
        """Whether its Docker daemon answers."""
        if self.pid1() is None:
            return False
        return self.run(["docker", "version"], check=False, timeout=20).returncode == 0

    def wait_ssh(self, budget: float = SSH_SECONDS) -> None:
        """Return when its sshd answers on the management network."""
        log = f"Its console: {self.paths.log(self.host)}"
        wait_until(f"{self.host.name}: ssh", budget, self.ssh_answers, log)

    def wait_docker(self, budget: float = DOCKER_SECONDS) -> None:
        """Return when its Docker daemon answers."""
        log = f"Do: python3 -m lab exec {self.host.name} -- journalctl -u docker"
        wait_until(f"{self.host.name}: Docker", budget, self.docker_answers, log)

    def system_state(self) -> str:
        """What `systemctl is-system-running` says inside, or `off`."""
        if self.pid1() is None:
            return "off"
        return self.run(["systemctl", "is-system-running"], check=False).stdout.strip()

    def answers_ping(self) -> bool:
        """Whether its management address answers one ping within a second."""
        argv = ["ping", "-n", "-c", "1", "-W", "1", self.host.management]
        return run(argv, check=False).returncode == 0

    def _pid1(self) -> int:
        pid = self.pid1()
        if pid is None:
            raise LabError(f"{self.host.name} is off. Do: lab power-on {self.host.name}")
        return pid

    def _popen(
        self, argv: Sequence[str], *, capture: bool, stdin: str | None = None
    ) -> subprocess.Popen[str]:
        source = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
        pipe = subprocess.PIPE if capture else None
        return subprocess.Popen(
            self.enter(argv),
            stdin=source if capture else None,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"},
            preexec_fn=lambda: self.group.join(f"exec-{os.getpid()}"),
        )

    def _kill_child(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            (self.group.path / f"exec-{pid}" / "cgroup.kill").write_text("1")

    def _drop_child(self, pid: int) -> None:
        for tree in self.group.hierarchy.trees:
            # Busy while something it started lives on in the background: goes away with the host.
            with contextlib.suppress(OSError):
                (tree / self.group.name / f"exec-{pid}").rmdir()
