"""Docker's two stores, on a newer suite's docker (26): an image is the same one in both, either way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from glm53_service.artifacts.content import image_content, local_tag
from lab.api import Lab
from lab.registry import Registry, serving
from lab.settings import Suite
from tests.lab.conftest import HEAD, WORKER, play
from tests.lab.test_27_images import layer

DAEMON = "/etc/docker/daemon.json"
STORES = {True: "io.containerd.snapshotter.v1", False: ""}


@pytest.fixture(scope="module")
def newer(lab: Lab) -> Iterator[Lab]:
    """Hosts of the newer suite, ready to ship, in place of those that the tests before had."""
    lab.down()
    lab.up(2, Suite.TRIXIE)
    for name in ("playbooks/host.yml", "playbooks/fabric.yml"):
        run = play(lab, name)
        assert run.code == 0, run.output[-3000:]
    yield lab
    lab.down()


@pytest.fixture(scope="module")
def registry(newer: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that the head trusts."""
    with serving(tmp_path_factory.mktemp("registry"), newer.paths) as registry:
        folder = f"/etc/docker/certs.d/{registry.name}"
        script = f"mkdir -p {folder} && echo '{registry.certificate}' > {folder}/ca.crt"
        newer.exec(HEAD, ["sh", "-c", script])
        yield registry


def store(lab: Lab, host: str, *, containerd: bool) -> None:
    """Have docker on `host` keep its images in containerd's store, or in its own."""
    settings = json.loads(lab.exec(host, ["cat", DAEMON]).stdout)
    settings["features"] = {"containerd-snapshotter": containerd}
    lab.exec(host, ["sh", "-c", f"echo '{json.dumps(settings)}' > {DAEMON} && systemctl restart docker"])
    info = json.loads(lab.exec(host, ["docker", "info", "--format", "{{json .DriverStatus}}"]).stdout)
    assert (["driver-type", STORES[True]] in info) is containerd


def inspect(lab: Lab, host: str, image: str) -> dict[str, Any]:
    """Return docker's word on an image."""
    found: list[dict[str, Any]] = json.loads(lab.exec(host, ["docker", "image", "inspect", image]).stdout)
    return found[0]


@pytest.mark.parametrize("head", [True, False], ids=["containerd-to-overlay2", "overlay2-to-containerd"])
def test_an_image_is_the_same_in_both_stores(newer: Lab, registry: Registry, head: bool) -> None:
    """Prevents an index that cannot be loaded elsewhere, and an image that is shipped for ever because
    docker's Id differs between stores.
    """
    store(newer, HEAD, containerd=head)
    store(newer, WORKER, containerd=not head)
    platforms = {name: [layer(f"{name}{head}", 2_000_000)] for name in ("amd64", "arm64")}
    image = f"{registry.name}/lab/stores@{registry.push('lab/stores', platforms)}"
    variables = ("-e", json.dumps({"glm53_image": image}))
    run = play(newer, "playbooks/artifacts.yml", *variables)
    assert run.code == 0, run.output[-3000:]
    here = inspect(newer, HEAD, image)
    there = inspect(newer, WORKER, local_tag(image_content(here)))
    assert image_content(there) == image_content(here)
    assert there["Id"] != here["Id"]
    again = play(newer, "playbooks/artifacts.yml", *variables)
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]
