"""What can be made to go wrong, and how fast everything goes: environment variables `TF_DOUBLE_*`.

`TF_DOUBLE_X_RANK1` is `TF_DOUBLE_X` for rank 1 alone, so one environment can serve all ranks. The file `env`
in TF_DOUBLE_DIR (lines NAME=VALUE, read at a start) wins over the environment: a drill writes it into one
node's cache folder. A name or value that is not in this table ends the program with exit code 2.

TF_DOUBLE_         Default           Meaning
-------------------------------------------------------------------------------------------------
DIR                /cache/tf-double  folder of `env`, `control` and the counts (environment only)
TIME_SCALE         1                 factor on every wait and limit that TensorFold has (600 s to meet,
                                     watchdog, ...)
LOAD_SECONDS       1                 how long the weights load, silently
LOAD_CPU           0.1               share of a core that loading uses; 0: loading shows no sign of life
BUILD_SECONDS      0.3               how long a kernel build takes, once for each kernel cache
ROUND_SECONDS      0.05              one iteration of the scheduler
DECODE_RATE        200               reply tokens a second, each request
PREFILL_RATE       20000             prompt tokens a second
FLUSH_SECONDS      0.2               how long a spill flush takes at SIGTERM, with --spill-gib
RAM_GIB            121.69            memory of the node
MEM_AVAILABLE_GIB  118               MemAvailable at a start
POOL_TOKENS        (from memory)     size of the shared pool
PID1               0                 1: ignore the signals that PID 1 of a container would not get (not a
                                     container)
MAX_TP             3                 largest --tp (environment only: the parser reads it)
NEVER_LOADS        0                 1: this rank never finishes loading, and uses no CPU at it
NCCL_ERROR_2       0                 this many starts end with NCCL error 2, unless TF_GLM_HC_SPLIT=0; counted
                                     in DIR
LARGEST_WINDOW     (from memory)     the largest window that fits; a larger --context is refused and this one
                                     named
PORT_TAKEN         0                 1: the HTTP port is taken by the time the model is loaded
DRAFTER_FAILS      0                 1: the DFlash2 drafter fails while it loads; nothing when there is none
SLOTS              --parallel        requests served at once, whatever was asked for
CRASH                                SECONDS[:CODE]: exit that long after the start, with CODE (1)
LEAK                                 MB_A_SECOND[:MAX_MB]: allocate and keep, from loading on, at most MAX_MB
                                     (512)
FAULT                                live faults (table in faults.py) to begin with when the rank serves, by
                                     comma
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

PREFIX = "TF_DOUBLE_"
DEFAULT_DIR = "/cache/tf-double"


class SwitchError(Exception):
    """A switch is not in the table or has a value that it cannot have; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """SECONDS[:CODE]."""

    seconds: float
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """MB_A_SECOND[:MAX_MB]."""

    rate: float
    most: float


def timed(text: str) -> Timed:
    """SECONDS[:CODE]; the code is 1 when left out."""
    seconds, _, code = text.partition(":")
    return Timed(seconds=float(seconds), code=int(code or 1))


def leak(text: str) -> Leak:
    """MB_A_SECOND[:MAX_MB]; at most 4096 MB, 512 when left out."""
    rate, _, most = text.partition(":")
    return Leak(rate=float(rate), most=min(float(most or 512), 4096.0))


def boolean(text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The table above, for one rank."""

    folder: Path = Path(DEFAULT_DIR)
    time_scale: float = 1.0
    load_seconds: float = 1.0
    load_cpu: float = 0.1
    build_seconds: float = 0.3
    round_seconds: float = 0.05
    decode_rate: float = 200.0
    prefill_rate: float = 20_000.0
    flush_seconds: float = 0.2
    ram_gib: float = 121.69
    mem_available_gib: float = 118.0
    pool_tokens: int | None = None
    pid1: bool = False
    max_tp: int = 3
    never_loads: bool = False
    nccl_error_2: int = 0
    largest_window: int | None = None
    port_taken: bool = False
    drafter_fails: bool = False
    slots: int | None = None
    crash: Timed | None = None
    leak: Leak | None = None
    fault: str = ""

    def scaled(self, seconds: float) -> float:
        """How long one of TensorFold's own waits takes here."""
        return seconds * self.time_scale


READERS: dict[str, Callable[[str], Any]] = {
    "crash": timed,
    "leak": leak,
    "pool_tokens": int,
    "largest_window": int,
    "slots": int,
    "folder": Path,
}
BY_TYPE: dict[type, Callable[[str], Any]] = {bool: boolean, int: int, float: float, str: str}


def read_switches(environ: Mapping[str, str], rank: int) -> Switches:
    """The switches of `rank`; raises SwitchError."""
    folder = Path(environ.get(f"{PREFIX}DIR") or DEFAULT_DIR)
    table = {f.name: f for f in fields(Switches)}
    plain: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in {**environ, **_file(folder / "env")}.items():
        if not name.startswith(PREFIX):
            continue
        key, _, suffix = name.removeprefix(PREFIX).partition("_RANK")
        field = "folder" if key == "DIR" else key.lower()
        if field not in table or (suffix and not suffix.isdigit()) or key == "FOLDER":
            raise SwitchError(f"{name}: no such switch; the table is in the double's switches.py")
        if not suffix:
            plain[field] = value
        elif int(suffix) == rank:
            own[field] = value
    read: dict[str, Any] = {"folder": folder}
    for field, value in {**plain, **own}.items():
        default = table[field].default
        kind: type = str if default is MISSING else type(default)
        reader = READERS.get(field) or BY_TYPE[kind]
        try:
            read[field] = reader(value)
        except ValueError as error:
            raise SwitchError(f"{PREFIX}{field.upper()}={value}: {error}") from None
    return Switches(**read)


def _file(path: Path) -> dict[str, str]:
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}
