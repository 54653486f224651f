"""The verbs of `glm53` that look at a machine: what they are called and what they take.

What they do is imported when they run, so that a supervisor does not carry it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm53_service.ask import ask, gate_port
from glm53_service.errors import UnavailableError

STATE = Path("/var/lib/glm53")
Add = Callable[..., argparse.Action]


def add_looking_verbs(commands: argparse._SubParsersAction[Any]) -> None:
    """Add fabric, doctor, snapshot and bandwidth to the parser of `glm53`."""
    fabric = _verb(
        commands, "fabric", _fabric, "the rails of this node and whether its peers answer; exit 20 and up"
    )
    doctor = _verb(
        commands, "doctor", _doctor, "read-only checks of this node; exit 10 for warnings, 11 for errors"
    )
    for add in (fabric, doctor):
        add("--json", action="store_true", help="for programs")
        add(
            "--from",
            dest="tree",
            type=Path,
            metavar="TREE",
            help="look at a snapshot in place of this machine",
        )
    doctor(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="lay what --json wrote on several nodes side by side",
    )
    doctor(
        "--weights",
        action="append",
        default=[],
        metavar="DIR",
        help="on a worker: the model's folder, then the drafter's (the head's settings name them)",
    )
    add = _verb(commands, "snapshot", _snapshot, "save what the checks read as plain files, without secrets")
    add("--out", type=Path, metavar="DIR", help="a new folder (default: one with node and time)")
    _add_bandwidth(commands)


def _add_bandwidth(commands: argparse._SubParsersAction[Any]) -> None:
    text = "what the rails' last measurement said; with --rail or --gather: this node's part of one (as root)"
    add = _verb(commands, "bandwidth", _bandwidth, text)
    add("--json", action="store_true", help="for programs")
    add("--rail", type=int, metavar="N", help="measure this rail, counted from 0")
    add("--serve", action="store_true", help="be the side that receives, and wait for the other")
    add("--peer", default="", metavar="NODE", help="the other node (needed with more than two)")
    add("--seconds", type=int, default=5, help="length of a measurement (%(default)s)")
    add("--bytes", type=int, default=65536, help="size of a buffer (%(default)s)")
    add("--gather", action="store_true", help="this node's part of an all-gather of all nodes")
    add("--image", default="", help="engine image of the all-gather (default: the one from the head)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="nccl, or gloo (%(default)s)")


def _verb(
    commands: argparse._SubParsersAction[Any], name: str, run: Callable[[argparse.Namespace], int], text: str
) -> Add:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    add: Add = command.add_argument
    return add


def _fabric(arguments: argparse.Namespace) -> int:
    from glm53_service.doctor.commands import fabric_command, source_of

    return fabric_command(source_of(arguments.etc, arguments.tree), as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from glm53_service.doctor.commands import compare_command, doctor_command, source_of

    if arguments.compare:
        return compare_command(arguments.compare, as_json=arguments.json)
    source = source_of(arguments.etc, arguments.tree, arguments.weights)
    return doctor_command(source, as_json=arguments.json)


def _snapshot(arguments: argparse.Namespace) -> int:
    from glm53_service.doctor.commands import snapshot_command, source_of

    return snapshot_command(source_of(arguments.etc, None), arguments.out)


def _bandwidth(arguments: argparse.Namespace) -> int:
    from glm53_service.bandwidth.command import Wish, gather_command, measure_command, show_command
    from glm53_service.node import read_node

    kept = STATE / "bandwidth.json"
    if arguments.rail is None and not arguments.gather:
        return show_command(kept, as_json=arguments.json)
    node = read_node(arguments.etc)
    try:
        status = ask(gate_port(arguments.etc))
    except UnavailableError:
        status = None
    if arguments.gather:
        cuda, image = arguments.device == "cuda", arguments.image
        return gather_command(node, image, kept, status, cuda=cuda)
    wish = Wish(
        rail=arguments.rail,
        peer=arguments.peer,
        serve=arguments.serve,
        seconds=arguments.seconds,
        buffer_bytes=arguments.bytes,
    )
    return measure_command(node, wish, kept, status)
