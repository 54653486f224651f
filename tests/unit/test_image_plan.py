"""The image's lines of `glm53 artifacts plan`: decided purely; looked at by a small Engine API and ssh."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.artifacts.images.look import Worker, image_steps
from glm53_service.artifacts.images.plan import REGISTRY, ImagePlace, ImageStep, plan_image, ship_rate
from glm53_service.artifacts.images.reference import Reference
from tests.unit.engine_server import IMAGE, EngineServer, engine_thread, inspect

GB = 10**9
OTHER = {**inspect(), "RootFS": {"Layers": ["sha256:another"]}}


def steps(
    head: dict[str, Any] | None,
    worker: dict[str, Any] | None,
    size: int | str = 2 * GB,
    *,
    registry: str = "ghcr.io",
    free: int = 100 * GB,
    rates: dict[str, float] | None = None,
) -> list[str]:
    """Return the plan's lines."""
    places = [ImagePlace(node=n, inspect=i, free=free) for n, i in (("a", head), ("b", worker))]
    over = "from the head, 10.0.0.2 over x (fabric)"
    found = plan_image("I", registry, size, places[0], [(places[1], over)], rates=rates or {}, spare=GB)
    return [str(step) for step in found]


def test_each_node_has_a_line() -> None:
    """Prevents a plan that is silent about 25 GB, and one that ships what is there."""
    there = "image I: there (5.0 GB)"
    assert steps(inspect(), inspect()) == [f"a: {there}", f"b: {there}"]
    ship = "b: image I: 5.0 GB to ship from the head, 10.0.0.2 over x (fabric)"
    assert steps(inspect(), None) == [f"a: {there}", ship]
    assert steps(inspect(), OTHER) == [f"a: {there}", ship]
    assert steps(None, OTHER) == [
        "a: image I: 2.0 GB to pull from ghcr.io",
        "b: image I: 2.0 GB to ship from the head, 10.0.0.2 over x (fabric)",
    ]
    assert steps(None, None, "no registry is asked")[0] == (
        "a: image I: size unknown (no registry is asked) to pull from ghcr.io"
    )
    assert steps(None, None, "it is no image of a registry", registry="")[0] == (
        "a: image I: size unknown (it is no image of a registry) to build"
    )


def test_time_and_room_are_said() -> None:
    """Prevents the rate of weights for an image, whose pace docker sets, and a full disk nobody foresaw."""
    rates = {REGISTRY: 1e8, ship_rate("b"): 5e8, "b": 1e10}
    pull, ship = steps(None, None, rates=rates)
    assert pull.endswith(", 20 s at the last rate")
    assert ship.endswith(", 4 s at the last rate")
    assert steps(None, None, free=5 * GB)[0].endswith("from ghcr.io")
    assert steps(None, None, free=5 * GB - 1)[0].endswith("; THERE IS NO ROOM FOR IT")


def look(
    root: Path, server: EngineServer, worker: list[str], *, offline: bool = True
) -> tuple[tuple[ImageStep, ...], list[str]]:
    """Return the steps and the notes; `worker` is the command in ssh's place."""
    notes: list[str] = []
    with engine_thread(server, root / "docker.sock"):
        found = image_steps(
            IMAGE,
            "a",
            [Worker(node="b", ssh=worker, over="from the head, x")],
            rates={},
            offline=offline,
            note=notes.append,
            socket=f"unix://{root / 'docker.sock'}",
        )
    return found, notes


def ssh(root: Path, said: str, code: int) -> list[str]:
    """Return a command in ssh's place that writes down what it is asked, and says `said`."""
    program = root / "ssh"
    program.write_text(f'#!/bin/sh\necho "$@" > {root}/asked\necho {shlex.quote(said)}\nexit {code}\n')
    program.chmod(0o755)
    return [str(program)]


def test_the_worker_is_asked_for_both_names(tmp_path: Path) -> None:
    """Prevents a shipped image, which has lost its digest, from being shipped again and again in the plan."""
    server = EngineServer(images={IMAGE: inspect()})
    found, notes = look(tmp_path, server, ssh(tmp_path, json.dumps([inspect()]), 1))
    assert [(step.node, step.missing_bytes) for step in found] == [("a", 0), ("b", 0)]
    tag = local_tag(image_content(inspect()))
    assert (tmp_path / "asked").read_text() == f"docker image inspect {IMAGE} {tag}\n"
    found, notes = look(tmp_path, server, ssh(tmp_path, "[]", 1))
    assert [(step.node, step.missing_bytes) for step in found] == [("a", 0), ("b", 5 * GB)]
    assert notes == []


@pytest.mark.parametrize(("said", "code"), [("", 255), ("Welcome!", 0)])
def test_a_worker_that_does_not_answer_is_named(tmp_path: Path, said: str, code: int) -> None:
    """Prevents a plan that calls a cut cable a missing image."""
    found, [note] = look(tmp_path, EngineServer(images={IMAGE: inspect()}), ssh(tmp_path, said, code))
    assert [step.node for step in found] == ["a"]
    assert note.startswith("b: what it has of the image is not known: ")
    assert ("ended with 255" in note) is (code == 255)


def test_the_registry_is_asked_for_the_size_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a plan without a figure, and a question about an image that is there."""
    asked: list[str] = []

    async def size(_engine: object, reference: Reference, platform: object, _login: object) -> int:
        asked.append(f"{reference.repository} {platform}")
        return 7 * GB

    monkeypatch.setattr("glm53_service.artifacts.images.look.manifest_size", size)
    monkeypatch.setenv("HOME", str(tmp_path))
    found, _ = look(tmp_path, EngineServer(), ssh(tmp_path, "[]", 1), offline=False)
    assert [step.missing_bytes for step in found] == [7 * GB, 7 * GB]
    look(tmp_path, EngineServer(images={IMAGE: inspect()}), ssh(tmp_path, "[]", 1), offline=False)
    assert asked == ["glm/engine linux/arm64"]


def test_offline_asks_no_registry(tmp_path: Path) -> None:
    """Prevents a question from a machine that must not ask; and a plan that fails without docker."""
    server = EngineServer()
    found, _ = look(tmp_path, server, ssh(tmp_path, "[]", 1))
    assert found[0].unknown == "no registry is asked"
    assert found[0].data()["estimated"] is True
    assert server.asked == []
    notes: list[str] = []
    socket = f"unix://{tmp_path}/none"
    assert image_steps(IMAGE, "a", [], rates={}, offline=True, note=notes.append, socket=socket) == ()
    assert notes[0].startswith("the image is not in the plan: docker does not answer")
