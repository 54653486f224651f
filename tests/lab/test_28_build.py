"""An image built on the head beside a pair that serves: by the head's real docker, offline, over a stand-in.

The base is the double's image without its package, the package a source tree of the double.
"""

from __future__ import annotations

import difflib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.content import image_content
from lab.api import Lab
from lab.playbook import ROOT, playbook
from lab.run import Completed
from lab.settings import IMAGE
from lab.tensorfold.image import IMAGE as DOUBLE
from lab.tensorfold.image import PROGRAM
from tests.lab.conftest import HEAD, WORKER, Pair, Run, play, until
from tests.unit.plugin_loader import load

build_module = load("modules", "glm53_image_build")
image_filters = load("filter", "glm53_image")

SOURCE = "/srv/src/tensorfold"
LOG = "/var/log/glm53-image-build.log"
FACTS = "tensorfold/__init__.py"

BASE = f"""FROM {DOUBLE}
COPY patch /usr/bin/patch
RUN python3 -m ensurepip && cd /opt/tensorfold && rm -rf lib/python3*/site-packages/tensorfold bin/tensorfold
"""

PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND = '''"""Builds the wheel with what Python has; a file called hold keeps it from ever being done."""
import os, pathlib, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    if os.path.exists("hold"):
        os.mkfifo("/tmp/held")
        open("/tmp/held").read()
    name, about = "tensorfold-0.6.0-py3-none-any.whl", "tensorfold-0.6.0.dist-info"
    files = {str(p): p.read_text() for p in pathlib.Path("tensorfold").rglob("*.py")}
    files[f"{about}/METADATA"] = "Metadata-Version: 2.1\\nName: tensorfold\\nVersion: 0.6.0\\n"
    about_wheel = ("Wheel-Version: 1.0", "Generator: x", "Root-Is-Purelib: true", "Tag: py3-none-any", "")
    files[f"{about}/WHEEL"] = "\\n".join(about_wheel)
    files[f"{about}/entry_points.txt"] = "[console_scripts]\\ntensorfold = tensorfold.cli:main\\n"
    files[f"{about}/RECORD"] = "".join(f"{n},,\\n" for n in files) + f"{about}/RECORD,,\\n"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
'''


@dataclass
class Workshop:
    """The head with a base image, and what the owner has for the build: a source tree and patches."""

    pair: Pair
    base: str
    here: Path

    @property
    def patches(self) -> Path:
        """The folder of patches on the control host."""
        return self.here / "patches"

    def source(self, *, hold: bool) -> str:
        """Put the source tree on the head and return its hash."""
        tree = self.here / "source"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(PROGRAM, tree / "tensorfold", ignore=shutil.ignore_patterns("__pycache__"))
        (tree / "pyproject.toml").write_text(PYPROJECT)
        (tree / "backend.py").write_text(BACKEND)
        if hold:
            (tree / "hold").touch()
        place = self.pair.lab.paths.root(self.pair.lab.host(HEAD)) / SOURCE.lstrip("/")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tree, place)
        return str(build_module.sha256_of(tree))

    def patch(self, name: str, was: str, now: str) -> None:
        """Write a patch of the package's first module."""
        old = (PROGRAM / "__init__.py").read_text().splitlines(keepends=True)
        if was not in "".join(old):  # its context is not in the package
            old = [was + "\n", "more\n"]
        new = [line.replace(was, now) for line in old]
        self.patches.mkdir(exist_ok=True)
        (self.patches / name).write_text("".join(difflib.unified_diff(old, new, FACTS, FACTS)))

    def build(self, sha256: str) -> dict[str, Any]:
        """Return what the owner's inventory says."""
        source = {"path": SOURCE, "sha256": sha256}
        return {"base": self.base, "source": source, "patches": str(self.patches)}

    def by_hand(self, engine: str, said: dict[str, Any], *, buildkit: int) -> Completed:
        """Build what an inventory says without a playbook, by either builder of docker; named unit/ENGINE."""
        build = image_filters.glm53_image_plan("", said, engine, str(self.here))["build"]
        if build["source"]:
            build["source"]["path"] = str(self.here / "source")
        place = self.pair.lab.paths.root(self.pair.lab.host(HEAD)) / "srv/base/by-hand.tar"
        with place.open("wb") as file:
            build_module.context(build, file)
        base = f"unit/base:{engine}"
        self.pair.sh(HEAD, "docker", "tag", said["base"], base)
        argv = build_module.argv_of(build | {"reference": f"unit/{engine}"}, base)
        script = f'DOCKER_BUILDKIT={buildkit} "$@" </srv/base/by-hand.tar'
        return self.pair.lab.exec(HEAD, ["sh", "-euc", script, "sh", *argv], check=False, timeout=300)

    def arguments(self, sha256: str) -> tuple[str, ...]:
        """Return a playbook's arguments for the build."""
        build = self.build(sha256)
        variables = self.here / "variables.json"
        variables.write_text(json.dumps({"glm53_image": "", "glm53_image_build": build}))
        return ("-e", "@lab/tensorfold/variables.yml", "-e", f"@{variables}")

    def images(self) -> set[str]:
        """Return the names of built images on the head."""
        form = "{{.Repository}}:{{.Tag}}"
        return set(self.pair.sh(HEAD, "docker", "image", "ls", "--format", form, "glm53/built").split())

    def inspect(self, host: str, reference: str) -> dict[str, Any]:
        """Return docker's word on an image."""
        found: list[dict[str, Any]] = json.loads(self.pair.sh(host, "docker", "image", "inspect", reference))
        return found[0]

    def half_done(self) -> list[str]:
        """Return the containers that a build has left or still uses."""
        out = self.pair.sh(HEAD, "docker", "ps", "-a", "--format", "{{.Names}} {{.Command}}")
        return [line for line in out.splitlines() if not line.startswith("glm53-")]


@pytest.fixture(scope="module")
def workshop(lab: Lab, site: Run, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The head after site.yml, with a base that has pip and patch, and no package."""
    assert site.code == 0
    lab.up()
    here = tmp_path_factory.mktemp("build")
    folder = lab.paths.root(lab.host(HEAD)) / "srv/base"
    folder.mkdir()
    with tarfile.open(folder / "context.tar", "w") as tar:
        for name, content in (("Dockerfile", BASE.encode()), ("patch", Path("/usr/bin/patch").read_bytes())):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    command = "docker build --network none --force-rm -q - </srv/base/context.tar"
    base = lab.exec(HEAD, ["sh", "-euc", command], timeout=120).stdout.split()[-1]
    return Workshop(Pair(lab), base, here)


def started(lab: Lab, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start artifacts.yml and do not wait for it."""
    argv, environment = playbook(lab, "playbooks/artifacts.yml", *arguments)
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_killed_build_leaves_nothing_and_the_next_one_builds(
    lab: Lab, pair: Pair, workshop: Workshop
) -> None:
    """Prevents half an image under the image's name, a lock that nobody holds, a worker with another image,
    and a pair that is touched by all this.
    """
    before = pair.status()
    workshop.patch("0001-notice.patch", "it runs no model", "it runs no model, as patched,")
    run = started(lab, workshop.arguments(workshop.source(hold=True)))
    until(lambda: any("/bin/sh" in line for line in workshop.half_done()), "a build that is at work")
    victims = pair.sh(HEAD, "sh", "-c", "cat /run/glm53-image-build.lock; echo; pgrep -x docker")
    pair.sh(HEAD, "kill", "-9", *victims.split())
    output = run.communicate(timeout=300)[0]
    assert run.returncode != 0, output[-3000:]
    assert f"tail -F {LOG}" in output
    assert workshop.images() == set()
    until(lambda: workshop.half_done() == [], "the killed build's container is gone")
    done = play(lab, "playbooks/artifacts.yml", *workshop.arguments(workshop.source(hold=False)))
    assert done.code == 0, done.output[-3000:]
    assert "because no image was built here yet" in " ".join(done.output.split())
    (reference,) = workshop.images()
    image = workshop.inspect(HEAD, reference)
    labels = image["Config"]["Labels"]
    assert labels["glm53.base"] == workshop.base
    assert labels["glm53.inputs"].startswith(reference.partition(":")[2])
    assert "TORCH_EXTENSIONS_DIR=/cache/torch_extensions" in image["Config"]["Env"]
    content = image_content(image)
    shipped = workshop.inspect(WORKER, f"glm53/engine:{content[7:19]}")
    assert image_content(shipped) == content
    said = lab.docker(WORKER, ["run", "--rm", "--network", "none", shipped["Id"], "tensorfold", "--version"])
    assert "it runs no model, as patched, and no GPU code" in said.stderr
    after = pair.status()
    assert (after["epoch"], after["since"], after["ready"]) == (before["epoch"], before["since"], True)


def test_the_second_run_builds_nothing(lab: Lab, pair: Pair, workshop: Workshop) -> None:
    """Prevents an image that is built, and a pair that is restarted, on every run: files of another time."""
    images = workshop.images()
    workshop.patch("0001-notice.patch", "it runs no model", "it runs no model, as patched,")
    run = play(lab, "playbooks/artifacts.yml", *workshop.arguments(workshop.source(hold=False)))
    assert (run.code, run.changed) == (0, 0), run.output[-3000:]
    assert workshop.images() == images


def test_a_patch_that_does_not_fit_fails_closed(lab: Lab, pair: Pair, workshop: Workshop) -> None:
    """Prevents an image that lacks its fix and says nothing: the old one stays, the pair is not touched, and
    the right patch is then built, for the reason that it is new.
    """
    before, images = pair.status(), workshop.images()
    arguments = workshop.arguments(workshop.source(hold=False))
    workshop.patch("0002-more.patch", "nobody ever wrote this", "nor that")
    run = play(lab, "playbooks/artifacts.yml", *arguments)
    assert run.code != 0
    assert "patch 0002-more.patch does not fit TensorFold v0.6.0 in this image" in run.output
    assert workshop.images() == images
    assert workshop.half_done() == []
    assert "0002-more.patch does not fit" in pair.sh(HEAD, "cat", LOG)
    workshop.patch("0002-more.patch", "tests: no model", "tests, patched twice: no model")
    checked = play(lab, "playbooks/artifacts.yml", "--check", *arguments)
    assert checked.code == 0, checked.output[-3000:]
    said = " ".join(checked.output.split())
    assert "because patches: 0002-more.patch was added since the image was built" in said
    assert workshop.images() == images
    run = play(lab, "playbooks/artifacts.yml", *arguments)
    assert run.code == 0, run.output[-3000:]
    assert len(workshop.images()) == len(images) + 1
    after = pair.status()
    assert (after["epoch"], after["since"], after["ready"]) == (before["epoch"], before["since"], True)


def test_buildkit_takes_the_same(workshop: Workshop) -> None:
    """Prevents a Dockerfile that only the classic builder takes: newer dockers have the other one."""
    said = workshop.build(workshop.source(hold=False))
    done = workshop.by_hand("tensorfold", said, buildkit=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Sending build context" not in done.stdout
    image = workshop.inspect(HEAD, "unit/tensorfold")
    assert image["Config"]["Labels"]["glm53.version"] == "v0.6.0"
    assert image["Config"]["WorkingDir"] == "/workspace"
    argv = ["run", "--rm", "--network", "none", "unit/tensorfold", "tensorfold", "--version"]
    ran = workshop.pair.lab.docker(HEAD, argv)
    assert "as patched" in ran.stderr
    assert ran.stdout.splitlines()[-1] == "tensorfold 0.6.0"


def test_a_layer_on_vllm(workshop: Workshop) -> None:
    """Prevents files of the owner that reach the image somewhere else than where vLLM is, and a base without
    `patch` on which patches are left out.
    """
    own = workshop.here / "overlay/vllm/unit_overlay.py"
    own.parent.mkdir(parents=True)
    own.write_text("SAYS = 'from the overlay'\n")
    base = workshop.inspect(HEAD, IMAGE)["Id"]
    said = {"base": base, "overlay": "overlay"}
    done = workshop.by_hand("vllm", said, buildkit=0)
    assert done.returncode == 0, done.stderr[-3000:]
    look = (
        "import importlib.util as u, os, runpy;"
        "f = os.path.join(os.path.dirname(u.find_spec('vllm').origin), 'unit_overlay.py');"
        "print(runpy.run_path(f)['SAYS'])"
    )
    argv = ["run", "--rm", "--network", "none", "--entrypoint", "python3", "unit/vllm", "-c", look]
    assert workshop.pair.lab.docker(HEAD, argv).stdout == "from the overlay\n"
    refused = workshop.by_hand("vllm", {**said, "patches": "patches"}, buildkit=0)
    assert refused.returncode != 0
    assert "Found: no program patch in the base image" in refused.stderr
