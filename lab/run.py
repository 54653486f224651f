"""The lab's one door to other programs."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lab.cgroups import Group, hierarchy
from lab.errors import CommandError, LabError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
WORK_GROUP = "g5-work"
# What a program needs to reach package mirrors on a machine with a proxy or its own certificate authority.
PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

# Debian's package for each program that the lab runs.
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "ssh-keygen": "openssh-client",
    "ping": "iputils-ping",
    "cp": "coreutils",
    "strip": "binutils",
    "sysctl": "procps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A program that ended: exit code (128 + n for signal n), standard output and standard error as text."""

    returncode: int
    stdout: str
    stderr: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A minimal environment: PATH, HOME, a UTF-8 locale, proxy variables if set, and `extra`."""
    base = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    base.update({name: os.environ[name] for name in PASSED_ON if name in os.environ})
    return base | dict(extra or {})


def exit_code(returncode: int) -> int:
    """A shell's exit code for a subprocess return code: 128 + n when signal n ended it."""
    return 128 - returncode if returncode < 0 else returncode


def run(
    argv: Sequence[str],
    *,
    timeout: float = 120.0,
    check: bool = True,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    contained: bool = False,
) -> Completed:
    """Run `argv` to its end within `timeout` seconds and return its output.

    A program that takes seconds is to run `contained`: in the cgroup of the lab's own work, where the next
    verb finds and ends it when this process was killed and left it behind.

    Raises CommandError when it fails (unless `check` is false) or runs out of time, LabError when it is not
    installed. The message can be pasted into a shell.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin if stdin is not None else None,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment(env),
            preexec_fn=_join_work if contained else None,
            check=False,
        )
    except FileNotFoundError as error:
        raise LabError(f"{argv[0]} is not installed: {install_hint([argv[0]])}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"still running after {timeout:g} s, ended: {shlex.join(argv)}", 124) from error
    result = Completed(returncode=exit_code(done.returncode), stdout=done.stdout, stderr=done.stderr)
    if check and result.returncode != 0:
        raise failed(argv, result)
    return result


def work_group() -> Group:
    """The cgroup of what the verbs themselves run, hosts apart."""
    return Group(hierarchy(), WORK_GROUP)


def _join_work() -> None:
    work_group().join("run")


def failed(argv: Sequence[str], result: Completed) -> CommandError:
    """The error for a program that ended with another exit code than 0: command, code, last lines it said."""
    said = "\n".join((result.stderr.strip() or result.stdout.strip()).splitlines()[-12:])
    message = f"exit code {result.returncode}: {shlex.join(argv)}\n{said}"
    return CommandError(message.rstrip(), result.returncode)


def install_hint(tools: Sequence[str]) -> str:
    """The command that installs `tools` on Debian or Ubuntu."""
    return "apt-get install " + " ".join(sorted({TOOLS.get(tool, tool) for tool in tools}))


def check_tools() -> None:
    """Raise LabError, naming the packages to install, unless every program that the lab runs is here."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        raise LabError(f"not installed: {', '.join(missing)}. Do: {install_hint(missing)}")


def say(text: str) -> None:
    """One progress line on standard error."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what begins, and how long it took (seconds) or that it failed."""
    say(f"{what} ...")
    begun = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"{what}: failed after {time.monotonic() - begun:.1f} s")
        raise
    say(f"{what}: {time.monotonic() - begun:.1f} s")
