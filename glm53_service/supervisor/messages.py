"""The epoch protocol: what the supervisors say to each other.

A follower dials the lead over the fabric and over the management network. `look` makes every node find its
rails and probe its peers; `prepare` makes it build its container for the rails that were agreed on; only when
all said `prepared` does the lead start rank 0 and say `go`. `stop` ends an epoch; a message of another epoch
than the current one is dropped.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from glm53_service.engines.base import Launch
from glm53_service.fabric.rails import Fabric
from glm53_service.status import RankStatus
from glm53_service.system import Memory
from glm53_service.vitals import Sign, Vitals

PROTOCOL = 2
"""Raised with every incompatible change; supervisors of different protocols do not form a pair."""


class PathName(StrEnum):
    """The two networks between the supervisors."""

    FABRIC = "fabric"
    MANAGEMENT = "management"


class RankState(StrEnum):
    """A rank's container on its node. ENDING: its supervisor is ending it; EXITED: it ended unasked."""

    ABSENT = "absent"
    CREATED = "created"
    RUNNING = "running"
    ENDING = "ending"
    EXITED = "exited"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a node's rank stands.

    `serial` counts the changes on that node: words travel over two networks and may arrive out of order, the
    highest serial of an instance is the truth. `exit_code`, `how` (the same in words) and `reason` belong to
    an exit, `command` to a created container, `refused` says why this node cannot make its rank of `epoch`.
    `guard` says why its own supervisor has killed the rank to save the machine. `fabric` is what the node
    found for that epoch, and once the container is made, what its rank was told.
    """

    serial: int = 0
    epoch: int = 0
    refused: str = ""
    state: RankState = RankState.ABSENT
    exit_code: int | None = None
    reason: str = ""
    how: str = ""
    guard: str = ""
    command: str = ""
    fabric: Fabric | None = None

    def shown(
        self, rank: int, node: str, *, release: str, connected: bool = True, seen: Fabric | None = None
    ) -> RankStatus:
        """Return this report as `glm53 status` shows it; `seen` is the node's fabric when none was found for
        an epoch.
        """
        fabric = self.fabric or seen or Fabric(rails=())
        return RankStatus(
            rank=rank,
            node=node,
            state=self.state,
            connected=connected,
            release=release,
            rails=tuple(rail.line() for rail in fabric.rails),
            warnings=tuple(map(str, fabric.warnings)),
            command=self.command,
        )


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A follower's first words on a path; `wall_time` in Unix seconds.

    It is only said once no container of the cluster is left on the node but that of the report.
    """

    node: str
    instance: str
    boot_id: str
    release: str
    wall_time: float
    path: PathName
    report: Report


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The lead's answer to a hello; the times that hold until the first launch."""

    instance: str
    heartbeat_seconds: float
    lease_seconds: float
    peer_lost_seconds: float


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A heartbeat, both ways, on each path.

    A follower's carries its report, so that a word lost with a dying connection is said again, its memory,
    and for how long it has not heard the lead over the fabric, in seconds. The lead's says whether the ranks
    load, and whether requests run.
    """

    report: Report | None = None
    fabric_silence: float = 0.0
    memory: Memory | None = None
    loading: bool = False
    busy: bool = False


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Find the rails of this node and probe the peers, for `epoch`; `rdma`: its ranks need RDMA devices.

    The answer is a report of that epoch with a fabric, or with a refusal.
    """

    epoch: int
    rdma: bool


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Build the container of `launch.epoch`, start nothing."""

    launch: Launch


class Go(msgspec.Struct, frozen=True, kw_only=True, tag="go"):
    """Start the prepared container."""

    epoch: int


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """A change of this node's rank."""

    report: Report


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A rank moved: its latest milestone, else only a sign of life. `fatal`: it can serve no more.

    `vitals` are the latest look at it, and `sign` what that look showed; a line of its log is MOVED.
    """

    epoch: int
    text: str = ""
    fatal: bool = False
    sign: Sign = Sign.MOVED
    vitals: Vitals | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the rank of `epoch` now; `fault` asks for evidence."""

    epoch: int
    reason: str
    fault: bool


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """A planned leave."""

    reason: str


Message = Hello | Welcome | Beat | Look | Prepare | Go | State | Progress | Stop | Bye
