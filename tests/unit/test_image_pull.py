"""`glm53 image pull` against a small Engine API: questions, silence, errors, tries, lines shown."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.images.credentials import Login
from glm53_service.artifacts.images.engine import Daemon, Engine, Platform
from glm53_service.artifacts.images.layers import Layers
from glm53_service.artifacts.images.pull import Outcome, World, pull
from glm53_service.artifacts.images.reference import parse_reference
from glm53_service.artifacts.images.refusals import refusal
from glm53_service.artifacts.images.show import Show
from glm53_service.errors import ArtifactError, AuthError, BusyError, Glm53Error, UnavailableError
from tests.unit.engine_server import DIGEST, IMAGE, NAME, EngineServer, engine_serving, inspect

STATUS = {"status": f"Status: Downloaded newer image for {IMAGE}"}


def layer(name: str, status: str, current: int = 0, total: int = 0) -> dict[str, Any]:
    """A line about one layer."""
    detail = {"current": current, "total": total} if total else {}
    return {"id": name, "status": status, "progressDetail": detail}


def whole() -> list[Any]:
    """The lines of a pull that goes well."""
    return [
        {"status": "Pulling from glm/engine", "id": IMAGE},
        layer("a", "Pulling fs layer"),
        layer("b", "Already exists"),
        layer("a", "Downloading", 1000, 4000),
        layer("a", "Download complete"),
        layer("a", "Pull complete"),
        STATUS,
    ]


@dataclass
class Run:
    """One pull and what it said. `size`, `free`: as the world's; `clock` moves only when a test moves it."""

    root: Path
    server: EngineServer = field(default_factory=EngineServer)
    login: Login | None = None
    size: int | str = 4000
    free: int = 1 << 40
    silence: float = 30.0
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    shown: list[tuple[int, int, int]] = field(default_factory=list)

    def __call__(self, text: str = IMAGE, *, offline: bool = False) -> Outcome:
        """Pull."""
        return asyncio.run(self._run(text, offline))

    async def _run(self, text: str, offline: bool) -> Outcome:
        async with engine_serving(self.server, self.root / "docker.sock"):
            engine = Engine.connect(f"unix://{self.root / 'docker.sock'}")
            try:
                return await pull(text, engine, self.world(), offline=offline)
            finally:
                await engine.close()

    def world(self) -> World:
        """The world of this run."""

        async def login(_: object) -> Login | None:
            return self.login

        async def size(*_: object) -> int | str:
            return self.size

        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)

        return World(
            login=login,
            size=size,
            say=self.said.append,
            show=lambda layers, _: self.shown.append((layers.done, layers.total, layers.bytes)),
            pause=pause,
            clock=lambda: self.now,
            free=lambda _: self.free,
            locks=self.root,
            silence=self.silence,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A pull that nothing has happened to yet."""
    return Run(tmp_path)


def refused(run: Run, kind: type[Glm53Error], text: str = IMAGE, *, offline: bool = False) -> str:
    """Return the message of a pull that ends with just this error."""
    with pytest.raises(Glm53Error) as caught:
        run(text, offline=offline)
    assert type(caught.value) is kind, caught.value
    return str(caught.value)


def test_it_is_asked_for_this_machine_and_pulled_by_digest(run: Run) -> None:
    """Prevents a pull of another platform or by a tag, and one that reports nothing."""
    run.server.pulls = [whole()]
    done = run(f"{NAME}:1.2@{DIGEST}")
    assert run.server.asked == [f"distribution {IMAGE}", f"pull {IMAGE} linux/arm64"]
    assert (done.pulled, done.bytes, done.inspect) == (True, 4000, inspect())
    assert run.shown[-1] == (2, 2, 4000)
    assert run.said == [f"{NAME}:1.2@{DIGEST}: 4.0 kB for linux/arm64 from registry.example:5000"]
    run.server.images.clear()
    run.size, run.server.pulls = 9000, [whole(), [layer("a", "Download complete"), STATUS]]
    assert run().bytes == 4000, "a layer was there already"
    run.server.images.clear()
    assert run().bytes == 9000, "docker said no size"


def test_what_is_there_is_taken_and_nobody_is_asked(run: Run) -> None:
    """Prevents a pull that replaces a local build, or a start that needs a registry."""
    for name in (IMAGE, "glm53/engine:built", "sha256:" + "ab" * 32):
        run.server.images[name] = inspect()
        assert run(name).pulled is False
    assert run(IMAGE, offline=True).pulled is False
    assert run.server.asked == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("glm53/engine:built", "named by a tag: only a digest is pulled"),
        ("sha256:" + "ab" * 32, "the id of a local build cannot be pulled"),
    ],
)
def test_only_a_digest_is_pulled(run: Run, text: str, words: str) -> None:
    """Prevents another image under yesterday's tag."""
    assert words in refused(run, ArtifactError, text)
    assert run.server.asked == []


def test_offline_asks_nobody(run: Run) -> None:
    """Prevents a question to a registry from a machine that must not ask, and an error without a way out."""
    said = refused(run, ArtifactError, offline=True)
    assert "no registry is asked" in said
    assert "docker load" in said
    assert run.server.asked == []


def test_a_wrong_architecture_is_refused_before_a_byte_comes(run: Run) -> None:
    """Prevents 25 GB of 'exec format error'; signatures in an index are no platform."""
    run.server.platforms = [
        {"os": "linux", "architecture": "amd64"},
        {"os": "unknown", "architecture": "unknown"},
    ]
    assert "is made for linux/amd64; this machine is linux/arm64" in refused(run, ArtifactError)
    assert run.server.asked == [f"distribution {IMAGE}"]


def test_a_wrong_architecture_that_is_there_is_named(run: Run) -> None:
    """Prevents a start with an image of another machine, since it is there."""
    run.server.images[IMAGE] = inspect("amd64")
    assert "is made for linux/amd64; this machine is linux/arm64" in refused(run, ArtifactError)


def test_what_came_is_compared(run: Run) -> None:
    """Prevents an image that a mirror gave under the digest's name, or that nobody could tell before."""
    run.server.platforms = []
    run.server.arrives, run.server.pulls = inspect("amd64"), [whole()]
    assert "is made for linux/amd64" in refused(run, ArtifactError)
    run.server.images.clear()
    run.server.arrives, run.server.pulls = inspect(digest="sha256:" + "66" * 32), [whole()]
    assert f"expected {DIGEST}" in refused(run, ArtifactError)


class Slow:
    """An engine whose lines take time by the run's own clock: seconds before each line."""

    def __init__(self, run: Run, *pulls: list[tuple[float, Any]]) -> None:
        self._run, self._pulls = run, list(pulls)
        self._there = False

    async def daemon(self) -> Daemon:
        return Daemon(platform=Platform(os="linux", architecture="arm64"), root="/")

    async def image(self, _: str) -> dict[str, Any] | None:
        return inspect() if self._there else None

    async def platforms(self, *_: object) -> list[Platform]:
        return []

    async def pull(self, *_: object) -> AsyncGenerator[dict[str, Any], None]:
        for seconds, line in self._pulls.pop(0):
            self._run.now += seconds
            self._there = line is STATUS
            yield line


def test_a_slow_pull_is_healthy_however_long_it_takes(run: Run) -> None:
    """Prevents report 73: a deadline that kills a pull with progress each 30 s for 20 minutes."""
    lines = [(29.0, layer("a", "Downloading", step * 100, 4000)) for step in range(1, 41)]
    engine = Slow(run, [*lines, (1.0, layer("a", "Pull complete")), (0.0, STATUS)])
    assert asyncio.run(pull(IMAGE, engine, run.world())).seconds == 40 * 29.0 + 1.0
    assert run.pauses == []


def test_lines_that_repeat_are_silence(run: Run) -> None:
    """Prevents a stall that a store hides by repeating the same numbers ten times a second."""
    same = [(10.0, layer("a", "Downloading", 10, 40))] * 5
    engine = Slow(run, [*same, (0.0, STATUS)], [(0.0, STATUS)])
    assert asyncio.run(pull(IMAGE, engine, run.world())).pulled
    assert [said for said in run.said if "the pull has stalled: nothing moved for 30 s" in said]
    layers = Layers()
    assert layers.take(layer("a", "Downloading", 10, 40))
    assert not layers.take(layer("a", "Downloading", 10, 40))
    assert layers.take(layer("a", "Downloading", 11, 40))
    assert layers.take(layer("b", "Waiting"))
    assert layers.take({"status": "Pulling from x", "id": IMAGE})
    assert not layers.take({"status": "Pulling from x", "id": IMAGE})


def test_a_pull_in_which_nothing_moves_has_stalled_and_is_tried_again(run: Run) -> None:
    """Prevents a pull that waits for ever, one that never gets a second try, and one that goes on unheard."""
    run.silence = 0.2
    never = asyncio.Event
    run.server.pulls = [[layer("a", "Downloading", 1000, 4000), never()], whole()]
    done = run()
    assert (done.pulled, run.server.gone) == (True, 1)
    assert any(
        "the pull has stalled: nothing moved for 0 s, last Downloading (a)" in said for said in run.said
    )
    assert len(run.pauses) == 1


def test_it_gives_up_when_nothing_comes_any_more(run: Run) -> None:
    """Prevents a playbook that tries for ever, and a count that bytes in between do not begin anew."""
    broken = {"error": "unexpected EOF", "errorDetail": {"message": "unexpected EOF"}}
    some = [layer("a", "Downloading", 1000, 4000), broken]
    run.server.pulls = [[broken]] * 7 + [some] + [[broken]] * 7 + [whole()]
    assert "no way from docker to registry.example:5000: unexpected EOF" in refused(run, UnavailableError)
    assert len(run.server.pulls) == 1
    assert len(run.pauses) == 14
    assert max(run.pauses) <= 60.0 * 1.3


def test_a_docker_that_goes_away_in_the_middle_is_no_success(run: Run) -> None:
    """Prevents `pulled` after a restart of docker: the lines just end."""
    run.server.pulls = [[layer("a", "Downloading", 1000, 4000)], whole()]
    assert run().pulled
    assert f"docker broke the pull of {IMAGE} off" in run.said[1]


def test_a_registry_that_is_never_reached_is_told_soon(run: Run) -> None:
    """Prevents a worker without a way out that holds up site.yml through eight tries."""
    run.server.refusals = [(500, "dial tcp: lookup registry.example: no such host")] * 5
    said = refused(run, UnavailableError)
    assert "no way from docker to registry.example:5000: dial tcp" in said
    assert len(run.server.asked) == 3


def test_there_must_be_room(run: Run) -> None:
    """Prevents a disk that is full after an hour of pulling, and a check that is silently left out."""
    run.size, run.free = 25_000_000_000, 49_000_000_000
    said = refused(run, ArtifactError)
    assert "/var/lib/docker: 49.0 GB free for docker" in said
    assert run.server.asked == [f"distribution {IMAGE}"]
    run.size, run.server.pulls = "the registry asks for a login of another kind", [whole()]
    assert run().pulled
    assert run.said == [f"{IMAGE}: how much it is, and whether there is room, is not known ({run.size})"]


def test_two_runs_keep_apart(run: Run) -> None:
    """Prevents two pulls of the same image; what another image does is nobody's business."""
    lock = run.root / f"glm53-image-{DIGEST[7:19]}.lock"
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert f"another run pulls {IMAGE} here (process {os.getpid()})" in refused(run, BusyError)
    finally:
        os.close(descriptor)
    run.server.pulls = [whole()]
    assert run().pulled


def test_an_image_that_another_run_has_just_brought_is_taken(run: Run) -> None:
    """Prevents a second pull after the wait of a person for the first one."""
    run.server.images[IMAGE] = inspect()
    assert run().pulled is False


def test_the_login_goes_to_docker_and_nowhere_else(run: Run) -> None:
    """Prevents a token in a message; and a login that only one of the two requests carries."""
    run.login = Login(user="me", secret="CANARY-9", source="/x")
    run.server.pulls = [whole()]
    run()
    login = {"username": "me", "password": "CANARY-9", "serveraddress": "registry.example:5000"}
    assert run.server.logins == [login, login]
    assert "CANARY" not in "".join(run.said) + repr(run.login)


REAL = [
    (
        500,
        'Get "https://r/v2/": x509: certificate signed by unknown authority',
        UnavailableError,
        "does not trust",
    ),
    (404, "manifest unknown: manifest unknown", ArtifactError, "404: "),
    (404, "manifest for r/e@sha256:00 not found: manifest unknown: manifest unknown", ArtifactError, "404: "),
    (500, "dial tcp 10.0.0.1:5999: connect: connection refused", UnavailableError, "no way"),
    (500, "dial tcp 192.0.2.1:443: connect: network is unreachable", UnavailableError, "no way"),
    (
        500,
        "lookup no.where on [::1]:53: read udp [::1]:4->[::1]:53: read: connection refused",
        UnavailableError,
        "no way",
    ),
    (500, 'Get "https://r/v2/": no basic auth credentials', AuthError, "401 or 403"),
    (401, "unauthorized: authentication required", AuthError, "401 or 403"),
    (
        404,
        "pull access denied for x, repository does not exist or may require 'docker login': denied",
        AuthError,
        "401",
    ),
    (500, "proxyconnect tcp: Proxy Authentication Required", UnavailableError, "no way"),
    (0, "toomanyrequests: You have reached your pull rate limit.", UnavailableError, "429: "),
    (0, "write /var/lib/docker/tmp/x: no space left on device", ArtifactError, "the disk of docker is full"),
    (
        0,
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
        ArtifactError,
        "nothing for this",
    ),
    (500, "something new", UnavailableError, "docker could not pull"),
]


@pytest.mark.parametrize(
    ("status", "words", "kind", "message"), REAL, ids=[words[:30] for _, words, *_ in REAL]
)
def test_docker_s_words_get_ours(status: int, words: str, kind: type[Glm53Error], message: str) -> None:
    """Prevents one message for a missing login, a typing mistake and a pulled cable."""
    found = refusal(status, words, parse_reference(IMAGE), has_login=False)
    assert type(found.error) is kind
    assert message in found.error.message
    assert found.error.hint
    once = message == "does not trust" or words.startswith("proxyconnect")
    assert found.again is (kind is UnavailableError and not once)


def test_a_reference_is_read_as_docker_reads_it() -> None:
    """Prevents a login, or a question, for another registry than docker asks."""
    found = {
        name: (ref.registry, ref.repository, ref.key)
        for name in ("vllm/vllm-openai:1", "debian", "ghcr.io/a/b", "localhost/x", "host:5000/x:2")
        if (ref := parse_reference(f"{name}@{DIGEST}"))
    }
    assert found == {
        "vllm/vllm-openai:1": ("docker.io", "vllm/vllm-openai", "https://index.docker.io/v1/"),
        "debian": ("docker.io", "library/debian", "https://index.docker.io/v1/"),
        "ghcr.io/a/b": ("ghcr.io", "a/b", "ghcr.io"),
        "localhost/x": ("localhost", "x", "localhost"),
        "host:5000/x:2": ("host:5000", "x", "host:5000"),
    }


@pytest.fixture
def clock() -> list[float]:
    """A clock that a test moves."""
    return [0.0]


def test_what_is_shown_says_how_far_and_how_long(clock: list[float]) -> None:
    """Prevents a pull of an hour without a sign, and a program that has to read sentences."""
    out = io.StringIO()
    show = Show(lambda: clock[0], as_json=True, out=out)
    layers = Layers()
    layers.take(layer("b", "Already exists"))
    for second, have in ((0.0, 1000), (1.0, 1100), (10.0, 2000), (20.0, 2900), (40.0, 3000)):
        clock[0] = second
        layers.take(layer("a", "Downloading", have, 4000))
        show.layers(layers, 4000)
    show.say("a word")
    first, second_line, _, last, word = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first["seconds_left"] is None
    assert second_line == {
        "event": "progress",
        "what": "image",
        "layers": 1,
        "layers_total": 2,
        "bytes": 2000,
        "bytes_total": 4000,
        "bytes_per_second": 100,
        "seconds_left": 20,
        "doing": "Downloading (a)",
    }
    assert (last["bytes_per_second"], last["seconds_left"]) == (5, 200)
    assert word == {"event": "message", "text": "a word"}
    text = io.StringIO()
    Show(lambda: 0.0, out=text).layers(layers, None)
    assert text.getvalue() == "image: 1 of 2 layers, 3.0 kB, 0 MB/s, Downloading (a)\n"
