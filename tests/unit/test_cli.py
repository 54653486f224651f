"""The command line: exit codes, and one message a fault."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from glm53_service.cli import main
from tests.unit.doubles import free_port, settings_text

NODE = """{{version: 1, cluster: {cluster}, node: {node}, nodes: [
 {{node: a, management: 10.9.0.1, fabric: [10.8.0.1]}},
 {{node: b, management: 10.9.0.2, fabric: [10.8.0.2]}}]}}"""


def etc(folder: Path, *, node: str = "a", cluster: str = "unit", gate: int = 18889) -> Path:
    """Write a node's configuration into `folder`."""
    (folder / "node.yaml").write_text(NODE.format(node=node, cluster=cluster))
    if node == "a":
        (folder / "settings.yaml").write_text(settings_text(Path("/m"), gate={"port": gate}))
    return folder


def run(*argv: str) -> int:
    """Return the exit code of `glm53 argv`."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


def test_check_says_valid_or_names_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a unit that loops on a file that cannot be right."""
    folder = etc(tmp_path)
    assert run("--etc", str(folder), "check") == 0
    assert "a: rank 0 of 2 in cluster unit: settings are valid" in capsys.readouterr().out
    (folder / "settings.yaml").write_text(settings_text(Path("/m"), vllm={"max_num_seqs": 0}))
    assert run("--etc", str(folder), "check") == 78
    assert "vllm.max_num_seqs: found 0; expected int >= 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("node", "cluster", "verb", "said"),
    [
        ("a", "other", "lead", "cluster: settings.yaml says 'unit', node.yaml 'other'"),
        ("b", "unit", "lead", "cannot be read"),
        ("a", "unit", "follow", "node: a has rank 0"),
        ("a", "unit", "lead", "token cannot be used"),
    ],
)
def test_a_service_with_bad_files_exits_78(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], node: str, cluster: str, verb: str, said: str
) -> None:
    """Prevents a service that starts half configured; systemd does not restart on 78."""
    assert run("--etc", str(etc(tmp_path, node=node, cluster=cluster)), verb) == 78
    err = capsys.readouterr().err
    assert said in err
    assert "the pair is down until this is mended" in err


def test_status_of_a_stopped_service_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a script from taking 'not running' for 'serving'."""
    folder = str(etc(tmp_path, gate=free_port()))
    assert run("--etc", folder, "status", "--json") == 3
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"
    assert run("--etc", folder, "status") == 3
    assert "not running here" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [(), ("nonsense",), ("status", "--yaml")])
def test_a_wrong_command_line_is_64(argv: tuple[str, ...]) -> None:
    """Prevents argparse's 2, which collides with other meanings."""
    assert run(*argv) == 64


GATE = {
    "state": "starting",
    "ready": False,
    "epoch": 4,
    "reasons": ["x"],
    "cluster": "unit",
    "node": "a",
    "role": "lead",
    "endpoint": "e",
    "model": "m",
    "progress": "loading",
    "answered_at": 1795980000.9,
    "last_end": "",
    "faults": 1,
    "ranks": [
        {
            "rank": 0,
            "node": "a",
            "state": "running",
            "connected": True,
            "rails": ["netdev=f0"],
            "warnings": ["w"],
            "vitals": {"available_gib": 5.5, "read_gib": 43.2, "warnings": ["little memory"]},
            "command": "docker run zero",
        },
        {
            "rank": 1,
            "node": "b",
            "state": "created",
            "connected": False,
            "rails": [],
            "warnings": [],
            "command": "",
        },
    ],
}


@pytest.fixture
def gate() -> Iterator[int]:
    """Serve GATE as a lead's gate does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(GATE).encode())

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def test_status_shows_what_the_gate_says(
    tmp_path: Path, gate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a status that leaves out why the pair is not ready."""
    assert run("--etc", str(etc(tmp_path, gate=gate)), "status") == 3
    shown = capsys.readouterr().out
    for part in (
        "unit / a (lead): starting, epoch 4",
        "progress  loading",
        "canary    right at 2026-11-29 19:20:00 UTC",
        "netdev=f0",
        "warning: w",
        "          43.2 GiB read, 5.5 GiB available",
        "warning: little memory",
        "rank 1    b: created, not connected",
        "faults    1",
    ):
        assert part in shown


def test_command_refuses_to_guess(tmp_path: Path, gate: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a container line that is not the one that runs."""
    assert run("--etc", str(etc(tmp_path, gate=gate)), "command") == 69
    assert "no container is made for rank 1 on b: the pair is starting" in capsys.readouterr().err
