"""The drafter's choice: what is used, what is refused, and what it costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from glm53_service.drafter import (
    Choice,
    DrafterKind,
    DrafterSettings,
    DraftFiles,
    Refusal,
    check_files,
    choose,
    fall_back,
)
from tests.unit.fixtures import DRAFTER_DIR, LICENCE, SHA

OTHER = "cd" * 32
ACCEPTED = {"licence": LICENCE, "path": DRAFTER_DIR}


def wish(**wanted: Any) -> DrafterSettings:
    """Return what an inventory asks for."""
    return msgspec.convert(wanted, DrafterSettings)


def chosen(
    wanted: dict[str, Any],
    *,
    engine: str = "tensorfold",
    device: str = "cuda",
    parallel: int | None = None,
    files: tuple[DraftFiles, ...] | None = None,
    mtp_head: bool | None = None,
) -> Choice | Refusal:
    """Return the choice for `wanted`."""
    return choose(
        wish(**wanted), engine=engine, device=device, parallel=parallel, files=files, mtp_head=mtp_head
    )


def choice(wanted: dict[str, Any], **more: Any) -> Choice:
    """Return the choice, which is none of the refusals."""
    made = chosen(wanted, **more)
    assert isinstance(made, Choice), made
    return made


def refusal(wanted: dict[str, Any], **more: Any) -> str:
    """Return the reasons of a refusal."""
    made = chosen(wanted, **more)
    assert isinstance(made, Refusal), made
    return " | ".join(made.reasons)


def found(rank: int, sha256: str = SHA, problem: str = "") -> DraftFiles:
    """Return what the node of `rank` found."""
    return DraftFiles(node="ab"[rank], rank=rank, sha256=sha256, problem=problem)


@pytest.mark.parametrize(
    ("wanted", "parallel", "kind", "served"),
    [
        ({"request": "mtp"}, None, DrafterKind.MTP, 1),
        ({"request": "mtp"}, 1, DrafterKind.MTP, 1),
        ({"request": "none"}, None, DrafterKind.NONE, 1),
        ({"request": "auto"}, None, DrafterKind.MTP, 1),
        ({"request": "auto", **ACCEPTED}, None, DrafterKind.DFLASH2, 4),
        ({"request": "dflash2", **ACCEPTED}, None, DrafterKind.DFLASH2, 4),
        ({"request": "dflash2", **ACCEPTED}, 7, DrafterKind.DFLASH2, 7),
        ({"request": "mtp", **ACCEPTED}, None, DrafterKind.MTP, 1),
    ],
)
def test_what_a_request_becomes(
    wanted: dict[str, Any], parallel: int | None, kind: DrafterKind, served: int
) -> None:
    """Prevents more requests at once than the drafter can serve, and fewer than it could."""
    made = choice(wanted, parallel=parallel)
    assert (made.kind, made.parallel) == (kind, served)


def test_auto_without_a_licence_says_what_that_costs() -> None:
    """Prevents a pair that serves one request at a time without anybody knowing why."""
    line = choice({"request": "auto"}).line()
    assert line == (
        "drafter mtp, 1 request at once (DFlash2's licence is not accepted). Cost: one request at a time"
        " where DFlash2 serves four, decoding 5 to 10 % slower, 1.8 GiB a node for the head"
    )


def test_the_record_of_the_acceptance_is_shown() -> None:
    """Prevents a non-commercial drafter in use with nobody's name under it."""
    made = choice({"request": "auto", **ACCEPTED})
    assert made.licence == "CC BY-NC-ND 4.0, accepted by Ada Example on 2026-10-03 for non-commercial use"
    assert "non-commercial use only" in made.cost


@pytest.mark.parametrize(
    ("wanted", "parallel", "said"),
    [
        (
            {"request": "mtp"},
            4,
            "tensorfold.parallel: found 4, but drafter.request 'mtp'; TensorFold serves more than one",
        ),
        ({"request": "none"}, 2, "tensorfold.parallel: found 2, but drafter.request 'none'"),
        (
            {"request": "auto"},
            3,
            "tensorfold.parallel: found 3, but drafter.request 'auto' is mtp here: DFlash2's licence is not",
        ),
        (
            {"request": "dflash2", "path": DRAFTER_DIR},
            None,
            "drafter.licence: missing; DFlash2 is under CC BY-NC",
        ),
        ({"request": "dflash2", "licence": LICENCE}, None, "drafter.path: missing"),
        (
            {"request": "dflash2", **ACCEPTED, "licence": {**LICENCE, "use": "commercial"}},
            None,
            "drafter.licence.use: found 'commercial'; DFlash2 is under CC BY-NC-ND 4.0",
        ),
        (
            {"request": "auto", **ACCEPTED, "fallback": "mtp"},
            4,
            "drafter.fallback: found 'mtp' with tensorfold.parallel 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    wanted: dict[str, Any], parallel: int | None, said: str
) -> None:
    """Prevents a start whose engine would refuse, and a download without leave."""
    assert refusal(wanted, parallel=parallel).startswith(said)


def test_vllm_serves_many_with_any_drafter() -> None:
    """Prevents TensorFold's limit of one request from being put on vLLM."""
    assert choice({"request": "mtp"}, engine="vllm", parallel=6).parallel == 6
    assert choice({"request": "none"}, engine="vllm", parallel=6).parallel == 6


def test_auto_drafts_nothing_on_vllms_cpu() -> None:
    """Prevents a lab whose small model is asked for a draft head that it does not have."""
    assert choice({"request": "auto"}, engine="vllm", device="cpu", parallel=2).kind is DrafterKind.NONE
    assert choice({"request": "auto"}, engine="tensorfold", device="cpu").kind is DrafterKind.MTP


def test_a_checkpoint_without_an_mtp_head_is_not_asked_for_one() -> None:
    """Prevents a load of minutes that ends because the vendor's checkpoint has no draft head."""
    assert "this checkpoint has no MTP head" in refusal({"request": "mtp"}, mtp_head=False)
    made = choice({"request": "auto"}, mtp_head=False)
    assert (made.kind, made.parallel) == (DrafterKind.NONE, 1)


def test_equal_files_on_every_rank_are_used() -> None:
    """Prevents a refusal of what is right, and a start that does not say which weights it uses."""
    made = choice({"request": "dflash2", **ACCEPTED}, files=(found(0), found(1)))
    assert (made.kind, made.sha256, made.path) == (DrafterKind.DFLASH2, SHA, DRAFTER_DIR)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((found(0), found(1, OTHER)), "b (rank 1): DFlash2 in /srv/models/dflash2 has SHA-256 cdcdcdcdcdcd"),
        (
            (found(0), found(1, problem="no model.safetensors")),
            "b (rank 1): DFlash2 in /srv/models/dflash2: no mo",
        ),
        ((found(0, problem="absent"), found(1, problem="absent")), "a (rank 0): DFlash2 in"),
    ],
)
def test_a_drafter_that_one_rank_lacks_is_refused(files: tuple[DraftFiles, ...], said: str) -> None:
    """Prevents a drafter on one rank only, which the engine refuses after minutes."""
    assert said in refusal({"request": "auto", **ACCEPTED}, files=files)


def test_the_pinned_hash_counts_even_when_all_ranks_agree() -> None:
    """Prevents another release of the drafter, published under the same name, on both nodes."""
    wanted = {"request": "dflash2", **ACCEPTED, "sha256": SHA}
    assert "a (rank 0): DFlash2" in refusal(wanted, files=(found(0, OTHER), found(1, OTHER)))


def test_a_follower_checks_its_own_files_against_the_start() -> None:
    """Prevents a follower that brings other draft weights into the epoch."""
    made = choice({"request": "dflash2", **ACCEPTED, "sha256": SHA})
    assert check_files(made, found(1)) == ""
    assert "this start uses abababababab" in check_files(made, found(1, OTHER))
    assert "cannot be read" in check_files(made, found(1, problem="cannot be read"))
    assert check_files(choice({"request": "mtp"}), found(1, problem="absent")) == ""


def test_no_fallback_unless_it_is_the_policy() -> None:
    """Prevents a pair that silently serves one request at a time after a bad copy."""
    broken = (found(0), found(1, OTHER))
    assert "drafter.fallback: mtp" in refusal({"request": "auto", **ACCEPTED}, files=broken)
    made = choice({"request": "auto", **ACCEPTED, "fallback": "mtp"}, files=broken)
    assert (made.kind, made.parallel, made.fallback) == (DrafterKind.MTP, 1, True)
    assert made.line().startswith(
        "FALLBACK: drafter mtp, 1 request at once (DFlash2 cannot be used: b (rank 1)"
    )


def test_no_fallback_to_a_head_that_is_not_there() -> None:
    """Prevents a second failed start after the first."""
    made = fall_back(wish(**ACCEPTED, fallback="mtp"), engine="vllm", parallel=2, fault="x", mtp_head=False)
    assert isinstance(made, Refusal)
    assert "no MTP head" in made.reasons[0]
