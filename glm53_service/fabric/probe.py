"""Looks at this machine's fabric now: the thin part between the kernel and the pure functions beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from glm53_service.errors import UnavailableError
from glm53_service.fabric.links import ARGV, parse_links
from glm53_service.fabric.rails import NO_WISHES, Fabric, Signs, Wishes, find_fabric
from glm53_service.fabric.reach import probe_peers
from glm53_service.fabric.sysfs import connectx_functions, read_hcas
from glm53_service.fabric.trouble import Kind, Trouble
from glm53_service.run import Runner, run

KERNEL_LOG = ("journalctl", "-k", "-b", "-o", "cat", "-n", "2000", "--no-pager")


async def probe(
    addresses: Sequence[str],
    *,
    rdma: bool,
    runner: Runner = run,
    root: Path = Path("/"),
    wishes: Wishes = NO_WISHES,
) -> Fabric:
    """Return the rails of this node for its fabric `addresses`; a tool that fails is a problem, not a
    crash.
    """
    try:
        hcas = read_hcas(root)
        signs = Signs() if hcas or not rdma else await read_signs(runner, root)
        links = parse_links(await runner(ARGV))
        return find_fabric(addresses, links, hcas, rdma=rdma, wishes=wishes, signs=signs)
    except UnavailableError as error:
        return _unreadable(error.message)
    except (OSError, ValueError, KeyError) as error:  # a device that goes away while it is read
        return _unreadable(f"the fabric cannot be read: {type(error).__name__}: {error}")


async def survey(
    addresses: Sequence[str],
    peers: Sequence[str],
    *,
    rdma: bool,
    runner: Runner = run,
    root: Path = Path("/"),
    wishes: Wishes = NO_WISHES,
) -> Fabric:
    """Return `probe`, and which of the `peers` addresses answer a full packet over which rail."""
    fabric = await probe(addresses, rdma=rdma, runner=runner, root=root, wishes=wishes)
    return msgspec.structs.replace(fabric, reach=await probe_peers(fabric.rails, peers, runner))


async def read_signs(runner: Runner, root: Path) -> Signs:
    """Return what tells a lost ConnectX from none; without the kernel's log the PCI bus alone says it."""
    try:
        log = await runner(KERNEL_LOG)
    except UnavailableError:
        log = ""
    return Signs(connectx=connectx_functions(root), kernel_log=log)


def _unreadable(text: str) -> Fabric:
    return Fabric(rails=(), trouble=Trouble(kind=Kind.UNREADABLE, text=text))
