"""TensorFold's settings: the recipe's defaults, what is refused, what is warned about."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.drafter import Choice, DrafterKind
from glm53_service.errors import ConfigError
from glm53_service.settings import choose_drafter, dump, load_settings, settings_from, warnings
from glm53_service.settings.tensorfold import Tensorfold, reserve, reserve_rule, window
from tests.unit.fixtures import DRAFTER_DIR, LICENCE, settings_of, tensorfold_data, with_dflash2


def problems(**changes: Any) -> tuple[str, ...]:
    """Return what is wrong with DFlash2's settings after `changes`."""
    with pytest.raises(ConfigError) as caught:
        settings_of(with_dflash2(**changes))
    return caught.value.problems


def test_tensorfold_is_the_default_engine() -> None:
    """Prevents a file that says nothing of the engine from starting another one."""
    data = with_dflash2()
    del data["engine"]
    assert settings_of(data).engine == "tensorfold"


def test_the_settings_survive_the_way_to_a_follower() -> None:
    """Prevents a date, a tuple or a default that is lost between the head's file and a follower's rank."""
    settings = settings_of(with_dflash2(tensorfold={"parallel": 3, "media": {"max_images": 9}}))
    assert settings_from(dump(settings), "start message") == settings
    assert str(settings.drafter.licence).startswith("CC BY-NC-ND 4.0, accepted by Ada Example on 2026-10-03")


def test_a_bare_yaml_date_is_a_date() -> None:
    """Prevents a refusal of 2026-10-03 without quotes, which YAML reads as a date and not as a text."""
    text = (
        "{version: 1, cluster: u, device: cpu, image: i, model: {path: /m, name: n}, drafter: {path: /d,"
        " licence: {accepted_by: Ada, accepted_on: 2026-10-03, use: non-commercial}}}"
    )
    assert (
        str(load_settings(text, "x").drafter.licence).split(" on ")[1] == "2026-10-03 for non-commercial use"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensorfold": {"parallel": 9}}, "tensorfold.parallel: found 9; expected auto or int 1 to 8"),
        (
            {"tensorfold": {"parallel": "many"}},
            "tensorfold.parallel: found 'many'; expected auto or int 1 to 8",
        ),
        (
            {"tensorfold": {"context": 1_048_577}},
            "tensorfold.context: found 1048577; expected auto or int 0 to",
        ),
        ({"tensorfold": {"context": -1}}, "tensorfold.context: found -1; expected auto or int 0 to 1048576"),
        ({"tensorfold": {"max_tokens": "32k"}}, "tensorfold.max_tokens: found '32k'; expected int"),
        ({"tensorfold": {"kv": "int8"}}, "tensorfold.kv: found 'int8'; expected one of fp8, bf16"),
        ({"tensorfold": {"dense": "q8"}}, "tensorfold.dense: found 'q8'; expected one of q4, fp8, bf16"),
        ({"tensorfold": {"comm": "mpi"}}, "tensorfold.comm: found 'mpi'; expected one of roce, nccl"),
        (
            {"tensorfold": {"media": {"max_videos": 17}}},
            "tensorfold.media.max_videos: found 17; expected int <= 16",
        ),
        (
            {"tensorfold": {"memory_reserve_gib": 1}},
            "tensorfold.memory_reserve_gib: found 1; expected float >= 2",
        ),
        ({"tensorfold": {"paralell": 2}}, "tensorfold.paralell: unknown key; did you mean 'parallel'?"),
        (
            {"drafter": {"request": "dflash"}},
            "drafter.request: found 'dflash'; expected one of auto, dflash2",
        ),
        ({"drafter": {"sha256": "abc"}}, "drafter.sha256: found 'abc'"),
        (
            {"drafter": {"licence": {**LICENCE, "accepted_on": "yesterday"}}},
            "drafter.licence.accepted_on: found 'ye",
        ),
        ({"drafter": {"licence": {**LICENCE, "accepted_by": " "}}}, "drafter.licence.accepted_by: found ' '"),
        ({"drafter": {"licence": {**LICENCE, "who": "me"}}}, "drafter.licence.who: unknown key"),
        (
            {"drafter": {"request": "mtp"}, "tensorfold": {"parallel": 4}},
            "tensorfold.parallel: found 4, but drafter.request 'mtp'; TensorFold serves more than one",
        ),
        (
            {"drafter": {"request": "mtp"}, "tensorfold": {"extra_env": {"TF_GLM_MTP": "0"}}},
            "tensorfold.extra_env: found TF_GLM_MTP='0' with drafter mtp",
        ),
        (
            {"tensorfold": {"parallel": 8, "memory_reserve_gib": 18.2}},
            "tensorfold.memory_reserve_gib: found 18.2, expected at least 18.3 with 8 requests at once",
        ),
        (
            {"tensorfold": {"memory_reserve_gib": 9.9}},
            "tensorfold.memory_reserve_gib: found 9.9, expected at least 10 with 4 requests at once",
        ),
        (
            {"tensorfold": {"vision": False, "vision_urls": True}},
            "tensorfold.vision_urls: found true with tensorfold.vision false",
        ),
        (
            {"tensorfold": {"media": {"image_tokens": 4096, "request_image_tokens": 2048}}},
            "tensorfold.media.image_tokens: found 4096, more than request_image_tokens (2048)",
        ),
        (
            {"tensorfold": {"media": {"video_tokens": 4096, "request_video_tokens": 2048}}},
            "tensorfold.media.video_tokens: found 4096, more than request_video_tokens (2048)",
        ),
        (
            {"tensorfold": {"rendezvous_port": 18888}},
            "tensorfold.rendezvous_port: found 18888, the port of the API",
        ),
        (
            {"tensorfold": {"rendezvous_port": 8889}},
            "tensorfold.rendezvous_port: found 8889, the port of the API",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict[str, Any], said: str) -> None:
    """Prevents a start that dies minutes later of a value that was wrong from the first."""
    (problem,) = problems(**changes)
    assert problem.startswith(said), problem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp", "3"], "found --tp, which the supervisor sets for each rank itself"),
        (["--rank=1"], "found --rank, which the supervisor sets"),
        (["--mast", "10.0.0.1"], "found --mast, which the supervisor sets"),
        (["--port", "9000"], "found --port, which the supervisor sets"),
        (["--po=9000"], "found --po, which the supervisor sets"),
        (["--name", "x"], "found --name, which the supervisor sets"),
        (["--context=5"], "found --context, which has a setting of its own; use tensorfold.context"),
        (["--parallel", "8"], "found --parallel, which has a setting of its own; use tensorfold.parallel"),
        (["--drafter", "none"], "found --drafter, which the drafter sets"),
        (["--no-drafts"], "found --no-drafts, which the drafter sets"),
        (["--api-key", "CANARYKEY123"], "found --api-key, a secret that `ps` and `docker inspect` show"),
        (["--api-key-file", "/k"], "found --api-key-file, which leaves /health without what the supervisor"),
        (["--spill-gib", "9"], "found --spill-gib, a disk tier"),
        (["--prefill-fp8"], "found --prefill-fp8, which the engine refuses for EXL3"),
        (["--kv-dtype", "int8"], "found --kv-dtype, which is another model's; use tensorfold.kv"),
        (["--help"], "found --help; the engine would print and end"),
    ],
)
def test_arguments_that_are_not_a_users(arguments: list[str], said: str) -> None:
    """Prevents a second value that splits the ranks, blinds the supervisor, or ends the engine with 0."""
    found = problems(tensorfold={"extra_args": arguments})
    assert found[0].startswith(f"tensorfold.extra_args: {said}"), found
    assert "CANARYKEY123" not in " ".join(found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HF_TOKEN", "found HF_TOKEN; a secret in the environment shows in `docker inspect`"),
        ("TENSORFOLD_API_KEY", "found TENSORFOLD_API_KEY; a secret"),
        ("TF_GLM_KV", "found TF_GLM_KV, which tensorfold.kv sets"),
        (
            "TENSORFOLD_MEMORY_RESERVE_GIB",
            "found TENSORFOLD_MEMORY_RESERVE_GIB, which tensorfold.memory_reserve_gib",
        ),
        (
            "TENSORFOLD_GLM_MAX_IMAGES",
            "found TENSORFOLD_GLM_MAX_IMAGES, which tensorfold.media.max_images sets",
        ),
        ("NCCL_IB_GID_INDEX", "found NCCL_IB_GID_INDEX, which the supervisor sets for each rank"),
        ("TF_ROCE_HCA", "found TF_ROCE_HCA, which the supervisor sets"),
        ("TF_GLM_KV_TIER", "found TF_GLM_KV_TIER, a disk tier"),
        ("TF GLM", "found 'TF GLM', expected an environment variable name"),
        ("TF_GLM_MULTI_WINDOW", "found TF_GLM_MULTI_WINDOW='1', expected a number 16 to 64 in steps of 8"),
        ("TF_ROCE_WAIT_S", "found TF_ROCE_WAIT_S='0'"),
    ],
)
def test_variables_that_are_not_a_users(name: str, said: str) -> None:
    """Prevents secrets in `docker inspect`, one rank's device on all ranks, two places for one setting."""
    (problem,) = problems(tensorfold={"extra_env": {name: "0" if name == "TF_ROCE_WAIT_S" else "1"}})
    assert problem.startswith(f"tensorfold.extra_env: {said}"), problem


def test_a_variable_is_one_line() -> None:
    """Prevents a line break that makes two variables of one."""
    (problem,) = problems(tensorfold={"extra_env": {"TF_GLM_L2PF": "1\nHF_TOKEN=x"}})
    assert problem.startswith("tensorfold.extra_env: found a line break in TF_GLM_L2PF")


def test_a_users_own_arguments_are_allowed() -> None:
    """Prevents a list of owned flags that eats the flags beside them."""
    arguments = ["--alias", "glm", "--temperature", "-0.5", "--reasoning-effort=high", "--max-tokens", "9"]
    settings = settings_of(with_dflash2(tensorfold={"extra_args": arguments}))
    assert list(settings.tensorfold.extra_args) == arguments


@pytest.mark.parametrize(
    ("parallel", "extra_env", "rule"),
    [
        (1, {}, 14.5),
        (4, {}, 14.5),
        (5, {}, 16.7),
        (8, {}, 19.6),
        (8, {"TF_GLM_MULTI_WINDOW": "32"}, 18.3),
        (4, {"TF_GLM_MULTI_WINDOW": "64"}, 15.8),
    ],
)
def test_the_reserve_grows_with_requests_and_rows(
    parallel: int, extra_env: dict[str, str], rule: float
) -> None:
    """Prevents a head, and with it the machine, that runs out of memory at eight long requests."""
    settings = Tensorfold(extra_env=extra_env)
    assert reserve_rule(settings, parallel) == rule
    assert reserve(settings, parallel) == rule
    assert reserve(Tensorfold(memory_reserve_gib=30), parallel) == 30


@pytest.mark.parametrize(
    ("changes", "kind", "tokens"),
    [
        ({}, DrafterKind.DFLASH2, 1_048_576),
        ({"kv": "bf16"}, DrafterKind.MTP, 524_288),
        ({"kv": "bf16"}, DrafterKind.DFLASH2, 196_608),
        ({"kv": "bf16", "dense": "fp8"}, DrafterKind.DFLASH2, 163_840),
        ({"kv": "bf16", "dense": "fp8", "vision": False}, DrafterKind.DFLASH2, 196_608),
        ({"context": 70_000}, DrafterKind.DFLASH2, 70_000),
        ({"context": 0}, DrafterKind.DFLASH2, 0),
    ],
)
def test_the_window_follows_what_was_measured(
    changes: dict[str, Any], kind: DrafterKind, tokens: int
) -> None:
    """Prevents a default window that cannot fit beside an exact cache, and a missing one (2,051 tokens)."""
    assert window(Tensorfold(**changes), kind) == tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tensorfold": {"context": 0}},
            "tensorfold.context: 0; the largest window that fits leaves nothing for",
        ),
        (
            {"tensorfold": {"kv": "bf16", "context": 400_000}},
            "tensorfold.context: 400000; with kv bf16 and drafter dflash2, 196608 was the largest",
        ),
        (
            {"tensorfold": {"context": 32_768}},
            "tensorfold.max_tokens: 32768, no less than the window (32768)",
        ),
        (
            {"tensorfold": {"parallel": 6}},
            "tensorfold.parallel: 6; the reserve grows to 17.7 GiB and the shared pool shrinks",
        ),
        (
            {"tensorfold": {"memory_reserve_gib": 12}},
            "tensorfold.memory_reserve_gib: 12; the rule for 4 requests and 32 rows is 14.5",
        ),
        (
            {"tensorfold": {"vision_urls": True}, "api": {"bind": "management", "without_key": True}},
            "tensorfold.vision_urls: true with an open API",
        ),
        ({"vllm": {"max_num_seqs": 2}}, "vllm: set, but the engine is tensorfold: no effect"),
        ({"drafter": {"sha256": None}}, "drafter.sha256: not set"),
        ({"supervision": {"min_free_gib": 0}}, "supervision.min_free_gib: 0; nothing waits for memory"),
        (
            {"supervision": {"still_seconds": 600}},
            "supervision.still_seconds: 600; a prompt of a million tokens",
        ),
        (
            {"supervision": {"start_stall_seconds": 60}},
            "supervision.start_stall_seconds: 60; an engine that loads",
        ),
        (
            {"supervision": {"stall_seconds": 20}},
            "supervision.stall_seconds: 20; a late peer is slow for longer",
        ),
    ],
)
def test_what_is_known_to_hurt_is_warned_about(changes: dict[str, Any], said: str) -> None:
    """Prevents a setting that the engine takes and that hurts hours later, unannounced."""
    (warning,) = warnings(settings_of(with_dflash2(**changes)))
    assert warning.startswith(said), warning


def test_the_recipes_defaults_raise_no_warning() -> None:
    """Prevents warnings that everybody learns to ignore."""
    assert warnings(settings_of(with_dflash2())) == ()
    assert warnings(settings_of(tensorfold_data())) == ()


def test_a_spark_s_limits_do_not_hit_the_double_on_a_cpu() -> None:
    """Prevents a lab that needs a Spark's memory and times to test anything."""
    changes: dict[str, Any] = {
        "device": "cpu",
        "tensorfold": {"memory_reserve_gib": 2, "parallel": 8},
        "supervision": {"min_free_gib": 0, "stall_seconds": 2, "still_seconds": 5, "start_stall_seconds": 9},
    }
    found = warnings(settings_of(with_dflash2(**changes)))
    assert [text.split(":")[0] for text in found] == ["tensorfold.parallel"]


def test_validated_settings_are_never_refused_for_themselves() -> None:
    """Prevents settings that pass the check and are refused by the start that reads them."""
    for data in (with_dflash2(), tensorfold_data(), tensorfold_data(drafter={"request": "none"})):
        assert isinstance(choose_drafter(settings_of(data)), Choice)


def test_the_environment_of_a_shell_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a forgotten export from winning over the inventory."""
    before = dump(settings_of(with_dflash2()))
    for name in ("MAX_MODEL_LEN", "PARALLEL", "CONTEXT", "TF_GLM_KV", "DRAFTER"):
        monkeypatch.setenv(name, "1")
    assert dump(settings_of(with_dflash2())) == before


def test_dflash2_needs_leave_and_a_place() -> None:
    """Prevents a licence that is asked for after the download, and a drafter that nobody can find."""
    with pytest.raises(ConfigError) as caught:
        settings_of(tensorfold_data(drafter={"request": "dflash2"}))
    assert [text.split(":")[0] for text in caught.value.problems] == ["drafter.licence", "drafter.path"]
    settings_of(tensorfold_data(drafter={"request": "dflash2", "path": DRAFTER_DIR, "licence": LICENCE}))
