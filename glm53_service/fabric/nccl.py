"""Reads from a rank's output which network NCCL chose: TCP instead of RDMA is a silent loss of most speed."""

from __future__ import annotations

import re

from glm53_service.fabric.trouble import Kind, Trouble

NETWORK = re.compile(r"NCCL INFO (?:NET/(IB|Socket) : Using|Using network (IB|Socket)\b)")

SLOW = Trouble(
    kind=Kind.SLOW,
    text="NCCL took NET/Socket: the ranks talk over TCP, about 3 GB/s in place of 20",
    fix="Look for NET/IB lines in `journalctl -t glm53-rank0` (and rank1); /dev/infiniband in the container,"
    " locked memory, the image's libibverbs",
)


class Network:
    """What the lines of one rank said so far."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, line: str) -> Trouble | None:
        """Take one line; return the trouble the moment that it shows: a socket, and no RDMA before it."""
        found = NETWORK.search(line)
        if not found:
            return None
        name = found[1] or found[2]
        first = name not in self._names
        self._names.add(name)
        return SLOW if name == "Socket" and first and "IB" not in self._names else None
