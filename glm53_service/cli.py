"""The command line `glm53`: the only place that exits."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from glm53_service import __version__
from glm53_service.artifacts.images.verbs import add_image_verbs
from glm53_service.artifacts.pair_verbs import add_pair_verbs
from glm53_service.artifacts.prune_verb import add_prune_verb
from glm53_service.artifacts.verbs import add_verbs
from glm53_service.ask import ask, gate_port
from glm53_service.errors import ConfigError, Glm53Error, NotServingError, UnavailableError, UsageError
from glm53_service.looking import add_looking_verbs

if TYPE_CHECKING:
    from glm53_service.config import Value
    from glm53_service.node import Node
    from glm53_service.settings import Settings

ETC = Path("/etc/glm53")
INTERRUPTED = 130
"""128 and SIGINT's number, as shells have it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "--json": {"action": "store_true", "help": "for programs"},
    "--image": {"action": "store_true", "help": "let the engine's image read its arguments too (head)"},
    "--verify": {"action": "store_true", "help": "compare every file of the release with what was installed"},
    "--origin": {"action": "store_true", "help": "where each value comes from"},
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; an error is one message on stderr, a traceback only with
    --debug.
    """
    arguments = _parser().parse_args(argv)
    try:
        sys.exit(arguments.run(arguments))
    except Glm53Error as error:
        if arguments.debug:
            raise
        print(f"glm53: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("glm53: stopped; a download or a copy goes on with the next run", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="glm53", description="Serves GLM-5.3-Flash as ranks on a pair of DGX Sparks.")
    parser.add_argument(
        "--etc", type=Path, default=ETC, help="folder of node.yaml and settings.yaml (%(default)s)"
    )
    parser.add_argument("--debug", action="store_true", help="log details, show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text, options in (
        (
            "status",
            _status,
            "what this node's supervisor does now; exit 0 only while it serves (head) or runs",
            ("--json",),
        ),
        ("command", _command, "the exact container of each rank of the current epoch", ("--json",)),
        ("config", _config, "each effective value of the head's settings", ("--json", "--origin")),
        ("check", _check, "validate this node's settings; exit 78 names every fault", ("--image",)),
        ("version", _version, "package version and release", ("--verify",)),
        ("lead", _lead, "supervise rank 0 (glm53-head.service)", ()),
        ("follow", _follow, "supervise another rank (glm53-worker.service)", ()),
        ("cleanup", _cleanup, "remove this cluster's rank containers here (ExecStopPost)", ()),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        for option in options:
            command.add_argument(option, **OPTIONS[option])
    add_verbs(commands)
    add_image_verbs(commands)
    add_pair_verbs(commands)
    add_prune_verb(commands)
    add_looking_verbs(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"glm53: {message}", file=sys.stderr)
        sys.exit(UsageError.exit_code)


# For people and programs ------------------------------------------------------------------------


def _version(arguments: argparse.Namespace) -> int:
    from glm53_service.release import check_files, running_release

    print(f"glm53 {__version__}, release {running_release(Path(sys.prefix))}", flush=True)
    if arguments.verify:
        check_files(Path(sys.prefix))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from glm53_service.node import read_node
    from glm53_service.settings import read_settings, warnings

    node = read_node(arguments.etc)
    if node.rank == 0:
        settings = read_settings(arguments.etc)
        _same_pair(node, settings, arguments.etc)
        for warning in warnings(settings):
            print(f"warning: {warning}")
        if arguments.image:
            _ask_image(node, settings)
    print(f"{node.node}: rank {node.rank} of {len(node.nodes)} in cluster {node.cluster}: settings are valid")
    return 0


def _ask_image(node: Node, settings: Settings) -> None:
    import asyncio

    from glm53_service.docker import Docker
    from glm53_service.precheck import ask_image
    from glm53_service.supervisor.world import World

    async def asked() -> str:
        docker = Docker.connect()
        try:
            return await ask_image(node, settings, docker, World())
        finally:
            await docker.close()

    print(asyncio.run(asked()) or f"{settings.image} takes the arguments")


def _config(arguments: argparse.Namespace) -> int:
    """Print the file's values; in place of those that a start chooses, what the running one chose."""
    import msgspec

    from glm53_service.config import Value, effective_values
    from glm53_service.node import read_node
    from glm53_service.settings import read_text, settings_from
    from glm53_service.structs import load_yaml

    path = arguments.etc / "settings.yaml"
    if read_node(arguments.etc).rank != 0:
        raise UsageError("only the head has settings; a start carries them to the other nodes")
    given = load_yaml(read_text(path), str(path))
    settings = settings_from(given, str(path))
    try:
        running = msgspec.convert(ask(settings.gate.port).get("chosen", ()), tuple[Value, ...])
    except UnavailableError:
        running = ()
    values = effective_values(settings, given, running or _planned(settings))
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(values), indent=1))
        return 0
    for value in values:
        line = f"{value.key}: {json.dumps(value.value)}"
        print(f"{line:60} # {value.origin}" if arguments.origin else line)
    return 0


def _planned(settings: Settings) -> tuple[Value, ...]:
    """Return what a start would choose by the settings alone."""
    from glm53_service.drafter import Refusal
    from glm53_service.engines import engine_for
    from glm53_service.engines.base import Attempt
    from glm53_service.settings import choose_drafter

    choice = choose_drafter(settings)
    return () if isinstance(choice, Refusal) else engine_for(settings).resolved(settings, choice, Attempt())


def _status(arguments: argparse.Namespace) -> int:
    try:
        now = ask(gate_port(arguments.etc))
    except UnavailableError as error:
        if arguments.json:
            print(json.dumps({"state": "stopped", "ready": False, "reasons": [error.message]}))
            return NotServingError.exit_code
        raise NotServingError(
            f"the supervisor is not running here ({error.message})",
            hint="systemctl status glm53-head (or glm53-worker)",
        ) from None
    print(json.dumps(now) if arguments.json else _table(now))
    return 0 if now["ready"] else NotServingError.exit_code


def _command(arguments: argparse.Namespace) -> int:
    now = ask(gate_port(arguments.etc))
    commands = {f"rank {r['rank']} on {r['node']}": r["command"] for r in now["ranks"]}
    missing = [who for who, command in commands.items() if not command]
    if missing:
        raise UnavailableError(
            f"no container is made for {', '.join(missing)}: the pair is {now['state']}",
            hint="ask again once an epoch has begun (glm53 status)",
        )
    print(
        json.dumps(commands, indent=1)
        if arguments.json
        else "\n\n".join(f"# {who}\n{command}" for who, command in commands.items())
    )
    return 0


def _table(now: dict[str, Any]) -> str:
    import msgspec

    from glm53_service.vitals import Vitals

    lines = [
        f"{now['cluster']} / {now['node']} ({now['role']}): {now['state']}"
        + (f", epoch {now['epoch']}" if now["epoch"] else "")
    ]
    lines += [f"  {reason}" for reason in now["reasons"]]
    if now["role"] == "lead":
        lines.append(f"endpoint  {now['endpoint']}  model {now['model']}")
    if now["answered_at"]:
        at = datetime.fromtimestamp(now["answered_at"], UTC)
        lines.append(f"canary    right at {at:%Y-%m-%d %H:%M:%S} UTC")
    if now["progress"] and now["state"] in ("starting", "checking"):
        lines.append(f"progress  {now['progress']}")
    for rank in now["ranks"]:
        lines.append(
            f"rank {rank['rank']}    {rank['node']}: {rank['state']}"
            + ("" if rank["connected"] else ", not connected")
        )
        lines += [f"          {rail}" for rail in rank["rails"]]
        warnings = list(rank["warnings"])
        if rank.get("vitals"):  # the supervisor may be older than this command, until it is restarted
            vitals = msgspec.convert(rank["vitals"], Vitals)
            lines.append(f"          {vitals.line()}")
            warnings += vitals.warnings
        lines += [f"          warning: {warning}" for warning in warnings]
    if now["last_end"]:
        lines.append(f"last end  {now['last_end']}")
    if now["faults"]:
        lines.append(f"faults    {now['faults']} within the window")
    return "\n".join(lines)


# The services ------------------------------------------------------------------------


def _lead(arguments: argparse.Namespace) -> int:
    from glm53_service.docker import Docker
    from glm53_service.node import read_node
    from glm53_service.settings import read_settings
    from glm53_service.supervisor.lead import Lead
    from glm53_service.supervisor.world import World

    def make() -> Coroutine[Any, Any, None]:
        node, settings = read_node(arguments.etc), read_settings(arguments.etc)
        _same_pair(node, settings, arguments.etc)
        if node.rank != 0:
            raise ConfigError(
                str(arguments.etc / "node.yaml"),
                [f"node: {node.node} has rank {node.rank}; only rank 0 leads"],
                hint="systemctl start glm53-worker here",
            )
        tokens = _tokens(arguments.etc)

        async def run() -> None:
            docker = Docker.connect()
            try:
                await Lead(node, settings, tokens, _release(), docker, World()).run()
            finally:
                await docker.close()

        return run()

    return _serve(arguments, make)


def _follow(arguments: argparse.Namespace) -> int:
    from glm53_service.docker import Docker
    from glm53_service.node import read_node
    from glm53_service.supervisor.follow import Follower
    from glm53_service.supervisor.world import World

    def make() -> Coroutine[Any, Any, None]:
        node = read_node(arguments.etc)
        if node.rank == 0:
            raise ConfigError(
                str(arguments.etc / "node.yaml"),
                [f"node: {node.node} has rank 0; rank 0 leads"],
                hint="systemctl start glm53-head here",
            )
        tokens = _tokens(arguments.etc)

        async def run() -> None:
            docker = Docker.connect()
            try:
                await Follower(node, tokens, _release(), docker, World()).run()
            finally:
                await docker.close()

        return run()

    return _serve(arguments, make)


def _cleanup(arguments: argparse.Namespace) -> int:
    from glm53_service.docker import Docker
    from glm53_service.node import read_node
    from glm53_service.supervisor.cleanup import clean_up
    from glm53_service.supervisor.world import World

    async def run(cluster: str) -> None:
        docker = Docker.connect()
        try:
            await clean_up(docker, cluster, World(), os.environ)
        finally:
            await docker.close()

    return _serve(arguments, lambda: run(read_node(arguments.etc).cluster))


def _serve(arguments: argparse.Namespace, make: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service; its errors go to the journal with their priority, and STATUS= says why the unit is
    down.
    """
    import asyncio
    import logging

    from glm53_service.notify import Notifier
    from glm53_service.story import set_up_logging

    set_up_logging(debug=arguments.debug)
    try:
        asyncio.run(make())
    except Glm53Error as error:
        down = "the pair is down until this is mended: " if isinstance(error, ConfigError) else ""
        logging.getLogger(__name__).error("%s%s", down, error)
        Notifier().status(f"{down}{error}"[:500])
        return error.exit_code
    return 0


def _tokens(etc: Path) -> tuple[str, ...]:
    """Return the cluster's tokens: systemd's credential, or the file itself when run by hand as root."""
    from glm53_service.settings import read_text
    from glm53_service.supervisor.wire import parse_tokens

    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    path = Path(folder) / "cluster-token" if folder else etc / "token"
    return parse_tokens(read_text(path), str(path))


def _release() -> str:
    from glm53_service.release import running_release

    return running_release(Path(sys.prefix))


def _same_pair(node: Node, settings: Settings, etc: Path) -> None:
    """Raise ConfigError where node.yaml and settings.yaml are of two pairs, or the nodes cannot serve it."""
    from glm53_service.settings import pair_problems

    if node.cluster != settings.cluster:
        raise ConfigError(
            str(etc),
            [f"cluster: settings.yaml says {settings.cluster!r}, node.yaml {node.cluster!r}"],
            hint="run site.yml: it writes both",
        )
    if problems := pair_problems(settings, len(node.nodes)):
        raise ConfigError(str(etc), problems)
