"""The engine image from a real registry to the head and on to the worker; killed in the middle, and again."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.content import image_content, local_tag
from lab.api import Lab
from lab.playbook import ROOT, playbook
from lab.registry import SECRET, USER, Registry, serving
from lab.settings import ACCOUNT
from tests.lab.conftest import HEAD, WORKER, Pair, Run, play, until

TOKEN = "/root/registry-token"
LOGIN = ("--user", ACCOUNT, "--registry-user", USER, "--token-file", TOKEN)
NO_WAY = "table inet lab_no_way { chain out { type filter hook output priority 0; tcp dport 5000 reject; }; }"
PIPE = "/run/lab-held.pipe"
HOLDER = f"""#!/bin/sh
/usr/bin/zstd "$@" | {{ head -c 3000000; exec cat {PIPE}; }}
"""


def layer(name: str, size: int) -> bytes:
    """A layer of one file that nothing makes smaller."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = size
        tar.addfile(member, io.BytesIO(os.urandom(size)))
    return gzip.compress(raw.getvalue(), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """A registry that wants a login, which both hosts trust and the head has."""

    pair: Pair
    registry: Registry
    folder: Path

    def image(
        self, name: str, *, layers: int = 2, architectures: tuple[str, ...] = ("amd64", "arm64")
    ) -> str:
        """Store a new image; return it by digest."""
        platforms = {a: [layer(f"{a}{n}", 3_000_000) for n in range(layers)] for a in architectures}
        return f"{self.registry.name}/{name}@{self.registry.push(name, platforms)}"

    def play(self, image: str, *arguments: str, pull: str = "head") -> Run:
        """Run playbooks/artifacts.yml for another image than the one that is served; one line of output."""
        run = play(self.pair.lab, "playbooks/artifacts.yml", *self.variables(image, pull), *arguments)
        return Run(code=run.code, output=" ".join(run.output.split()))

    def variables(self, image: str, pull: str) -> tuple[str, ...]:
        """Arguments of a run."""
        values = {
            "glm53_image": image,
            "glm53_image_pull": pull,
            "glm53_registry_user": USER,
            "glm53_registry_token_file": TOKEN,
        }
        return ("-e", json.dumps(values))

    def pull(self, image: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the verb on the head."""
        done = self.pair.lab.exec(HEAD, ["glm53", "image", "pull", *LOGIN, *arguments, image], check=False)
        return subprocess.CompletedProcess([], done.returncode, done.stdout, done.stderr)

    def inspect(self, host: str, image: str) -> dict[str, Any] | None:
        """Return docker's word on an image."""
        done = self.pair.lab.exec(host, ["docker", "image", "inspect", image], check=False)
        return None if done.returncode else json.loads(done.stdout)[0]

    def blobs(self) -> int:
        """How many layers and configurations were asked for."""
        return sum("/blobs/sha256" in line for line in self.registry.requests() if line.startswith("GET"))


@pytest.fixture(scope="module")
def registry(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """The registry."""
    with serving(tmp_path_factory.mktemp("registry"), lab.paths, closed=True) as registry:
        yield registry


@pytest.fixture
def shop(lab: Lab, pair: Pair, registry: Registry, tmp_path: Path) -> Iterator[Shop]:
    """The registry, its certificate and its token on both hosts, which have neither afterwards."""
    for host in (HEAD, WORKER):
        folder = f"/etc/docker/certs.d/{registry.name}"
        pair.sh(host, "sh", "-c", f"mkdir -p {folder} && echo '{registry.certificate}' > {folder}/ca.crt")
        pair.sh(host, "sh", "-c", f"umask 077 && echo {SECRET} > {TOKEN}")
    yield Shop(pair=pair, registry=registry, folder=tmp_path)
    for host in (HEAD, WORKER):
        pair.sh(host, "rm", "-r", "/etc/docker/certs.d", TOKEN)


def leaks(pair: Pair, host: str) -> str:
    """Return where the token shows on a host: processes' arguments and environments, journal, docker."""
    script = f"""
        for p in /proc/[0-9]*; do
            tr '\\0' ' ' < $p/cmdline | grep -q '{SECRET[:3]}[-]{SECRET[4:]}' && echo "argv of $p"
            tr '\\0' ' ' < $p/environ | grep -q '{SECRET[:3]}[-]{SECRET[4:]}' && echo "environment of $p"
        done 2>/dev/null
        journalctl --no-pager | grep -F "$(cat {TOKEN})"
        docker image ls -q | xargs docker image inspect | grep -F "$(cat {TOKEN})"
        grep -rlF "$(cat {TOKEN})" /var/log /home /etc/glm53 /opt/glm53 /tmp"""
    return pair.lab.exec(host, ["bash", "-c", script], check=False).stdout


def test_head_pulls_and_the_worker_gets_it(shop: Shop) -> None:
    """Prevents a pull by hand, one that a check makes or hides, a worker that asks, a token in the open, and
    a second run that does anything.
    """
    image = shop.image("lab/engine")
    checked = shop.play(image, "--check")
    assert checked.code == 0, checked.output[-3000:]
    assert f"would pull {image} (0.01 GB) on {HEAD} from {shop.registry.name}" in checked.output
    assert f"would ship {image}, once the head has it, from {HEAD} to {WORKER}" in checked.output
    assert (shop.inspect(HEAD, image), shop.blobs()) == (None, 0)
    run = shop.play(image)
    assert run.code == 0, run.output[-3000:]
    on_head = shop.inspect(HEAD, image)
    assert on_head is not None
    assert shop.blobs() == 3
    there = shop.inspect(WORKER, local_tag(image_content(on_head)))
    assert there is not None
    assert image_content(there) == image_content(on_head)
    asked = len(shop.registry.requests())
    again = shop.play(image)
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]
    assert len(shop.registry.requests()) == asked
    assert SECRET not in run.output + checked.output + again.output
    assert [leaks(shop.pair, host) for host in (HEAD, WORKER)] == ["", ""]


def test_what_cannot_be_pulled_says_why(shop: Shop) -> None:
    """Prevents one message for a wrong machine, a wrong digest, no login and no way; and bytes in vain."""
    arm = shop.image("lab/arm", architectures=("arm64", "riscv64"))
    before = shop.blobs()
    wrong = shop.pull(arm)
    assert (wrong.returncode, shop.blobs()) == (65, before)
    assert f"{arm} is made for linux/arm64, linux/riscv64; this machine is linux/amd64" in wrong.stderr
    gone = shop.pull(arm.partition("@")[0] + "@sha256:" + "0" * 64)
    assert gone.returncode == 65
    assert "404: 10.78.0.254:5000 has no lab/arm@sha256:000000000000" in gone.stderr
    nobody = shop.pair.lab.exec(HEAD, ["glm53", "image", "pull", "--user", ACCOUNT, arm], check=False)
    assert nobody.returncode == 77
    assert "shows lab/arm to nobody without a login" in nobody.stderr
    shop.pair.sh(HEAD, "sh", "-c", f"echo wrong-token-1234 > {TOKEN}")
    refused = shop.pull(arm)
    assert refused.returncode == 77
    assert "does not let this login read lab/arm" in refused.stderr
    other = shop.pull("10.78.0.254:5999/lab/arm@sha256:" + "0" * 64)
    assert other.returncode == 69
    assert "no way from docker to 10.78.0.254:5999" in other.stderr


def test_a_docker_login_counts(shop: Shop) -> None:
    """Prevents a second place for the login of somebody who has one."""
    image = shop.image("lab/login")
    # By a shell of root, which opens the file: the journal keeps the arguments of runuser beside its line.
    login = f"docker login --username {USER} --password-stdin {shop.registry.name}"
    shop.pair.sh(HEAD, "sh", "-c", f"runuser -u {ACCOUNT} -- {login} < {TOKEN}")
    done = shop.pair.lab.exec(HEAD, ["glm53", "image", "pull", "--user", ACCOUNT, image], check=False)
    shop.pair.sh(HEAD, "rm", "-r", f"/home/{ACCOUNT}/.docker")
    assert done.returncode == 0, done.stderr
    assert shop.inspect(HEAD, image) is not None


def test_a_pull_that_is_killed_goes_well_the_next_time(shop: Shop) -> None:
    """Prevents half an image that passes for one, a lock that outlives its holder, two pulls at once, and a
    token in the arguments or environment of a process.
    """
    image = shop.image("lab/killed", layers=4)
    relay = shop.registry.relay
    relay.carried, relay.hold_after = 0, 7_000_000
    argv = ["glm53", "image", "pull", "--json", *LOGIN, image]
    inside = ["systemd-run", "--unit=lab-pull", "--quiet", *argv]
    shop.pair.sh(HEAD, *inside)
    try:
        until(relay.held.is_set, "the pull is in the middle", 60.0)
        second = shop.pull(image)
        shown = leaks(shop.pair, HEAD)
        shop.pair.sh(HEAD, "systemctl", "kill", "--signal=KILL", "lab-pull")
    finally:
        relay.let_go()
    assert second.returncode == 75, second.stderr
    assert f"another run pulls {image} here (process" in second.stderr
    assert shown == ""
    assert shop.inspect(HEAD, image) is None
    done = shop.pull(image)
    assert done.returncode == 0, done.stderr
    assert shop.inspect(HEAD, image) is not None


def test_the_base_of_an_image_that_is_built_is_pulled_like_any_image(shop: Shop) -> None:
    """Prevents a base that only an owner's own `docker pull` brings, without a login and without a sign."""
    base = shop.image("lab/base")
    (shop.folder / "overlay").mkdir()
    (shop.folder / "overlay/unit.py").write_text("")
    build = {"base": base, "overlay": str(shop.folder / "overlay")}
    asked = ("-e", json.dumps({"glm53_image_build": build}))
    never = shop.play("", *asked, pull="never")
    assert never.code != 0
    assert f"Found: no image {base} in docker on {HEAD}, and no registry is asked" in never.output
    checked = shop.play("", *asked, "--check")
    assert checked.code == 0, checked.output[-3000:]
    assert f"would pull {base} (0.01 GB) on {HEAD} from {shop.registry.name}" in checked.output
    assert "would build glm53/built:" in checked.output
    assert shop.inspect(HEAD, base) is None
    run = shop.play("", *asked)
    assert shop.inspect(HEAD, base) is not None
    # It has no shell to build with: the build ends there, and nothing has a name.
    assert run.code != 0
    assert "The images of before and the pair are as they were" in run.output
    assert shop.pair.sh(HEAD, "docker", "image", "ls", "--quiet", "glm53/built") == ""


def test_never_asks_nobody_and_all_asks_for_itself(shop: Shop) -> None:
    """Prevents a question to a registry from a machine that must not, and a worker that waits for a copy that
    it could have had; one without a way out gets it shipped.
    """
    image = shop.image("lab/each")
    asked = len(shop.registry.requests())
    refused = shop.play(image, pull="never")
    assert refused.code != 0
    assert "and no registry is asked" in refused.output
    assert len(shop.registry.requests()) == asked
    before = shop.blobs()
    run = shop.play(image, pull="all")
    assert run.code == 0, run.output[-3000:]
    assert shop.blobs() == before + 6
    assert [shop.inspect(host, image) is not None for host in (HEAD, WORKER)] == [True, True]
    there = shop.play(image, pull="never")
    assert (there.code, there.changed) == (0, 0), there.output[-3000:]
    lonely = shop.image("lab/lonely")
    shop.pair.sh(WORKER, "sh", "-c", f"echo '{NO_WAY}' | nft -f -")
    try:
        run = shop.play(lonely, pull="all")
    finally:
        shop.pair.sh(WORKER, "nft", "delete", "table", "inet", "lab_no_way")
    assert run.code == 0, run.output[-3000:]
    assert f"{WORKER} gets the image from {HEAD}: " in run.output
    on_head = shop.inspect(HEAD, lonely)
    assert on_head is not None
    assert shop.inspect(WORKER, lonely) is None
    assert shop.inspect(WORKER, local_tag(image_content(on_head))) is not None


def test_a_ship_that_is_killed_goes_well_the_next_time(shop: Shop) -> None:
    """Prevents half an image under the tag that says which one it is, and images that a failed run costs."""
    image = shop.image("lab/ship", layers=3)
    assert shop.pull(image).returncode == 0
    on_head = shop.inspect(HEAD, image)
    assert on_head is not None
    tag = local_tag(image_content(on_head))
    listing = ("docker", "image", "ls", "--all", "--quiet", "--no-trunc")
    before = sorted(shop.pair.sh(WORKER, *listing).split())
    held = f"mkfifo {PIPE}; printf '%s' '{HOLDER}' > /usr/local/bin/zstd; chmod 755 /usr/local/bin/zstd"
    shop.pair.sh(WORKER, "sh", "-c", held)
    argv, environment = playbook(shop.pair.lab, "playbooks/artifacts.yml", *shop.variables(image, "head"))
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        until(
            lambda: shop.pair.lab.exec(WORKER, ["pgrep", "-f", f"cat {PIPE}"], check=False).returncode == 0,
            "half of it",
        )
        shop.pair.sh(
            WORKER,
            "sh",
            "-c",
            f"rm /usr/local/bin/zstd; kill -9 $(pgrep -f '[c]at {PIPE}|[d]ocker load --quiet')",
        )
        output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output[-3000:]
    assert shop.inspect(WORKER, tag) is None
    assert sorted(shop.pair.sh(WORKER, *listing).split()) == before
    run = shop.play(image)
    assert run.code == 0, run.output[-3000:]
    there = shop.inspect(WORKER, tag)
    assert there is not None
    assert image_content(there) == image_content(on_head)
