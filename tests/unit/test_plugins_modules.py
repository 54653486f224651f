"""The modules that change or hash files on a node, against real files."""

from __future__ import annotations

import grp
import itertools
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugin_loader import load
from tests.unit.snapshots import touch_after

files = load("modules", "glm53_files")
token = load("modules", "glm53_token")
keys = load("modules", "glm53_authorized_key")
weights = load("modules", "glm53_weights")
release = load("modules", "glm53_release")
units = load("modules", "glm53_units")
fabric = load("modules", "glm53_fabric_apply")
wheels = load("action", "glm53_release")
wait = load("action", "glm53_wait")

ME = {"owner": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}


def wanted(path: Path, content: str = "x\n", mode: str = "0640") -> dict[str, Any]:
    """A file as a role asks for it."""
    return {"path": str(path), "content": content, "mode": mode, **ME}


def ask(*entries: dict[str, Any], folders: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The module's arguments."""
    return {"files": list(entries), "folders": folders or [], "absent": []}


def test_files_are_written_once_with_their_mode(tmp_path: Path) -> None:
    """Defect: the second run changes something, or a secret is readable for a moment or for good."""
    folder = {"path": str(tmp_path / "etc"), "mode": "0750", **ME}
    request = ask(wanted(tmp_path / "etc/a", "one\n"), folders=[folder])
    files.apply(files.plan(request))
    assert (tmp_path / "etc/a").read_text() == "one\n"
    assert (tmp_path / "etc/a").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "etc").stat().st_mode & 0o777 == 0o750
    assert files.plan(request) == {"folders": [], "contents": [], "attributes": [], "absent": []}


def test_a_wrong_mode_alone_is_mended(tmp_path: Path) -> None:
    """Defect: content that is right hides permissions that are wrong."""
    path = tmp_path / "a"
    path.write_text("x\n")
    path.chmod(0o666)
    todo = files.plan(ask(wanted(path)))
    assert (todo["contents"], [f["path"] for f in todo["attributes"]]) == ([], [str(path)])
    files.apply(todo)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_in_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    """Defect: writing through a link changes a file that is not ours."""
    target = tmp_path / "theirs"
    target.write_text("x\n")
    (tmp_path / "a").symlink_to(target)
    files.apply(files.plan(ask(wanted(tmp_path / "a", "ours\n"))))
    assert target.read_text() == "x\n"
    assert (tmp_path / "a").read_text() == "ours\n"


def test_a_unit_with_a_misspelt_key_is_refused() -> None:
    """Defect: a misspelt hardening key is a warning that nobody sees."""
    unit = "[Service]\nType=oneshot\nExecStart=/bin/true\n{}\n"
    files.check_units([{"path": "/x/probe.service", "content": unit.format("NoNewPrivileges=true")}])
    with pytest.raises(files.CheckFailed, match="NoNewPrivilege"):
        files.check_units([{"path": "/x/probe.service", "content": unit.format("NoNewPrivilege=true")}])


def test_token_texts() -> None:
    """Defect: a rotation forgets the old token, or a run without need makes a new one."""
    first = token.wanted_text("", "", rotate=False)
    assert token.TOKEN.fullmatch(first.strip())
    assert token.wanted_text(first, "", rotate=False) == first
    rotated = token.wanted_text(first, "", rotate=True)
    assert rotated.split()[1] == first.strip()
    assert rotated.split()[0] != first.strip()
    assert len(token.wanted_text(rotated, "", rotate=True).split()) == 2
    assert token.wanted_text("garbage\n", "", rotate=False) != "garbage\n"
    assert token.wanted_text("old\n", rotated, rotate=False) == rotated


def test_the_token_file_is_private(tmp_path: Path) -> None:
    """Defect: the token can be read by others."""
    token.write(tmp_path / "token", "ab\n")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_only_our_authorized_key_line_changes() -> None:
    """Defect: the owner's own keys are lost, or ours piles up."""
    theirs = "ssh-rsa AAA owner@desk\n# note\nssh-ed25519 AAA glm53-lab\n"
    first = 'restrict,from="10.0.0.1" ssh-ed25519 BBB glm53-lab'
    second = 'restrict,from="10.0.0.2" ssh-ed25519 CCC glm53-lab'
    added = keys.with_line(theirs, "glm53-lab", first)
    assert added == f"{theirs}{first}\n"
    assert keys.with_line(added, "glm53-lab", second) == f"{theirs}{second}\n"
    assert keys.with_line(added, "glm53-lab", "") == theirs


def test_a_look_follows_links_and_names_dangling_ones(tmp_path: Path) -> None:
    """Defect: a cache whose blobs are missing counts as a model of a few kilobytes."""
    blob = tmp_path / "blob"
    blob.write_bytes(b"1234")
    model = tmp_path / "model"
    (model / ".rsync-partial").mkdir(parents=True)
    (model / ".rsync-partial/part").write_text("half")
    for name in (".w.safetensors.0123456789abcdef.incomplete", ".glm53-manifest.unfinished.json"):
        (model / name).write_text("half")
    (model / ".weights.safetensors.aB3dE9").write_text("half")
    (model / ".gitattributes").write_text("x")
    (model / "weights.safetensors").symlink_to(blob)
    (model / "gone.safetensors").symlink_to(tmp_path / "nothing")
    found = weights.look(str(model))
    sizes = {name: size for name, (size, _) in found["files"].items()}
    assert sizes == {"weights.safetensors": 4, ".gitattributes": 1}
    assert found["dangling"] == ["gone.safetensors"]
    assert found["parts"] == {".w.safetensors.0123456789abcdef.incomplete": 4}
    absent = weights.look(str(tmp_path / "no/such"))
    assert (absent["exists"], absent["files"], absent["file_system"]) == (False, {}, tmp_path.stat().st_dev)


def test_a_look_names_what_changed_after_the_manifest(tmp_path: Path) -> None:
    """Defect: a template that somebody edited passes for the published one; or weights are read for it."""
    for name in ("a.safetensors", "b.safetensors", "config.json", "same.json"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".glm53-manifest.json").write_text("{}")
    assert weights.look(str(tmp_path))["changed"] == []
    record, config = tmp_path / ".glm53-manifest.json", tmp_path / "config.json"
    touch_after(config, record, lambda: config.write_text("y"))
    os.utime(tmp_path / "b.safetensors", (1, 1))
    found = weights.look(str(tmp_path))
    assert found["changed"] == ["b.safetensors", "config.json"]
    assert found["hashes"] == {
        "config.json": "a1fce4363854ff888cff4b8e7875d600c2682390412a8cf79b37d0b11148b0fa"
    }


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another account")
def test_a_model_in_a_closed_home_is_not_readable(tmp_path: Path) -> None:
    """Defect: root can read the model, so nobody notices that the service cannot."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    (home / "model/a").write_text("x")
    folder = str(home / "model")
    assert weights.look(folder, "nobody")["closed"] == ""
    assert weights.look(folder, "no-such-account")["closed"] == ""
    (home / "model/a").chmod(0o600)
    assert weights.look(folder, "nobody")["closed"] == f"{folder}/a"
    home.chmod(0o750)
    assert weights.look(folder, "nobody")["closed"] == str(home)


def make_release(root: Path, name: str) -> None:
    """A finished release without a venv."""
    folder = root / "releases" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/glm53").touch()
    (folder / ".complete").write_text(f'{{"python": "{release.python_tag()}"}}')


def test_switching_keeps_the_current_and_the_previous_release(tmp_path: Path) -> None:
    """Defect: the rollback's release is removed, or old ones pile up."""
    link = tmp_path / "glm53"
    for name in ("r1", "r2", "r3"):
        make_release(tmp_path, name)
        release.switch(tmp_path, name, link)
    assert sorted(p.name for p in (tmp_path / "releases").iterdir()) == ["r2", "r3"]
    assert release.query(tmp_path, "r3", link)["current"] == "r3"
    assert str(link.readlink()) == str(tmp_path / "current/bin/glm53")
    release.switch(tmp_path, "r3", link)
    assert (tmp_path / "previous").read_text() == "r2\n"


def test_an_unfinished_release_or_one_of_another_python_is_not_complete(tmp_path: Path) -> None:
    """Defect: a release cut off in the middle, or one whose Python is gone, is switched to."""
    make_release(tmp_path, "r1")
    assert release.is_complete(tmp_path / "releases/r1") is True
    (tmp_path / "releases/r1/.complete").write_text('{"python": "3.2"}')
    assert release.is_complete(tmp_path / "releases/r1") is False
    (tmp_path / "releases/r1/.complete").unlink()
    assert release.is_complete(tmp_path / "releases/r1") is False


def test_wheels_fit_the_node_not_the_control_host() -> None:
    """Defect: the control host's own platform is used, and the Spark gets x86 wheels."""
    argv = wheels.download_argv(
        Path("node.txt"), Path("w"), {"python": "3.12", "architecture": "aarch64", "glibc": "2.39"}
    )
    chosen = [value for flag, value in itertools.pairwise(argv) if flag == "--platform"]
    assert chosen[0] == "manylinux_2_39_aarch64"
    assert "manylinux_2_17_aarch64" in chosen
    assert argv[argv.index("--python-version") + 1] == "3.12"
    assert "cp312" in argv
    assert "--require-hashes" in argv


def test_what_changed_after_the_start_is_stale(tmp_path: Path) -> None:
    """Defect: a run that broke off after writing files leaves the old process running for ever."""
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    for path, when in ((old, 100), (new, 300)):
        path.touch()
        os.utime(path, (when, when))
    link.symlink_to(old)
    os.utime(link, (400, 400), follow_symlinks=False)
    paths = [str(old), str(new), str(link), str(tmp_path / "absent")]
    assert units.newer_than(paths, 200.0) == [str(new), str(link)]


def test_missing_addresses_are_said() -> None:
    """Defect: the wait ends once the device is up, with another address or MTU than asked for."""
    rails = [{"netdev": "x0", "address": "10.1.0.1/24", "mtu": "9000"}]
    entry = {
        "ifname": "x0",
        "mtu": 1500,
        "addr_info": [{"family": "inet", "local": "10.1.0.1", "prefixlen": 24}],
    }
    assert "MTU 1500, expected 9000" in fabric.missing(rails, [entry])[0]
    assert "no IPv4 address" in fabric.missing(rails, [])[0]
    assert fabric.missing(rails, [entry | {"mtu": 9000}]) == []


@pytest.mark.parametrize(
    ("status", "stopped", "waited", "expected"),
    [
        ({"state": "serving", "ready": True}, 0, 5, "serving"),
        ({"state": "serving", "ready": False}, 0, 5, "wait"),
        ({"state": "starting", "ready": False}, 0, 5, "wait"),
        ({"state": "stopped", "ready": False}, 5, 95, "wait"),
        ({"state": "stopped", "ready": False}, 25, 25, "dead"),
        ({"state": "gave_up", "ready": False}, 0, 1, "dead"),
        ({"state": "starting", "ready": False}, 0, 101, "late"),
        ({}, 0, 5, "wait"),
    ],
)
def test_waiting_ends_when_it_is_no_use(
    status: dict[str, Any], stopped: float, waited: float, expected: str
) -> None:
    """Defect: it waits ninety minutes for a unit that is down, or calls one dead that only restarts."""
    assert wait.verdict(status, stopped, waited, 100) == expected


def test_a_counting_reason_is_one_phase() -> None:
    """Defect: every poll prints a line because the seconds in it differ."""
    one = {"state": "starting", "reasons": ["loading since 10 s"]}
    two = {"state": "starting", "reasons": ["loading since 12 s"]}
    assert wait.phase_of(one) == wait.phase_of(two)
    assert wait.line_of(one) == "starting: loading since 10 s"


def test_a_release_that_runs_is_in_use(tmp_path: Path) -> None:
    """Defect: two failed upgrades in a row remove the code of the supervisor that still runs."""
    releases = tmp_path / "releases"
    for pid, command in (
        (7, f"{releases}/abc/bin/python"),
        (8, "/usr/bin/python3"),
        (9, f"{releases}x/def/bin/python"),
    ):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cmdline").write_bytes(command.encode() + b"\0lead\0")
    assert release.in_use(releases, tmp_path / "proc") == {"abc"}
