"""Looks at this machine's fabric now: the thin part between the kernel and `find_fabric`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm53_service.errors import UnavailableError
from glm53_service.fabric.links import ARGV, parse_links
from glm53_service.fabric.rails import Fabric, find_fabric
from glm53_service.fabric.sysfs import read_hcas
from glm53_service.run import Runner, run


async def probe(
    addresses: Sequence[str], *, rdma: bool, runner: Runner = run, root: Path = Path("/")
) -> Fabric:
    """Return the rails of this node for its fabric `addresses`; a tool that fails is a problem, not a
    crash.
    """
    try:
        return find_fabric(addresses, parse_links(await runner(ARGV)), read_hcas(root), rdma=rdma)
    except UnavailableError as error:
        return Fabric(rails=(), problem=error.message)
    except (OSError, ValueError, KeyError) as error:  # a device that goes away while it is read
        return Fabric(rails=(), problem=f"the fabric cannot be read: {type(error).__name__}: {error}")
