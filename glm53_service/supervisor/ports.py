"""Ports of this node: bound for us, or had by somebody else."""

from __future__ import annotations

import socket

from glm53_service.errors import UnavailableError

IP_FREEBIND = getattr(socket, "IP_FREEBIND", 15)
"""ip(7): bind an address that the machine does not have (yet): there is none while the peer is off."""


def listening_sockets(addresses: list[str], port: int) -> list[socket.socket]:
    """Return bound sockets on each address, also on one that is not there yet (IP_FREEBIND).

    UnavailableError when somebody else has the port.
    """
    sockets = []
    for address in addresses:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_IP, IP_FREEBIND, 1)
        try:
            bound.bind((address, port))
        except OSError as error:
            raise UnavailableError(
                f"port {port} on {address} cannot be had: {(error.strerror or str(error)).lower()}",
                hint=f"`ss -ltnp 'sport = :{port}'` shows who has it; end that or take another port",
            ) from None
        bound.setblocking(False)
        sockets.append(bound)
    return sockets
