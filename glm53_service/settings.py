"""What the head is asked to serve: `/etc/glm53/settings.yaml`, typed and validated.

Only the head has this file; a start carries its content to the followers, so the ranks cannot differ in it.
Unknown keys are errors. Every default is stated here and nowhere else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from glm53_service.errors import ConfigError
from glm53_service.structs import decode, load_yaml

Port = Annotated[int, Meta(ge=1024, le=65535)]
Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
SIZE = r"^[1-9][0-9]*[KMG]$"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot directory, the same path on every node, and the id that the API gives it."""

    path: Annotated[str, Meta(pattern=r"^/\S+$")]
    name: Annotated[str, Meta(pattern=r"^\S+$")]


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0 serves. Without a key it stays on loopback unless `without_key` says otherwise."""

    port: Port = 8888
    bind: Literal["loopback", "management"] = "loopback"
    without_key: bool = False


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Where /live, /ready, /status and /metrics answer; `management` keeps loopback as well."""

    port: Port = 8889
    bind: Literal["loopback", "management"] = "loopback"


class CanarySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A question with a known answer: no rank set is called ready before it gave it."""

    prompt: Annotated[str, Meta(min_length=1)] = "What is 2+2? Answer with a number only."
    expect: Annotated[str, Meta(min_length=1)] = r"\b4\b"
    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 256
    timeout_seconds: Seconds = 120.0


class Vllm(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `vllm serve`; lengths in tokens, sizes as 128M or 2G. `extra_args` come last and win."""

    max_model_len: Count = 900_000
    max_num_seqs: Count = 4
    max_num_batched_tokens: Count = 1024
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.87
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_memory: Annotated[str, Meta(pattern=SIZE)] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    speculative: dict[str, Any] | None = None
    limit_mm_per_prompt: dict[str, Any] | None = None
    skip_mm_profiling: bool = False
    rendezvous_port: Port = 29521
    distributed_timeout_seconds: Annotated[int, Meta(ge=30)] = 600
    execute_timeout_seconds: Annotated[int, Meta(ge=30)] = 300
    shm_gib: Annotated[int, Meta(ge=1, le=64)] = 10
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the supervisor, in seconds on each node's own monotonic clock.

    `stop_grace_seconds` leaves room below the units' TimeoutStopSec (120). The window for faults is long
    enough to hold `faults_allowed` starts that each take many minutes.
    """

    heartbeat_seconds: Seconds = 1.0
    lease_seconds: Seconds = 4.0
    peer_lost_seconds: Seconds = 8.0
    start_stall_seconds: Seconds = 900.0
    stop_grace_seconds: Annotated[float, Meta(gt=0, le=60)] = 20.0
    faults_allowed: Count = 5
    faults_window_seconds: Seconds = 7200.0
    min_free_gib: Annotated[float, Meta(ge=0)] = 0.0
    min_free_wait_seconds: Annotated[float, Meta(ge=0)] = 180.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of settings.yaml."""

    version: Literal[1]
    cluster: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
    engine: Literal["vllm"]
    device: Literal["cuda", "cpu"] = "cuda"
    image: Annotated[str, Meta(pattern=r"^\S+$")]
    model: Model
    api: Api = Api()
    gate: Gate = Gate()
    canary: CanarySettings = CanarySettings()
    vllm: Vllm = Vllm()
    supervision: Supervision = Supervision()


def load_settings(text: str, source: str) -> Settings:
    """Return the settings in YAML `text`; ConfigError lists every fault (key, found, expected, fix)."""
    return settings_from(load_yaml(text, source), source)


def settings_from(data: dict[str, Any], source: str) -> Settings:
    """Return the settings in `data` (as a start message carries them); errors as load_settings."""
    if data.get("engine") == "tensorfold":
        raise ConfigError(
            source,
            ["engine: found 'tensorfold'; this release has the vllm adapter only"],
            hint="set glm53_engine: vllm, or install a release with the TensorFold adapter",
        )
    settings = decode(Settings, data, source)
    problems = list(_cross_checks(settings))
    if problems:
        raise ConfigError(source, problems)
    return settings


def read_settings(etc: Path) -> Settings:
    """Return the settings of this node's `etc` folder; ConfigError when absent or wrong."""
    return load_settings(read_text(etc / "settings.yaml"), str(etc / "settings.yaml"))


def read_text(path: Path) -> str:
    """Return the text of a configuration file; ConfigError when it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        hint = (
            "run this with sudo"
            if isinstance(error, PermissionError)
            else "run site.yml: it writes this file"
        )
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"], hint=hint) from None


def dump(settings: Settings) -> dict[str, Any]:
    """Return `settings` as plain data, every default written out."""
    data: dict[str, Any] = msgspec.to_builtins(settings)
    return data


def _cross_checks(s: Settings) -> list[str]:
    problems = []
    if s.api.bind == "management" and not s.api.without_key:
        problems.append(
            "api.bind: found 'management' with no key; anyone on that network could use the model."
            " Fix: bind 'loopback', or say api.without_key: true (glm53_api_without_key)"
        )
    try:
        re.compile(s.canary.expect)
    except re.error as error:
        problems.append(f"canary.expect: found {s.canary.expect!r}, not a regular expression: {error}")
    if s.api.port == s.gate.port:
        problems.append(f"gate.port: found {s.gate.port}, the API's own port; give each its own")
    if s.device == "cpu" and s.vllm.kv_cache_memory is None:
        problems.append(
            "vllm.kv_cache_memory: missing; on the CPU vLLM otherwise claims a share of all memory"
            " and refuses to start. Fix: set it, for example 128M"
        )
    problems += _supervision_checks(s.supervision)
    return problems + _never(s.vllm)


def _supervision_checks(t: Supervision) -> list[str]:
    problems = []
    if t.lease_seconds < 3 * t.heartbeat_seconds:
        problems.append(
            f"supervision.lease_seconds: found {t.lease_seconds:g}, expected at least three heartbeats"
            f" ({3 * t.heartbeat_seconds:g}): one lost packet must not end a rank"
        )
    if t.peer_lost_seconds < t.lease_seconds:
        problems.append(
            f"supervision.peer_lost_seconds: found {t.peer_lost_seconds:g}, expected at least"
            f" lease_seconds ({t.lease_seconds:g})"
        )
    return problems


OWNED_ARGUMENTS = frozenset(
    {
        "--tensor-parallel-size",
        "-tp",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--headless",
        "--distributed-executor-backend",
        "--host",
        "--port",
        "--served-model-name",
        "--api-key",
        "--model",
    }
)
"""Flags that the supervisor sets from what it knows of the pair; a second value would split the ranks."""


def _never(v: Vllm) -> list[str]:
    problems = []
    for argument in v.extra_args:
        flag = argument.split("=", 1)[0]
        if flag in OWNED_ARGUMENTS:
            problems.append(
                f"vllm.extra_args: found {flag}, which the supervisor sets for each rank itself; take it out"
            )
    for name in v.extra_env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(f"vllm.extra_env: found {name!r}, expected an environment variable name")
        if re.search(r"(TOKEN|PASSWORD|SECRET|API_KEY)$", name):
            problems.append(
                f"vllm.extra_env: found {name}; a secret in the environment shows in `docker inspect`."
                " Take it out"
            )
    return problems
