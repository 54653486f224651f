"""What the lead does next: a pure function of what is known now.

Everything that ends or begins an epoch is decided here, so that every case can be a test without a clock or a
container.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from glm53_service.exits import exit_text
from glm53_service.settings import Supervision
from glm53_service.supervisor.messages import RankState, Report


class Phase(StrEnum):
    """Where the current epoch stands. IDLE: there is none."""

    IDLE = "idle"
    PREPARING = "preparing"
    STARTING = "starting"
    CHECKING = "checking"
    SERVING = "serving"
    ENDING = "ending"


class Action(StrEnum):
    """What the shell around this module carries out."""

    NONE = "none"
    BEGIN = "begin"
    GO = "go"
    CHECK = "check"
    SERVE = "serve"
    END = "end"
    SETTLE = "settle"
    GIVE_UP = "give_up"
    QUIT = "quit"


class Cause(StrEnum):
    """Why an epoch ends. Only FAULT counts against the engine; the others re-form for ever."""

    PLANNED = "planned"
    LOSS = "loss"
    REFUSED = "refused"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A follower as the lead knows it.

    Silences in seconds since the last word on that network; `deaf`: since it heard the lead over the fabric,
    as it says. `rebooted`: its boot id is another one than when the epoch began.
    """

    node: str
    rank: int
    connected: bool
    known: bool
    same_instance: bool
    fabric_silence: float
    management_silence: float
    report: Report
    deaf: float = 0.0
    refused: str = ""
    bye: str = ""
    mismatch: str = ""
    rebooted: bool = False

    def __str__(self) -> str:
        return f"{self.node} (rank {self.rank})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the decision may look at; times in seconds.

    `quiet`: without a starting rank having moved (a line, bytes, memory); `idle`: without even CPU time.
    `phase_for`: since the phase began. `ended`: whether
    this node's own part of ending the epoch is done. `exit_known_for`: since the first exit of a rank of this
    epoch became known. `resume_in`: until the next attempt. `faults`: engine
    faults within the window. `crash`: an unforeseen failure of the epoch's own work.
    """

    phase: Phase
    epoch: int
    members: tuple[Member, ...]
    local: Report
    stop_requested: bool = False
    docker_problem: str = ""
    fabric_problem: str = ""
    prepare_problem: str = ""
    crash: str = ""
    api_up: bool = False
    api_problem: str = ""
    canary_right: bool = False
    canary_problem: str = ""
    quiet: float = 0.0
    idle: float = 0.0
    phase_for: float = 0.0
    ended: bool = False
    exit_known_for: float = 0.0
    faults: int = 0
    resume_in: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next act and the reasons; the reasons are what log, status, STATUS= and the gate show."""

    action: Action
    state: str
    reasons: tuple[str, ...] = ()
    cause: Cause | None = None
    ready: bool = False


STOP_LIMIT_SECONDS = 100.0
"""Below the units' TimeoutStopSec (120): with docker away, the supervisor leaves and says so; the next one
cleans up.
"""

ENDING_LIMIT_SECONDS = 30.0
"""A follower that has not said by then that its rank is gone is waited for in IDLE, by name."""


def decide(s: Snapshot, t: Supervision) -> Decision:
    """Return what the lead does now. Never acts on an unknown as if it were good."""
    if s.phase is Phase.IDLE:
        return _idle(s, t)
    if s.phase is Phase.ENDING:
        return _ending(s)
    guards = _guards(s)
    if guards:
        return Decision(action=Action.END, state="ending", reasons=guards, cause=Cause.FAULT)
    end = _end(s, t)
    if end and end.cause is Cause.FAULT and _more_to_come(s):
        return Decision(action=Action.NONE, state=str(s.phase), reasons=end.reasons)
    return end if end else _advance(s, t)


def _idle(s: Snapshot, t: Supervision) -> Decision:
    if s.stop_requested:
        return Decision(action=Action.QUIT, state="stopped", reasons=("stop requested",))
    if s.faults >= t.faults_allowed:
        return Decision(
            action=Action.GIVE_UP,
            state="gave_up",
            reasons=(
                f"{s.faults} engine faults within {t.faults_window_seconds:g} s, {t.faults_allowed} allowed",
            ),
        )
    reasons = [problem for problem in (s.docker_problem, s.fabric_problem) if problem]
    if s.local.state is not RankState.ABSENT:
        reasons.append("this node's own rank container is not gone yet")
    reasons += [reason for member in s.members for reason in _missing(member, t)]
    if reasons:
        return Decision(action=Action.NONE, state="waiting", reasons=tuple(reasons))
    if s.resume_in > 0:
        return Decision(
            action=Action.NONE, state="backoff", reasons=(f"next attempt in {s.resume_in:.0f} s",)
        )
    return Decision(action=Action.BEGIN, state="preparing")


def _missing(m: Member, t: Supervision) -> list[str]:
    """Why an epoch cannot begin with this member; empty when it can."""
    if m.mismatch:
        return [f"{m}: {m.mismatch}"]
    if m.bye:
        return [f"waiting for {m}: it left ({m.bye})"]
    if not m.connected:
        return [f"waiting for {m}: {'it lost both networks' if m.known else 'not heard of yet'}"]
    reasons = []
    if m.fabric_silence > t.lease_seconds:
        reasons.append(f"waiting for {m}: connected over the management network only, the fabric is silent")
    elif m.deaf > t.lease_seconds:
        reasons.append(f"waiting for {m}: it does not hear this node over the fabric yet")
    if m.report.state is not RankState.ABSENT:
        reasons.append(f"waiting for {m}: its container is not gone yet (rank of epoch {m.report.epoch})")
    return reasons


def _ending(s: Snapshot) -> Decision:
    late = [str(m) for m in s.members if m.connected and m.report.state is not RankState.ABSENT]
    if s.ended and (not late or s.phase_for > ENDING_LIMIT_SECONDS):
        return Decision(action=Action.SETTLE, state="ending")
    if s.stop_requested and s.phase_for > STOP_LIMIT_SECONDS:
        return Decision(action=Action.QUIT, state="stopped", reasons=("docker does not let rank 0 end",))
    waiting = late + ([] if s.ended else ["rank 0"])
    return Decision(
        action=Action.NONE, state="ending", reasons=(f"ending epoch {s.epoch}: {', '.join(waiting)}",)
    )


def _end(s: Snapshot, t: Supervision) -> Decision | None:
    exits = _exits(s)
    dark = any(m.fabric_silence > SUSPECT_HEARTBEATS * t.heartbeat_seconds for m in s.members)
    for cause, reasons in (
        (Cause.PLANNED, ["stop requested"] if s.stop_requested else []),
        (Cause.PLANNED, [f"{m} leaves: {m.bye}" for m in s.members if m.bye and m.same_instance]),
        (Cause.LOSS, [s.docker_problem] if s.docker_problem else []),
        (
            Cause.LOSS,
            _losses(s, t) + ([f"{exit_} (the fabric was silent)" for exit_ in exits] if dark else []),
        ),
        (Cause.REFUSED, _refusals(s, t)),
        (Cause.FAULT, exits + _faults(s, t)),
    ):
        if reasons:
            return Decision(action=Action.END, state="ending", reasons=tuple(reasons), cause=cause)
    return None


EXIT_HOLD_SECONDS = 0.3
"""How long one rank's exit waits for the others' words: when docker or a machine goes down under a rank, the
other rank's own exit may be heard of first, and would be taken for the cause.
"""


def exited_ranks(reports: Iterable[Report], epoch: int) -> int:
    """Return how many ranks of `epoch` are known to have exited."""
    return sum(report.epoch == epoch and report.state is RankState.EXITED for report in reports)


def _more_to_come(s: Snapshot) -> bool:
    """Return whether a rank exited so shortly ago that another one's word may still explain it."""
    exited = exited_ranks((s.local, *(m.report for m in s.members)), s.epoch)
    return 0 < exited <= len(s.members) and s.exit_known_for < EXIT_HOLD_SECONDS


SUSPECT_HEARTBEATS = 2.5
"""A rank that exits while its peer has missed that many heartbeats on the fabric died of the fabric, not
of itself.
"""


def _reports(s: Snapshot) -> list[tuple[str, Report]]:
    return [("rank 0", s.local), *((str(m), m.report) for m in s.members)]


def _guards(s: Snapshot) -> tuple[str, ...]:
    """Return which ranks were killed to save their machine: whatever else is seen follows from that."""
    return tuple(f"{who}: {r.guard}" for who, r in _reports(s) if r.epoch == s.epoch and r.guard)


def _exits(s: Snapshot) -> list[str]:
    return [
        f"{who} exited with code {report.exit_code}:"
        f" it {report.how or exit_text({'ExitCode': report.exit_code})}"
        + (f"; its last error: {report.reason}" if report.reason else "")
        for who, report in _reports(s)
        if report.epoch == s.epoch and report.state is RankState.EXITED and report.exit_code is not None
    ]


def _losses(s: Snapshot, t: Supervision) -> list[str]:
    losses = [reason for m in s.members if (reason := _loss(m, t))]
    for who, report in _reports(s):
        if report.epoch == s.epoch and report.state is RankState.EXITED and report.exit_code is None:
            losses.append(f"{who} is out of sight: {report.reason}")
        elif report.epoch == s.epoch and report.state is RankState.ENDING:
            losses.append(f"{who} was ended by its own supervisor: {report.reason}")
    return losses


HOST_WENT_DOWN = "its host went down and came back (boot id changed)"


def _loss(m: Member, t: Supervision) -> str:
    if m.rebooted:
        return f"{m}: {HOST_WENT_DOWN}"
    if not m.same_instance:
        return f"{m}: its supervisor was started anew"
    if not m.connected:
        return f"{m}: both connections are closed"
    if min(m.fabric_silence, m.management_silence) > t.lease_seconds:
        return f"{m}: silent on both networks for {min(m.fabric_silence, m.management_silence):.1f} s"
    if m.fabric_silence > t.peer_lost_seconds:
        return f"{m}: the fabric is silent for {m.fabric_silence:.1f} s (the management network is fine)"
    return ""


PREPARE_SECONDS = 120.0
"""What making a container may take, after the wait for memory: docker under a heavy load, no more."""


def _refusals(s: Snapshot, t: Supervision) -> list[str]:
    own = [f"rank 0: {s.prepare_problem}"] if s.prepare_problem else []
    refusals = own + [f"{m}: {m.refused}" for m in s.members if m.refused]
    limit = t.min_free_wait_seconds + PREPARE_SECONDS
    if s.phase is Phase.PREPARING and s.phase_for > limit:
        refusals.append(f"not prepared within {limit:.0f} s: {', '.join(_unprepared(s))}")
    return refusals


def _unprepared(s: Snapshot) -> list[str]:
    return [who for who, report in _reports(s) if not _has(report, s.epoch, RankState.CREATED)]


def _faults(s: Snapshot, t: Supervision) -> list[str]:
    faults = []
    for who, report in _reports(s):
        other = report.epoch != s.epoch
        wrong = other or report.state in (RankState.ABSENT, RankState.CREATED)
        if wrong and s.phase in (Phase.CHECKING, Phase.SERVING):
            found, wanted = (f" in epoch {n}" if other else "" for n in (report.epoch, s.epoch))
            faults.append(f"{who} is {report.state}{found}, expected running{wanted}")
    if s.phase is Phase.STARTING:
        faults += _stalled(s, t)
    if s.crash:
        faults.append(f"the supervisor's own work failed: {s.crash}")
    if s.api_problem and s.phase in (Phase.CHECKING, Phase.SERVING):
        faults.append(s.api_problem)
    if s.canary_problem:
        faults.append(f"canary: {s.canary_problem}")
    return faults


def _stalled(s: Snapshot, t: Supervision) -> list[str]:
    """Return why a start is given up.

    A line, bytes or memory are life. CPU time alone is what a compiler shows, and a wait that spins for ever
    as well, so it counts only for a longer while.
    """
    if min(s.quiet, s.idle) > t.start_stall_seconds:
        return [f"no rank showed a sign of life for {min(s.quiet, s.idle):.0f} s while starting"]
    if s.quiet > max(t.start_busy_seconds, t.start_stall_seconds):
        return [
            f"no rank said a line, read, wrote or took memory for {s.quiet:.0f} s while starting; CPU time"
            f" was used, as by a wait that spins (supervision.start_busy_seconds: {t.start_busy_seconds:g})"
        ]
    return []


def _advance(s: Snapshot, t: Supervision) -> Decision:
    if s.phase is Phase.PREPARING:
        late = _unprepared(s)
        if late:
            return Decision(action=Action.NONE, state="preparing", reasons=(f"preparing: {', '.join(late)}",))
        return Decision(action=Action.GO, state="starting")
    if s.phase is Phase.STARTING:
        running = all(_has(m.report, s.epoch, RankState.RUNNING) for m in s.members)
        if s.api_up and running and s.local.state is RankState.RUNNING:
            return Decision(action=Action.CHECK, state="checking")
        return Decision(action=Action.NONE, state="starting")
    if s.phase is Phase.CHECKING:
        return Decision(
            action=Action.SERVE if s.canary_right else Action.NONE,
            state="checking",
            reasons=() if s.canary_right else ("asking the canary question",),
        )
    suspects = tuple(
        f"{m}: the fabric is silent for {m.fabric_silence:.1f} s"
        for m in s.members
        if m.fabric_silence > t.lease_seconds
    )
    return Decision(action=Action.NONE, state="serving", reasons=suspects, ready=not suspects)


def _has(report: Report, epoch: int, state: RankState) -> bool:
    return report.epoch == epoch and report.state is state


BACKOFF_SECONDS = (0.0, 5.0, 15.0, 30.0, 60.0)
"""Wait before the next attempt after the first, second, ... fault in the window: the first one is free."""

REFUSED_RETRY_SECONDS = 10.0
"""A refusal (image missing, memory held) waits for a person or another process; asking again is cheap."""


def backoff_seconds(cause: Cause, faults: int) -> float:
    """Return how long to wait after an epoch that ended for `cause`, with `faults` engine faults in the
    window.
    """
    if cause is Cause.FAULT:
        return BACKOFF_SECONDS[min(faults, len(BACKOFF_SECONDS)) - 1] if faults else 0.0
    return REFUSED_RETRY_SECONDS if cause is Cause.REFUSED else 0.0


def follower_verdict(
    *,
    connected: bool,
    fabric_silence: float,
    management_silence: float,
    same_lead: bool,
    lease_seconds: float,
    peer_lost_seconds: float,
) -> str:
    """Return why a follower must end its rank now; empty while its lease holds. Silences in seconds."""
    if not same_lead:
        return "the lead's supervisor was started anew"
    if not connected:
        return "both connections to the lead are closed"
    if min(fabric_silence, management_silence) > lease_seconds:
        return f"the lead is silent on both networks for {min(fabric_silence, management_silence):.1f} s"
    if fabric_silence > peer_lost_seconds:
        return f"the fabric is silent for {fabric_silence:.1f} s"
    return ""
