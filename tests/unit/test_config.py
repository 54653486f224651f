"""Each effective value with where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm53_service.cli import main
from glm53_service.config import Origin, Value, effective_values
from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt
from tests.unit.fixtures import launch_of, settings_of, tensorfold_data, vllm_data, with_dflash2


def node_text(name: str, count: int) -> str:
    """Return node.yaml of the node `name` among `count`."""
    nodes = [
        {"node": "abc"[n], "management": f"10.9.0.{n + 1}", "fabric": [f"10.8.0.{n + 1}"]}
        for n in range(count)
    ]
    return yaml.safe_dump({"version": 1, "cluster": "unit", "node": name, "nodes": nodes})


def values(data: dict[str, Any], attempt: Attempt | None = None) -> dict[str, tuple[Any, Origin]]:
    """Return value and origin by key."""
    settings = settings_of(data)
    launch = launch_of(settings, attempt=attempt or Attempt())
    chosen = engine_for(settings).resolved(settings, launch.choice, launch.attempt)
    return {v.key: (v.value, v.origin) for v in effective_values(settings, data, chosen)}


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("api.port", 18888, Origin.FILE),
        ("api.bind", "loopback", Origin.DEFAULT),
        ("tensorfold.kv", "bf16", Origin.FILE),
        ("tensorfold.dense", "q4", Origin.DEFAULT),
        ("tensorfold.media.max_images", 9, Origin.FILE),
        ("tensorfold.media.max_videos", 4, Origin.DEFAULT),
        ("tensorfold.parallel", 4, Origin.DRAFTER),
        ("tensorfold.context", 196_608, Origin.RULE),
        ("tensorfold.memory_reserve_gib", 14.5, Origin.RULE),
        ("drafter.request", "dflash2", Origin.DRAFTER),
        ("drafter.licence.accepted_on", "2026-10-03", Origin.FILE),
        ("tensorfold.extra_env", {}, Origin.DEFAULT),
    ],
)
def test_where_a_value_comes_from(key: str, value: Any, origin: Origin) -> None:
    """Prevents a value of which nobody knows who set it."""
    data = with_dflash2(tensorfold={"kv": "bf16", "media": {"max_images": 9}})
    assert values(data)[key] == (value, origin)


def test_what_the_file_says_is_not_called_a_choice() -> None:
    """Prevents an explicit value from being shown as if the start had picked it."""
    data = with_dflash2(
        drafter={"request": "dflash2"},
        tensorfold={"parallel": 3, "context": 70_000, "memory_reserve_gib": 20},
    )
    found = values(data)
    for key in (
        "drafter.request",
        "tensorfold.parallel",
        "tensorfold.context",
        "tensorfold.memory_reserve_gib",
    ):
        assert found[key][1] is Origin.FILE


def test_a_refit_is_shown_as_one() -> None:
    """Prevents a smaller window than the file's from looking like the file's."""
    data = with_dflash2(tensorfold={"context": 900_000})
    found = values(data, Attempt(number=3, window=393_216, split=False))
    assert found["tensorfold.context"] == (393_216, Origin.REFIT)
    assert found["tensorfold.split"] == (False, Origin.REFIT)


def test_only_the_engine_that_runs_is_shown() -> None:
    """Prevents settings without effect from being read as if they had one."""
    assert not [key for key in values(tensorfold_data()) if key.startswith("vllm.")]
    found = values(vllm_data(vllm={"max_num_seqs": 2}), Attempt(number=2, window=4096))
    assert not [key for key in found if key.startswith("tensorfold.")]
    assert found["vllm.max_model_len"] == (4096, Origin.REFIT)
    assert found["vllm.cudagraph_capture_sizes"] == ([1, 2, 3, 4, 6], Origin.RULE)
    assert found["vllm.quantization"] == ("exl3", Origin.DEFAULT)
    assert found["drafter.request"] == ("mtp", Origin.DRAFTER)


def etc(folder: Path, node: str = "a") -> str:
    """Write a node's configuration, whose gate does not answer."""
    (folder / "node.yaml").write_text(node_text(node, 2))
    data = tensorfold_data(tensorfold={"parallel": 1}, gate={"port": 1025})
    (folder / "settings.yaml").write_text(yaml.safe_dump(data))
    return str(folder)


def run(*argv: str) -> int:
    """Return the exit code of `glm53 argv`."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


def test_the_command_shows_values_and_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a question about a setting that only the source can answer."""
    assert run("--etc", etc(tmp_path), "config", "--origin") == 0
    lines = [line.split(" # ") for line in capsys.readouterr().out.splitlines()]
    shown = {left.strip(): origin for left, origin in lines}
    assert shown["tensorfold.parallel: 1"] == "settings.yaml"
    assert shown['drafter.request: "mtp"'] == "drafter"
    assert shown['tensorfold.kv: "fp8"'] == "default"
    assert run("--etc", str(tmp_path), "config") == 0
    assert "#" not in capsys.readouterr().out


def test_the_command_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents programs from parsing what is meant for people."""
    assert run("--etc", etc(tmp_path), "config", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"key": "tensorfold.parallel", "value": 1, "origin": "settings.yaml"} in rows


def test_what_the_running_start_chose_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a window from the file in place of the one that is served."""
    said = {"chosen": [{"key": "tensorfold.context", "value": 393_216, "origin": "refit"}]}
    monkeypatch.setattr("glm53_service.cli.ask", lambda port: said)
    assert run("--etc", etc(tmp_path), "config", "--origin") == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if line.startswith("tensorfold.context")] == [
        ["tensorfold.context:", "393216", "#", "refit"]
    ]


def test_a_follower_has_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a stale file on a worker from being shown as what is served."""
    assert run("--etc", etc(tmp_path, "b"), "config") == 64
    assert "only the head has settings" in capsys.readouterr().err


def test_check_prints_warnings_and_refuses_three_sparks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a warning that nobody sees before the old pair is stopped, and a pair of three."""
    folder = etc(tmp_path)
    data = tensorfold_data(tensorfold={"context": 0})
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(data))
    assert run("--etc", folder, "check") == 0
    assert "warning: tensorfold.context: 0; the largest window" in capsys.readouterr().out
    (tmp_path / "node.yaml").write_text(node_text("a", 3))
    assert run("--etc", folder, "check") == 78
    assert "nodes: found 3, expected 2 with tensorfold on Sparks" in capsys.readouterr().err


def test_a_value_of_a_start_that_the_file_has_no_key_for_is_kept() -> None:
    """Prevents a choice from being lost because its key is new."""
    data = tensorfold_data()
    extra = Value(key="tensorfold.new", value=1, origin=Origin.DRAFTER)
    assert effective_values(settings_of(data), data, [extra])[-1] == extra
