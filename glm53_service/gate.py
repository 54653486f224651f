"""The gate: each path answers one question, and only from what the supervisor knows.

/live: does the supervisor's loop turn. /ready: may traffic come (200 or 503 with the reasons). /status:
everything. /metrics: the same for Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from aiohttp import web

from glm53_service.status import RankStatus, Status
from glm53_service.system import GIB

STATES = (
    "waiting",
    "preparing",
    "starting",
    "checking",
    "serving",
    "ending",
    "backoff",
    "gave_up",
    "stopped",
    "idle",
    "running",
)


def gate_app(status: Callable[[], Status]) -> web.Application:
    """Return the application; `status` gives the state at the time of a request."""

    async def live(_: web.Request) -> web.Response:
        return _json({"live": True}, 200)

    async def ready(_: web.Request) -> web.Response:
        now = status()
        return _json(
            {"ready": now.ready, "state": now.state, "reasons": list(now.reasons)}, 200 if now.ready else 503
        )

    async def full(_: web.Request) -> web.Response:
        return _json(status().builtins(), 200)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=metrics_text(status()), content_type="text/plain")

    app = web.Application()
    app.add_routes(
        [
            web.get("/live", live),
            web.get("/ready", ready),
            web.get("/status", full),
            web.get("/metrics", metrics),
        ]
    )
    return app


def metrics_text(now: Status) -> str:
    """Return `now` in Prometheus' text format 0.0.4."""
    rows: list[tuple[str, str, str, list[tuple[str, float]]]] = [
        ("ready", "gauge", "Whether traffic may come.", [("", int(now.ready))]),
        (
            "state",
            "gauge",
            "1 for the current state.",
            [(f'{{state="{s}"}}', int(s == now.state)) for s in STATES],
        ),
        ("epoch", "gauge", "Number of the current epoch.", [("", now.epoch)]),
        (
            "epochs_ended_total",
            "counter",
            "Epochs that ended since the supervisor started.",
            [("", now.epochs_ended)],
        ),
        (
            "canary_right_timestamp_seconds",
            "gauge",
            "When the canary was last right in this epoch, Unix seconds.",
            [("", now.answered_at)] if now.answered_at else [],
        ),
        ("engine_faults", "gauge", "Engine faults within the window.", [("", now.faults)]),
        (
            "rank_up",
            "gauge",
            "Whether a rank's container runs.",
            [(_of(r), int(r.state == "running")) for r in now.ranks],
        ),
        (
            "memory_available_bytes",
            "gauge",
            "MemAvailable of a running rank's node.",
            [(_of(r), round(r.vitals.available_gib * GIB)) for r in now.ranks if r.vitals],
        ),
        (
            "warnings",
            "gauge",
            "Warnings of a running rank's node: little memory, a clamped GPU.",
            [(_of(r), len(r.vitals.warnings)) for r in now.ranks if r.vitals],
        ),
    ]
    out = []
    for name, kind, text, values in rows:
        if values:
            out += [f"# HELP glm53_{name} {text}", f"# TYPE glm53_{name} {kind}"]
            out += [f"glm53_{name}{labels} {value}" for labels, value in values]
    return "\n".join(out) + "\n"


def _of(rank: RankStatus) -> str:
    return f'{{rank="{rank.rank}",node="{rank.node}"}}'


def _json(data: object, status: int) -> web.Response:
    return web.Response(text=json.dumps(data) + "\n", status=status, content_type="application/json")
