"""TensorFold 0.6.0's command line with the flags that the recipe's patches add to it."""

import argparse
import os
from dataclasses import dataclass
from typing import Any

from . import VERSION

SUBCOMMANDS = ("serve", "pull", "models", "info", "update")
PATCHED_TP = 3
"""Stock 0.6.0 has --tp 1 or 2; the recipe's patch 0066 makes it 3."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `serve`, as add_argument takes it."""

    name: str
    options: dict[str, Any]


def flag(name: str, **options: Any) -> Flag:
    """A flag; without `type` or `action` it takes a string."""
    return Flag(name, options)


def parallel(text: str) -> int | str:
    """A number of requests, or `auto`."""
    if text == "auto":
        return text
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number or auto, found {text}")
    return number


SWITCH: dict[str, Any] = {"action": "store_true"}
ON_OFF: dict[str, Any] = {"action": argparse.BooleanOptionalAction}

SERVE_FLAGS = (
    flag("--host", default="127.0.0.1"),
    flag("--port", type=int, default=8080),
    flag("--name", default=""),
    flag("--alias", action="append", default=[]),
    flag("--vision", **SWITCH),
    flag("--vision-urls", **SWITCH),
    flag("--context", type=int, default=None),
    flag("--max-tokens", type=int, default=4096),
    flag("--temperature", type=float, default=None),
    flag("--top-p", type=float, default=None),
    flag("--top-k", type=int, default=None),
    flag("--min-p", type=float, default=None),
    flag("--thinking", **ON_OFF, default=True),
    flag("--reasoning-effort", choices=("low", "medium", "high", "xhigh"), default=None),
    flag("--thinking-budget", type=int, default=0),
    flag("--no-drafts", **SWITCH),
    flag("--drafter", default="auto"),
    flag("--drafter-bits", type=int, default=4),
    flag("--mtp-drafts", type=int, default=None),
    flag("--mtp-confidence", type=float, default=None),
    flag("--lane-kernels", choices=("auto", "on", "off"), default="auto"),
    flag("--prompt-cache-gib", type=float, default=None),
    flag("--checkpoint-slots", type=int, default=None),
    flag("--spill-gib", type=float, default=0.0),
    flag("--snapshot-dir", default=None),
    flag("--max-snapshots", type=int, default=3),
    flag("--parallel", type=parallel, default="auto"),
    flag("--decode-share", type=float, default=None),
    flag("--prefill-pass", type=int, default=8),
    flag("--pass-cache-gib", type=float, default=16.0),
    flag("--mlx-cache-gib", type=float, default=8.0),
    flag("--ssd-experts", **SWITCH),
    flag("--ple-on-ssd", **SWITCH),
    flag("--no-update-check", **SWITCH),
    flag("--backend", choices=("auto", "mlx", "cuda"), default="auto"),
    flag("--master", default=""),
    flag("--master-port", type=int, default=29551),
    flag("--kv-dtype", choices=("bf16", "int8", "int4"), default="bf16"),
    flag("--prefill-fp8", **ON_OFF, default=None),
    # The recipe's spill tier (patch 0088).
    flag("--spill-highwater", type=float, default=0.70),
    flag("--spill-min-tokens", type=int, default=8192),
    flag("--spill-min-free-gib", type=float, default=50.0),
    flag("--spill-keep-builds", type=int, default=1),
)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; parsing a wrong flag or value exits 2 with usage on stderr.

    TF_DOUBLE_MAX_TP=4 lets four ranks in, which the image that the double stands for does not do.
    """
    ranks = int(os.environ.get("TF_DOUBLE_MAX_TP", PATCHED_TP))
    parser = argparse.ArgumentParser(prog="tensorfold", description="A double of TensorFold for tests.")
    parser.add_argument("--version", action="version", version=f"tensorfold {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve a model over HTTP")
    serve.add_argument("model", metavar="MODEL", help="a directory or a Hugging Face repo id")
    for each in SERVE_FLAGS:
        serve.add_argument(each.name, **each.options)
    serve.add_argument("--tp", type=int, choices=range(1, ranks + 1), default=1)
    serve.add_argument("--rank", type=int, choices=range(ranks), default=0)
    commands.add_parser("pull", help="download models").add_argument("repos", nargs="+", metavar="REPO")
    commands.add_parser("models", help="list downloaded models")
    commands.add_parser("info", help="say what a checkpoint is").add_argument("model", metavar="MODEL")
    update = commands.add_parser("update", help="update TensorFold")
    update.add_argument("--check", action="store_true")
    update.add_argument("--force", action="store_true")
    return parser


def with_serve(argv: list[str]) -> list[str]:
    """`tensorfold MODEL ...` is short for `tensorfold serve MODEL ...`."""
    if argv and not argv[0].startswith("-") and argv[0] not in SUBCOMMANDS:
        return ["serve", *argv]
    return argv
