"""The verb `glm53 image pull`, and the image's lines of `glm53 artifacts plan`."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53_service.artifacts.verbs import result, verb
from glm53_service.errors import UsageError

if TYPE_CHECKING:
    from glm53_service.artifacts.images.credentials import Login
    from glm53_service.artifacts.images.engine import Engine, Platform
    from glm53_service.artifacts.images.pull import Outcome, World
    from glm53_service.artifacts.images.reference import Reference

DOCKER_SOCKET = Path("/run/docker.sock")


def add_image_verbs(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the verbs to the parser of `glm53`."""
    image = commands.add_parser("image", help="the engine image on this node")
    inner = image.add_subparsers(required=True, metavar="COMMAND")
    pull = verb(inner, "pull", _pull, "bring the engine image from its registry into docker here, by digest")
    pull.add_argument("reference", nargs="?", default="", help="NAME@sha256:... (the settings name it)")
    _login_options(pull)
    pull.add_argument("--offline", action="store_true", help="ask no registry: only say whether it is there")
    pull.add_argument(
        "--silence",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="a pull in which nothing moves for so long has stalled (%(default)g)",
    )
    rate = verb(inner, "shipped", _shipped, "remember how fast the image came to a worker, for the next plan")
    rate.add_argument("node", help="the worker")
    rate.add_argument("bytes", type=int, help="size of the image")
    rate.add_argument("seconds", type=float, help="how long it took")
    rate.add_argument("--user", default="", help="as root: the account that keeps the figure")


def _login_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registry-user", default="", metavar="NAME", help="user of the token")
    parser.add_argument(
        "--token-file", type=Path, help="file (mode 600) with the registry's token, if one is needed"
    )
    parser.add_argument(
        "--user", default="", help="as root: the account whose `docker login` counts, and that this becomes"
    )


def become_puller(user: str, socket: Path = DOCKER_SOCKET) -> None:
    """Give root away but for docker's socket: helper programs run, and files are made, as the account."""
    import pwd

    me = os.geteuid()
    try:
        account = pwd.getpwnam(user) if user else pwd.getpwuid(me)
    except KeyError:
        raise UsageError(f"--user: there is no account {user!r} here") from None
    if account.pw_uid == me:
        return
    if me != 0:
        raise UsageError(f"--user {user}: only root can become another account", hint="use sudo")
    groups = set(os.getgrouplist(account.pw_name, account.pw_gid))
    if socket.exists():
        groups.add(socket.stat().st_gid)
    os.umask(0o022)
    os.setgroups(sorted(groups))
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.environ["HOME"] = account.pw_dir


# pull ------------------------------------------------------------------------


def _pull(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.images.credentials import token_login
    from glm53_service.artifacts.images.plan import REGISTRY
    from glm53_service.artifacts.progress import duration, gigabytes
    from glm53_service.artifacts.rates import rates_file, remember

    reference = arguments.reference or _own(arguments.etc)
    given = token_login(arguments.registry_user, arguments.token_file)
    become_puller(arguments.user)
    outcome = asyncio.run(_pulled(reference, arguments, given))
    size = int(outcome.inspect.get("Size") or 0)
    if outcome.pulled:
        remember(rates_file(Path.home()), REGISTRY, outcome.bytes, outcome.seconds)
    did = f"{gigabytes(outcome.bytes)} pulled in {duration(outcome.seconds)}" if outcome.pulled else "there"
    data = {
        "event": "result",
        "what": "image",
        "reference": reference,
        "pulled": outcome.pulled,
        "id": outcome.inspect.get("Id"),
        "size": size,
        "bytes": outcome.bytes,
        "seconds": round(outcome.seconds, 3),
    }
    result(arguments, data, f"{reference}: {did}, {gigabytes(size)} in docker")
    return 0


def _own(etc: Path) -> str:
    from glm53_service.settings import read_settings

    if not (etc / "settings.yaml").exists():
        raise UsageError(
            "this node has no settings: only the head has", hint="glm53 image pull NAME@sha256:..."
        )
    return read_settings(etc).image


async def _pulled(reference: str, arguments: argparse.Namespace, given: Login | None) -> Outcome:
    from glm53_service.artifacts.images.engine import Engine
    from glm53_service.artifacts.images.pull import pull

    engine = Engine.connect()
    try:
        return await pull(reference, engine, _world(arguments, given, engine), offline=arguments.offline)
    finally:
        await engine.close()


def _world(arguments: argparse.Namespace, given: Login | None, engine: Engine) -> World:
    from glm53_service.artifacts.images.credentials import docker_login
    from glm53_service.artifacts.images.pull import World
    from glm53_service.artifacts.images.show import Show
    from glm53_service.artifacts.images.size import manifest_size

    show = Show(time.monotonic, as_json=arguments.json)

    async def login(reference: Reference) -> Login | None:
        return given or await docker_login(reference, Path.home())

    async def size(reference: Reference, platform: Platform, who: Login | None) -> int | str:
        return await manifest_size(engine, reference, platform, who)

    return World(login=login, size=size, say=show.say, show=show.layers, silence=arguments.silence)


def _shipped(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.images.plan import ship_rate
    from glm53_service.artifacts.rates import rates_file, remember
    from glm53_service.artifacts.verbs import become

    become(arguments.user, [Path.home()])
    remember(rates_file(Path.home()), ship_rate(arguments.node), arguments.bytes, arguments.seconds)
    return 0
