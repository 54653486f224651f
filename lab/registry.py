"""A real registry (Debian's docker-registry) beside the lab's hosts, with TLS, an access log, and a gate.

The hosts reach it on the machine's management address through a relay that a test can hold: what comes after
so many bytes waits until it is let go, or the connection is cut.
"""

import base64
import contextlib
import gzip
import hashlib
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab import cache
from lab.errors import LabError
from lab.run import PATH, run
from lab.settings import MACHINE_ADDRESS, Paths

USER = "lab"
SECRET = "lab-registry-CANARY-5f2c"
HTPASSWD = "lab:$2b$05$abcdefghijklmnopqrstuuI0EERTRUPkmPdOrrN8j0UvaKmSyDKf2\n"
"""SECRET by bcrypt at its lowest cost."""

PORT = 5000
BEHIND = 5001
READY_SECONDS = 20.0
PIECE = 1 << 16
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"

CONFIG = """version: 0.1
log: {{level: info, fields: {{service: registry}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}
http:
  addr: 127.0.0.1:{port}
  tls: {{certificate: {folder}/tls.crt, key: {folder}/tls.key}}
{auth}"""
AUTH = "auth: {{htpasswd: {{realm: lab, path: {folder}/htpasswd}}}}\n"


def registry_program(paths: Paths) -> Path:
    """Return the program docker-registry, unpacked from the machine's own Debian package: nothing is
    installed, so no service starts.
    """

    def build(part: Path) -> None:
        part.chmod(0o755)
        fetched = part / "deb"
        fetched.mkdir()
        done = subprocess.run(
            ["apt-get", "-qq", "download", "docker-registry"],
            cwd=fetched,
            env={**os.environ, "PATH": PATH},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        debs = list(fetched.glob("*.deb"))
        if done.returncode or not debs:
            raise LabError(f"apt-get download docker-registry: {done.stderr.strip()}. Do: apt-get update")
        run(["dpkg-deb", "-x", str(debs[0]), str(part)], timeout=120, contained=True)

    folder = cache.ensure(cache.entry(paths.cache, "registry", "docker-registry"), "registry", build)
    return folder / "usr/bin/docker-registry"


@dataclass
class Relay:
    """Passes TCP on from the management address to the registry. `hold_after`: bytes from the registry that
    a connection may still carry, None: all.
    """

    hold_after: int | None = None
    carried: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _open: list[socket.socket] = field(default_factory=list)
    _listener: socket.socket | None = None

    def serve(self) -> None:
        """Listen; each connection has threads of its own."""
        self._listener = socket.create_server((MACHINE_ADDRESS, PORT))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def let_go(self) -> None:
        """Carry everything again; what was held is cut, as by a network that comes back."""
        self.hold_after = None
        self.held.clear()
        self._cut()

    def close(self) -> None:
        """End."""
        self._stop.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread that waits in accept()
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self._cut()

    def _cut(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", BEHIND))
            except OSError:
                continue
            self._open += [client, server]
            for ends in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if counted:
                    self.carried += len(data)
                    while self.hold_after is not None and self.carried > self.hold_after:
                        self.held.set()
                        if self._stop.wait(0.05):
                            return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Registry:
    """A registry that runs; `log` is what it wrote, one line a request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.relay = Relay()
        self.name = f"{MACHINE_ADDRESS}:{PORT}"

    @property
    def certificate(self) -> str:
        """The certificate that signs itself: what the hosts put into /etc/docker/certs.d."""
        return (self.folder / "tls.crt").read_text()

    def requests(self) -> list[str]:
        """Return `METHOD PATH` of each request that came from a host."""
        return re.findall(r'"((?:GET|HEAD|POST|PUT) \S+) HTTP', (self.folder / "log").read_text())

    def push(self, name: str, platforms: Mapping[str, Sequence[bytes]]) -> str:
        """Store an image of these layers (tar.gz) by architecture; return its digest. More than one: an
        index.
        """
        manifests = []
        for architecture, layers in platforms.items():
            body = self._manifest(name, architecture, layers)
            digest = self._put_manifest(name, body, DOCKER_MANIFEST)
            place = {"architecture": architecture, "os": "linux"}
            manifests.append(
                {"mediaType": DOCKER_MANIFEST, "size": len(body), "digest": digest, "platform": place}
            )
        if len(manifests) == 1:
            return str(manifests[0]["digest"])
        index = {"schemaVersion": 2, "mediaType": DOCKER_LIST, "manifests": manifests}
        return self._put_manifest(name, json.dumps(index).encode(), DOCKER_LIST)

    def _manifest(self, name: str, architecture: str, layers: Sequence[bytes]) -> bytes:
        config = {
            "architecture": architecture,
            "os": "linux",
            "created": "2026-11-29T00:00:00Z",
            "config": {"Cmd": ["/engine"], "Env": ["PATH=/"], "Labels": {"of": architecture}},
            "rootfs": {"type": "layers", "diff_ids": [_digest(gzip.decompress(layer)) for layer in layers]},
            "history": [{"created": "2026-11-29T00:00:00Z", "created_by": "lab"} for _ in layers],
        }
        body = json.dumps(config).encode()
        blobs = [self._blob(name, body, DOCKER_CONFIG)]
        blobs += [self._blob(name, layer, DOCKER_LAYER) for layer in layers]
        manifest = {"schemaVersion": 2, "mediaType": DOCKER_MANIFEST, "config": blobs[0], "layers": blobs[1:]}
        return json.dumps(manifest).encode()

    def _blob(self, name: str, data: bytes, kind: str) -> dict[str, object]:
        location = self._ask("POST", f"/v2/{name}/blobs/uploads/", b"")["Location"]
        path = location.partition(f":{BEHIND}")[2] or location
        mark = "&" if "?" in path else "?"
        self._ask("PUT", f"{path}{mark}digest={_digest(data)}", data, "application/octet-stream")
        return {"mediaType": kind, "size": len(data), "digest": _digest(data)}

    def _put_manifest(self, name: str, body: bytes, kind: str) -> str:
        self._ask("PUT", f"/v2/{name}/manifests/{_digest(body)}", body, kind)
        return _digest(body)

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> Mapping[str, str]:
        word = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()
        headers = {"Authorization": f"Basic {word}"} | ({"Content-Type": kind} if kind else {})
        url = path if path.startswith("http") else f"https://127.0.0.1:{BEHIND}{path}"
        request = urllib.request.Request(url, body, headers, method=method)
        context = ssl.create_default_context(cafile=str(self.folder / "tls.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(request, timeout=60) as response:
            return dict(response.headers)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def serving(folder: Path, paths: Paths, *, closed: bool = False) -> Iterator[Registry]:
    """Run a registry in `folder` while the block runs; `closed`: only for USER with SECRET."""
    run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "30", "-subj", "/CN=lab registry", "-keyout", str(folder / "tls.key")),
            *(
                "-addext",
                f"subjectAltName=IP:{MACHINE_ADDRESS},IP:127.0.0.1",
                "-out",
                str(folder / "tls.crt"),
            ),
        ]
    )
    (folder / "htpasswd").write_text(HTPASSWD)
    auth = AUTH.format(folder=folder) if closed else ""
    (folder / "config.yml").write_text(CONFIG.format(folder=folder, port=BEHIND, auth=auth))
    registry = Registry(folder)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(registry_program(paths)), "serve", str(folder / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": PATH, "OTEL_TRACES_EXPORTER": "none"},
        )
        try:
            _wait(registry, process)
            registry.relay.serve()
            try:
                yield registry
            finally:
                registry.relay.close()
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait(registry: Registry, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            registry._ask("GET", "/v2/")
            return
        except (OSError, urllib.error.URLError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = (registry.folder / "log").read_text()[-500:]
                raise LabError(f"the registry does not answer ({error}): {said}") from None
        time.sleep(0.1)
