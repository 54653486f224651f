"""The lead's decisions, one case a test: no clock, no container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glm53_service.settings import Supervision
from glm53_service.supervisor.decide import (
    Action,
    Cause,
    Decision,
    Member,
    Phase,
    Snapshot,
    backoff_seconds,
    decide,
    follower_verdict,
)
from glm53_service.supervisor.messages import RankState, Report

TIMES = Supervision(
    lease_seconds=3.0,
    peer_lost_seconds=7.0,
    start_stall_seconds=100.0,
    start_busy_seconds=500.0,
    faults_allowed=4,
)


def report(state: RankState, **more: Any) -> Report:
    """Return a report of epoch 9."""
    return Report(epoch=9, state=state, **more)


def member(state: RankState = RankState.RUNNING, **more: Any) -> Member:
    """Return a healthy follower in epoch 9."""
    facts: dict[str, Any] = {
        "node": "b",
        "rank": 1,
        "connected": True,
        "known": True,
        "same_instance": True,
        "fabric_silence": 0.2,
        "management_silence": 0.3,
        "report": report(state),
    }
    return Member(**{**facts, **more})


def snapshot(phase: Phase, state: RankState = RankState.RUNNING, **more: Any) -> Snapshot:
    """Return a snapshot of epoch 9 in which every rank is in `state`."""
    facts: dict[str, Any] = {"phase": phase, "epoch": 9, "members": (member(state),), "local": report(state)}
    return Snapshot(**{**facts, **more})


def serving(**more: Any) -> Snapshot:
    """Return a healthy serving pair, changed."""
    facts: dict[str, Any] = {"api_up": True, "canary_right": True, "exit_known_for": 1.0}
    return snapshot(Phase.SERVING, **{**facts, **more})


def idle(**more: Any) -> Snapshot:
    """Return an idle pair that could begin, changed."""
    return snapshot(Phase.IDLE, RankState.ABSENT, **more)


def judged(s: Snapshot) -> Decision:
    """Return the decision under this module's times."""
    return decide(s, TIMES)


def test_a_healthy_pair_serves_on() -> None:
    """Prevents a supervisor that finds a reason to act when there is none."""
    assert judged(serving()) == Decision(action=Action.NONE, state="serving", ready=True)


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        ({"members": (member(fabric_silence=7.1),)}, Cause.LOSS, "the fabric is silent for 7.1 s"),
        (
            {"members": (member(fabric_silence=3.1, management_silence=3.2),)},
            Cause.LOSS,
            "silent on both networks",
        ),
        ({"members": (member(connected=False),)}, Cause.LOSS, "both connections are closed"),
        ({"members": (member(same_instance=False),)}, Cause.LOSS, "started anew"),
        ({"members": (member(bye="reboot"),)}, Cause.PLANNED, "b (rank 1) leaves: reboot"),
        (
            {"members": (member(RankState.ENDING, report=report(RankState.ENDING, reason="lease")),)},
            Cause.LOSS,
            "ended by its own supervisor: lease",
        ),
        (
            {"members": (member(report=report(RankState.EXITED, exit_code=0)),)},
            Cause.FAULT,
            "b (rank 1) exited with code 0: it ended with 0, which is no success",
        ),
        ({"members": (member(report=report(RankState.ABSENT)),)}, Cause.FAULT, "b (rank 1) is absent"),
        (
            {"members": (member(report=Report(epoch=8, state=RankState.RUNNING)),)},
            Cause.FAULT,
            "b (rank 1) is running in epoch 8, expected running in epoch 9",
        ),
        (
            {"local": report(RankState.EXITED, exit_code=137, reason="ERROR oom")},
            Cause.FAULT,
            "rank 0 exited with code 137: it was killed (SIGKILL): by the kernel for want of memory, or by"
            " hand; its last error: ERROR oom",
        ),
        (
            {"local": report(RankState.EXITED, reason="docker does not answer")},
            Cause.LOSS,
            "rank 0 is out of sight",
        ),
        ({"api_problem": "no 200 on /health"}, Cause.FAULT, "no 200 on /health"),
        ({"crash": "TypeError()"}, Cause.FAULT, "the supervisor's own work failed: TypeError()"),
        ({"stop_requested": True}, Cause.PLANNED, "stop requested"),
    ],
)
def test_what_ends_a_serving_epoch_and_whether_it_counts(
    change: dict[str, Any], cause: Cause, said: str
) -> None:
    """Prevents a pair that serves on without a rank, and a pulled cable that counts as an engine fault."""
    decision = judged(serving(**change))
    assert (decision.action, decision.cause, decision.ready) == (Action.END, cause, False)
    assert said in decision.reasons[0]


@pytest.mark.parametrize("silence", [3.1, 6.9])
def test_a_silent_fabric_is_suspect_before_it_is_a_loss(silence: float) -> None:
    """Prevents traffic into a pair whose fabric may be dead, and a restart for a flap of a few seconds."""
    decision = judged(serving(members=(member(fabric_silence=silence),)))
    assert (decision.action, decision.ready) == (Action.NONE, False)
    assert f"silent for {silence}" in decision.reasons[0]


def test_one_missed_heartbeat_is_nothing() -> None:
    """Prevents a false alarm."""
    assert judged(serving(members=(member(fabric_silence=2.9, management_silence=2.9),))).ready


def test_a_report_of_another_epoch_ends_nothing() -> None:
    """Prevents the exit of the epoch before from ending this one while it begins."""
    old = Report(epoch=8, state=RankState.EXITED, exit_code=1)
    s = snapshot(Phase.PREPARING, RankState.CREATED, members=(member(report=old),))
    assert judged(s).action is Action.NONE


@pytest.mark.parametrize(
    ("s", "action"),
    [
        (idle(), Action.BEGIN),
        (snapshot(Phase.PREPARING, RankState.CREATED), Action.GO),
        (snapshot(Phase.PREPARING, RankState.CREATED, local=report(RankState.ABSENT)), Action.NONE),
        (snapshot(Phase.STARTING, api_up=True), Action.CHECK),
        (snapshot(Phase.STARTING), Action.NONE),
        (snapshot(Phase.STARTING, api_up=True, members=(member(RankState.CREATED),)), Action.NONE),
        (snapshot(Phase.CHECKING, api_up=True), Action.NONE),
        (snapshot(Phase.CHECKING, api_up=True, canary_right=True), Action.SERVE),
        (snapshot(Phase.ENDING, RankState.ABSENT), Action.NONE),
        (snapshot(Phase.ENDING, RankState.ABSENT, ended=True), Action.SETTLE),
        (snapshot(Phase.ENDING, RankState.ENDING, stop_requested=True, phase_for=101.0), Action.QUIT),
        (snapshot(Phase.ENDING, RankState.ENDING), Action.NONE),
        (idle(stop_requested=True), Action.QUIT),
        (idle(faults=4), Action.GIVE_UP),
        (idle(resume_in=2.0), Action.NONE),
    ],
)
def test_the_way_of_an_epoch(s: Snapshot, action: Action) -> None:
    """Prevents a step that is taken before the one before it is true on every node."""
    assert judged(s).action is action


def test_only_a_right_canary_makes_ready() -> None:
    """Prevents 'ready' from anything less than a right answer."""
    for phase in Phase:
        if phase is not Phase.SERVING:
            assert not judged(snapshot(phase)).ready


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"connected": False, "known": False}, "waiting for b (rank 1): not heard of yet"),
        ({"connected": False}, "waiting for b (rank 1): it lost both networks"),
        ({"bye": "stopped"}, "waiting for b (rank 1): it left (stopped)"),
        ({"mismatch": "it runs release x"}, "b (rank 1): it runs release x"),
        ({"fabric_silence": float("inf")}, "connected over the management network only"),
        ({"deaf": 3.5}, "it does not hear this node over the fabric yet"),
        ({"report": report(RankState.RUNNING)}, "its container is not gone yet (rank of epoch 9)"),
    ],
)
def test_no_epoch_begins_without_everybody(change: dict[str, Any], said: str) -> None:
    """Prevents half a pair, and a wait that does not say for whom."""
    decision = judged(idle(members=(replace(member(RankState.ABSENT), **change),)))
    assert (decision.action, decision.state) == (Action.NONE, "waiting")
    assert said in decision.reasons[0]


def test_a_silent_start_is_a_fault_only_after_its_limit() -> None:
    """Prevents both an endless start and a kill of an engine that loads without a word for a minute."""
    assert judged(snapshot(Phase.STARTING, quiet=99.0, idle=99.0)).action is Action.NONE
    decision = judged(snapshot(Phase.STARTING, quiet=101.0, idle=101.0))
    assert (decision.action, decision.cause) == (Action.END, Cause.FAULT)
    assert decision.reasons == ("no rank showed a sign of life for 101 s while starting",)


def test_a_start_that_only_burns_cpu_time_has_longer_but_not_for_ever() -> None:
    """Prevents the end of a search for kernels without a word, and a wait that spins in NCCL till morning."""
    assert judged(snapshot(Phase.STARTING, quiet=499.0, idle=4.0)).action is Action.NONE
    decision = judged(snapshot(Phase.STARTING, quiet=501.0, idle=4.0))
    assert (decision.action, decision.cause) == (Action.END, Cause.FAULT)
    assert "CPU time was used, as by a wait that spins" in decision.reasons[0]
    assert judged(serving(quiet=9e9, idle=9e9)).ready


GUARD = "memory guard: MemAvailable is 3.2 GiB on b while loading, limit 4"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.CHECKING, Phase.SERVING])
@pytest.mark.parametrize("where", ["a", "b"])
def test_the_memory_guard_is_a_fault_of_its_own(phase: Phase, where: str) -> None:
    """Prevents a machine saved from freezing from being told as a lost link, or as a crash with code 137 of
    whichever rank was heard of first; and a wait for the other rank's word before that one is ended too.
    """
    guarded = report(RankState.RUNNING, guard=GUARD)
    killed = report(RankState.EXITED, exit_code=1)
    own, other = (guarded, killed) if where == "a" else (killed, guarded)
    decision = judged(snapshot(phase, local=own, members=(member(report=other, fabric_silence=2.9),)))
    assert (decision.action, decision.cause) == (Action.END, Cause.FAULT)
    assert decision.reasons == (f"{'rank 0' if where == 'a' else 'b (rank 1)'}: {GUARD}",)


def test_a_guard_of_another_epoch_ends_nothing() -> None:
    """Prevents the last word of the epoch before from ending this one."""
    old = Report(epoch=8, state=RankState.ENDING, guard=GUARD)
    s = snapshot(Phase.PREPARING, RankState.CREATED, members=(member(report=old),))
    assert judged(s).action is Action.NONE


def test_dockers_own_words_about_an_exit_are_told() -> None:
    """Prevents `code 137` where docker knows that the kernel killed it for memory."""
    dead = report(RankState.EXITED, exit_code=137, how="was killed by the kernel for want of memory (OOM)")
    (reason,) = judged(serving(local=dead)).reasons
    assert reason == "rank 0 exited with code 137: it was killed by the kernel for want of memory (OOM)"


def test_a_host_that_went_down_is_told_as_that() -> None:
    """Prevents a power cut that reads like a restart of the supervisor by hand."""
    decision = judged(serving(members=(member(same_instance=False, rebooted=True),)))
    assert (decision.action, decision.cause) == (Action.END, Cause.LOSS)
    assert decision.reasons == ("b (rank 1): its host went down and came back (boot id changed)",)


def test_a_follower_that_never_reports_the_end_does_not_hold_the_lead_for_ever() -> None:
    """Prevents an endless 'ending'; the next epoch still waits for that follower by name."""
    s = snapshot(Phase.ENDING, RankState.ABSENT, members=(member(RankState.ENDING),), ended=True)
    assert judged(replace(s, phase_for=29.0)).action is Action.NONE
    assert judged(replace(s, phase_for=31.0)).action is Action.SETTLE


def test_an_exit_while_the_fabric_is_dark_is_the_fabrics() -> None:
    """Prevents five pulled cables from becoming five engine faults: NCCL makes a rank exit within seconds."""
    dead = report(RankState.EXITED, exit_code=1)
    decision = judged(serving(members=(member(report=dead, fabric_silence=2.6),)))
    assert (decision.action, decision.cause) == (Action.END, Cause.LOSS)
    assert decision.reasons == ("b (rank 1) exited with code 1: it failed (exit 1) (the fabric was silent)",)
    assert judged(serving(members=(member(report=dead, fabric_silence=2.4),))).cause is Cause.FAULT


def test_an_exit_waits_for_the_other_ranks_word() -> None:
    """Prevents a docker that is restarted under rank 0 from counting as fault: rank 1's exit comes first."""
    dead = (member(report=report(RankState.EXITED, exit_code=1)),)
    held = judged(serving(members=dead, exit_known_for=0.2))
    assert held == Decision(
        action=Action.NONE,
        state="serving",
        reasons=("b (rank 1) exited with code 1: it failed (exit 1)",),
        ready=False,
    )
    gone = report(RankState.EXITED, reason="docker is being stopped here")
    assert judged(serving(members=dead, exit_known_for=0.2, local=gone)).cause is Cause.LOSS
    assert judged(serving(members=dead, exit_known_for=0.4)).cause is Cause.FAULT
    both = report(RankState.EXITED, exit_code=137)
    assert judged(serving(members=dead, exit_known_for=0.0, local=both)).cause is Cause.FAULT
    assert judged(serving(api_problem="hangs", exit_known_for=0.0)).cause is Cause.FAULT


def test_a_preparation_that_never_ends_is_refused() -> None:
    """Prevents an endless 'preparing' when a node's word is lost."""
    s = snapshot(Phase.PREPARING, RankState.CREATED, local=report(RankState.ABSENT))
    assert judged(replace(s, phase_for=299.0)).action is Action.NONE
    decision = judged(replace(s, phase_for=301.0))
    assert (decision.action, decision.cause) == (Action.END, Cause.REFUSED)
    assert decision.reasons == ("not prepared within 300 s: rank 0",)


@pytest.mark.parametrize(
    ("cause", "faults", "seconds"),
    [
        (Cause.FAULT, 1, 0.0),
        (Cause.FAULT, 2, 5.0),
        (Cause.FAULT, 9, 60.0),
        (Cause.LOSS, 3, 0.0),
        (Cause.REFUSED, 0, 10.0),
        (Cause.PLANNED, 2, 0.0),
    ],
)
def test_backoff(cause: Cause, faults: int, seconds: float) -> None:
    """Prevents a restart storm, and a wait after a fault that was nobody's."""
    assert backoff_seconds(cause, faults) == seconds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"fabric_silence": 6.0}, ""),
        ({"fabric_silence": 7.5}, "the fabric is silent for 7.5 s"),
        ({"fabric_silence": 3.5, "management_silence": 3.4}, "the lead is silent on both networks for 3.4 s"),
        ({"connected": False}, "both connections to the lead are closed"),
        ({"same_lead": False}, "the lead's supervisor was started anew"),
    ],
)
def test_a_followers_lease(change: dict[str, Any], said: str) -> None:
    """Prevents a rank that outlives its lead."""
    facts: dict[str, Any] = {
        "connected": True,
        "fabric_silence": 0.5,
        "management_silence": 0.5,
        "same_lead": True,
        "lease_seconds": 3.0,
        "peer_lost_seconds": 7.0,
    }
    assert follower_verdict(**{**facts, **change}) == said
