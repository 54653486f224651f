"""For our Ansible modules on a node: docker's HTTP interface on its socket, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

DOCKER_SOCKET = "/run/docker.sock"
ANSWER_SECONDS = 20.0


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over docker's unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def docker_call(
    method: str,
    path: str,
    body: Any = None,
    *,
    connection: str = DOCKER_SOCKET,
    timeout: float = ANSWER_SECONDS,
) -> tuple[int, Any]:
    """Return status and decoded answer of a request; OSError when nobody answers within `timeout` seconds."""
    http_connection = _SocketConnection(connection, timeout)
    try:
        text = None if body is None else json.dumps(body)
        http_connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        response = http_connection.getresponse()
        answer = response.read()
        return response.status, json.loads(answer) if answer else None
    finally:
        http_connection.close()


def docker_get(path: str, connection: str = DOCKER_SOCKET) -> tuple[int, Any]:
    """Return status and decoded answer of a GET; OSError when nobody answers."""
    return docker_call("GET", path, connection=connection)
