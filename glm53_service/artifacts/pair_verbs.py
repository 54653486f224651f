"""The verbs of `glm53` that concern the whole pair's files: ship, artifacts plan. They run on the head."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53_service.artifacts.verbs import become, count, result, say, verb
from glm53_service.errors import ArtifactError, BusyError, UnavailableError, UsageError

if TYPE_CHECKING:
    from glm53_service.artifacts.images.plan import ImageStep
    from glm53_service.artifacts.manifest import Manifest
    from glm53_service.artifacts.plan import Place, Step
    from glm53_service.artifacts.route import Route
    from glm53_service.artifacts.ship import Speed, Target
    from glm53_service.artifacts.sources import Want
    from glm53_service.node import Node, Peer
    from glm53_service.settings import Settings

LOOK_SECONDS = 5.0
"""How often a copy asks whether the pair runs."""

RUNS = ("preparing", "starting", "checking", "serving", "ending")
"""States of the head in which ranks need the machine's memory bandwidth and disks."""


def add_pair_verbs(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the verbs to the parser of `glm53`."""
    ship = verb(commands, "ship", _ship, "copy checkpoint and drafter from this head to the workers")
    ship.add_argument(
        "--to", action="append", default=[], metavar="NODE", help="only this worker (repeatable)"
    )
    ship.add_argument("--full", action="store_true", help="hash again what is there on the workers")
    ship.add_argument("--streams", type=count, default=8, help="files at once (%(default)s)")
    ship.add_argument(
        "--limit", type=float, default=0.0, metavar="MB/S", help="slower, so that a pair can serve"
    )
    ship.add_argument(
        "--beside", type=float, default=0.0, metavar="MB/S", help="the limit while ranks run (else refused)"
    )
    ship.add_argument("--any-network", action="store_true", help="also over Wi-Fi or a VPN")
    _login(ship)
    artifacts = commands.add_parser("artifacts", help="what is on disk, for the whole pair")
    inner = artifacts.add_subparsers(required=True, metavar="COMMAND")
    plan = verb(inner, "plan", _plan, "what a download and a copy would move, and how long; changes nothing")
    plan.add_argument("--offline", action="store_true", help="ask no registry how much the image is")
    _login(plan)


def _login(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--user", default="", help="as root: the account here that owns the files and the key"
    )
    parser.add_argument("--login", default="", help="account on the workers (the same name as here)")
    parser.add_argument("--port", type=int, default=22, help="ssh port of the workers (%(default)s)")
    parser.add_argument("--key", type=Path, help="the copying key (~/.ssh/glm53_ed25519)")
    parser.add_argument("--known-hosts", type=Path, help="the workers' host keys (~/.ssh/glm53_known_hosts)")


def _head(arguments: argparse.Namespace) -> tuple[Node, Settings, tuple[Want, ...]]:
    from glm53_service.artifacts.sources import wants
    from glm53_service.node import read_node
    from glm53_service.settings import read_settings

    node = read_node(arguments.etc)
    if node.rank != 0:
        raise UsageError(f"{node.node} is a worker: copies start on the head, {node.lead.node}")
    settings = read_settings(arguments.etc)
    return node, settings, wants(settings)


def _workers(node: Node, names: list[str]) -> list[Peer]:
    known = [peer.node for peer in node.followers]
    for name in names:
        if name not in known:
            raise UsageError(f"--to {name}: no such worker; there are {', '.join(known)}")
    return [peer for peer in node.followers if not names or peer.node in names]


def _target(arguments: argparse.Namespace, peer: Peer, folder: Path) -> Target:
    from glm53_service.artifacts.ship import Target, ssh_launcher

    home = Path.home()
    launcher = ssh_launcher(
        arguments.login or pwd.getpwuid(os.geteuid()).pw_name,
        peer.fabric[0],
        port=arguments.port,
        key=arguments.key or home / ".ssh/glm53_ed25519",
        known_hosts=arguments.known_hosts or home / ".ssh/glm53_known_hosts",
    )
    return Target(node=peer.node, launcher=launcher, addresses=peer.fabric, folder=folder)


# ship ------------------------------------------------------------------------


def _ship(arguments: argparse.Namespace) -> int:
    node, settings, wanted = _head(arguments)
    workers = _workers(node, arguments.to)
    become(arguments.user, [want.layout.folder for want in wanted])
    for want in wanted:
        manifest = _manifest(want)
        for peer in workers:
            _ship_one(arguments, want, manifest, peer, settings.gate.port)
    return 0


def _speed(port: int, limit: float, beside: float) -> Speed:
    """Return what a copy may take, bytes a second: `limit`, or `beside` while ranks run here (both MB/s).

    Ranks and neither of them: BusyError, for a copy at full speed starves requests. A pair that starts while
    a copy goes on is seen within seconds.
    """
    asked, found = -LOOK_SECONDS, 0.0

    def speed() -> float:
        nonlocal asked, found
        if limit or time.monotonic() - asked < LOOK_SECONDS:
            return limit * 1e6 or found
        first, asked, state = asked < 0, time.monotonic(), _state(port)
        if state in RUNS and first and beside <= 0:
            raise BusyError(
                f"the pair is {state}: a copy at full speed would starve its requests",
                hint="--limit 200 copies at 200 MB/s beside it; or stop it first (systemctl stop glm53-head)",
            )
        found = beside * 1e6 if state in RUNS else 0.0
        return found

    return speed


def _state(port: int) -> str:
    from glm53_service.ask import ask

    try:
        return str(ask(port)["state"])
    except UnavailableError:
        return ""


def _manifest(want: Want) -> Manifest:
    from glm53_service.artifacts.manifest import read_manifest

    manifest = read_manifest(want.layout.folder)
    if manifest is None:
        raise ArtifactError(
            f"{want.layout.folder} has no manifest, so nobody can say what is right",
            hint="glm53 download: it hashes what is there and writes one",
        )
    return manifest


def _ship_one(arguments: argparse.Namespace, want: Want, manifest: Manifest, peer: Peer, port: int) -> None:
    from glm53_service.artifacts.progress import duration, gigabytes
    from glm53_service.artifacts.rates import rates_file, remember
    from glm53_service.artifacts.route import check_route
    from glm53_service.artifacts.ship import Shipment

    routes = _routes(peer)
    for route in routes:
        check_route(route, any_network=arguments.any_network)
    say(f"{want.what} to {peer.node}: {'; '.join(map(str, routes))}")
    done = Shipment(
        want.layout,
        manifest,
        _target(arguments, peer, want.layout.folder),
        streams=arguments.streams,
        limit=_speed(port, arguments.limit, arguments.beside),
        full=arguments.full,
        as_json=arguments.json,
        say=lambda text: _say_beside(arguments, text),
    ).run()
    remember(rates_file(Path.home()), peer.node, done.bytes, done.seconds)
    what = f"{done.files} files, {gigabytes(done.bytes)}" if done.files else "nothing"
    rate = f" ({gigabytes(done.bytes / done.seconds)}/s)" if done.bytes else ""
    data = {
        "event": "result",
        "what": want.what,
        "node": peer.node,
        "folder": str(want.layout.folder),
        "files": done.files,
        "bytes": done.bytes,
        "seconds": round(done.seconds, 3),
        "over": [str(route) for route in routes],
    }
    text = f"{want.title} on {peer.node}: complete; {what} sent in {duration(done.seconds)}{rate}"
    result(arguments, data, text)


def _say_beside(arguments: argparse.Namespace, text: str) -> None:
    """Tell what goes on; a program that follows reads it in the order of the rest."""
    if arguments.json:
        print(json.dumps({"event": "message", "text": text}), flush=True)
    else:
        say(text)


def _routes(peer: Peer) -> list[Route]:
    from glm53_service.artifacts.route import find_route

    return [find_route(address) for address in peer.fabric]


# plan ------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.disk import SPARE_BYTES
    from glm53_service.artifacts.look import look
    from glm53_service.artifacts.plan import Snapshot, place_of, plan
    from glm53_service.artifacts.rates import rates_file, read_rates

    node, settings, wanted = _head(arguments)
    become(arguments.user, [want.layout.folder for want in wanted])
    snapshots = [
        Snapshot(
            want=want,
            head=place_of(node.node, look(str(want.layout.folder))),
            workers=[_there(arguments, want, peer) for peer in node.followers],
        )
        for want in wanted
    ]
    steps = plan(snapshots, rates=read_rates(rates_file(Path.home())), spare=SPARE_BYTES)
    lines: list[Step | ImageStep] = [*steps, *_image_steps(arguments, node, settings.image)]
    if arguments.json:
        print(json.dumps({"steps": [line.data() for line in lines]}))
    else:
        print("\n".join(map(str, lines)))
    return 0


def _image_steps(arguments: argparse.Namespace, node: Node, image: str) -> tuple[ImageStep, ...]:
    from glm53_service.artifacts.images.look import Worker, image_steps
    from glm53_service.artifacts.plan import from_head
    from glm53_service.artifacts.rates import rates_file, read_rates

    workers = []
    for peer in node.followers:
        launcher = _target(arguments, peer, Path("/")).launcher
        over = from_head(map(str, _routes(peer)))
        workers.append(Worker(node=peer.node, ssh=launcher[: launcher.index("--") + 1], over=over))
    rates = read_rates(rates_file(Path.home()))
    return image_steps(image, node.node, workers, rates=rates, offline=arguments.offline, note=say)


def _there(arguments: argparse.Namespace, want: Want, peer: Peer) -> tuple[Place, str]:
    from glm53_service.artifacts.plan import from_head, place_of
    from glm53_service.artifacts.ship import look_there

    seen = look_there(_target(arguments, peer, want.layout.folder))
    return place_of(peer.node, seen), from_head(map(str, _routes(peer)))
