"""The engine's own environment variables: what they may be, and which must be equal on every rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMPARED = ("TF_GLM_", "TENSORFOLD_")
# Not part of the computation, so the ranks may differ in them.
NOT_COMPARED = frozenset(
    {
        "TENSORFOLD_MEMORY_RESERVE_GIB",
        "TENSORFOLD_CUDA_MEMORY_LIMIT_GB",
        "TENSORFOLD_NO_UPDATE_CHECK",
        "TENSORFOLD_PEER_TIMEOUT_S",
        "TENSORFOLD_SSE_KEEPALIVE_S",
        "TF_GLM_DISPLAY_KV_BACKEND",
        "TF_GLM_DISPLAY_KV_MIB",
        "TF_GLM_MAX_QUEUED",
        "TF_GLM_MULTI_WATCHDOG_EXIT",
        "TF_GLM_MULTI_WATCHDOG_S",
    }
)


def one_of(*allowed: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected {', '.join(allowed[:-1])} or {allowed[-1]}")
        return text

    return read


def whole(least: int, most: int | None = None, step: int = 1) -> Callable[[str], int]:
    """A reader of an integer in a range."""

    def read(text: str) -> int:
        wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        wanted += f" in steps of {step}" if step > 1 else ""
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"expected {wanted}") from None
        if number < least or (most is not None and number > most) or number % step:
            raise ValueError(f"expected {wanted}")
        return number

    return read


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A reader of a number in a range."""

    def read(text: str) -> float:
        wanted = f"a number of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
        try:
            found = float(text)
        except ValueError:
            raise ValueError(f"expected {wanted}") from None
        if not (found >= least and (most is None or found <= most)):
            raise ValueError(f"expected {wanted}")
        return found

    return read


# Name: (value when unset, reader). Ranges of the media limits and of TF_ROCE_WAIT_S are published; where only
# a default is known, any integer that is not negative is taken.
VARIABLES: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "TF_GLM_KV": ("bf16", one_of("bf16", "fp8")),
    "TF_GLM_DENSE": ("bf16", one_of("bf16", "fp8", "q4")),
    "TF_GLM_COMM": ("nccl", one_of("nccl", "roce")),
    "TF_GLM_MTP": ("1", one_of("auto", "0", "1")),
    "TF_GLM_HC_SPLIT": ("1", one_of("0", "1")),
    "TF_GLM_PREFILL_OVERLAP": (2, whole(0)),
    "TF_GLM_CACHE_GIB": (3.0, number(0)),
    "TF_GLM_CACHE_ENTRIES": (8, whole(0)),
    "TF_GLM_MAX_QUEUED": (None, whole(0)),
    "TF_GLM_MULTI_WINDOW": (32, whole(16, 64, 8)),
    "TF_GLM_MULTI_VERIFY": ("batched", one_of("batched", "serial")),
    "TF_GLM_MULTI_WATCHDOG_S": (300.0, number(0)),
    "TF_GLM_MULTI_WATCHDOG_EXIT": ("0", one_of("0", "1")),
    "TF_GLM_COPY_MAX": (15, whole(1, 15)),
    "TF_GLM_DISPLAY_KV_MIB": (0, whole(0, 2032, 16)),
    "TF_GLM_DRAFT_QUANT": ("minmax", one_of("minmax", "mse")),
    "TF_GLM_SHARED_PREFIX": ("1", one_of("0", "1")),
    "TF_GLM_PREFILL_ROWS": (2048, whole(1)),
    "TF_ROCE_WAIT_S": (20, whole(1, 3600)),
    "TF_ROCE_MAX_KB": (256, whole(1)),
    "TF_SPILL_FLUSH_S": (60.0, number(0)),
    "TENSORFOLD_GLM_IMAGE_TOKENS": (2048, whole(16, 8000)),
    "TENSORFOLD_GLM_VIDEO_TOKENS": (16384, whole(64, 240_000)),
    "TENSORFOLD_GLM_VIDEO_FRAMES": (128, whole(2, 2048)),
    "TENSORFOLD_GLM_MAX_IMAGES": (50, whole(1, 256)),
    "TENSORFOLD_GLM_MAX_VIDEOS": (4, whole(1, 16)),
    "TENSORFOLD_GLM_REQUEST_IMAGE_TOKENS": (16384, whole(16, 262_144)),
    "TENSORFOLD_GLM_REQUEST_VIDEO_TOKENS": (32768, whole(64, 1_048_576)),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The engine's variables, validated: `env["TF_GLM_KV"]` is the value that holds, set or not."""

    values: dict[str, Any]
    compared: dict[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def read_environment(environ: Mapping[str, str], ram_gib: float) -> Environment:
    """The engine's variables in `environ`; raises ValueError for a value that one cannot have.

    Variables that the double knows nothing of are not validated, but compared between the ranks.
    """
    known = VARIABLES | {
        "TENSORFOLD_MEMORY_RESERVE_GIB": (max(4.0, ram_gib / 10), number(2, ram_gib)),
    }
    values = {}
    for name, (default, read) in known.items():
        text = environ.get(name, "")
        try:
            values[name] = read(text) if text else default
        except ValueError as error:
            raise ValueError(f"{name}={text}: {error}") from None
    compared = {
        name: value
        for name, value in environ.items()
        if name.startswith(COMPARED) and name not in NOT_COMPARED and value
    }
    return Environment(values, compared)
