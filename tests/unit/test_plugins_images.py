"""The module that reads how much a pull would bring, on a node with nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine_server import DIGEST, IMAGE
from tests.unit.plugin_loader import CHECKOUT, load

module = load("modules", "glm53_image_size")
SECRET = "CANARY-token-77"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a registry is asked, in place of the real client, whose own tests are in test_image_login."""
    found: list[Any] = []

    class Registry:
        def __init__(self, name: str, info: dict[str, Any], *, login: tuple[str, str] | None) -> None:
            found.append((name, info, login))

        def size(self, repository: str, digest: str, architecture: str) -> int:
            found.append((repository, digest, architecture))
            if repository == "gone":
                raise module.Unknown("answers 404")
            return 4711

    monkeypatch.setattr(module, "Registry", Registry)
    monkeypatch.setattr(module, "docker_get", lambda path: (200, {"asked": path}))
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    return found


def test_it_asks_as_a_pull_would(asked: list[Any], tmp_path: Path) -> None:
    """Prevents a check that shows another platform's size, or that needs another login than the run."""
    token = tmp_path / "token"
    token.write_text(SECRET + "\n")
    token.chmod(0o600)
    assert module.size_of(IMAGE, "me", str(token)) == {
        "bytes": 4711,
        "why": "",
        "registry": "registry.example:5000",
    }
    assert asked == [
        ("registry.example:5000", {"asked": "/info"}, ("me", SECRET)),
        ("glm/engine", DIGEST, "arm64"),
    ]


def test_what_comes_in_the_way_is_told_and_fails_nothing(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a check that fails where a run might go well, and a token open to others that is used."""
    del asked
    assert module.size_of(f"ghcr.io/gone@{DIGEST}", "", "")["why"] == "answers 404"
    open_to_all = tmp_path / "token"
    open_to_all.write_text(SECRET)
    open_to_all.chmod(0o644)
    assert module.size_of(IMAGE, "me", str(open_to_all))["why"] == f"{open_to_all} is open to others"
    assert module.size_of(IMAGE, "me", "/none")["why"] == "/none: No such file or directory"

    def silent(_: str) -> None:
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(module, "docker_get", silent)
    assert module.size_of(IMAGE, "", "") == {
        "bytes": 0,
        "why": "nobody there",
        "registry": "registry.example:5000",
    }


def test_the_node_gets_the_package_s_own_client() -> None:
    """Prevents two clients that read a manifest differently: what Ansible sends along is a link."""
    link = CHECKOUT / "plugins/module_utils/glm53_registry.py"
    assert link.resolve() == CHECKOUT / "glm53_service/artifacts/images/registry.py"
    assert "glm53_service" not in link.read_text()
