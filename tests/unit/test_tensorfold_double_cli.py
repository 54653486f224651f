"""The TensorFold double's command line, environment and checkpoint: what ends it before any rank is met."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.tensorfold.checkpoint import write_checkpoint, write_drafter
from lab.tensorfold.double import checkpoint as engine_checkpoint
from lab.tensorfold.double import cli, faults, switches, tokens
from lab.tensorfold.double.answers import answer
from lab.tensorfold.double.environment import read_environment
from lab.tensorfold.double.memory import choose_window, plan_memory, pool_size
from lab.tensorfold.double.switches import SwitchError, Timed, read_switches
from tests.unit.double_ranks import Ranks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint."""
    write_checkpoint(tmp_path / "model-a")
    return tmp_path / "model-a"


def changed(model: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the checkpoint's config.json."""
    config = json.loads((model / "config.json").read_text())
    change(config)
    (model / "config.json").write_text(json.dumps(config))


def test_the_parser_in_the_image_reads_exactly_what_serve_reads(tmp_path: Path) -> None:
    """Prevents the argument pre-check, `python` with build_parser, from meaning something else."""
    ranks = Ranks(tmp_path)
    script = (
        "import sys; from tensorfold.cli import build_parser;"
        "print(build_parser().parse_args(sys.argv[1:]).parallel)"
    )

    def check(*extra: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", script, *ranks.arguments(0, *extra)]
        return subprocess.run(argv, env=ranks.environment(0), capture_output=True, text=True, check=False)

    right, wrong = check(), check("--no-such-flag")
    assert (right.returncode, right.stdout, right.stderr) == (0, "3\n", "")
    assert wrong.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in wrong.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "m", "--port", "x"],
        ["serve", "m", "--reasoning-effort", "max"],
        ["serve", "m", "--kv-dtype", "fp8"],
        ["serve", "m", "--tp", "4"],
        ["serve", "m", "--parallel", "0"],
        ["serve", "m", "--parallel", "several"],
        ["serve", "m", "--context"],
        ["doctor"],
        [],
    ],
    ids=" ".join,
)
def test_a_wrong_flag_or_value_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a typo from getting as far as a model."""
    # `doctor` is no subcommand, so it is a model that does not exist; that is 1.
    if argv == ["doctor"]:
        assert cli.main(argv) == 1
        return
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "usage: tensorfold" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents the double from hiding what it is, or from spoiling the line that a program reads."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    printed = capsys.readouterr()
    assert ended.value.code == 0
    assert printed.out == "tensorfold 0.6.0\n"
    assert printed.err.startswith("[tensorfold-double] this is a double of TensorFold 0.6.0 for tests")


def test_info(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents the checkpoint gate from passing what the engine cannot read, or from looking at shards."""
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    assert cli.main(["info", str(model)]) == 0
    out = capsys.readouterr().out
    assert "num_hidden_layers        45\n" in out
    assert "EXL3 support is experimental" in out
    changed(model, lambda config: config["quantization_config"].update(bits=3))
    assert cli.main(["info", str(model)]) == 1
    assert "this one has bits 3, codebook mcg" in capsys.readouterr().err


def serve_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `serve` says before it ends with 1."""
    assert cli.main(["serve", *argv]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_what_one_rank_alone_refuses(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a start that can only fail from waiting for its peer first."""
    pair = (str(model), "--tp", "2", "--master", "127.0.0.1", "--drafter", "none")
    beyond = (*pair, "--context", "1048577")
    found = [
        serve_error(capsys, "/no/such/folder"),
        serve_error(capsys, str(model)),
        serve_error(capsys, str(model), "--tp", "2"),
        serve_error(capsys, *pair, "--rank", "2"),
        serve_error(capsys, *beyond),
        serve_error(capsys, *pair, "--parallel", "2"),
        serve_error(capsys, *pair, "--prefill-fp8"),
        serve_error(capsys, *pair, "--spill-gib", "4"),
        serve_error(capsys, *pair, "--drafter", str(model)),
    ]
    monkeypatch.setenv("TF_GLM_MTP", "0")
    found.append(serve_error(capsys, *pair))
    expected = [
        "/no/such/folder is neither a directory nor a Hugging Face repo id (owner/name)",
        "GLM-5.3-Flash needs two GPUs",
        "--tp 2 needs --master",
        "--rank 2 is not below --tp 2",
        "max_position_embeddings is 1048576",
        "--parallel 2 needs a DFlash2 draft model",
        "--prefill-fp8 does not read EXL3 packs",
        "--spill-gib needs --snapshot-dir",
        f"drafter {model} has no model.safetensors",
        "TF_GLM_MTP=0 leaves no MTP head and no DFlash2 draft model was given",
    ]
    assert all(
        line.startswith("tensorfold: ") and part in line for line, part in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("TENSORFOLD_MEMORY_RESERVE_GIB", "1.5", "a number from 2 to 121.69"),
        ("TF_GLM_KV", "int8", "bf16 or fp8"),
        ("TF_GLM_DENSE", "q8", "bf16, fp8 or q4"),
        ("TF_ROCE_WAIT_S", "3601", "an integer from 1 to 3600"),
        ("TF_GLM_MULTI_WINDOW", "36", "an integer from 16 to 64 in steps of 8"),
        ("TENSORFOLD_GLM_MAX_IMAGES", "many", "an integer from 1 to 256"),
        ("TF_GLM_MULTI_WATCHDOG_S", "nan", "a number of at least 0"),
    ],
)
def test_a_variable_out_of_range_is_named(name: str, value: str, wanted: str) -> None:
    """Prevents an environment variable that the engine refuses from being taken by the double."""
    with pytest.raises(ValueError, match=f"^{name}={value}: expected {wanted}$"):
        read_environment({name: value}, 121.69)


def test_a_switch_that_is_not_in_the_table_is_an_error(tmp_path: Path) -> None:
    """Prevents a drill with a misspelt fault from passing because nothing went wrong."""
    for name in ("TF_DOUBLE_CRASHES", "TF_DOUBLE_FOLDER", "TF_DOUBLE_CRASH_RANKX"):
        with pytest.raises(SwitchError, match=name):
            read_switches({name: "1"}, 0)
    with pytest.raises(SwitchError, match="TF_DOUBLE_SLOTS=two"):
        read_switches({"TF_DOUBLE_SLOTS": "two"}, 0)


def test_a_switch_can_be_for_one_rank_and_come_from_the_cache_folder(tmp_path: Path) -> None:
    """Prevents faults of one rank from needing different settings on the nodes."""
    (tmp_path / "env").write_text("# a drill\nTF_DOUBLE_LOAD_SECONDS=7\n")
    environ = {
        "TF_DOUBLE_DIR": str(tmp_path),
        "TF_DOUBLE_LOAD_SECONDS": "5",
        "TF_DOUBLE_CRASH": "2",
        "TF_DOUBLE_CRASH_RANK1": "3:0",
    }
    first, second = read_switches(environ, 0), read_switches(environ, 1)
    assert (first.crash, second.crash) == (Timed(seconds=2, code=1), Timed(seconds=3, code=0))
    assert first.load_seconds == 7


def test_the_tables_name_every_switch_and_every_fault(tmp_path: Path) -> None:
    """Prevents a switch that nobody can find, and one in the table that does nothing."""
    listed = re.findall(r"^([A-Z][A-Z0-9_]+)  ", switches.__doc__ or "", re.MULTILINE)
    known = [field.name.upper() for field in dataclasses.fields(switches.Switches)]
    assert sorted(name for name in listed if name != "TF_DOUBLE_") == sorted(
        "DIR" if name == "FOLDER" else name for name in known
    )
    table = re.findall(r"^([a-z_0-9]+)(?:\[?=\S+)? +(?:any|0|>0)  ", faults.__doc__ or "", re.MULTILINE)
    assert len(table) == 16

    async def begin_all() -> None:
        live = faults.Faults(switches.Switches(folder=tmp_path))
        for name in table:
            assert live._begin(name, "") is True, name
        assert live._begin("hangs", "") is False

    asyncio.run(begin_all())


def test_the_published_start_comes_out_of_the_memory_model() -> None:
    """Prevents estimates and pools that no adapter will ever see."""
    environ = {"TF_GLM_KV": "fp8", "TF_GLM_DENSE": "q4", "TF_GLM_MTP": "auto", "TF_GLM_CACHE_GIB": "12.5"}
    environment = read_environment({**environ, "TENSORFOLD_MEMORY_RESERVE_GIB": "14.5"}, 121.69)
    memory = plan_memory(
        environment,
        available_gib=110,
        native=1048576,
        requested=1048576,
        forced_largest=None,
        vision=True,
        mtp=False,
    )
    window = choose_window(1048576, memory.largest)
    assert (f"{memory.estimate_gib(window):.2f}", pool_size(environment, window)) == ("88.09", 2684928)
    assert choose_window(None, memory.largest) == 2051
    assert choose_window(0, 4096) == 4096


def test_a_shard_that_was_cut_off_is_found(model: Path) -> None:
    """Prevents an incomplete copy of the weights from being loaded by the double."""
    found = engine_checkpoint.read_checkpoint(str(model), {})
    assert found.problem() == ""
    shard = model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "model-00002-of-00003.safetensors" in found.problem()
    shard.unlink()
    assert "No such file" in found.problem()


def test_auto_takes_a_complete_drafter_of_the_cache_only(tmp_path: Path) -> None:
    """Prevents `--drafter auto` from meaning a half download."""
    from lab.tensorfold.double.glm5_next.cuda.dflash2 import find_drafter

    snapshot = tmp_path / "hub/models--incoai--GLM-5.3-Flash-DFlash2/snapshots/abc"
    environ = {"HF_HOME": str(tmp_path)}
    assert find_drafter("auto", environ) is None
    write_drafter(snapshot)
    found = find_drafter("auto", environ)
    assert found is not None
    assert found.folder == snapshot
    (snapshot / "model.safetensors").unlink()
    assert find_drafter("auto", environ) is None


def test_tokens_come_back_as_the_text() -> None:
    """Prevents /detokenize from returning something else than what was tokenized."""
    text = "What is 2+2? Zwölf; the end."
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert tokens.count(text) == len(ids)
    with pytest.raises(ValueError, match="999999"):
        tokens.decode([999999])


@pytest.mark.parametrize(
    ("prompt", "question", "reply"),
    [
        ("", "What is the capital of France? Answer with one word.", "Paris"),
        ("", "What is 2+2? Answer with a number only.", "4"),
        ("", "17 + 25 = ?", "42"),
        ("The secret word is heron. " + "filler " * 500, "What is the secret word?", "heron"),
        ("code: `zebra-7`; " * 3, "Repeat the code.", "zebra-7"),
        ("", "Reply with OK.", "OK"),
        ("", "Count to 4.", "1 2 3 4"),
        ("", "Write 3 words", "word1 word2 word3"),
        ("", "Why?", "This is a double of TensorFold: no model has read your text."),
    ],
)
def test_questions_and_answers(prompt: str, question: str, reply: str) -> None:
    """Prevents a canary that a sound engine passes from failing on the double."""
    assert answer(prompt + question, question) == reply
