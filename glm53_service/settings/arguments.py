"""Reads what a user adds to an engine's command line and environment, as the engine's parser will."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

SECRET = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|API_KEYS?|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

LINK_VARIABLES = frozenset(
    {
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
        "GLOO_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "UCX_NET_DEVICES",
    }
)
"""Set for each rank from what its node has now: a value for all ranks hangs the pair in ncclCommInitRank."""

ENDS_AT_ONCE = {"--help": "", "-h": "", "--version": ""}


def flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return (flag, value) for each flag: `--a b`, `--a=b` and `--a_b` read alike; no value is an empty one.

    A dotted flag (`--a.b c`, which vLLM merges into a JSON value) keeps its dots.
    """
    found = []
    for place, argument in enumerate(arguments):
        if not re.match(r"--?[A-Za-z]", argument):
            continue
        flag, equals, value = argument.partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        if not equals and not re.match(r"--?[A-Za-z]", following):
            value = following
        if flag.startswith("--"):
            head, dot, rest = flag.partition(".")
            flag = head.replace("_", "-") + dot + rest
        found.append((flag, value))
    return found


def last(arguments: Sequence[str], names: Collection[str], default: str) -> str:
    """Return the value that the engine's parser ends up with for a flag that has these `names`."""
    values = [value for flag, value in flags(arguments) if meant(flag, names)]
    return values[-1] if values else default


def meant(flag: str, names: Collection[str]) -> str:
    """Return which of `names` the parser takes `flag` for, or an empty text.

    argparse takes any unambiguous beginning of a flag for the whole one, so `--por` is `--port`.
    """
    head = flag.partition(".")[0]
    if head in names:
        return head
    return next((name for name in names if len(head) > 3 and name.startswith(head)), "")


def argument_problems(key: str, arguments: Sequence[str], owned: Mapping[str, str]) -> list[str]:
    """Return which arguments are not a user's: `owned` maps a flag to the reason and the way out."""
    problems = []
    reasons = {**ENDS_AT_ONCE, **owned}
    for flag, _ in flags(arguments):
        name = meant(flag, reasons)
        if name in ENDS_AT_ONCE:
            problems.append(f"{key}: found {flag}; the engine would print and end. Take it out")
        elif name:
            problems.append(f"{key}: found {flag}, {reasons[name]}")
    return problems


def environment_problems(key: str, environment: Mapping[str, str], owned: Mapping[str, str]) -> list[str]:
    """Return which variables are not a user's, are no variable, or would show a secret."""
    problems = []
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            problems.append(f"{key}: found {name!r}, expected an environment variable name")
        if SECRET.search(name):
            problems.append(
                f"{key}: found {name}; a secret in the environment shows in `docker inspect`. Take it out"
            )
        elif name in owned:
            problems.append(f"{key}: found {name}, {owned[name]}")
        elif name in LINK_VARIABLES:
            problems.append(
                f"{key}: found {name}, which the supervisor sets for each rank from what its node has."
                " Take it out"
            )
        if "\n" in value or "\0" in value:
            problems.append(f"{key}: found a line break in {name}; a variable is one line")
    return problems
