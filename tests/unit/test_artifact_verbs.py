"""`glm53 download` and `glm53 verify` as an operator calls them: exit codes, words, JSON, the token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm53_service.artifacts.hub import read_token
from glm53_service.artifacts.progress import Progress, duration, gigabytes
from glm53_service.cli import main
from glm53_service.errors import ConfigError
from tests.unit.doubles import settings_text
from tests.unit.hub_server import COMMIT, HubServer, Repository, serving
from tests.unit.snapshots import REPOSITORY, contents, flat, model_files

TOKEN = "hf_CANARYKEY123456"
PROGRAM = """
import encodings.idna, glm53_service.artifacts.download  # nobody may not read this machine's Python
from glm53_service.artifacts.hub import Hub
from glm53_service.cli import main
Hub().name
main()
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A gated hub that takes one token."""
    repository = Repository(files=model_files(), gated=True, terms=True)
    with serving(HubServer({REPOSITORY: repository}, token=TOKEN)) as server:
        yield server


def etc(root: Path, model: Path) -> Path:
    """Write the head's settings."""
    folder = root / "etc"
    folder.mkdir()
    source = {"repository": REPOSITORY, "revision": COMMIT}
    (folder / "settings.yaml").write_text(settings_text(model, model={"source": source}))
    return folder


def run(*argv: str) -> int:
    """Return the exit code of `glm53 argv`."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


def token_file(root: Path, mode: int = 0o600, text: str = TOKEN) -> Path:
    """Write the token."""
    path = root / "token"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every account may enter. pytest's own is closed again by the next pytest that starts."""
    with tempfile.TemporaryDirectory(prefix="glm53-unit-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_download_as_a_program_shows_no_token_anywhere(hub: HubServer, open_path: Path) -> None:
    """Prevents the token in argv, environment, output or files; and an exit code that says nothing."""
    model = open_path / "models/m"
    argv = [
        *(
            sys.executable,
            "-c",
            PROGRAM,
            "--debug",
            "--etc",
            str(etc(open_path, model)),
        ),
        *("download", "--json", "--token-file", str(token_file(open_path))),
        *(("--user", "nobody") if os.geteuid() == 0 else ()),
    ]
    environment = {"PATH": os.environ["PATH"], "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_wrong_from_env"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = [line for text in done.stdout.splitlines() if (line := json.loads(text))["event"] == "result"]
    assert (result["fetched"], result["files"]) == (7, 7)
    assert contents(model) == hub.repositories[REPOSITORY].files
    assert TOKEN not in done.stdout + done.stderr + " ".join(argv)
    assert not [p for p in open_path.rglob("*") if p.is_file() and p.name != "token" and TOKEN in _text(p)]
    if os.geteuid() == 0:
        assert {path.owner() for path in (open_path / "models").rglob("*")} == {"nobody"}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_root_makes_no_files_of_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents the root-owned cache that the next download cannot write to."""
    if os.geteuid() != 0:
        assert run("--etc", str(etc(tmp_path, tmp_path / "m")), "download", "--user", "root") == 64
        return
    assert run("--etc", str(etc(tmp_path, tmp_path / "m")), "download") == 64
    assert "this would make files of root" in capsys.readouterr().err


def test_verify_as_an_operator_sees_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents exit 0 for a broken snapshot, and a worker that needs settings to look at its own files."""
    folder = flat(tmp_path / "m", model_files())
    assert run("verify", "--json", str(folder)) == 0
    assert json.loads(capsys.readouterr().out)["right"] is True
    (folder / "config.json").unlink()
    assert run("--etc", str(etc(tmp_path, folder)), "verify") == 65
    out = capsys.readouterr().out
    assert f"{folder}: 1 wrong\n  - config.json: not there\n  Fix: on the head `glm53 download`" in out
    assert run("--etc", str(tmp_path), "verify") == 64
    assert "glm53 verify FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o640, TOKEN, "found mode 640, expected 600"),
        (0o600, "", "found no token"),
        (0o600, "two words", "found no token"),
    ],
)
def test_a_token_file_that_cannot_be_right_is_refused(
    tmp_path: Path, mode: int, text: str, said: str
) -> None:
    """Prevents a token that every account can read, and an empty one that becomes a 401 of the hub."""
    with pytest.raises(ConfigError, match=said):
        read_token(token_file(tmp_path, mode, text), {})


def test_the_token_comes_from_a_file_or_a_credential(tmp_path: Path) -> None:
    """Prevents a token by variable: /proc/PID/environ and `systemctl show` give it away."""
    token_file(tmp_path).rename(tmp_path / "hub-token")
    assert read_token(None, {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == TOKEN
    assert read_token(None, {"HF_TOKEN": TOKEN}) is None
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "gone", {})


def test_progress_says_files_bytes_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a copy that looks hung, and a log with a line for each block."""
    now = [100.0]
    progress = Progress("unit", 4, 10_000_000, clock=lambda: now[0], there=2_000_000, files_there=1)
    for _ in range(100):
        progress.count(1000)
    assert capsys.readouterr().err == ""
    now[0] += 5
    progress.count(1_900_000)
    assert capsys.readouterr().err == "unit: 1 of 4 files, 4.0 MB of 10.0 MB, 0 MB/s, 15 s left\n"
    progress.file_done()
    now[0] += 5
    progress.end()
    assert capsys.readouterr().err == "unit: 2 of 4 files, 4.0 MB of 10.0 MB, 0 MB/s\n"
    assert [gigabytes(176e9), duration(7500), duration(61)] == ["176.0 GB", "2 h 05 min", "1 min 01 s"]


def test_the_supervisor_does_not_pay_for_the_download(tmp_path: Path) -> None:
    """Prevents 34 MiB of the hub's client in a process that has to stay below 64."""
    code = (
        "import sys, glm53_service.cli, glm53_service.supervisor.lead, glm53_service.supervisor.follow;"
        "heavy = ('huggingface_hub', 'httpx2', 'glm53_service.artifacts.download');"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
