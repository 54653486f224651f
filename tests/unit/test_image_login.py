"""Who asks a registry: the inventory's token file, or what `docker login` left; a manifest's size."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.images import credentials
from glm53_service.artifacts.images.credentials import Login, docker_login, token_login
from glm53_service.artifacts.images.reference import parse_reference
from glm53_service.artifacts.images.registry import Registry, Unknown
from glm53_service.errors import ConfigError, UnavailableError
from tests.unit.engine_server import DIGEST, IMAGE

SECRET = "CANARY-token-77"
HELPER = """#!/bin/sh
[ "$1" = get ] && [ "$(cat)" = registry.example:5000 ] || { echo "CANARY credentials not found"; exit 1; }
[ -z "$LEAK" ] && echo '{"ServerURL":"x","Username":"helped","Secret":"CANARY-token-77"}'
"""


def config(home: Path, **content: Any) -> Path:
    """Write what `docker login` leaves."""
    path = home / ".docker/config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def login(home: Path, text: str = IMAGE) -> Login | None:
    """Return the account's own login."""
    return asyncio.run(docker_login(parse_reference(text), home))


def word(user: str = "me", secret: str = SECRET) -> dict[str, str]:
    """An entry of `auths`."""
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


def helper(root: Path, monkeypatch: pytest.MonkeyPatch, text: str = HELPER) -> None:
    """Install docker-credential-unit."""
    program = root / "docker-credential-unit"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(credentials, "HELPER_PATHS", f"{root}:/usr/bin:/bin")


def test_a_token_file_needs_a_user_and_closed_doors(tmp_path: Path) -> None:
    """Prevents a token that others can read, half a login, and a token in a message."""
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    found = token_login("me", path)
    assert found is not None
    assert (found.user, found.secret) == ("me", SECRET)
    assert SECRET not in repr(found)
    assert token_login("", None) is None
    for user, file, fault in (("", path, "no user beside it"), ("me", None, "without a token file")):
        with pytest.raises(ConfigError, match=fault):
            token_login(user, file)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="found mode 640, expected 600") as caught:
        token_login("me", path)
    assert SECRET not in str(caught.value)


def test_what_docker_login_left_is_used(tmp_path: Path) -> None:
    """Prevents a second login for somebody who has one, and one registry's login at another."""
    assert login(tmp_path) is None
    config(tmp_path, auths={"registry.example:5000": word("one"), "https://index.docker.io/v1/": word("hub")})
    found, hub = login(tmp_path), login(tmp_path, f"vllm/vllm-openai@{DIGEST}")
    assert found is not None
    assert hub is not None
    assert (found.user, found.secret, hub.user) == ("one", SECRET, "hub")
    assert login(tmp_path, f"ghcr.io/a/b@{DIGEST}") is None
    sent = json.loads(base64.urlsafe_b64decode(found.header("registry.example:5000")))
    assert sent == {"username": "one", "password": SECRET, "serveraddress": "registry.example:5000"}


def test_an_identity_token_is_sent_as_one(tmp_path: Path) -> None:
    """Prevents a refusal by registries whose login gives a token and no password."""
    config(tmp_path, auths={"registry.example:5000": {"auth": word()["auth"], "identitytoken": SECRET}})
    found = login(tmp_path)
    assert found is not None
    sent = json.loads(base64.urlsafe_b64decode(found.header("registry.example:5000")))
    assert sent == {"identitytoken": SECRET, "serveraddress": "registry.example:5000"}


@pytest.mark.parametrize("kind", ["credHelpers", "credsStore"])
def test_a_helper_is_asked_on_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Prevents no login where a desktop keeps it, and a secret of the environment in a helper."""
    monkeypatch.setenv("LEAK", "1")
    helper(tmp_path, monkeypatch)
    value: Any = {"registry.example:5000": "unit"} if kind == "credHelpers" else "unit"
    config(tmp_path, **{kind: value}, auths={"registry.example:5000": {}})
    found = login(tmp_path)
    assert found is not None
    assert (found.user, found.secret) == ("helped", SECRET)
    if kind == "credsStore":
        assert login(tmp_path, f"ghcr.io/a/b@{DIGEST}") is None


def test_a_helper_that_cannot_help_is_named_without_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a traceback, a program by a path of somebody's choice, and a helper's output in a log."""
    path = config(tmp_path, credsStore="missing")
    with pytest.raises(UnavailableError, match="docker-credential-missing cannot be run: No such file"):
        login(tmp_path)
    helper(tmp_path, monkeypatch, "#!/bin/sh\necho CANARY-nonsense\n")
    config(tmp_path, credsStore="unit")
    with pytest.raises(UnavailableError, match="gave no login") as caught:
        login(tmp_path)
    assert "CANARY" not in str(caught.value)
    config(tmp_path, credsStore="../../x")
    with pytest.raises(ConfigError, match="expected the name of a program"):
        login(tmp_path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        login(tmp_path)
    config(tmp_path, auths={"registry.example:5000": {"auth": "%%%"}})
    with pytest.raises(ConfigError, match="an entry that is no login"):
        login(tmp_path)


# The size that a manifest says ------------------------------------------------------------------------


def body(data: dict[str, Any]) -> tuple[str, bytes]:
    """Return digest and bytes."""
    text = json.dumps(data).encode()
    return "sha256:" + hashlib.sha256(text).hexdigest(), text


ONE = body({"config": {"size": 100}, "layers": [{"size": 4000}, {"size": 900}]})
INDEX = body(
    {
        "manifests": [
            {"digest": "sha256:0", "platform": {"os": "linux", "architecture": "amd64"}},
            {"digest": ONE[0], "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
        ]
    }
)


class Handler(BaseHTTPRequestHandler):
    """A registry: `kind` is how it wants a login."""

    kind = ""
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        self.asked.append((self.path, given))
        wanted = {"": "", "Basic": "Basic " + word()["auth"], "Bearer": "Bearer T-1"}[self.kind]
        bodies = {f"/v2/glm/engine/manifests/{digest}": text for digest, text in (ONE, INDEX)}
        if self.path.startswith("/token?"):
            ok = "scope=repository%3Aglm%2Fengine%3Apull" in self.path and given in (
                "",
                "Basic " + word()["auth"],
            )
            self._send(200 if ok else 400, b'{"token": "T-1"}')
        elif given != wanted:
            where = (
                f'realm="https://{self.headers["Host"]}/token",service="unit"'
                if self.kind == "Bearer"
                else ""
            )
            self._send(401, b"", {"WWW-Authenticate": f"{self.kind} {where}"})
        elif self.path == "/v2/glm/away/manifests/" + ONE[0]:
            self._send(307, b"", {"Location": "https://127.0.0.1:1/x"})
        elif self.path in bodies:
            self._send(200, bodies[self.path])
        else:
            self._send(200, b"{}")

    def _send(self, status: int, text: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[str, type[Handler], Path]]:
    """A registry with a certificate of its own: name, its handler, and docker's certs.d."""
    names = [str(tmp_path / "tls.key"), str(tmp_path / "tls.crt")]
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *(
                "-subj",
                "/CN=u",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-keyout",
                names[0],
                "-out",
                names[1],
            ),
        ],
        check=True,
        capture_output=True,
    )
    handler = type("OwnHandler", (Handler,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(names[1], names[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    name = f"127.0.0.1:{server.server_port}"
    (tmp_path / "certs" / name).mkdir(parents=True)
    (tmp_path / "certs" / name / "ca.crt").write_bytes(Path(names[1]).read_bytes())
    yield name, handler, tmp_path / "certs"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("kind", "who"), [("", None), ("Basic", ("me", SECRET)), ("Bearer", None), ("Bearer", ("me", SECRET))]
)
def test_a_manifest_says_what_would_come(
    registry: tuple[str, type[Handler], Path], kind: str, who: tuple[str, str] | None
) -> None:
    """Prevents a plan without gigabytes, and one that counts another platform's layers."""
    name, handler, certificates = registry
    handler.kind = kind
    asked = Registry(name, {}, login=who, certificates=certificates)
    assert asked.size("glm/engine", INDEX[0], "arm64") == 5000
    tokens = [given for path, given in handler.asked if path.startswith("/token")]
    assert tokens == ([] if kind != "Bearer" else ["Basic " + word()["auth"] if who else ""])


def test_what_comes_in_the_way_makes_it_unknown(registry: tuple[str, type[Handler], Path]) -> None:
    """Prevents a pull that fails for a figure, a login that follows a redirect, another image's figure."""
    name, handler, certificates = registry
    asked = Registry(name, {}, login=("me", SECRET), certificates=certificates)
    for repository, digest, architecture, why in (
        ("glm/engine", INDEX[0], "riscv64", "nothing for linux/riscv64"),
        ("glm/other", ONE[0], "arm64", "another manifest than"),
        ("glm/away", ONE[0], "arm64", "answers 307"),
    ):
        with pytest.raises(Unknown, match=why):
            asked.size(repository, digest, architecture)
    with pytest.raises(Unknown, match="CERTIFICATE_VERIFY_FAILED"):
        Registry(name, {}, certificates=certificates / "none").size("glm/engine", ONE[0], "arm64")
    with pytest.raises(Unknown, match="refused"):
        Registry(name, {"HttpsProxy": "http://127.0.0.1:1"}, certificates=certificates).size(
            "glm/engine", ONE[0], "arm64"
        )
    around = {"HttpsProxy": "http://127.0.0.1:1", "NoProxy": "example.org,127.0.0.1"}
    assert Registry(name, around, certificates=certificates).size("glm/engine", ONE[0], "arm64") == 5000
    handler.kind = "Basic"
    with pytest.raises(Unknown, match="wants a login"):
        Registry(name, {}, certificates=certificates).size("glm/engine", ONE[0], "arm64")
