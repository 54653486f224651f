"""Services of the system that end processes, set clocks, upgrade packages or put the machine to sleep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, good, info, warning
from glm53_service.doctor.source import Source

KILLERS = (
    "earlyoom.service",
    "systemd-oomd.service",
    "nohang.service",
    "nohang-desktop.service",
    "oomd.service",
)
RUNNING = ("systemctl", "list-units", "--type=service", "--state=active", "--no-legend", "--plain", "--full")
SLEEP = (
    "sleep.target",
    "suspend.target",
    "hibernate.target",
    "hybrid-sleep.target",
    "suspend-then-hibernate.target",
)
APT = ("apt-config", "dump", "APT::Periodic", "Unattended-Upgrade")
HELD = ("apt-mark", "showhold")
CAREFUL = ("containerd", "docker", "nvidia", "linux")
"""Beginnings of package names whose upgrade under a running pair ends it, or breaks its next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemons:
    """`needrestart`: None where it is not installed, else its configuration. `apt`: what apt-config says."""

    active: frozenset[str]
    clock: dict[str, str]
    apt: str
    held: tuple[str, ...]
    needrestart: str | None
    sleeping: tuple[str, ...]
    graphical: bool


async def read(source: Source) -> Daemons:
    """Gather."""
    listed = await source.run(*RUNNING)
    clock = await source.run("timedatectl", "show")
    enabled = await source.run("systemctl", "is-enabled", *SLEEP)
    states = enabled.out.split()
    configs = source.names("etc/needrestart/conf.d/*.conf")
    there = bool(configs or source.names("etc/needrestart/needrestart.conf"))
    return Daemons(
        active=frozenset(line.split()[0] for line in listed.out.splitlines() if line.strip()),
        clock=dict(line.partition("=")[::2] for line in clock.out.splitlines()),
        apt=(await source.run(*APT)).out,
        held=tuple((await source.run(*HELD)).out.split()),
        needrestart="\n".join(source.read(path) for path in configs) if there else None,
        sleeping=tuple(
            unit
            for unit, state in zip(SLEEP, states, strict=False)
            if state not in ("masked", "masked-runtime")
        ),
        graphical=(await source.run("systemctl", "get-default")).out.strip() == "graphical.target",
    )


def check(found: Daemons) -> Iterator[Finding]:
    """Judge."""
    killers = sorted(found.active & set(KILLERS))
    if killers:
        yield warning(
            "daemons.oom",
            ", ".join(killers),
            "none: they end the engine at a deep context, when memory is short as planned",
            f"systemctl disable --now {' '.join(killers)}",
        )
    yield from _time(found)
    yield from _upgrades(found)
    if found.sleeping:
        level = warning if found.graphical else info
        yield level(
            "daemons.sleep",
            f"{', '.join(found.sleeping)} not masked"
            + (", and a desktop is the default" if found.graphical else ""),
            "masked: a desktop suspends a machine that nobody touches",
            f"glm53_mask_sleep: true and playbooks/host.yml, or systemctl mask {' '.join(found.sleeping)}",
        )


def _time(found: Daemons) -> Iterator[Finding]:
    if not found.clock:
        yield info("daemons.time", "timedatectl says nothing")
    elif found.clock.get("NTPSynchronized") == "yes":
        yield good("daemons.time", "the clock is synchronised")
    else:
        yield warning(
            "daemons.time",
            f"NTP={found.clock.get('NTP', '?')}, NTPSynchronized={found.clock.get('NTPSynchronized', '?')}",
            "a synchronised clock: else the logs of two nodes do not fit, and certificates fail",
            "timedatectl set-ntp true; without internet: an NTP server of your own in timesyncd.conf",
        )


def _upgrades(found: Daemons) -> Iterator[Finding]:
    runs = re.search(r'^APT::Periodic::Unattended-Upgrade "([^"]*)"', found.apt, re.MULTILINE)
    if runs and runs[1] not in ("", "0"):
        spared = [*re.findall(r'^Unattended-Upgrade::Package-Blacklist:: "([^"]*)"', found.apt, re.MULTILINE)]
        kept = [*spared, *found.held]
        open_ = [name for name in CAREFUL if not any(name in entry for entry in kept)]
        if open_:
            yield warning(
                "daemons.upgrades",
                f"packages are upgraded by themselves, {', '.join(open_)}* too",
                "not under a running pair: it stops docker, or leaves a driver that does not fit its library",
                "glm53_unattended_exclude: true (or glm53_hold_versions: true) and playbooks/host.yml",
            )
        else:
            yield good("daemons.upgrades", "unattended, and they spare docker, driver and kernel")
    if found.needrestart is not None and not ("docker" in found.needrestart and "glm53" in found.needrestart):
        yield warning(
            "daemons.needrestart",
            "needrestart may restart docker and our units after an upgrade",
            "both are left alone: the pair ends with docker",
            "glm53_needrestart_exclude: true and playbooks/host.yml (/etc/needrestart/conf.d/60-glm53.conf)",
        )


NOUN = Noun(
    name="daemons",
    read=read,
    check=check,
    files=("etc/needrestart/needrestart.conf", "etc/needrestart/conf.d/*.conf"),
)
