"""What TensorFold's lines mean, and what is changed after a failed start."""

from __future__ import annotations

import pytest

from glm53_service.engines import engine_for
from glm53_service.engines.base import Attempt, LineKind
from tests.unit.fixtures import launch_of, place, settings_of, tensorfold_data, value

ENGINE = engine_for(settings_of(tensorfold_data()))
PLAIN = settings_of(tensorfold_data())
WINDOW_REFUSAL = (
    "tensorfold: CUDA startup memory budget cannot fit requested context 1048576; estimated largest fitting"
    " prompt-plus-reply window: 393216 tokens across the ranks. Use --context 393216 with a smaller"
    " prompt/reply reserve, or free memory; no model weights or KV caches have been loaded."
)
NCCL = "RuntimeError: NCCL error 2: unhandled system error"


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        (
            "[tensorfold] loading GLM-5.3-Flash-EXL3: GLM-5.3-Flash (glm5_next) on CUDA, rank 0 of 2",
            LineKind.PROGRESS,
            "engine process is up; joining the other rank",
        ),
        (
            "[tensorfold] building CUDA extension tf_exl3 (first start after an install or update; later"
            " starts reuse it)",
            LineKind.PROGRESS,
            "building CUDA kernels: tf_exl3 (the first start of an image only)",
        ),
        (
            "[tensorfold] CUDA extension tf_exl3 waits on the build lock /cache/x/lock; if no other build is"
            " running, a killed build left it",
            LineKind.WAITING,
            "waiting until another process has built tf_exl3",
        ),
        (
            "[tensorfold] still waiting after 60 s on the build lock /cache/x/lock",
            LineKind.WAITING,
            "waiting for 60 s on the build lock /cache/x/lock; when nothing builds, a killed build left it:"
            " remove it",
        ),
        (
            "[tensorfold] CUDA rank 1 startup estimate 88.09 GiB within 101.30 GiB; native 1048576, allocated"
            " prompt/reply window 1048576, cache slots 32",
            LineKind.PROGRESS,
            "loading the weights: 88.09 of 101.30 GiB, a window of 1048576 tokens",
        ),
        (
            "[tensorfold] rank 1 finished loading; waiting for rank 0 (120 s)",
            LineKind.WAITING,
            "rank 1 has its weights and waits for rank 0",
        ),
        (
            "[tensorfold] --parallel 4: up to 4 requests decode together, their caches in one pool of 2684928"
            " tokens (each up to 1048576); DFlash2 drafts, prompt chunks of 2048",
            LineKind.PROGRESS,
            "a pool of 2684928 tokens for 4 requests at once",
        ),
        (
            "[tensorfold] serving GLM-5.3-Flash-EXL3 at http://127.0.0.1:8888/v1 on CUDA, rank 0 of 2"
            " (sampling: x; drafts: on; context: 1048576; loaded in 211.4s)",
            LineKind.PROGRESS,
            "loaded in 211.4 s; opening the API",
        ),
        (
            "[tensorfold] rank 1 ready in 209.0s, following rank 0",
            LineKind.PROGRESS,
            "rank 1 is ready after 209.0 s",
        ),
        (WINDOW_REFUSAL, LineKind.ERROR, WINDOW_REFUSAL),
        (NCCL, LineKind.ERROR, NCCL),
        ("tensorfold banner: hello", LineKind.DETAIL, "tensorfold banner: hello"),
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            LineKind.ERROR,
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "tensorfold serve: error: argument --tp: invalid choice: 3",
            LineKind.ERROR,
            "tensorfold serve: error: argument --tp: invalid choice: 3",
        ),
        ("Timeout (0:05:00)!", LineKind.ERROR, "Timeout (0:05:00)!"),
        (
            '[tensorfold] 10.0.0.9 "POST /v1/chat/completions HTTP/1.1" 200 -',
            LineKind.DETAIL,
            '10.0.0.9 "POST /v1/chat/completions HTTP/1.1" 200 -',
        ),
        (
            "[tensorfold] EXL3 support is experimental: replies are exact, but speed may change",
            LineKind.DETAIL,
            "EXL3 support is experimental: replies are exact, but speed may change",
        ),
    ],
)
def test_log_lines(line: str, kind: LineKind, text: str) -> None:
    """Prevents a start that is silent for minutes although the engine told its milestones."""
    read = ENGINE.read_line(line)
    assert (read.kind, read.text, read.fatal) == (kind, text, False)


@pytest.mark.parametrize(
    "line",
    [
        "[tensorfold] request error: RuntimeError: the two ranks are out of step after an error",
        "RuntimeError: RoCE all-gather failed (sequence 812, peer 1, hca roce0) [doorbell 1, posted 1]",
        "[tensorfold] request error: RuntimeError: NCCL error 6: remote process exited or network error",
        "[tensorfold] request error: AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: rank 1: expected rank 0's message 9, received number 11: the ranks are out of step",
    ],
)
def test_a_broken_pair_is_known_by_its_line(line: str) -> None:
    """Prevents a pair whose /health is 200 for ever while every request fails: no field shows the latch."""
    assert ENGINE.read_line(line).fatal


@pytest.mark.parametrize(
    "line",
    [
        "[tensorfold] request error: ValueError: a prompt of 9 tokens leaves no room in the 8-token window",
        "[tensorfold] request error: BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_clients_error_breaks_nothing(line: str) -> None:
    """Prevents a client's own fault from taking the pair down."""
    read = ENGINE.read_line(line)
    assert (read.kind, read.fatal) == (LineKind.ERROR, False)


# Second chances


def test_one_refit_to_the_window_that_the_engine_names() -> None:
    """Prevents a night without service because another program holds two GiB more than yesterday."""
    attempt = ENGINE.next_attempt(WINDOW_REFUSAL, Attempt(), PLAIN)
    assert attempt == Attempt(
        number=2, window=393_216, changes=("the window is 393216 tokens, the largest that fits now",)
    )
    made = ENGINE.container(launch_of(PLAIN, attempt=attempt), place(1), "sha256:local")
    assert value(made.command, "--context") == "393216"
    again = WINDOW_REFUSAL.replace("393216", "196608")
    assert ENGINE.next_attempt(again, attempt, PLAIN) is None


def test_the_poorer_nodes_window_counts() -> None:
    """Prevents a refit to the richer node's window, which the poorer one refuses again."""
    both = f"rank 0 exited: {WINDOW_REFUSAL}\nb (rank 1) exited: {WINDOW_REFUSAL.replace('393216', '131072')}"
    attempt = ENGINE.next_attempt(both, Attempt(), PLAIN)
    assert attempt is not None
    assert attempt.window == 131_072


@pytest.mark.parametrize("window", ["0", "2051"])
def test_no_refit_to_a_window_that_serves_nobody(window: str) -> None:
    """Prevents a pair that calls itself ready with no window to speak of."""
    assert ENGINE.next_attempt(WINDOW_REFUSAL.replace("393216", window), Attempt(), PLAIN) is None


def test_nccl_error_2_once_as_is_then_without_the_split() -> None:
    """Prevents a pair that stays down for a fault that passes about every second time."""
    second = ENGINE.next_attempt(NCCL, Attempt(), PLAIN)
    assert second is not None
    assert (second.number, second.split, second.window) == (2, True, None)
    third = ENGINE.next_attempt(NCCL, second, PLAIN)
    assert third is not None
    assert (third.number, third.split) == (3, False)
    environment = ENGINE.container(launch_of(PLAIN, attempt=third), place(0), "sha256:local").environment
    assert (environment["TF_GLM_HC_SPLIT"], environment["TF_GLM_PREFILL_OVERLAP"]) == ("0", "0")
    assert ENGINE.next_attempt(NCCL, third, PLAIN) is None
    off = settings_of(tensorfold_data(tensorfold={"split": False}))
    assert ENGINE.next_attempt(NCCL, Attempt(), off) is None


def test_both_faults_in_one_start_keep_what_was_changed() -> None:
    """Prevents a repeat that forgets the refit and fails for the first reason again."""
    first = ENGINE.next_attempt(WINDOW_REFUSAL, Attempt(), PLAIN)
    assert first is not None
    second = ENGINE.next_attempt(NCCL, first, PLAIN)
    assert second is not None
    third = ENGINE.next_attempt(NCCL, second, PLAIN)
    assert third is not None
    assert (third.number, third.window, third.split, len(third.changes)) == (4, 393_216, False, 3)
    assert ENGINE.next_attempt(WINDOW_REFUSAL, third, PLAIN) is None


@pytest.mark.parametrize(
    "fault",
    [
        "exited with code 1",
        "RuntimeError: NCCL error 3: internal error",
        "tensorfold: /srv/models/glm is neither a directory nor a Hugging Face repo id (owner/name)",
        "OSError: [Errno 98] Address already in use",
    ],
)
def test_other_faults_are_not_tried_again_at_once(fault: str) -> None:
    """Prevents a loop of starts that each fail the same way and leave memory behind."""
    assert ENGINE.next_attempt(fault, Attempt(), PLAIN) is None


@pytest.mark.parametrize(
    ("fault", "drafters"),
    [
        ("ValueError: drafter heads must split evenly over the ranks", True),
        ("FileNotFoundError: [Errno 2] No such file: '/srv/models/dflash2/model.safetensors'", True),
        ("ValueError: unexpected attention_conv base kernel shape", True),
        (
            'File "/x/glm5/engine.py", line 9, in load\n  File "/x/glm5/dflash2.py", line 7, in'
            " __init__\nKeyError: 'head_dim'",
            True,
        ),
        (
            'File "/x/glm5/dflash2.py", line 7, in _row\n  File "/x/glm5/comm.py", line 70, in'
            f" all_gather\n{NCCL}",
            False,
        ),
        ("tensorfold: TF_GLM_MTP=0 leaves no MTP head and no DFlash2 draft model was given", False),
        (
            "RuntimeError: the two ranks were started with different settings (drafter): [1] [0]",
            False,
        ),
        (WINDOW_REFUSAL, False),
    ],
)
def test_a_fault_of_the_drafter_is_told_from_others(fault: str, drafters: bool) -> None:
    """Prevents DFlash2 from being given up for the fabric's fault, and from being kept for its own."""
    assert ENGINE.drafter_fault(fault) == drafters


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (WINDOW_REFUSAL, "smaller tensorfold.context"),
        (WINDOW_REFUSAL.replace("393216 tokens across", "0 tokens across"), "not even the weights fit"),
        ("ibv_reg_mr_iova2 failed: Cannot allocate memory", "kho=off"),
        (NCCL, "kho=off"),
        ("RoCE vendor_err 0x81", "second rail"),
        ("OSError: [Errno 98] Address already in use", "ss -ltnp"),
        ("PermissionError: [Errno 13] Permission denied: '/cache/torch_extensions'", "chown"),
        (
            "tensorfold: CUDA startup memory geometry could not be established on every rank: x",
            "artifacts.yml",
        ),
        ("tensorfold: error: unrecognized arguments: --x", "tensorfold.extra_args"),
        ("torch.distributed.DistStoreError: timed out after 600s waiting for clients", "rendezvous port"),
        ("nothing of note", ""),
    ],
)
def test_a_known_fault_comes_with_what_to_do(fault: str, part: str) -> None:
    """Prevents an engine's traceback as the only help there is."""
    said = ENGINE.advice(fault)
    assert part in said
    assert bool(said) == bool(part)
