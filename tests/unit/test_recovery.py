"""The next start after one that failed, for both engines."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.drafter import DrafterKind
from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt, Launch
from glm53_service.recovery import Recovery, recover
from tests.unit.fixtures import launch_of, settings_of, tensorfold_data, vllm_data, with_dflash2

REFUSAL = (
    "tensorfold: ...; estimated largest fitting prompt-plus-reply window: 393216 tokens across the ranks"
)
DRAFTER = "Traceback (most recent call last):\nValueError: drafter heads must split evenly over the ranks"
NCCL = "RuntimeError: NCCL error 2: unhandled system error"


def after(launch: Launch, fault: str) -> Recovery | None:
    """Return the start after `launch` failed with `fault`."""
    return recover(engine_for(launch.settings), launch, fault)


def next_launch(launch: Launch, fault: str) -> Launch:
    """Return the launch that follows; there must be one."""
    recovery = after(launch, fault)
    assert recovery is not None
    return launch_of(launch.settings, attempt=recovery.attempt, drafter=recovery.drafter)


def test_a_refit_keeps_the_drafter_and_says_so() -> None:
    """Prevents a start with another window that nobody was told of."""
    recovery = after(launch_of(settings_of(with_dflash2())), REFUSAL)
    assert recovery is not None
    assert (recovery.attempt.window, recovery.drafter.kind) == (393_216, DrafterKind.DFLASH2)
    assert recovery.reason == "start 2: the window is 393216 tokens, the largest that fits now"


def test_never_more_starts_than_the_stated_number() -> None:
    """Prevents a loop of starts: each leaks memory on a Spark until the machine needs a power cycle."""
    launch = launch_of(settings_of(with_dflash2(drafter={"fallback": "mtp"})))
    starts = 1
    for fault in (REFUSAL, NCCL, NCCL, DRAFTER, REFUSAL, NCCL):
        recovery = after(launch, fault)
        if recovery is None:
            continue
        starts += 1
        launch = launch_of(launch.settings, attempt=recovery.attempt, drafter=recovery.drafter)
    assert (starts, launch.attempt.number) == (4, 4)
    assert after(launch, DRAFTER) is None


@pytest.mark.parametrize("seconds", [20])
def test_an_engine_that_always_exits_is_not_started_again(seconds: int) -> None:
    """Prevents 35 restarts in a row of an engine that fails 20 s into each of them."""
    assert after(launch_of(settings_of(with_dflash2())), f"exited with code 1 after {seconds} s") is None


def test_the_policy_decides_about_a_drafter_that_fails() -> None:
    """Prevents DFlash2 from being dropped without leave, and from being kept where the policy lets it go."""
    never = launch_of(settings_of(with_dflash2()))
    assert after(never, DRAFTER) is None
    allowed = launch_of(settings_of(with_dflash2(drafter={"fallback": "mtp"})))
    recovery = after(allowed, DRAFTER)
    assert recovery is not None
    assert (recovery.drafter.kind, recovery.drafter.parallel) == (DrafterKind.MTP, 1)
    assert recovery.reason.startswith(
        "start 2: FALLBACK: drafter mtp, 1 request at once (DFlash2 cannot be used: ValueError: drafter heads"
    )
    assert recovery.attempt.changes[-1].startswith("FALLBACK: ")


def test_a_fallback_keeps_the_refit() -> None:
    """Prevents a fallback that forgets the window and fails for the first reason again."""
    launch = next_launch(launch_of(settings_of(with_dflash2(drafter={"fallback": "mtp"}))), REFUSAL)
    launch = next_launch(launch, DRAFTER)
    assert (launch.attempt.window, launch.choice.kind, launch.attempt.number) == (393_216, DrafterKind.MTP, 3)


def test_the_mtp_head_has_nothing_to_fall_back_to() -> None:
    """Prevents a fallback from MTP to MTP, for ever."""
    assert after(launch_of(settings_of(tensorfold_data(drafter={"fallback": "mtp"}))), DRAFTER) is None


@pytest.mark.parametrize(
    ("fault", "window"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (900000), (9 GiB KV cache"
            " is needed, which is larger than the available KV cache memory (5 GiB). Based on the available"
            " memory, the estimated maximum model length is 393216. Try increasing `gpu_memory_utilization`",
            393_216,
        ),
        ("the estimated maximum model length is 12.", None),
        ("Free memory on device cuda:0 (62.1/121.69 GiB) on startup is less than desired GPU memory", None),
    ],
)
def test_vllm_is_refitted_once_too(fault: str, window: int | None) -> None:
    """Prevents a kind of fault from being handled for one engine only: vLLM names what fits as well."""
    launch = launch_of(settings_of(vllm_data()))
    recovery = after(launch, fault)
    assert (recovery.attempt.window if recovery else None) == window
    second = launch_of(launch.settings, attempt=Attempt(number=2, window=393_216))
    assert after(second, fault) is None


def test_vllm_falls_back_with_its_requests() -> None:
    """Prevents vLLM's requests at once from being cut to TensorFold's one."""
    drafter: dict[str, Any] = {"request": "dflash2", "fallback": "mtp", **with_dflash2()["drafter"]}
    launch = launch_of(settings_of(vllm_data(drafter=drafter, vllm={"max_num_seqs": 3})))
    recovery = after(launch, "ValueError: DFlash draft model has no config")
    assert recovery is not None
    assert (recovery.drafter.kind, recovery.drafter.parallel) == (DrafterKind.MTP, 3)
