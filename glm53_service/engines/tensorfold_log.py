"""What TensorFold's lines mean: milestones, errors, what to change after a failed start, what to advise.

The texts are those of 0.6.0 with the recipe's patches; nothing here needs a patch that its image lacks.
"""

from __future__ import annotations

import re

import msgspec

from glm53_service.engines.base import Attempt, Line, LineKind
from glm53_service.settings import Settings

ATTEMPTS = 4
"""Starts in a row, the first one included, before a fault is a fault."""

SMALLEST_WINDOW = 4096
"""A smaller window than this serves nobody; something else holds the memory."""

PREFIX = re.compile(r"^\[tensorfold\] ")

PROGRESS = (
    (re.compile(r"^loading .+ on CUDA, rank \d+ of \d+"), "engine process is up; joining the other rank"),
    (
        re.compile(r"^building CUDA extension (\S+)"),
        r"building CUDA kernels: \1 (the first start of an image only)",
    ),
    (
        re.compile(r"startup estimate ([\d.]+) GiB within ([\d.]+) GiB;.* prompt/reply window (\d+)"),
        r"loading the weights: \1 of \2 GiB, a window of \3 tokens",
    ),
    (re.compile(r"^drafter timings"), "weights are loaded; the drafter was timed"),
    (
        re.compile(r"up to (\d+) requests? decode together.* one pool of (\d+) tokens"),
        r"a pool of \2 tokens for \1 requests at once",
    ),
    (re.compile(r"^serving \S+ at .*loaded in ([\d.]+) ?s"), r"loaded in \1 s; opening the API"),
    (re.compile(r"^rank (\d+) ready in ([\d.]+) ?s, following rank 0"), r"rank \1 is ready after \2 s"),
)
"""Milestones of a start, in order. "serving" comes before the port is open: only an answer means ready."""

WAITING = (
    (
        re.compile(r"still waiting after (\d+ s) on the build lock (\S+)"),
        r"waiting for \1 on the build lock \2; when nothing builds, a killed build left it: remove it",
    ),
    (
        re.compile(r"^CUDA extension (\S+) waits on the build lock"),
        r"waiting until another process has built \1",
    ),
    (
        re.compile(r"^rank (\d+) finished loading; waiting for rank (\d+)"),
        r"rank \1 has its weights and waits for rank \2",
    ),
)
"""What a rank repeats while it waits for another one that may never come."""

ERROR = re.compile(
    r"^tensorfold(?: \w+: error)?: |^(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)|request error: "
    r"|^Timeout \(\d+:\d\d:\d\d\)!"  # the engine's own watchdog
)

BROKEN = re.compile(
    r"ranks are out of step|RoCE all-gather failed"
    r"|request error: .*(?:NCCL error|CUDA error|AcceleratorError)"
)
"""After one of these every request fails while /health stays well: the ranks have to be started anew."""

WINDOW = re.compile(r"largest fitting prompt-plus-reply window: (\d+) tokens")
NCCL_MEMORY = "NCCL error 2: unhandled system error"

ADVICE = (
    (
        re.compile(r"largest fitting prompt-plus-reply window: 0 tokens"),
        "not even the weights fit: another program holds the memory; stop it, or drop the page cache",
    ),
    (
        WINDOW,
        "free memory on the node that has less, or ask for a smaller tensorfold.context",
    ),
    (
        re.compile(rf"{NCCL_MEMORY}|ibv_reg_mr\S*.*Cannot allocate memory"),
        "memory could not be registered for RDMA: with CmaFree above CmaTotal in /proc/meminfo, the kernel's"
        " KHO reserve is in the way (boot with kho=off, or kernel 6.17); else tensorfold.split: false",
    ),
    (
        re.compile(r"vendor_err 0x81"),
        "the second rail does not reach its peer: mend it, or leave it out of glm53_fabric_rails",
    ),
    (
        re.compile(r"RoCE all-gather failed|ranks are out of step"),
        "a rank was late or gone; the other rank's log and the link tell which",
    ),
    (
        re.compile(r"[Aa]ddress already in use"),
        "another program has the API's or the rendezvous port: ss -ltnp",
    ),
    (
        re.compile(r"startup memory geometry|neither a directory nor a Hugging Face repo"),
        "the checkpoint is missing or incomplete on a node: run playbooks/artifacts.yml",
    ),
    (
        re.compile(r"CUDA engine reads EXL3 checkpoints with"),
        "this is not the TensorFold checkpoint: glm53_model_dir must hold EXL3 4-bit with the mcg codebook",
    ),
    (
        re.compile(r"different settings|different native windows"),
        "the ranks were not started alike: two releases or images; run site.yml",
    ),
    (
        re.compile(r"leaves no MTP head and no DFlash2"),
        "TF_GLM_MTP=0 without DFlash2 leaves nothing to draft with: take it out of tensorfold.extra_env",
    ),
    (
        re.compile(r"finished loading but rank \d+ has not"),
        "one rank never finished loading: its log tells why, and its disk may be slow",
    ),
    (
        re.compile(r"Permission denied: '?/cache|Read-only file system: '?/cache"),
        "the kernel cache is not writable for the service: chown -R glm53 /var/lib/glm53/cache",
    ),
    (
        re.compile(r"No space left on device"),
        "the disk is full: the kernel cache is /var/lib/glm53/cache",
    ),
    (
        re.compile(r"timed out after \d+ ?s(?:econds)? waiting for clients|DistStoreError|DistNetworkError"),
        "the ranks did not find each other: is the rendezvous port open between the fabric addresses?",
    ),
    (
        re.compile(r"unrecognized arguments|invalid choice|invalid int value"),
        "the image does not know an argument: mend tensorfold.extra_args, or the image",
    ),
)

DRAFTER_FRAME = re.compile(r'File "[^"]*dflash\w*\.py"')
DRAFTER_WORDS = re.compile(
    r"(?:Error|Exception)\b:?.*(?:drafter|dflash|_conv base kernel shape|two-tap conv)", re.I
)
NOT_THE_DRAFTER = re.compile(
    r"leaves no MTP head|different settings|memory budget|NCCL error|RoCE all-gather"
)


def read_line(text: str) -> Line:
    """Return a milestone, a sign of waiting, an error, or a detail."""
    line = PREFIX.sub("", text.strip())
    if BROKEN.search(line):
        return Line(kind=LineKind.ERROR, text=line[:400], fatal=True)
    if ERROR.search(line):
        return Line(kind=LineKind.ERROR, text=line[:400])
    for kind, patterns in ((LineKind.PROGRESS, PROGRESS), (LineKind.WAITING, WAITING)):
        for pattern, told in patterns:
            if match := pattern.search(line):
                return Line(kind=kind, text=match.expand(told))
    return Line(kind=LineKind.DETAIL, text=line[:400])


def next_attempt(fault: str, attempt: Attempt, settings: Settings) -> Attempt | None:
    """Return the start after `attempt`.

    One refit to the window that the engine names; a failed registration of memory once more as it was, then
    with the split of prompt chunks off.
    """
    if attempt.number >= ATTEMPTS:
        return None
    named = WINDOW.findall(fault)
    if named:
        fits = min(map(int, named))
        if attempt.window is not None or fits < SMALLEST_WINDOW:
            return None
        return _after(attempt, f"the window is {fits} tokens, the largest that fits now", window=fits)
    if NCCL_MEMORY in fault and settings.tensorfold.split and attempt.split:
        if not attempt.repeats:
            return _after(attempt, f"once more as it was, after {NCCL_MEMORY}", repeats=1)
        return _after(
            attempt,
            f"the split of prompt chunks is off, after {NCCL_MEMORY} again: long prompts fill slower",
            split=False,
        )
    return None


def _after(attempt: Attempt, change: str, **changes: object) -> Attempt:
    return msgspec.structs.replace(
        attempt, number=attempt.number + 1, changes=(*attempt.changes, change), **changes
    )


def drafter_fault(fault: str) -> bool:
    """Return whether the draft model is what failed: its own words, or the traceback's innermost frame."""
    if NOT_THE_DRAFTER.search(fault):
        return False
    frames = re.findall(r'File "[^"]+", line \d+', fault)
    return bool(DRAFTER_WORDS.search(fault) or (frames and DRAFTER_FRAME.search(frames[-1])))


def advice(fault: str) -> str:
    """Return what a person can do about `fault`; empty when it is not a known one."""
    return next((text for pattern, text in ADVICE if pattern.search(fault)), "")
