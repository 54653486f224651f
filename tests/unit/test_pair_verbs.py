"""`glm53 ship` and `glm53 artifacts plan` on the head, and the plan as a pure function."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Entry, Manifest, write_manifest
from glm53_service.artifacts.plan import Place, plan
from glm53_service.artifacts.rates import read_rates, remember
from glm53_service.artifacts.sources import RECIPES, Want
from tests.unit.doubles import free_port, settings_text
from tests.unit.hub_server import COMMIT, sha256
from tests.unit.snapshots import REPOSITORY, flat, model_files
from tests.unit.test_artifact_verbs import run

FILES = model_files()
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
exec sh -c "$*"
"""


def manifest_of(files: dict[str, bytes]) -> Manifest:
    """Return the manifest of these files."""
    entries = tuple(Entry(path=n, size=len(d), sha256=sha256(d)) for n, d in files.items())
    return Manifest(repository=REPOSITORY, revision=COMMIT, files=entries)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head whose ssh leads back to itself: settings, model, manifest. Returns the folder of settings."""
    model = flat(tmp_path / "m", FILES)
    write_manifest(model, manifest_of(FILES))
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "node.yaml").write_text(
        "{version: 1, cluster: unit, node: a, nodes: ["
        "{node: a, management: 10.9.0.1, fabric: [127.0.0.1]},"
        "{node: b, management: 10.9.0.2, fabric: [127.0.0.2]}]}"
    )
    source = {"repository": REPOSITORY, "revision": COMMIT}
    text = settings_text(model, model={"source": source}, gate={"port": free_port()})
    (etc / "settings.yaml").write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("glm53_service.artifacts.pair_verbs.become", lambda *_: None)
    return etc


@contextmanager
def gate(etc: Path, state: str) -> Iterator[None]:
    """Answer as the head's gate does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"state": state}).encode())

        def log_message(self, *_: object) -> None:
            pass

    port = int((etc / "settings.yaml").read_text().partition("gate:")[2].partition("port: ")[2].split()[0])
    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_ship_goes_through_ssh_and_says_the_path(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a copy that nobody can see: over which network, how much, how long."""
    assert run("--etc", str(head), "ship") == 0
    said = capsys.readouterr()
    assert "model to b: 127.0.0.2 over lo (local)" in said.err
    assert f"model {REPOSITORY}@{COMMIT[:12]} on b: complete; nothing sent in" in said.out
    assert run("--etc", str(head), "ship", "--json", "--to", "b") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["node"], answer["files"], answer["bytes"]) == ("b", 0, 0)
    assert run("--etc", str(head), "ship", "--to", "c") == 64


@pytest.mark.parametrize(
    ("state", "code"), [("serving", 75), ("starting", 75), ("waiting", 0), ("backoff", 0)]
)
def test_ship_does_not_starve_a_pair_that_runs(
    head: Path, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a copy at full speed under the requests of a serving pair, unless it is slowed by name."""
    with gate(head, state):
        assert run("--etc", str(head), "ship") == code
        if code:
            assert f"the pair is {state}" in capsys.readouterr().err
        assert run("--etc", str(head), "ship", "--limit", "150") == 0


def test_ship_wants_a_manifest(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a worker that is "equal" to something nobody has ever checked."""
    (tmp_path / "m/.glm53-manifest.json").unlink()
    assert run("--etc", str(head), "ship") == 65
    assert "no manifest" in capsys.readouterr().err


def test_plan_as_an_operator_sees_it(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a surprise of 176 GB: what would be moved is said before, and nothing is touched."""
    assert run("--etc", str(head), "artifacts", "plan") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a", "b"]
    assert all("all there" in line for line in lines)
    assert run("--etc", str(head), "artifacts", "plan", "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(s["node"], s["missing_bytes"], s["room"]) for s in steps] == [("a", 0, True), ("b", 0, True)]


# The plan itself


def want(source: bool = True) -> Want:
    """Return the model as something to have."""
    return Want(what="model", layout=layout_of("/srv/m"), source=RECIPES["tensorfold"] if source else None)


def place(node: str, there: dict[str, int], *, manifest: Manifest | None = None, free: int = 10**12) -> Place:
    """Return one node's files."""
    return Place(node=node, manifest=manifest, there=there, free=free)


def test_a_plan_counts_only_what_is_missing() -> None:
    """Prevents a plan that says 176 GB for one missing shard, and a time from nowhere."""
    manifest = Manifest(
        repository="a/b",
        revision=COMMIT,
        files=(Entry(path="x", size=6_000_000_000), Entry(path="y", size=2_000_000_000)),
    )
    head = place("a", {"x": 6_000_000_000, "y": 2_000_000_000}, manifest=manifest)
    there = place("b", {"x": 6_000_000_000, "y": 1_000}, free=2_500_000_000)
    rates = {"b": 400e6, "hub": 1.0}
    steps = plan(want(), head, [(there, "over unit")], rates=rates, spare=1_000_000_000)
    assert [(s.missing_bytes, s.missing_files, s.seconds) for s in steps] == [
        (0, 0, None),
        (2_000_000_000, 1, 5),
    ]
    assert str(steps[0]).endswith("all there (8.0 GB in /srv/m)")
    assert "1 files, 2.0 GB to get over unit, 5 s at the last rate; THERE IS NO ROOM" in str(steps[1])


def test_a_plan_for_nothing_yet_says_what_the_recipe_says() -> None:
    """Prevents "0 bytes to get" on a bare head."""
    steps = plan(want(), place("a", {}), [(place("b", {}), "over unit")], rates={"hub": 80e6}, spare=1)
    assert [s.missing_bytes for s in steps] == [176_000_000_000] * 2
    assert "about 176.0 GB to get from the hub, 36 min 40 s at the last rate" in str(steps[0])
    assert "last rate" not in str(steps[1])


def test_rates_are_kept_by_node_and_small_copies_say_nothing(tmp_path: Path) -> None:
    """Prevents an estimate from a copy of two small files."""
    path = tmp_path / "c/rates.json"
    remember(path, "b", 99_999_999, 0.1)
    assert read_rates(path) == {}
    remember(path, "b", 3_000_000_000, 2.0)
    remember(path, "hub", 100_000_000, 10.0)
    assert read_rates(path) == {"b": 1.5e9, "hub": 1e7}
