"""Which drafter a start uses, and what that costs. Pure: wishes, licence and files in, choice or refusal out.

Drafts only propose tokens, so replies are the same with any drafter. Speed, memory and, on TensorFold, how
many requests run at once are not.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LICENCE = "CC BY-NC-ND 4.0"
LICENSOR = "contact@inco.ai"
REPOSITORY = "incoai/GLM-5.3-Flash-DFlash2"
REVISION = "bf582e4eacc1810f76656d1811693ff6c6737d2a"
"""DFlash2's revision that the recipe was measured with. Other weights have had the same repository name."""

PARALLEL_DEFAULT = 4
"""Requests at once that TensorFold's recipe serves with DFlash2; without it the engine serves one."""


class DrafterKind(StrEnum):
    """DFLASH2: a draft model of its own. MTP: the checkpoint's own draft head. NONE: no drafts at all."""

    DFLASH2 = "dflash2"
    MTP = "mtp"
    NONE = "none"


class Licence(msgspec.Struct, frozen=True, kw_only=True):
    """Who accepted DFlash2's licence, on which day, and for which use."""

    accepted_by: Annotated[str, Meta(pattern=r"\S")]
    accepted_on: datetime.date
    use: Literal["non-commercial", "commercial"]

    def __str__(self) -> str:
        return f"{LICENCE}, accepted by {self.accepted_by} on {self.accepted_on} for {self.use} use"


class DrafterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    `path` is DFlash2's snapshot folder, the same on every node; `sha256` that of its model.safetensors.
    `fallback` says whether a start may go on with the MTP head when DFlash2 cannot be used.
    """

    request: Literal["auto", "dflash2", "mtp", "none"] = "auto"
    path: Annotated[str, Meta(pattern=r"^/\S+$")] | None = None
    revision: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}$")] = REVISION
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    licence: Licence | None = None
    fallback: Literal["never", "mtp"] = "never"


class DraftFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a node found in the drafter's folder.

    `problem`: absent, incomplete or unreadable; else `sha256` is that of the weights.
    """

    node: str
    rank: int
    sha256: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.node} (rank {self.rank})"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a start uses. `parallel` is the number of requests at once, `cost` what it costs in words."""

    kind: DrafterKind
    parallel: int
    path: str = ""
    sha256: str = ""
    licence: str = ""
    reasons: tuple[str, ...] = ()
    cost: str = ""
    fallback: bool = False

    def line(self) -> str:
        """Return one readable line for the journal and `glm53 status`."""
        loud = "FALLBACK: " if self.fallback else ""
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{loud}drafter {self.kind}, {_requests(self.parallel)} at once{why}. Cost: {self.cost}"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why no start is made; each reason names the setting and the way out."""

    reasons: tuple[str, ...]


COPY_IT = "Fix: run site.yml, which brings the head's folder to the same path here"

Files = Sequence[DraftFiles] | None
"""One entry a rank; None when nobody has looked yet."""


def choose(
    wish: DrafterSettings,
    *,
    engine: str,
    device: str,
    parallel: int | None,
    files: Files = None,
    mtp_head: bool | None = None,
) -> Choice | Refusal:
    """Return what to draft with. `parallel` None means auto; `mtp_head` None means that nobody has looked.

    `auto` is DFlash2 once its licence is accepted, else the MTP head; on vLLM's CPU device, which serves
    models without draft heads, it is none.
    """
    if wish.request == "none" or (wish.request == "auto" and engine == "vllm" and device == "cpu"):
        return _single(DrafterKind.NONE, wish, engine, parallel, ())
    if wish.request == "dflash2" or (wish.request == "auto" and wish.licence is not None):
        return _dflash2(wish, engine, parallel, files, mtp_head)
    if mtp_head is False and wish.request == "mtp":
        return Refusal(
            reasons=(
                "drafter.request: found 'mtp', but this checkpoint has no MTP head"
                " (num_nextn_predict_layers in its config.json). Fix: 'dflash2' with its licence, or 'none'",
            )
        )
    why = () if wish.request == "mtp" else ("DFlash2's licence is not accepted",)
    if mtp_head is False:
        return _single(DrafterKind.NONE, wish, engine, parallel, (*why, "this checkpoint has no MTP head"))
    return _single(DrafterKind.MTP, wish, engine, parallel, why)


def check_files(choice: Choice, found: DraftFiles) -> str:
    """Return why the node of `found` cannot take part in `choice`; empty when it can.

    The other half of `choose`, for a rank that only knows its own files.
    """
    if choice.kind is not DrafterKind.DFLASH2:
        return ""
    if found.problem:
        return f"DFlash2 in {choice.path}: {found.problem}. {COPY_IT}"
    if choice.sha256 and found.sha256 != choice.sha256:
        return (
            f"DFlash2 in {choice.path} has SHA-256 {found.sha256[:12]}, this start uses {choice.sha256[:12]}"
            f" (different weights have had this name). {COPY_IT}"
        )
    return ""


def fall_back(
    wish: DrafterSettings, *, engine: str, parallel: int | None, fault: str, mtp_head: bool | None = None
) -> Choice | Refusal:
    """Return what the fallback policy makes of a DFlash2 that cannot be used for the reason `fault`."""
    if wish.fallback == "never":
        return Refusal(
            reasons=(
                f"DFlash2 cannot be used: {fault}. Fix: mend it; or drafter.request: mtp; or"
                f" drafter.fallback: mtp ({_cost(DrafterKind.MTP, engine)})",
            )
        )
    if mtp_head is False:
        return Refusal(reasons=(f"DFlash2 cannot be used: {fault}; and the checkpoint has no MTP head",))
    made = _single(
        DrafterKind.MTP, wish, engine, parallel, (f"DFlash2 cannot be used: {fault}", "drafter.fallback: mtp")
    )
    return msgspec.structs.replace(made, fallback=True) if isinstance(made, Choice) else made


def _dflash2(
    wish: DrafterSettings, engine: str, parallel: int | None, files: Files, mtp_head: bool | None
) -> Choice | Refusal:
    problems = _without_leave(wish)
    if wish.path is None:
        problems.append(
            "drafter.path: missing; DFlash2 needs the folder of its snapshot (config.json, model.safetensors)"
        )
    if wish.fallback == "mtp" and engine == "tensorfold" and (parallel or 1) > 1:
        problems.append(
            f"drafter.fallback: found 'mtp' with tensorfold.parallel {parallel}; the MTP head serves one"
            " request at a time, so it could never be used. Fix: tensorfold.parallel: auto, or"
            " drafter.fallback: never"
        )
    if problems:
        return Refusal(reasons=tuple(problems))
    expected = wish.sha256 or next((found.sha256 for found in files or () if not found.problem), "")
    choice = Choice(
        kind=DrafterKind.DFLASH2,
        parallel=parallel or PARALLEL_DEFAULT,
        path=wish.path or "",
        sha256=expected,
        licence=str(wish.licence),
        reasons=("drafter.request: dflash2",) if wish.request == "dflash2" else ("its licence is accepted",),
        cost=_cost(DrafterKind.DFLASH2, engine),
    )
    wrong = "; ".join(f"{found}: {why}" for found in files or () if (why := check_files(choice, found)))
    if wrong:
        return fall_back(wish, engine=engine, parallel=parallel, fault=wrong, mtp_head=mtp_head)
    return choice


def _without_leave(wish: DrafterSettings) -> list[str]:
    if wish.licence is None:
        return [
            f"drafter.licence: missing; DFlash2 is under {LICENCE} (no commercial use). Fix: say accepted_by,"
            " accepted_on and use there; or drafter.request: mtp, which needs no licence"
        ]
    if wish.licence.use == "commercial":
        return [
            f"drafter.licence.use: found 'commercial'; DFlash2 is under {LICENCE}, for non-commercial use"
            f" only. Fix: drafter.request: mtp, or a licence of your own from {LICENSOR}"
        ]
    return []


def _single(
    kind: DrafterKind, wish: DrafterSettings, engine: str, parallel: int | None, reasons: tuple[str, ...]
) -> Choice | Refusal:
    """Return a choice without a draft model: TensorFold then serves one request at a time."""
    if engine == "tensorfold" and (parallel or 1) > 1:
        asked = f"drafter.request {wish.request!r}" + (f" is {kind} here" if wish.request != kind else "")
        why = f": {'; '.join(reasons)}" if reasons else ""
        return Refusal(
            reasons=(
                f"tensorfold.parallel: found {parallel}, but {asked}{why}; TensorFold serves more than one"
                " request at a time with DFlash2 only. Fix: tensorfold.parallel: auto, or accept DFlash2's"
                " licence (drafter.licence)",
            )
        )
    return Choice(
        kind=kind,
        parallel=parallel or 1,
        reasons=reasons or (f"drafter.request: {wish.request}",),
        cost=_cost(kind, engine),
    )


COSTS = {
    (DrafterKind.DFLASH2, "tensorfold"): f"2.3 GB more on each node, non-commercial use only ({LICENCE})",
    (DrafterKind.DFLASH2, "vllm"): f"2.3 GB more on each node, non-commercial use only ({LICENCE})",
    (DrafterKind.MTP, "tensorfold"): (
        "one request at a time where DFlash2 serves four, decoding 5 to 10 % slower, 1.8 GiB a node for the"
        " head"
    ),
    (DrafterKind.MTP, "vllm"): "2 drafted tokens a step where DFlash2 drafts 7",
    (
        DrafterKind.NONE,
        "tensorfold",
    ): "no drafts: one token a step, one request at a time; the slowest there is",
    (DrafterKind.NONE, "vllm"): "no drafts: one token a step for each request",
}


def _cost(kind: DrafterKind, engine: str) -> str:
    return COSTS[kind, engine]


def _requests(count: int) -> str:
    return f"{count} request{'s' if count != 1 else ''}"
