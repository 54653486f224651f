"""`glm53 ship` and `glm53 artifacts plan` on the head, and the plan as a pure function."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.layout import layout_of
from glm53_service.artifacts.manifest import Entry, Manifest, write_manifest
from glm53_service.artifacts.pair_verbs import _speed
from glm53_service.artifacts.plan import Place, Snapshot, Step, plan
from glm53_service.artifacts.rates import read_rates, remember
from glm53_service.artifacts.sources import RECIPES, Want
from glm53_service.errors import BusyError
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

    server = HTTPServer(("127.0.0.1", port_of(etc)), Handler)
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
    assert run("--etc", str(head), "ship", "--json", "--full", "--to", "b") == 0
    *lines, answer = map(json.loads, capsys.readouterr().out.splitlines())
    assert (answer["node"], answer["files"], answer["bytes"]) == ("b", 0, 0)
    assert {
        "event": "message",
        "text": "b: hashing model-00001-of-00003.safetensors, which is there already",
    } in lines
    assert run("--etc", str(head), "ship", "--to", "c") == 64


def port_of(etc: Path) -> int:
    """Return the gate's port in these settings."""
    return int((etc / "settings.yaml").read_text().partition("gate:")[2].partition("port: ")[2].split()[0])


@pytest.mark.parametrize(
    ("state", "runs"), [("serving", True), ("starting", True), ("waiting", False), ("backoff", False)]
)
def test_a_copy_does_not_starve_a_pair_that_runs(head: Path, state: str, runs: bool) -> None:
    """Prevents a copy at full speed under the requests of a serving pair, unless it is slowed by name."""
    with gate(head, state):
        assert _speed(port_of(head), 0.0, 150.0)() == (150e6 if runs else 0.0)
        assert _speed(port_of(head), 30.0, 150.0)() == 30e6
        refused = _speed(port_of(head), 0.0, 0.0)
        if runs:
            with pytest.raises(BusyError, match=f"the pair is {state}: a copy at full speed would starve"):
                refused()
        else:
            assert refused() == 0.0
    assert _speed(port_of(head), 0.0, 150.0)() == 0.0


def test_ship_needs_no_leave_when_nothing_is_sent(head: Path) -> None:
    """Prevents a run that fails on a serving pair whose weights are all there."""
    with gate(head, "serving"):
        assert run("--etc", str(head), "ship") == 0


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


def test_plan_says_that_the_worker_cannot_be_looked_at(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a plan that calls a worker empty because its login failed."""
    (tmp_path / "bin/ssh").write_text("#!/bin/sh\necho no such login >&2\nexit 255\n")
    assert run("--etc", str(head), "artifacts", "plan") == 69
    assert "b: it cannot be looked at: no such login" in capsys.readouterr().err


# The plan itself


MANIFEST = Manifest(
    repository="a/b",
    revision=COMMIT,
    files=(
        Entry(path="config.json", size=2, sha256="c" * 64),
        Entry(path="x.safetensors", size=6_000_000_000, sha256="a" * 64),
        Entry(path="y.safetensors", size=2_000_000_000, sha256="b" * 64),
    ),
)
SIZES = {entry.path: (entry.size, 5) for entry in MANIFEST.files}
EACH = 1_000_000_000


def want(source: bool = True) -> Want:
    """Return the model as something to have."""
    return Want(what="model", layout=layout_of("/srv/m"), source=RECIPES["tensorfold"] if source else None)


def place(node: str, files: dict[str, tuple[int, int]], **more: Any) -> Place:
    """Return one node's files: size and time of each."""
    return Place(**{"node": node, "manifest": None, "files": files, "free": 10**12, **more})


def steps(
    head: Place, *workers: Place, rates: dict[str, float] | None = None, source: bool = True
) -> tuple[Step, ...]:
    """Return the plan of one snapshot."""
    snapshot = Snapshot(want=want(source), head=head, workers=[(w, f"over {w.node}") for w in workers])
    return plan([snapshot], rates=rates or {}, spare=EACH)


def test_a_plan_counts_only_what_is_missing() -> None:
    """Prevents a plan that says 176 GB for one missing shard, and a time from nowhere."""
    there = {**SIZES, "y.safetensors": (1000, 5)}
    there_b = place("b", there, manifest=MANIFEST, free=2_500_000_000)
    found = steps(place("a", SIZES, manifest=MANIFEST), there_b, rates={"b": 400e6, "hub": 1.0})
    assert [(s.missing_bytes, s.missing_files, s.seconds, s.settled) for s in found] == [
        (0, 0, None, True),
        (2_000_000_000, 1, 5, False),
    ]
    assert str(found[0]).endswith("all there (8.0 GB in /srv/m)")
    assert (
        "1 files, 2.0 GB to get over b, 5 s at the last rate; THERE IS NO ROOM FOR IT (2.5 GB free)"
        in str(found[1])
    )
    part = {".y.safetensors.bbbbbbbbbbbbbbbb.incomplete": 900_000_000}
    halfway = place("b", there, manifest=MANIFEST, free=2_500_000_000, parts=part)
    assert [s.room for s in steps(place("a", SIZES, manifest=MANIFEST), halfway)] == [True, True]


def test_a_copy_that_nobody_vouches_for_is_hashed_there_not_fetched_again() -> None:
    """Prevents 164 GiB over the fabric, beside an owner's own cache, because of other times."""
    head = place("a", SIZES, manifest=MANIFEST)
    other_times = {path: (size, 9) for path, (size, _) in SIZES.items()}
    (_, own) = steps(head, place("b", other_times))
    assert (own.missing_bytes, own.hash_bytes, own.settled) == (0, 8_000_000_000, False)
    assert str(own).endswith("all there (8.0 GB in /srv/m, 8.0 GB of it to be hashed once)")
    (_, proven) = steps(head, place("b", other_times, manifest=MANIFEST))
    assert (proven.hash_bytes, proven.settled) == (0, True)
    changed = {"y.safetensors": ""}
    (_, touched) = steps(head, place("b", other_times, manifest=MANIFEST, changed=changed))
    assert (touched.hash_bytes, touched.settled) == (2_000_000_000, False)
    (_, shipped) = steps(head, place("b", SIZES, manifest=MANIFEST, changed=changed))
    assert (shipped.hash_bytes, shipped.settled) == (0, True)
    (_, edited) = steps(head, place("b", SIZES, manifest=MANIFEST, changed={"config.json": "d" * 64}))
    assert (edited.missing_files, edited.settled) == (1, False)


def test_a_heads_own_files_are_the_measure_when_nobody_has_made_a_manifest() -> None:
    """Prevents a plan that fetches a model which somebody brought on a disk, or forgets to hash it."""
    (own, there, bare) = steps(place("a", SIZES), place("b", SIZES), place("c", {}), source=False)
    assert (own.missing_bytes, own.hash_bytes, own.settled) == (0, 8_000_000_002, False)
    assert (there.missing_bytes, there.hash_bytes, there.settled) == (0, 8_000_000_000, False)
    assert (bare.missing_files, bare.missing_bytes, bare.estimated) == (3, 8_000_000_002, False)
    cut = place("a", SIZES, missing=("z.safetensors",))
    assert [s.missing_files for s in steps(cut, place("b", {}), source=False)] == [None, None]


def test_files_that_the_head_has_not_are_named() -> None:
    """Prevents an engine that loads what an older copy left."""
    head = place("a", {**SIZES, "notes.txt": (3, 5)}, manifest=MANIFEST)
    more = {**SIZES, "notes.txt": (3, 5), "old.safetensors": (4, 5)}
    (_, found) = steps(head, place("b", more, manifest=MANIFEST))
    assert found.extra == ("old.safetensors",)
    assert str(found).endswith("; 1 files there that the head has not (old.safetensors)")


def test_room_is_counted_for_all_that_comes_to_a_file_system_together() -> None:
    """Prevents a model that fits and a drafter that fits, which do not fit together."""
    head = place("a", SIZES, manifest=MANIFEST)

    def room(second: int) -> list[bool]:
        free = 2 * 8_000_000_002 + EACH - 1
        both = [
            Snapshot(want=want(), head=head, workers=[(place("b", {}, free=free, file_system=system), "")])
            for system in (7, second)
        ]
        return [step.room for step in plan(both, rates={}, spare=EACH) if step.node == "b"]

    assert (room(7), room(8)) == ([False, False], [True, True])


def test_a_full_disk_is_no_matter_when_all_is_there() -> None:
    """Prevents a second run that fails on a node whose weights are complete."""
    found = steps(place("a", SIZES, manifest=MANIFEST, free=0), place("b", SIZES, manifest=MANIFEST, free=0))
    assert [s.room for s in found] == [True, True]


def test_a_plan_for_nothing_yet_says_what_the_recipe_says() -> None:
    """Prevents "0 bytes to get" on a bare head."""
    found = steps(place("a", {}), place("b", {}), rates={"hub": 80e6})
    assert [s.missing_bytes for s in found] == [176_000_000_000] * 2
    assert "about 176.0 GB to get from the hub, 36 min 40 s at the last rate" in str(found[0])
    assert "last rate" not in str(found[1])


def test_rates_are_kept_by_node_and_small_copies_say_nothing(tmp_path: Path) -> None:
    """Prevents an estimate from a copy of two small files."""
    path = tmp_path / "c/rates.json"
    remember(path, "b", 99_999_999, 0.1)
    assert read_rates(path) == {}
    remember(path, "b", 3_000_000_000, 2.0)
    remember(path, "hub", 100_000_000, 10.0)
    assert read_rates(path) == {"b": 1.5e9, "hub": 1e7}
