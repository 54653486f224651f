"""Copies a snapshot from the head to a worker: many streams over the fabric, hashed where they arrive.

Why a mover of our own: docs/benchmarks.md. ssh starts the other end (receive.py) and carries orders; the
bytes go beside it, not encrypted: the fabric is the pair's own cable, and what arrives is compared with the
manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import secrets
import shlex
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from glm53_service.artifacts.disk import SPARE_BYTES
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import NAME, Manifest, encode_manifest
from glm53_service.artifacts.progress import Progress
from glm53_service.artifacts.snapshot import quick_check, summary
from glm53_service.errors import ArtifactError, BusyError, Glm53Error, UnavailableError

STREAMS = 8
CHUNK = 8 << 20
"""Bytes a sendfile(2): the rate limit and the page cache are looked after this often."""

CONNECT_SECONDS = 10.0
REASON_SECONDS = 5.0
"""How long the worker's own word on a broken stream, which comes by ssh, is waited for."""

STILL_HERE_SECONDS = 10.0
"""How often the worker is told that this end lives: it ends after a minute without."""

DEAD_SECONDS = 60
"""A connection over which nothing goes for so long is dead (a rail that was pulled says nothing)."""

IDLE_SECONDS = 120
"""So is one over which no answer comes for so long."""

SENDS = 3
"""How often one file is sent when what arrives is wrong."""

LOADER = (
    "import sys; i = sys.stdin.buffer; "
    "exec(compile(i.read(int(i.readline())), 'glm53-receive', 'exec'), {'__name__': '__main__'})"
)
"""What the worker's Python is started with: it reads the program from stdin, its length first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker: how a program is started there (ssh and its options), and its addresses on the rails, and the
    folder that is filled.
    """

    node: str
    launcher: tuple[str, ...]
    addresses: tuple[str, ...]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """What one copy did; `peak_kib` is the receiver's largest resident size."""

    files: int
    bytes: int
    seconds: float
    peak_kib: int


def ssh_launcher(user: str, address: str, *, port: int, key: Path, known_hosts: Path) -> tuple[str, ...]:
    """Return the command that starts Python on a worker, with the copying key and pinned host keys only."""
    options = (
        f"UserKnownHostsFile={known_hosts}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
        "BatchMode=yes",
        "ConnectTimeout=10",
        "ServerAliveInterval=15",
        "Compression=no",
    )
    argv = ["ssh", "-F", "/dev/null", "-i", str(key), "-p", str(port)]
    for option in options:
        argv += ["-o", option]
    return (*argv, f"{user}@{address}", "--", "/usr/bin/python3", "-I", "-c", shlex.quote(LOADER))


Speed = Callable[[], float]
"""What a copy may take now, bytes a second; 0 is no limit. It raises BusyError when none may begin."""


class Pace:
    """Keeps all streams together below so many bytes a second, asked for each piece; 0 is no limit."""

    def __init__(self, limit: Speed, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._limit, self._clock, self._sleep = limit, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def wait(self, size: int) -> None:
        """Return when `size` more bytes may go."""
        with self._lock:
            limit, now = self._limit(), self._clock()
            if not limit:
                return
            start = max(self._free_at, now)
            self._free_at = start + size / limit
        if start > now:
            self._sleep(start - now)


def look_there(target: Target) -> dict[str, Any]:
    """Return what look.look() sees in the target's folder; UnavailableError with ssh's own words."""
    program = Path(__file__).with_name("look.py").read_bytes()
    order = json.dumps({"folder": str(target.folder)}).encode()
    done = subprocess.run(
        target.launcher,
        input=b"%d\n" % len(program) + program + order + b"\n",
        capture_output=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise _no_login(target, said[-1] if said else f"exit {done.returncode}", "it cannot be looked at")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _no_login(target: Target, said: str, what: str) -> UnavailableError:
    return UnavailableError(
        f"{target.node}: {what}: {said}",
        hint=f"does `{' '.join(target.launcher[:-4])} true` work? site.yml sets up the key",
    )


class Shipment:
    """One snapshot on its way to one worker."""

    def __init__(
        self,
        layout: Layout,
        manifest: Manifest,
        target: Target,
        *,
        streams: int = STREAMS,
        limit: Speed = lambda: 0.0,
        full: bool = False,
        as_json: bool = False,
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._layout, self._manifest, self._target = layout, manifest, target
        self._streams, self._full, self._json = streams, full, as_json
        self._say, self._clock = say, clock
        self._limit, self._pace = limit, Pace(limit, clock, sleep)
        self._entries = {entry.path: entry for entry in manifest.files}
        self._secret = secrets.token_bytes(32)
        self._work: queue.Queue[tuple[str, int] | None] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._sent: dict[str, int] = {}

    def run(self) -> Shipped:
        """Return once every file is there and its hash is right; Glm53Error says what is in the way.

        A file that is there already is not sent again. What was sent of a file before this run was stopped
        is not sent again either.
        """
        problems = quick_check(self._layout, self._manifest)
        if problems:
            raise ArtifactError(
                f"{self._layout.folder} is not complete here:\n{summary(problems)}",
                hint="glm53 download, then again",
            )
        began = self._clock()
        with self._receiver() as orders:
            wanted, places = self._ask_what_is_wanted()
            size = sum(self._entries[path].size - offset for path, offset in wanted.items())
            if wanted:
                self._limit()
                self._send_all(wanted, places)
            orders(b'{"event": "end"}\n')
            done = self._next("done")
        return Shipped(
            files=len(wanted), bytes=size, seconds=self._clock() - began, peak_kib=int(done["peak_kib"])
        )

    # The other end

    @contextlib.contextmanager
    def _receiver(self) -> Iterator[Callable[[bytes], None]]:
        program = Path(__file__).with_name("receive.py").read_bytes()
        order = {
            "folder": str(self._target.folder),
            "addresses": list(self._target.addresses),
            "secret": self._secret.hex(),
            "spare": SPARE_BYTES,
            "full": self._full,
            "text": encode_manifest(self._manifest),
            "times": self._times(),
            "manifest": msgspec.to_builtins(self._manifest),
        }
        process = subprocess.Popen(
            self._target.launcher,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        stdin = process.stdin

        lock, over = threading.Lock(), threading.Event()

        def orders(data: bytes) -> None:
            with contextlib.suppress(BrokenPipeError, ValueError), lock:
                stdin.write(data)
                stdin.flush()

        def live() -> None:
            while not over.wait(STILL_HERE_SECONDS):
                orders(b"\n")

        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        threading.Thread(target=live, daemon=True).start()
        try:
            orders(b"%d\n" % len(program) + program + json.dumps(order).encode() + b"\n")
            yield orders
        finally:
            over.set()
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _times(self) -> dict[str, int]:
        folder = self._layout.folder
        names = [*self._entries, *([NAME] if (folder / NAME).exists() else [])]
        return {name: (folder / name).stat().st_mtime_ns for name in names}

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self._answers.put(json.loads(line))
        said = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
        self._answers.put({"event": "closed", "text": said.splitlines()[-1] if said else f"exit {code}"})

    def _next(self, *events: str, timeout: float | None = None) -> dict[str, Any]:
        """Return the next answer of one of these kinds; the worker's own error becomes ours."""
        while True:
            answer = self._answers.get(timeout=timeout)
            event = answer.get("event")
            if event in events:
                return answer
            if event == "checking":
                self._say(f"{self._target.node}: hashing {answer['path']}, which is there already")
            elif event == "error":
                raise _as_error(f"{self._target.node}: {answer['text']}", answer)
            elif event == "closed":
                raise _no_login(self._target, str(answer["text"]), "the copy's other end ended")

    def _ask_what_is_wanted(self) -> tuple[dict[str, int], list[tuple[str, int]]]:
        answer = self._next("wanted")
        return answer["files"], [(str(address), int(port)) for address, port in answer["places"]]

    # The bytes

    def _send_all(self, wanted: dict[str, int], places: Sequence[tuple[str, int]]) -> None:
        progress = Progress(
            f"to {self._target.node} over {', '.join(address for address, _ in places)}",
            len(self._entries),
            self._manifest.bytes,
            clock=self._clock,
            there=self._manifest.bytes - sum(self._entries[p].size - o for p, o in wanted.items()),
            files_there=len(self._entries) - len(wanted),
            as_json=self._json,
        )
        # The largest first: no stream is left alone with one at the end.
        for path in sorted(wanted, key=lambda p: -self._entries[p].size):
            self._work.put((path, wanted[path]))
        streams = min(self._streams, len(wanted))
        threads = [
            threading.Thread(target=self._stream, args=(number, places, progress), daemon=True)
            for number in range(streams)
        ]
        for thread in threads:
            thread.start()
        try:
            self._follow(set(wanted), progress, streams)
        finally:
            for _ in threads:
                self._work.put(None)
        for thread in threads:
            thread.join(timeout=CONNECT_SECONDS)
        progress.end()

    def _follow(self, open_files: set[str], progress: Progress, streams: int) -> None:
        lost = 0
        while open_files:
            answer = self._next("file", "lost", "failed")
            if answer["event"] == "file" and answer["right"] and answer["path"] in open_files:
                open_files.discard(answer["path"])
                progress.file_done()
            elif answer["event"] == "failed":
                lost += 1
                progress.say(f"{self._target.node}: a stream ended: {answer['text']}")
                if lost >= streams:
                    with contextlib.suppress(queue.Empty):
                        self._next(timeout=REASON_SECONDS)
                    raise UnavailableError(
                        f"{self._target.node}: no stream is left: {answer['text']}",
                        hint="the cable, the other machine; run it again, it goes on where it stopped",
                    )

    def _again(self, path: str, progress: Progress) -> None:
        self._sent[path] = self._sent.get(path, 1) + 1
        if self._sent[path] > SENDS:
            text = f"{path}: what arrives is not what the manifest says, {SENDS} times"
            hint = "`glm53 verify --full` here says whether this head's own file is right"
            self._answers.put({"event": "error", "text": text, "hint": hint})
            return
        progress.say(f"{path}: arrived wrong; sent again")
        progress.count(-self._entries[path].size)
        self._work.put((path, 0))

    def _stream(self, number: int, places: Sequence[tuple[str, int]], progress: Progress) -> None:
        """Send files over one connection until there are none; a broken one gives its file back."""
        item: tuple[str, int] | None = None
        try:
            with self._connect(number, places) as connection:
                while (item := self._work.get()) is not None:
                    right = self._send(connection, *item, progress)
                    path, item = item[0], None
                    if not right:
                        self._again(path, progress)
                connection.sendall(bytes(4))
        except (OSError, Glm53Error) as error:
            if item is not None:
                self._work.put((item[0], 0))
            self._answers.put({"event": "failed", "text": str(error) or type(error).__name__})

    def _connect(self, number: int, places: Sequence[tuple[str, int]]) -> socket.socket:
        """Return a proven connection; streams take turns on the rails, and any rail is better than none."""
        error: OSError | None = None
        for turn in range(len(places)):
            place = places[(number + turn) % len(places)]
            try:
                connection = socket.create_connection(place, timeout=CONNECT_SECONDS)
            except OSError as failed:
                error = failed
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_SECONDS * 1000)
            patience = struct.pack("ll", IDLE_SECONDS, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            nonce = connection.recv(32, socket.MSG_WAITALL)
            connection.sendall(hmac.new(self._secret, nonce, hashlib.sha256).digest())
            if connection.recv(1) == b"+":
                connection.settimeout(None)
                return connection
            connection.close()
        raise error or BusyError("somebody else answers at the receiver's port")

    def _send(self, connection: socket.socket, path: str, offset: int, progress: Progress) -> bool:
        """Send one file; return whether the worker has it and its hash is right."""
        entry = self._entries[path]
        head = json.dumps({"path": path, "offset": offset}).encode()
        connection.sendall(len(head).to_bytes(4, "big") + head)
        with (self._layout.folder / path).open("rb", buffering=0) as file:
            source = file.fileno()
            first = offset
            try:
                # The worker hashes the half that it has before it takes more; dots say that it is at it.
                while (said := connection.recv(1)) == b".":
                    pass
                if said != b"!":
                    raise ConnectionError("the worker closed the connection")
                while offset < entry.size:
                    size = min(CHUNK, entry.size - offset)
                    self._pace.wait(size)
                    sent = os.sendfile(connection.fileno(), source, offset, size)
                    if not sent:
                        raise ArtifactError(f"{path} became shorter while it was sent")
                    os.posix_fadvise(source, offset, sent, os.POSIX_FADV_DONTNEED)
                    offset += sent
                    progress.count(sent)
                # In hand until the other end has it: what goes into a connection that breaks is lost.
                said = connection.recv(1)
                if said not in (b"+", b"-"):
                    raise ConnectionError("the worker closed the connection")
                return said == b"+"
            except OSError:
                progress.count(first - offset)
                raise


def _as_error(text: str, answer: dict[str, Any]) -> Glm53Error:
    kinds: dict[int, type[Glm53Error]] = {65: ArtifactError, 69: UnavailableError, 75: BusyError}
    return kinds.get(int(answer.get("code", 65)), ArtifactError)(text, hint=str(answer.get("hint", "")))
