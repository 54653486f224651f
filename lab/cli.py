"""The lab's command line: `python3 -m lab VERB`. Only this module turns errors into exit codes."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from lab.api import Lab
from lab.errors import LabError, UsageError
from lab.run import say
from lab.settings import Suite

NOT_UP = 3


def parser() -> argparse.ArgumentParser:
    """The verbs and their arguments."""
    top = argparse.ArgumentParser(prog="lab", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", help="bring the lab up (builds what the cache lacks)")
    up.add_argument("--hosts", type=int, default=2, help="2 to 4 (default 2)")
    build = verbs.add_parser("build", help="only fill the cache")
    for verb in (up, build):
        verb.add_argument("--suite", choices=[str(suite) for suite in Suite], default=str(Suite.BOOKWORM))
    verbs.add_parser("down", help="end every host and leave nothing but the cache")
    verbs.add_parser("reset", help="down and up again")
    verbs.add_parser("clean-cache", help="remove the cache")
    status = verbs.add_parser("status", help="state of each host; exit code 3 when no lab is up")
    status.add_argument("--json", action="store_true")

    execute = verbs.add_parser("exec", help="run a command as root in a host: exec HOST -- COMMAND ...")
    execute.add_argument("host")
    execute.add_argument("command", nargs=argparse.REMAINDER)
    for name, text in (
        ("power-on", "start a host"),
        ("power-off", "shut a host down cleanly"),
        ("power-cut", "take a host's power: links dark first, then everything killed"),
        ("reboot", "restart a host cleanly"),
    ):
        verbs.add_parser(name, help=text).add_argument("host")
    for name, text in (("unplug", "pull cables out of a host"), ("plug", "put cables back")):
        verb = verbs.add_parser(name, help=f"{text}; all rails unless told otherwise")
        verb.add_argument("host")
        which = verb.add_mutually_exclusive_group()
        which.add_argument("--rail", type=int)
        which.add_argument("--all", action="store_true", help="both rails (the default)")
        which.add_argument("--management", action="store_true")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 1 failed, 2 wrong arguments, `exec`: the command's own."""
    os.umask(0o022)
    arguments = parser().parse_args(argv)
    try:
        return _do(Lab(), arguments)
    except LabError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted. The next `up` or `down` cleans up")
        return 130


def _do(lab: Lab, arguments: argparse.Namespace) -> int:
    match arguments.verb:
        case "up":
            lab.up(arguments.hosts, Suite(arguments.suite))
            say(f"up. Inventory: {lab.inventory}")
        case "build":
            lab.build(Suite(arguments.suite))
        case "down":
            lab.down()
        case "reset":
            lab.reset()
        case "clean-cache":
            lab.clean_cache()
        case "status":
            return _status(lab, as_json=arguments.json)
        case "exec":
            return _exec(lab, arguments.host, arguments.command)
        case "power-on":
            lab.power_on(arguments.host)
        case "power-off":
            lab.power_off(arguments.host)
        case "power-cut":
            lab.power_cut(arguments.host)
        case "reboot":
            lab.reboot(arguments.host)
        case "unplug":
            lab.unplug(arguments.host, arguments.rail, management=arguments.management)
        case "plug":
            lab.plug(arguments.host, arguments.rail, management=arguments.management)
    return 0


def _exec(lab: Lab, host: str, command: list[str]) -> int:
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise UsageError(f"no command for {host}. Do: python3 -m lab exec {host} -- COMMAND ...")
    return lab.machine(host).attach(words)


def _status(lab: Lab, *, as_json: bool) -> int:
    status = lab.status()
    if as_json:
        print(json.dumps(status, indent=2))
    elif not status["up"]:
        print("no lab is up")
    else:
        print("\n".join(_lines(status)))
    return 0 if status["up"] else NOT_UP


def _lines(status: dict[str, object]) -> list[str]:
    found = status["hosts"]
    assert isinstance(found, list)
    lines = []
    for host in found:
        rails = ", ".join(
            f"{rail['netdev']} {'up' if rail['carrier'] else 'dark' if rail['plugged'] else 'unplugged'}"
            for rail in host["rails"]
        )
        answers = ", ".join(name for name in ("ssh", "docker") if host[name]) or "nothing"
        lines.append(f"{host['name']}: {host['system']}, {host['management']} answers {answers}; {rails}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
