"""An image of one's own, from both sides: what the control host sends, and what the head does with it."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from glm53_service.artifacts.build import Build
from tests.unit.plugin_loader import load
from tests.unit.test_build import OWN, PIN, inventory, planned

__all__ = ["inventory"]

module = load("modules", "glm53_image_build")
image_filters = load("filter", "glm53_image")

# The control host's side


def test_one_of_both_is_the_image(inventory: Path) -> None:
    """Prevents an inventory that says two images, or none, and gets whichever the code looks at first."""
    plan = image_filters.glm53_image_plan
    assert plan("x@sha256:1", {}, "tensorfold", str(inventory)) == {
        "reference": "x@sha256:1",
        "inputs": {},
        "build": {},
    }
    both = plan("", OWN, "tensorfold", str(inventory))
    assert both["reference"] == planned(inventory).reference == both["build"]["reference"]
    assert base64.b64decode(both["build"]["files"]["patches/0002-b.patch"]) == b"b"
    json.dumps(both)
    for image, build in (("x", OWN), ("", {})):
        with pytest.raises(AnsibleFilterError, match=r"^Found: (both|neither) glm53_image "):
            plan(image, build, "tensorfold", str(inventory))
    with pytest.raises(AnsibleFilterError, match="base: missing"):
        plan("", {"source": {}}, "tensorfold", str(inventory))
    problems = load("action", "glm53_inventory").image_problems
    assert "both are set" in problems({"glm53_image": "x", "glm53_image_build": OWN})[0]
    assert "neither is set" in problems({"glm53_image_build": {}})[0]
    assert problems({"glm53_image": "x"}) == problems({"glm53_image_build": OWN}) == []


def test_why_the_head_builds(inventory: Path) -> None:
    """Prevents a build of minutes that gives no reason, and one for nothing."""
    build = planned(inventory)
    reasons = image_filters.glm53_build_reasons
    assert reasons({"built": True, "newest": {}}, build.inputs) == []
    assert reasons({"built": False, "newest": {}}, build.inputs) == ["no image was built here yet"]
    old = {"reference": "glm53/built:0", "labels": planned(inventory, version="v0.6.0").labels}
    (reason,) = reasons({"built": False, "newest": old}, build.inputs)
    assert reason.startswith("version changed")
    lost = {"reference": "glm53/built:1", "labels": build.labels}
    assert reasons({"built": False, "newest": lost}, build.inputs) == ["glm53/built:1 has lost its name"]


# The head's side


def sent(build: Build, **changes: Any) -> dict[str, Any]:
    """Return a build as the module gets it."""
    files = {name: base64.b64encode(content).decode() for name, content in build.files.items()}
    whole = {name: getattr(build, name) for name in build.__struct_fields__}
    return whole | {"files": files} | changes


def tree(folder: Path) -> Path:
    """Return a source tree with a name that sorts differently by path and by bytes, and a program."""
    for name in ("tf/a.py", "tf/a/b.py", "tf/Z.py", "run"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run").chmod(0o755)
    return folder


def test_a_trees_hash_is_the_one_that_a_person_gets(tmp_path: Path) -> None:
    """Prevents a hash in the documentation that no tree has."""
    source = tree(tmp_path / "source")
    line = "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    shown = subprocess.run(["sh", "-c", line], cwd=source, capture_output=True, text=True, check=True).stdout
    assert module.sha256_of(source) == shown.split()[0]
    file = source / "run"
    assert module.sha256_of(file) == subprocess.check_output(["sha256sum", file], text=True).split()[0]


def test_the_context_is_what_docker_takes_and_the_same_for_the_same_content(
    inventory: Path, tmp_path: Path
) -> None:
    """Prevents a context that docker takes for a Dockerfile (its first header must be a plain one), one with
    times in it, and a program that is none any more.
    """
    source, wheels = tree(tmp_path / "source"), tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "w.whl").write_bytes(b"wheel")
    build = sent(planned(inventory), source={"path": str(source), "sha256": ""}, wheels=str(wheels))
    first, second = io.BytesIO(), io.BytesIO()
    module.context(build, first)
    os.utime(source / "run", (5, 5))
    module.context(build, second)
    assert first.getvalue() == second.getvalue()
    assert first.getvalue()[:6] == b"wheels"
    with tarfile.open(fileobj=io.BytesIO(first.getvalue())) as tar:
        modes = {entry.name: entry.mode for entry in tar.getmembers()}
        assert {entry.mtime for entry in tar.getmembers()} == {0}
        member = tar.extractfile("patches/0001-a.patch")
        assert member is not None
        assert member.read() == b"a"
    assert modes["source/source/run"] == 0o755
    assert modes["source/source/tf/a/b.py"] == 0o644
    assert {"wheels/w.whl", "requirements.txt", "Dockerfile", "overlay"} <= set(modes)


def test_files_that_are_not_the_ones_are_named_before_anything_runs(tmp_path: Path, inventory: Path) -> None:
    """Prevents a build of another package than the one whose hash the inventory has, or a refusal without the
    hash that was found.
    """
    file = tmp_path / "tf.tar.gz"
    build = sent(planned(inventory), source={"path": str(file), "sha256": "c" * 64})
    assert f"Found: no {file} here" in module.problems(build)[0]
    file.write_bytes(b"x")
    real = module.sha256_of(file)
    assert f"has SHA-256 {real}. Expected: {'c' * 64}" in module.problems(build)[0]
    build["source"]["sha256"] = real
    assert module.problems(build) == []
    assert "Found: no folder /nowhere here" in module.problems(build | {"wheels": "/nowhere"})[0]


def test_room_is_for_the_layers_and_what_is_carried(inventory: Path, tmp_path: Path) -> None:
    """Prevents a disk that fills up while the image is built, and a refusal with room for it."""
    file = tmp_path / "tf.tar.gz"
    file.write_bytes(b"x" * 1000)
    build = sent(planned(inventory), source={"path": str(file), "sha256": ""})
    assert module.room_problem(build, free=2 * 10**9 + 3000, room_gb=2) == ""
    said = module.room_problem(build, free=2 * 10**9 + 2999, room_gb=2)
    assert "Expected: 2.0 GB for the new layers" in said


def test_two_builds_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents two builds at once, also beside the docker client of one whose module was killed."""
    monkeypatch.setattr(module, "LOCK", tmp_path / "lock")
    with module.locked(tmp_path / "log") as lock:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(module.BuildError, match=f"another build runs here .process {os.getpid()},"):
        module.locked(tmp_path / "log").__enter__()
    child.communicate()
    with module.locked(tmp_path / "log"):
        pass


def test_the_command(inventory: Path) -> None:
    """Prevents a build that reaches for the network, or an image without its labels."""
    offline = module.argv_of(sent(planned(inventory, wheels="/w")), "glm53/base:555555555555")
    assert offline[:4] == ["docker", "build", "--force-rm", "--tag"]
    assert offline[-1] == "-"
    given = list(itertools.pairwise(offline))
    assert ("--network", "none") in given
    assert ("--build-arg", "BASE=glm53/base:555555555555") in given
    assert ("--build-arg", "VERSION=v0.6.6") in given
    assert ("--label", f"glm53.base={PIN}") in given
    assert "--network" not in module.argv_of(sent(planned(inventory)), "b")
