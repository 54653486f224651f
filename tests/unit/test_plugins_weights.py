"""Folders of weights in the playbooks: which are needed, what the plan says, how a long verb is followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.content import image_content, local_tag
from glm53_service.artifacts.folders import needed_folders, unused_drafter
from glm53_service.artifacts.look import link, look
from glm53_service.artifacts.manifest import ADOPTED, Entry, Manifest, write_manifest
from glm53_service.artifacts.progress import Progress
from glm53_service.settings import Settings, load_settings, settings_from
from tests.unit.hub_server import COMMIT, sha256
from tests.unit.plugin_loader import CHECKOUT, load
from tests.unit.snapshots import REPOSITORY, flat, model_files, touch_after

filters = load("filter", "glm53_artifacts")
follow = load("action", "glm53_follow")

LICENCE = {"accepted_by": "Ada Example", "accepted_on": "2026-11-02", "use": "non-commercial"}
FILES = model_files()
SHARD = "model-00002-of-00003.safetensors"


def settings(**drafter: Any) -> Settings:
    """Settings of TensorFold with this drafter section."""
    return settings_from(
        {
            "version": 1,
            "cluster": "probe",
            "image": "example/engine@sha256:" + "a" * 64,
            "model": {"path": "/data/model", "name": "M"},
            "drafter": drafter,
        },
        "test",
    )


def test_the_drafter_is_needed_once_its_licence_is_accepted() -> None:
    """Prevents a start that misses a folder which no run ever shipped."""
    both = needed_folders(settings(path="/data/draft", licence=LICENCE, sha256="c" * 64))
    assert [(f.name, f.path, f.sha256) for f in both] == [
        ("model", "/data/model", ""),
        ("drafter", "/data/draft", "c" * 64),
    ]
    assert both[1].needed == ("config.json", "model.safetensors")
    assert unused_drafter(settings(path="/data/draft", licence=LICENCE)) == ""


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"path": "/data/draft"}, "DFlash2's licence is not accepted"),
        ({"path": "/data/draft", "licence": LICENCE, "request": "mtp"}, "drafter.request: mtp"),
    ],
)
def test_a_drafter_without_leave_is_not_shipped_and_that_is_said(drafter: dict[str, Any], said: str) -> None:
    """Prevents spreading DFlash2 to nodes of somebody who never accepted its licence."""
    wanted = settings(**drafter)
    assert [f.name for f in needed_folders(wanted)] == ["model"]
    text = unused_drafter(wanted)
    assert text.startswith("drafter /data/draft is neither required nor shipped: ")
    assert said in text
    assert unused_drafter(settings()) == ""


# The plan, from what the module reads of real folders


def folder(path: Path, **more: Any) -> dict[str, Any]:
    """A folder as the playbooks hand it round."""
    return {
        "name": "model",
        "path": str(path),
        "needed": ["config.json"],
        "source": None,
        "sha256": "",
        **more,
    }


def manifest_of(files: dict[str, bytes], revision: str = COMMIT) -> Manifest:
    """Return the manifest of these files."""
    entries = tuple(Entry(path=n, size=len(d), sha256=sha256(d)) for n, d in sorted(files.items()))
    return Manifest(repository=REPOSITORY if revision == COMMIT else "", revision=revision, files=entries)


IMAGE = {"reference": f"registry.example/glm@sha256:{'7' * 64}", "bytes": 26_000_000_000, "why": ""}
BUILT: dict[str, Any] = {"Architecture": "arm64", "RootFS": {"Layers": ["sha256:1"]}, "Size": 52_000_000_000}


def nodes(tmp_path: Path, **ways: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is known of a head and a worker after glm53_weights has read their folders."""
    rails = {host: [{"netdev": "enp1s0f0np0", "address": f"10.9.0.{n}/24"}] for n, host in enumerate("ab", 1)}
    found: dict[str, dict[str, Any]] = {}
    for host in "ab":
        # The module's answer has gone through JSON.
        looks = json.loads(json.dumps([look(str(tmp_path / host))]))
        seen = {"looks": looks, "rates": {"b": 1000.0}, "ways": {"10.9.0.2": ways.get("way", {})}}
        docker: dict[str, Any] = {"answers": True, "image": None, "shipped": {}, "free_bytes": 10**12}
        found[host] = {
            "glm53_fabric_rails": rails[host],
            "__plan_seen": seen,
            "__glm53_found": {"docker": docker},
        }
    return found


def test_check_mode_says_what_is_to_be_moved_before_the_rails_are_there(tmp_path: Path) -> None:
    """Prevents a dry run on a bare pair that plans 176 GB over the office network."""
    write_manifest(flat(tmp_path / "a", FILES), manifest_of(FILES))
    way = {"netdev": "eno1", **link("eno1", tmp_path)}
    plan = filters.glm53_plan(["a", "b"], nodes(tmp_path, way=way), [folder(tmp_path / "a")], IMAGE)
    assert plan["lines"][0].startswith("a: model: all there (")
    assert "7 files, 9.4 kB to get from the head, 10.9.0.2, a rail that is not set up yet" in plan["lines"][1]
    assert (plan["adopt"], plan["todo"]) == ([], ["b"])
    way = {**way, "netdev": "enp1s0f0np0", "rdma": True, "speed": 200000}
    plan = filters.glm53_plan(["a", "b"], nodes(tmp_path, way=way), [folder(tmp_path / "a")], IMAGE)
    assert (
        "from the head, 10.9.0.2 over enp1s0f0np0 (fabric, 200 Gb/s), 9 s at the last rate"
        in plan["lines"][1]
    )


def test_nothing_is_done_where_all_is_proven(tmp_path: Path) -> None:
    """Prevents a second run that starts copies, and one that skips a node whose weights nobody has hashed."""
    for host in "ab":
        write_manifest(flat(tmp_path / host, FILES), manifest_of(FILES))
    plan = filters.glm53_plan(["a", "b"], nodes(tmp_path), [folder(tmp_path / "a")], IMAGE)
    assert (plan["adopt"], plan["todo"], plan["extra"]["b"], plan["tight"]["b"]) == ([], [], [], [])
    (tmp_path / "b/old.safetensors").write_bytes(b"x")
    shard, record = tmp_path / "b" / SHARD, tmp_path / "b/.glm53-manifest.json"
    touch_after(shard, record, lambda: shard.write_bytes(FILES[SHARD]))
    plan = filters.glm53_plan(["a", "b"], nodes(tmp_path), [folder(tmp_path / "a")], IMAGE)
    assert plan["todo"] == ["b"]
    assert "1 files there that the head has not (old.safetensors)" in plan["extra"]["b"][0]
    for host in "ab":
        (tmp_path / host / ".glm53-manifest.json").unlink()
    (tmp_path / "b/old.safetensors").unlink()
    plan = filters.glm53_plan(["a", "b"], nodes(tmp_path), [folder(tmp_path / "a")], IMAGE)
    assert (plan["adopt"], plan["todo"]) == (["model"], ["b"])
    assert all("to be hashed once" in line for line in plan["lines"] if ": image " not in line)


def faults(path: Path, **more: Any) -> list[str]:
    """What is wrong with a head's folder."""
    seen = {"looks": [look(str(path))]}
    return [
        str(p).replace(str(path), "F") for p in filters.glm53_incomplete(seen, [folder(path, **more)], "a")
    ]


def test_an_incomplete_head_is_named(tmp_path: Path) -> None:
    """Prevents shipping half of a download, or a drafter that nobody pinned."""
    assert faults(tmp_path / "none") == ["model F: no such directory, or an empty one"]
    head = flat(tmp_path / "a", FILES)
    assert faults(head) == []
    (head / "config.json").write_bytes(b"")
    (head / SHARD).unlink()
    (head / "x").symlink_to(tmp_path / "nothing")
    assert faults(head) == [
        "model F: config.json is missing or empty",
        f"model F: 2 links lead nowhere or files of its index are missing (x, {SHARD})",
    ]
    whole = flat(tmp_path / "b", FILES)
    weights = {**FILES, "model.safetensors": b"w"}
    (whole / "model.safetensors").write_bytes(b"w")
    write_manifest(whole, manifest_of(weights, ADOPTED))
    assert faults(whole, sha256=sha256(b"w")) == []
    (whole / SHARD).write_bytes(FILES[SHARD][:-1])
    assert faults(whole, sha256="c" * 64) == [
        f"model F: 1 files are not what its manifest says ({SHARD})",
        f"model F: model.safetensors has SHA-256 {sha256(b'w')[:12]}, the inventory's glm53_drafter.sha256 is"
        " cccccccccccc",
    ]


class Tagged(str):
    """Strings as Ansible hands them to filters: a class of their own."""

    __slots__ = ()


def tagged(value: Any) -> Any:
    """Return data with Ansible's strings in it, keys too."""
    if isinstance(value, dict):
        return {Tagged(key): tagged(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(inner) for inner in value]
    return Tagged(value) if isinstance(value, str) else value


NODE = """version: 1
cluster: probe
node: n-a
nodes:
- {node: n-a, management: 10.9.0.1, fabric: [10.1.0.1]}
- {node: n-b, management: 10.9.0.2, fabric: [10.1.0.2]}
"""
SETTINGS = """version: 1
cluster: probe
image: example/engine@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
model: {path: /data/model, name: M}
drafter: {path: /data/draft}
gate: {port: 8777}
"""


def test_the_playbooks_are_told_what_the_settings_need_of_the_nodes() -> None:
    """Prevents a playbook that reckons for itself what the service reads otherwise."""
    config = load("action", "glm53_config")
    found, problems = config.read(SETTINGS, NODE, 2)
    assert problems == []
    assert [folder["path"] for folder in found["folders"]] == ["/data/model"]
    assert filters._folders(tagged(found["folders"])) == list(needed_folders(load_settings(SETTINGS, "test")))
    assert found["unused_drafter"].startswith("drafter /data/draft")
    assert [claim["port"] for claim in found["claims"]["n-b"]] == [8777]
    worker, problems = config.read("", NODE, 2)
    assert (worker["folders"], problems) == ([], [])
    _, both = config.read(SETTINGS.replace("8777", "no"), NODE.replace("10.1.0.2", "x"), 3)
    assert ["gate.port" in both[0], "nodes[1].fabric" in both[1], len(both)] == [True, True, 2]


# What is shown while a verb runs


def test_the_lines_of_a_verb_are_those_that_it_prints_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents an hour of a copy in which Ansible shows nothing, or something else than the verb would."""
    now = [0.0]

    def copy(as_json: bool) -> str:
        now[0] = 0.0
        progress = Progress("to b", 3, 3_000_000_000, clock=lambda: now[0], as_json=as_json)
        now[0] = 10.0
        progress.count(1_000_000_000)
        progress.say("x: arrived wrong; sent again")
        said = capsys.readouterr()
        return said.out + said.err

    plain = copy(as_json=False).splitlines()
    assert plain[0] == "to b: 0 of 3 files, 1.0 GB of 3.0 GB, 100 MB/s, 20 s left"
    text = copy(as_json=True) + '{"event": "result", "files": 1}\n{"event": "progr'
    assert [line for event in follow.events(text) if (line := follow.line_of(event))] == plain


VERB = """import json, sys, time
from pathlib import Path
from glm53_service.artifacts.progress import Progress
progress = Progress("to b", 1, 4, clock=iter([0.0, 10.0, 10.0, 20.0, 20.0]).__next__, as_json=True)
progress.count(2)
Path(sys.argv[1]).touch()
for _ in range(3000):
    if not Path(sys.argv[2]).exists():
        time.sleep(0.01)
print(json.dumps({"event": "result", "files": int(sys.argv[3])}))
print("what the verb says of itself", file=sys.stderr)
sys.exit(int(sys.argv[4]))
"""


def followed(tmp_path: Path, code: int, seconds: int = 60) -> tuple[str, dict[str, Any]]:
    """Run a verb through the plugin as a play does; it ends once the plugin's line was shown."""
    (tmp_path / "verb.py").write_text(VERB)
    argv = [
        sys.executable,
        str(tmp_path / "verb.py"),
        str(tmp_path / "begun"),
        str(tmp_path / "end"),
        "7",
        str(code),
    ]
    task = {"name": "Follow", "glm53_follow": {"argv": argv}, "async": seconds, "poll": 0, "register": "done"}
    shown = {
        "name": "Keep",
        "copy": {"content": "{{ done | to_json }}", "dest": str(tmp_path / "done.json"), "mode": "0600"},
    }
    tasks = [{**task, "ignore_errors": True}, shown]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    run = [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", str(tmp_path / "play.yml")]
    run += ["-e", f"ansible_python_interpreter={sys.executable}", "-e", f"ansible_async_dir={tmp_path}/jobs"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "PYTHONUNBUFFERED": "1"}
    output = ""
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment) as process:
        for line in process.stdout or ():
            output += line
            if "of 1 files" in line:
                (tmp_path / "end").touch()
    answer: dict[str, Any] = json.loads((tmp_path / "done.json").read_text())
    return output, answer


def test_a_long_verb_shows_where_it_is_while_it_runs(tmp_path: Path) -> None:
    """Prevents 176 GB in which Ansible shows nothing: the verb here ends only once its line was seen."""
    output, done = followed(tmp_path, 0)
    assert "  localhost to b: 0 of 1 files, 2 B of 4 B, 0 MB/s, 10 s left" in output
    assert (done["changed"], done.get("failed", False), done["rc"]) == (True, False, 0)
    assert done["events"] == [{"event": "result", "files": 7}]
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_long_verb_that_fails_fails_with_its_own_words(tmp_path: Path) -> None:
    """Prevents a refused copy that ends green, and one that says only "non-zero return code"."""
    output, done = followed(tmp_path, 75)
    assert (done["failed"], done["rc"], done["msg"]) == (True, 75, "what the verb says of itself")
    assert "what the verb says of itself" in output


def test_what_prune_found_is_shown_with_what_became_of_it() -> None:
    """Prevents a list that hides what stayed, or that images were not looked at."""
    item = {"event": "item", "kind": "blob", "name": "/c/blobs/ab", "bytes": 3_000_000_000, "result": None}
    end = {"event": "result", "items": 1, "notes": ["images and kernel caches are not listed: no docker"]}
    assert filters.glm53_prune_lines([item, end]) == [
        "3.0 GB blob /c/blobs/ab",
        "remove: -e glm53_prune=true",
        "note: images and kernel caches are not listed: no docker",
    ]
    assert filters.glm53_prune_lines([{**item, "result": "removed"}, {**end, "notes": []}]) == [
        "3.0 GB blob /c/blobs/ab removed"
    ]
    assert filters.glm53_prune_lines([{**end, "notes": []}]) == []


def test_a_copy_is_told_with_its_path() -> None:
    """Prevents a run that does not say what it moved, and over which network."""
    event = {"event": "result", "what": "model", "node": "b", "files": 2, "bytes": 5_000_000_000}
    event |= {"seconds": 61.2, "over": ["10.9.0.2 over x (fabric)"]}
    results = [{"events": [{"event": "message", "text": "x"}, event]}, {"skipped": True}]
    assert filters.glm53_shipped(results) == [
        "model on b: 2 files, 5.0 GB in 1 min 01 s, to 10.9.0.2 over x (fabric)"
    ]


def test_the_plan_has_the_image_on_every_node(tmp_path: Path) -> None:
    """Prevents a dry run that is silent on 25 GB, and one that ships what a worker has under another name."""
    for host in "ab":
        write_manifest(flat(tmp_path / host, FILES), manifest_of(FILES))
    known = nodes(tmp_path, way={"netdev": "enp1s0f0np0", "rdma": True, "speed": 200000})

    def lines(image: dict[str, Any] = IMAGE) -> list[str]:
        found = filters.glm53_plan(["a", "b"], known, [folder(tmp_path / "a")], image)["lines"]
        return [line for line in found if ": image " in line]

    name, over = IMAGE["reference"], "from the head, 10.9.0.2 over enp1s0f0np0 (fabric, 200 Gb/s)"
    assert lines() == [
        f"a: image {name}: 26.0 GB to pull from registry.example",
        f"b: image {name}: 26.0 GB to ship {over}",
    ]
    unknown = lines({**IMAGE, "bytes": 0, "why": "no registry is asked"})
    assert unknown[0].endswith("size unknown (no registry is asked) to pull from registry.example")
    assert "it is no image of a registry) to build" in lines({"reference": "glm53/built:0a1b2c3d4e5f"})[0]
    dockers = {host: known[host]["__glm53_found"]["docker"] for host in "ab"}
    dockers["a"]["image"] = BUILT
    dockers["b"]["free_bytes"] = 60_000_000_000
    assert lines() == [
        f"a: image {name}: there (52.0 GB)",
        f"b: image {name}: 52.0 GB to ship {over}; THERE IS NO ROOM FOR IT",
    ]
    dockers["b"]["shipped"] = {local_tag(image_content(BUILT)): {**BUILT, "Id": "sha256:other"}}
    assert lines()[1] == f"b: image {name}: there (52.0 GB)"
    dockers["b"] |= {"shipped": {}, "image": {**BUILT, "RootFS": {"Layers": ["sha256:2"]}}}
    assert "to ship" in lines()[1]
    dockers["b"]["answers"] = False
    assert lines() == []
