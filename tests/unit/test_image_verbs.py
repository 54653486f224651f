"""`glm53 image pull` as an operator calls it: exit codes, words, JSON, the account, the token."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from glm53_service.artifacts.images.plan import ship_rate
from glm53_service.artifacts.rates import read_rates
from tests.unit.doubles import settings_text
from tests.unit.engine_server import IMAGE, EngineServer, engine_thread
from tests.unit.test_artifact_verbs import run, token_file
from tests.unit.test_image_pull import whole

TOKEN = "hf_CANARYKEY123456"
PROGRAM = """
import encodings.idna, os, sys  # nobody may not read this machine's Python
from pathlib import Path
import aiodocker, glm53_service.artifacts.images.show
import glm53_service.artifacts.images.size as size
import glm53_service.artifacts.images.engine as engine, glm53_service.artifacts.images.pull as pull
import glm53_service.artifacts.images.verbs as verbs
from glm53_service.cli import main
async def unknown(*_):
    return "no registry here"
size.manifest_size = unknown
engine.SOCKET = "unix://{0}/docker.sock"
pull.World.__init__.__kwdefaults__["locks"] = Path("{0}/locks")
verbs.become_puller.__defaults__ = (Path("{0}/docker.sock"),)
try:
    main()
finally:
    print(os.geteuid(), sorted(os.getgroups()), os.environ["HOME"], file=sys.stderr)
"""


def program(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `glm53 argv` in a process of its own, with the engine of this test."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root), *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=60,
    )


def test_pull_as_a_program_shows_no_token_anywhere(tmp_path: Path) -> None:
    """Prevents the token in argv or output, files of root, and an account that cannot reach docker."""
    root = Path("/tmp") / f"glm53-unit-{os.getpid()}"
    root.mkdir(mode=0o755)
    (root / "locks").mkdir()
    (root / "locks").chmod(0o777)
    server = EngineServer(pulls=[whole()])
    user = ("--user", "nobody") if os.geteuid() == 0 else ()
    login = ("--registry-user", "me", "--token-file", str(token_file(tmp_path)))
    try:
        with engine_thread(server, root / "docker.sock"):
            if user:
                os.chown(root / "docker.sock", 0, 4242)
                (root / "docker.sock").chmod(0o660)
            done = program(root, "image", "pull", "--json", *user, *login, IMAGE)
    finally:
        subprocess.run(["rm", "-r", str(root)], check=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["event"], result["pulled"], result["reference"]) == ("result", True, IMAGE)
    assert server.logins[1]["password"] == TOKEN
    assert "CANARY" not in done.stdout + done.stderr
    if user:
        nobody = pwd.getpwnam("nobody")
        groups = sorted({*os.getgrouplist("nobody", nobody.pw_gid), 4242})
        assert done.stderr.splitlines()[-1] == f"{nobody.pw_uid} {groups} {nobody.pw_dir}"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["glm53/engine:1"], 65, "named by a tag"),
        (["--offline", IMAGE], 65, "no registry is asked"),
        (["--registry-user", "me", IMAGE], 78, "without a token file"),
        (["--user", "no-such-account", IMAGE], 64, "there is no account 'no-such-account' here"),
    ],
)
def test_each_error_has_its_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    words: str,
) -> None:
    """Prevents a playbook that cannot tell a wrong name from a cut cable."""
    monkeypatch.setattr("glm53_service.artifacts.images.engine.SOCKET", f"unix://{tmp_path}/docker.sock")
    with engine_thread(EngineServer(), tmp_path / "docker.sock"):
        assert run("image", "pull", *argv) == code
    assert words in capsys.readouterr().err


def test_the_settings_name_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents an image that is named twice, and a traceback on a worker, which has no settings."""
    monkeypatch.setattr("glm53_service.artifacts.images.engine.SOCKET", f"unix://{tmp_path}/none")
    assert run("--etc", str(tmp_path), "image", "pull") == 64
    (tmp_path / "settings.yaml").write_text(settings_text(tmp_path / "m", image="unit/x:1"))
    assert run("--etc", str(tmp_path), "image", "pull") == 69
    assert f"docker does not answer on unix://{tmp_path}/none" in capsys.readouterr().err


def test_how_fast_a_copy_was_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a plan that never learns what docker's load takes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("glm53_service.artifacts.verbs.become", lambda *_: None)
    assert run("image", "shipped", "spark-b", "25000000000", "50") == 0
    assert read_rates(tmp_path / ".cache/glm53/rates.json") == {ship_rate("spark-b"): 5e8}
