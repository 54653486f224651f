"""The kernel: known traps of its releases, its page size, what it complained of since the boot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm53_service.doctor.finding import Finding, Noun, error, good, info, warning
from glm53_service.doctor.source import Source
from glm53_service.fabric.probe import KERNEL_LOG
from glm53_service.fabric.rails import FATAL

PAGE_BYTES = 4096
"""What DGX OS runs; all that is known of these engines on a Spark was seen with it."""

XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
KILLED = re.compile(r"Out of memory: Killed process \d+ \(([^)]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """`cma_total_kib`, `cma_free_kib`: the kernel's own figures of its contiguous memory."""

    release: str
    command_line: str
    cma_total_kib: int
    cma_free_kib: int
    page_bytes: int
    reboot_required: bool
    log: str


async def read(source: Source) -> Kernel:
    """Gather."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", source.read("proc/meminfo"), re.MULTILINE))
    page = await source.run("getconf", "PAGESIZE")
    log = await source.run(*KERNEL_LOG)
    return Kernel(
        release=source.read("proc/sys/kernel/osrelease").strip(),
        command_line=source.read("proc/cmdline").strip(),
        cma_total_kib=int(meminfo.get("CmaTotal", 0)),
        cma_free_kib=int(meminfo.get("CmaFree", 0)),
        page_bytes=int(page.out) if page.out.strip().isdigit() else 0,
        reboot_required=bool(source.names("run/reboot-required")),
        log=log.out,
    )


def check(kernel: Kernel) -> Iterator[Finding]:
    """Judge."""
    if kernel.cma_free_kib > kernel.cma_total_kib:
        yield error(
            "kernel.kho",
            f"CmaFree {kernel.cma_free_kib} kB > CmaTotal {kernel.cma_total_kib} kB ({kernel.release})",
            "CmaFree <= CmaTotal: else kexec handover holds back memory, and RDMA cannot register any",
            "add kho=off to GRUB_CMDLINE_LINUX in /etc/default/grub, update-grub, reboot; or boot 6.17",
        )
    else:
        yield good("kernel.kho", f"kernel {kernel.release}, CmaFree {kernel.cma_free_kib} kB")
    if kernel.page_bytes and kernel.page_bytes != PAGE_BYTES:
        yield warning(
            "kernel.page_size",
            f"{kernel.page_bytes} bytes",
            f"{PAGE_BYTES} bytes: nothing is known of these engines with others",
            "boot the kernel without -64k in its name",
        )
    if kernel.reboot_required:
        yield warning(
            "kernel.reboot",
            "/run/reboot-required is there",
            "what is installed is what runs",
            "reboot both nodes at a time that suits you, before the next start does it half",
        )
    yield from _log(kernel.log)


def _log(log: str) -> Iterator[Finding]:
    fatal = [line.strip() for line in log.splitlines() if FATAL.search(line)]
    if fatal:
        yield error(
            "kernel.pcie",
            fatal[-1][:160],
            "no fatal PCIe error since the boot",
            "reboot; if it comes back, set glm53_clock_cap_mhz (heat was seen as the cause), watch `dmesg`",
        )
    xids = XID.findall(log)
    if xids:
        yield warning(
            "kernel.xid",
            f"the GPU reported Xid {', '.join(sorted(set(xids)))} ({len(xids)} times)",
            "no Xid since the boot",
            "look the number up in NVIDIA's Xid table; if ranks died with it, reboot",
        )
    killed = KILLED.findall(log)
    if killed:
        yield warning(
            "kernel.oom",
            f"the kernel killed {', '.join(sorted(set(killed)))} for memory ({len(killed)} times)",
            "nothing is killed for memory",
            "raise the memory reserve of the engine, or end what else needs memory",
        )
    if not log:
        yield info("kernel.log", "the kernel's log cannot be read", "", "run it as root, or in group adm")


NOUN = Noun(
    name="kernel",
    read=read,
    check=check,
    files=("proc/meminfo", "proc/cmdline", "proc/sys/kernel/osrelease", "run/reboot-required"),
    parity=lambda kernel: {"kernel": kernel.release, "kernel.page_size": str(kernel.page_bytes)},
)
