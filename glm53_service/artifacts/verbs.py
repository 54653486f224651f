"""The verbs of `glm53` for what is on disk: download, verify. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53_service.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from glm53_service.artifacts.sources import Want
    from glm53_service.artifacts.verify import Verdict

Run = Callable[[argparse.Namespace], int]


def add_verbs(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the verbs to the parser of `glm53`."""
    download = verb(commands, "download", _download, "bring checkpoint and drafter from the hub to this disk")
    download.add_argument("what", nargs="?", choices=("all", "model", "drafter"), default="all")
    download.add_argument(
        "--token-file", type=Path, help="file (mode 600) with the hub's token, if one is needed"
    )
    download.add_argument("--user", default="", help="as root: the account that the files are to belong to")
    download.add_argument("--full", action="store_true", help="hash again what is there")
    download.add_argument("--repair", action="store_true", help="replace files that are whole but wrong")
    download.add_argument(
        "--offline", action="store_true", help="ask no hub; a complete folder without a manifest is hashed"
    )
    download.add_argument("--streams", type=count, default=4, help="files at once (%(default)s)")
    verify = verb(commands, "verify", _verify, "compare what is on this disk with its manifest; reads only")
    verify.add_argument("folders", nargs="*", type=Path, help="snapshots (the head's settings name its own)")
    verify.add_argument("--full", action="store_true", help="read and hash every byte")


def verb(
    commands: argparse._SubParsersAction[Any], name: str, run: Run, text: str
) -> argparse.ArgumentParser:
    """Return a new verb, which has --json."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="for programs")
    return command


def count(text: str) -> int:
    """Return a number of streams; for argparse."""
    if not (text.isdigit() and 1 <= int(text) <= 32):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 1 to 32")
    return int(text)


def say(text: str) -> None:
    """Tell a person, beside what a program reads."""
    print(text, file=sys.stderr, flush=True)


def result(arguments: argparse.Namespace, data: dict[str, Any], text: str) -> None:
    """Print what came out: `data` with --json, else `text`."""
    print(json.dumps(data) if arguments.json else text, flush=True)


# download ------------------------------------------------------------------------


def _download(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.hub import read_token
    from glm53_service.artifacts.sources import drafter_note, wants
    from glm53_service.settings import read_settings

    settings = read_settings(arguments.etc)
    wanted = [want for want in wants(settings) if arguments.what in ("all", want.what)]
    note = drafter_note(settings) if arguments.what != "model" else ""
    if not wanted:
        raise ArtifactError(note, hint="accept its licence in the inventory (drafter.licence), then site.yml")
    token = read_token(arguments.token_file, os.environ)
    become(arguments.user, [want.layout.folder for want in wanted], adopts=arguments.offline)
    for want in wanted:
        _download_one(arguments, want, token)
    if note:
        result(arguments, {"event": "note", "text": note}, note)
    return 0


def _download_one(arguments: argparse.Namespace, want: Want, token: str | None) -> None:
    from glm53_service.artifacts.download import Options, World, download
    from glm53_service.artifacts.hub import Hub
    from glm53_service.artifacts.progress import gigabytes
    from glm53_service.artifacts.rates import HUB, rates_file, remember

    options = Options(
        full=arguments.full,
        repair=arguments.repair,
        offline=arguments.offline or os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True"),
        streams=arguments.streams,
        as_json=arguments.json,
    )
    began = time.monotonic()
    outcome = download(want, options, World(hub=lambda: Hub(token), say=say))
    remember(rates_file(Path.home()), HUB, outcome.bytes, time.monotonic() - began)
    manifest = outcome.manifest
    size = f"{len(manifest.files)} files, {gigabytes(manifest.bytes)}, " if manifest else ""
    fetched = f"{outcome.fetched} fetched" if outcome.fetched else "nothing to fetch"
    text = f"{want.title}: complete, {size}{fetched}, in {want.layout.folder}"
    data = {
        "event": "result",
        "what": want.what,
        "folder": str(want.layout.folder),
        "repository": manifest.repository if manifest else None,
        "revision": manifest.revision if manifest else None,
        "files": len(manifest.files) if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "fetched": outcome.fetched,
        "notes": list(outcome.notes),
    }
    result(arguments, data, "\n".join([text, *(f"  note: {note}" for note in outcome.notes)]))


def become(user: str, folders: list[Path], *, adopts: bool = False) -> None:
    """Give root away before anything is written: files of root are what the next run cannot change.

    The account is `user`, else the owner of the nearest folder that exists. `adopts`: nothing but the
    manifest is written, so what is root's may stay root's.
    """
    import pwd

    from glm53_service.artifacts.disk import nearest

    os.umask(0o022)
    if os.geteuid() != 0:
        if user and pwd.getpwuid(os.geteuid()).pw_name != user:
            raise UsageError(f"--user {user}: only root can become another account", hint="use sudo")
        return
    try:
        owner = pwd.getpwnam(user) if user else pwd.getpwuid(nearest(folders[0]).stat().st_uid)
    except KeyError:
        raise UsageError(f"--user: there is no account {user!r} here") from None
    if owner.pw_uid == 0 and adopts and not user:
        return
    if owner.pw_uid == 0:
        raise UsageError(
            f"as root, this would make files of root in {folders[0]}",
            hint="--user NAME, the account that the files are to belong to",
        )
    for folder in folders if user else ():
        for parent in reversed([folder, *folder.parents]):
            if not parent.exists():
                parent.mkdir()
                os.chown(parent, owner.pw_uid, owner.pw_gid)
    os.initgroups(owner.pw_name, owner.pw_gid)
    os.setgid(owner.pw_gid)
    os.setuid(owner.pw_uid)
    os.environ["HOME"] = owner.pw_dir


# verify ------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from glm53_service.artifacts.layout import layout_of
    from glm53_service.artifacts.verify import verify

    layouts = [layout_of(folder.absolute()) for folder in arguments.folders] or _own_layouts(arguments.etc)
    verdicts = [verify(layout, full=arguments.full, as_json=arguments.json) for layout in layouts]
    for verdict in verdicts:
        result(arguments, _verdict_data(verdict), _verdict_text(verdict))
    return 0 if all(verdict.right for verdict in verdicts) else ArtifactError.exit_code


def _own_layouts(etc: Path) -> list[Any]:
    from glm53_service.artifacts.sources import wants
    from glm53_service.settings import read_settings

    if not (etc / "settings.yaml").exists():
        raise UsageError("this node has no settings: only the head has", hint="glm53 verify FOLDER")
    return [want.layout for want in wants(read_settings(etc))]


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    manifest = verdict.manifest
    return {
        "event": "result",
        "folder": str(verdict.folder),
        "right": verdict.right,
        "full": verdict.full,
        "repository": manifest.repository if manifest else None,
        "revision": manifest.revision if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "content": manifest.content if manifest else None,
        "seconds": round(verdict.seconds, 3),
        "problems": [problem.data() for problem in verdict.problems],
    }


def _verdict_text(verdict: Verdict) -> str:
    from glm53_service.artifacts.progress import gigabytes
    from glm53_service.artifacts.snapshot import summary

    manifest = verdict.manifest
    if not verdict.right:
        return (
            f"{verdict.folder}: {len(verdict.problems)} wrong\n{summary(verdict.problems, most=20)}\n"
            "  Fix: on the head `glm53 download` (wrong content: with --full --repair); for a worker"
            " `glm53 ship` there"
        )
    if manifest is None:
        return f"{verdict.folder}: complete by its own index; no manifest (`glm53 download` makes it)"
    what = (
        f"every byte is right ({gigabytes(manifest.bytes / max(verdict.seconds, 1e-9))}/s)"
        if verdict.full
        else "names, sizes and small files are right"
    )
    return f"{verdict.folder}: {manifest.origin}, {what}"
