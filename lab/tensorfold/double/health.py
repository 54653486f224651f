"""The bodies of GET /health and GET /metrics."""

from typing import Any

from .scheduler import Scheduler, State


def health(scheduler: Scheduler, window: int, parallel: int) -> dict[str, Any]:
    """The body of /health; what belongs to the concurrent engine is there with --parallel above 1 only."""
    stats = scheduler.stats
    body: dict[str, Any] = {
        "ok": True,
        "backend": "tensorfold",
        "busy": stats.running > 0,
        "requests_running": stats.running,
        "requests_total": stats.requests,
        "prompt_tokens_total": stats.prompt_tokens,
        "cached_tokens_total": stats.cached_tokens,
        "completion_tokens_total": stats.completion_tokens,
        "prefill_seconds_total": round(stats.prefill_seconds, 3),
        "decode_seconds_total": round(stats.decode_seconds, 3),
        "rounds_total": stats.rounds,
        "drafted_total": stats.drafted,
        "accepted_total": stats.accepted,
        "context_length": window,
    }
    if parallel > 1:
        filling = scheduler.count(State.FILLING)
        body["streams"] = {
            "decoding": scheduler.count(State.DECODING),
            "prefilling": filling,
            "filling": filling,
            "paused": 0,
            "max": scheduler.lanes,
        }
        body["pool_tokens"] = scheduler.pool_tokens
        body["pool_free_tokens"] = scheduler.pool_free
        body["kept_prompts"] = scheduler.kept_prompts
        body["iteration_s"] = round(scheduler.iteration_seconds, 3)
    return body


def metrics(scheduler: Scheduler, window: int, parallel: int) -> str:
    """The Prometheus text of /metrics, with the vLLM-named mirrors and the `tensorfold_health:` names."""
    stats, waiting = scheduler.stats, len(scheduler.waiting)
    used = 1 - scheduler.pool_free / scheduler.pool_tokens if scheduler.pool_tokens else 0.0
    rows: list[tuple[str, str, str, float]] = [
        ("gauge", "tensorfold:requests_running", "", stats.running),
        ("gauge", "tensorfold:requests_waiting", "", waiting),
        ("gauge", "tensorfold:kv_cache_usage_ratio", '{pool="shared"}', round(used, 6)),
        ("counter", "tensorfold:prompt_tokens_total", "", stats.prompt_tokens),
        ("counter", "tensorfold:generation_tokens_total", "", stats.completion_tokens),
        ("counter", "tensorfold:mtp_drafted_total", "", stats.drafted),
        ("counter", "tensorfold:mtp_accepted_total", "", stats.accepted),
        ("gauge", "tensorfold:num_requests_running", "", stats.running),
        ("gauge", "tensorfold:num_requests_waiting", "", waiting),
        ("gauge", "tensorfold:kv_cache_usage_perc", '{stream="shared"}', round(used, 6)),
        ("counter", "tensorfold:spec_decode_num_draft_tokens_total", "", stats.drafted),
        ("counter", "tensorfold:spec_decode_num_accepted_tokens_total", "", stats.accepted),
        ("counter", "tensorfold_health:requests_total", "", stats.requests),
        ("counter", "tensorfold_health:completion_tokens_total", "", stats.completion_tokens),
        ("counter", "tensorfold_health:cached_tokens_total", "", stats.cached_tokens),
        ("counter", "tensorfold_health:rounds_total", "", stats.rounds),
        ("counter", "tensorfold_health:prefill_seconds_total", "", round(stats.prefill_seconds, 3)),
        ("counter", "tensorfold_health:decode_seconds_total", "", round(stats.decode_seconds, 3)),
        ("gauge", "tensorfold_health:context_length", "", window),
    ]
    if parallel > 1:
        rows += [
            ("gauge", "tensorfold_health:streams", '{state="decoding"}', scheduler.count(State.DECODING)),
            ("gauge", "tensorfold_health:streams", '{state="filling"}', scheduler.count(State.FILLING)),
            ("gauge", "tensorfold_health:streams", '{state="paused"}', 0),
            ("gauge", "tensorfold_health:streams_max", "", scheduler.lanes),
            ("gauge", "tensorfold_health:pool_tokens", "", scheduler.pool_tokens),
            ("gauge", "tensorfold_health:pool_free_tokens", "", scheduler.pool_free),
            ("gauge", "tensorfold_health:kept_prompts", "", scheduler.kept_prompts),
        ]
    lines: list[str] = []
    typed: set[str] = set()
    for kind, name, labels, value in rows:
        if name not in typed:
            typed.add(name)
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{labels} {value}")
    lines += stats.latency.lines("tensorfold:request_latency_seconds")
    lines += stats.first_token.lines("tensorfold:time_to_first_token_seconds")
    lines += stats.latency.lines("tensorfold:e2e_request_latency_seconds")
    return "\n".join(lines) + "\n"
