"""Faults of machines, processes and links: whatever the engine is."""

from __future__ import annotations

from tests.faults.harness import Drill
from tests.faults.ways import burn, freeze, kill_rank, kill_supervisor, pause, power_on, sh, taken_port
from tests.lab.conftest import HEAD, UNIT, WORKER

STILL = r"no counter of the engine has moved|idle check: no answer|has been in one iteration"

DRILLS = (
    Drill(name="rank 0 killed", inject=kill_rank(HEAD), limit=1.0, said="rank 0 exited with code 137"),
    Drill(name="rank 1 killed", inject=kill_rank(WORKER), limit=1.0, said=r"exited with code"),
    # vLLM counts a request only after its first step, so there the idle check finds this one.
    Drill(name="rank 1 frozen under a request", inject=freeze(WORKER, request=True), limit=40.0, said=STILL),
    Drill(name="rank 1 frozen, nobody asks", inject=freeze(WORKER), limit=40.0, said=STILL),
    Drill(name="lead's supervisor killed", inject=kill_supervisor(HEAD), limit=5.0),
    Drill(name="worker's supervisor killed", inject=kill_supervisor(WORKER), limit=2.0, said="spark-b"),
    Drill(
        name="worker's unit restarted",
        inject=sh(WORKER, "systemctl", "restart", UNIT[WORKER]),
        limit=5.0,
        said="its supervisor was stopped",
    ),
    Drill(
        name="docker restarted, head",
        inject=sh(HEAD, "systemctl", "restart", "docker"),
        limit=15.0,
        said="docker",
    ),
    Drill(
        name="docker restarted, worker",
        inject=sh(WORKER, "systemctl", "restart", "docker"),
        limit=15.0,
        said="docker",
    ),
    Drill(
        name="power cut, worker",
        inject=lambda pair: pair.lab.power_cut(WORKER),
        limit=10.0,
        said="spark-b.*(silent|closed)",
        heal=power_on(WORKER),
    ),
    Drill(
        name="power cut, head", inject=lambda pair: pair.lab.power_cut(HEAD), limit=10.0, heal=power_on(HEAD)
    ),
    Drill(
        name="fabric unplugged",
        inject=lambda pair: pair.lab.unplug(WORKER),
        limit=10.0,
        said="fabric is silent|fabric was silent",
        heal=lambda pair: pair.lab.plug(WORKER),
    ),
    Drill(
        name="API port taken",
        inject=taken_port,
        start=True,
        limit=15.0,
        said="port 8888 .*cannot be had",
        heal=sh(HEAD, "systemctl", "stop", "g5-taken"),
    ),
    Drill(name="false alarm: busy machine", inject=burn),
    Drill(name="false alarm: heartbeats missed for 2 s", inject=pause(WORKER, 2)),
    Drill(
        name="false alarm: journald restarted", inject=sh(HEAD, "systemctl", "restart", "systemd-journald")
    ),
    Drill(name="false alarm: daemon-reload", inject=sh(HEAD, "systemctl", "daemon-reload")),
    Drill(
        name="false alarm: management network away",
        inject=lambda pair: pair.lab.unplug(WORKER, management=True),
        heal=lambda pair: pair.lab.plug(WORKER, management=True),
    ),
)
