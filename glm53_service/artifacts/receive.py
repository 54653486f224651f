"""The worker's end of `glm53 ship`: a program of the standard library alone, sent over ssh and run there.

So it needs nothing installed, and is always of the sender's version. Orders come as JSON lines on stdin,
answers go to stdout; bytes come over TCP on the fabric. It ends when stdin ends: a killed sender leaves no
process behind. What arrived stays, and the next run goes on from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import queue
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

BLOCK = 4 << 20
NAME = ".glm53-manifest.json"
UNFINISHED = ".glm53-manifest.unfinished.json"
ALIGNED = 4096
OURS = ".glm53-"
IDLE_SECONDS = 120.0
"""A connection that says nothing for so long is dead."""

TICK_BLOCKS = 16
"""How often a sender hears that a half is being hashed."""

SILENCE_SECONDS = 60.0
"""So is a sender that says nothing on stdin: a host that lost its power closes nothing."""

LONGEST_HEAD = 64 << 10
"""Bytes in which a sender names a file."""

LONGEST_NAME_BYTES = 200
"""Of a file's own name in that of its unfinished file: a file system takes 255 in all."""


class Fault(Exception):
    """What this end cannot do; `code` is the exit code of glm53 for it."""

    def __init__(self, text: str, hint: str = "", code: int = 65) -> None:
        super().__init__(text)
        self.data = {"event": "error", "text": text, "hint": hint, "code": code}


class Buffer:
    """Page-aligned memory, as O_DIRECT wants it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK)
        self.view = memoryview(self.memory)


class Receiver:
    """One folder that is being filled."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.folder = Path(order["folder"])
        self.manifest: dict[str, Any] = order["manifest"]
        self.files: dict[str, dict[str, Any]] = {e["path"]: e for e in self.manifest["files"]}
        self.secret = bytes.fromhex(order["secret"])
        self.addresses: list[str] = order["addresses"]
        self.text: str = order["text"]
        self.times: dict[str, int] = order["times"]
        self.spare = int(order["spare"])
        self.full = bool(order["full"])
        for name in (*self.files, *(name for name in self.times if name != NAME)):
            _inside(name)
        self.lock = threading.Lock()
        self.taking: dict[str, tuple[threading.Lock, list[socket.socket]]] = {
            path: (threading.Lock(), []) for path in self.files
        }
        self.proven: set[str] = set()

    # What is there

    def prepare(self) -> dict[str, int]:
        """Return the offset at which each file that is wanted goes on."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Fault(
                f"{self.folder} cannot be made by {_me()}: {error.strerror}",
                f"there: sudo install -d -o {_me()} {self.folder}",
            ) from None
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fault(f"{self.folder} is being filled by another run", "wait until it ends", 75) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            if os.statvfs(self.folder).f_flag & os.ST_RDONLY:
                raise Fault(
                    f"{self.folder} is on a filesystem that is mounted read-only", "mount it writable"
                )
            raise Fault(
                f"{self.folder} cannot be written by {_me()}", f"there: sudo chown -R {_me()}: {self.folder}"
            )
        self._extra()
        self._no_files()
        known = {} if self.full else self._known()
        with ThreadPoolExecutor(4) as pool:
            there = pool.map(lambda entry: self._there(entry, known), self.files.values())
            self.proven = {path for path, right in zip(self.files, there, strict=True) if right}
        wanted = {path: self._part_size(path) for path in self.files if path not in self.proven}
        need = sum(self.files[path]["size"] - offset for path, offset in wanted.items())
        free = os.statvfs(self.folder)
        room = free.f_bavail * free.f_frsize
        if need and room < need + self.spare:
            raise Fault(
                f"{self.folder}: {room / 1e9:.1f} GB free, but {need / 1e9:.1f} GB are missing and"
                f" {self.spare / 1e9:.1f} must stay free",
                "make room there",
            )
        return wanted

    def _extra(self) -> None:
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self.files and not path.name.startswith("."):
                raise Fault(
                    f"{path} is not one of the head's files, and an engine may load it",
                    "move it away there; nothing here removes weights",
                )

    def _no_files(self) -> None:
        """Refuse what nothing here replaces: a folder or a pipe as a file, a link that leads out."""
        root = self.folder.resolve()
        for path in self.files:
            target = self.folder / path
            if not target.parent.resolve().is_relative_to(root):
                raise Fault(
                    f"{target.parent} leads to {target.parent.resolve()}, outside {self.folder}",
                    "move that link away there",
                )
            with contextlib.suppress(OSError):
                mode = target.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                    raise Fault(f"{target} is no file", "move it away there")

    def _known(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in (NAME, UNFINISHED):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = self.folder / name
                since = record.stat().st_ctime_ns
                files = json.loads(record.read_bytes())["files"]
                found |= {e["path"]: {**e, "since": since} for e in files}
        return found

    def _there(self, entry: dict[str, Any], known: dict[str, dict[str, Any]]) -> bool:
        path = str(entry["path"])
        target = self.folder / path
        try:
            status = target.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != entry["size"]:
                return False
            before = known.get(path, {})
            small = self._small(path)
            same = before.get("sha256") == entry["sha256"] and before.get("size") == entry["size"]
            if same and not small and not self._touched(path, before["since"]):
                return True
            if not small:
                answer({"event": "checking", "path": path, "size": entry["size"]})
            return bool(_sha256(target).hexdigest() == entry["sha256"])
        except OSError:
            return False

    def _small(self, path: str) -> bool:
        """Return whether the file is hashed each time, so that nothing need be written down of it."""
        return bool(self.files[path]["size"] <= 64 << 20) and not path.endswith(".safetensors")

    def _touched(self, path: str, since: int) -> bool:
        """Say whether a file changed after its proof: it has not the head's time, and its status is newer."""
        status = (self.folder / path).stat()
        return bool(status.st_mtime_ns != self.times.get(path) and status.st_ctime_ns > since)

    def part(self, path: str) -> Path:
        """Return where an unfinished file grows; its name is of its content."""
        target, name = self.folder / path, Path(path).name
        if len(name.encode()) > LONGEST_NAME_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
        return target.with_name(f".{name}.{self.files[path]['sha256'][:16]}.incomplete")

    def _part_size(self, path: str) -> int:
        part, whole = self.part(path), int(self.files[path]["size"])
        size = part.stat().st_size if part.exists() else 0
        if whole < size < whole + ALIGNED:  # killed between the last page and its cut
            size = whole
        return size - size % ALIGNED if size <= whole else 0

    # What comes

    def serve(self, connection: socket.socket) -> None:
        """Take files from one connection until it is closed."""
        connection.settimeout(IDLE_SECONDS)
        nonce = secrets.token_bytes(32)
        connection.sendall(nonce)
        proof = hmac.new(self.secret, nonce, hashlib.sha256).digest()
        if not hmac.compare_digest(_exactly(connection, 32), proof):
            return
        connection.sendall(b"+")
        buffer = Buffer()
        while (length := self._next_length(connection)) != 0:
            if length > LONGEST_HEAD:
                raise ValueError(f"{length} bytes to name a file")
            head = json.loads(_exactly(connection, length))
            right = self._alone(connection, buffer, str(head["path"]), int(head["offset"]))
            # The sender keeps the file in hand until it knows.
            connection.sendall(b"+" if right else b"-")

    def _next_length(self, connection: socket.socket) -> int:
        """Return the length of the next head; a stream may have nothing to send while others have."""
        connection.settimeout(None)
        length = int.from_bytes(_exactly(connection, 4), "big")
        connection.settimeout(IDLE_SECONDS)
        return length

    def _alone(self, connection: socket.socket, buffer: Buffer, path: str, offset: int) -> bool:
        """Take one file while nobody else does. Who still waits for it on a connection that broke, ends."""
        lock, before = self.taking[path]
        for old in [*before]:
            with contextlib.suppress(OSError):
                old.shutdown(socket.SHUT_RDWR)
        with lock:
            before.append(connection)
            try:
                return self._take(connection, buffer, path, offset)
            except OSError as error:
                if error.errno not in (28, 122):
                    raise
                have = self._part_size(path)
                missing = (self.files[path]["size"] - have) / 1e9
                raise Fault(
                    f"{self.folder}: the disk is full; {missing:.3f} GB of {path} are missing",
                    "make room there and run it again; it goes on where it stopped",
                ) from None
            finally:
                before.remove(connection)

    def _take(self, connection: socket.socket, buffer: Buffer, path: str, offset: int) -> bool:
        entry, part = self.files[path], self.part(path)
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(part)
        try:
            if not 0 <= offset <= os.fstat(descriptor).st_size:
                raise ValueError(f"{path} from {offset}")
            os.ftruncate(descriptor, offset)
            digest = _sha256(part, lambda: connection.sendall(b".")) if offset else hashlib.sha256()
            connection.sendall(b"!")
            while offset < entry["size"]:
                size = min(BLOCK, entry["size"] - offset)
                piece = buffer.view[:size]
                _fill(connection, piece)
                digest.update(piece)
                _write(descriptor, buffer.view, size, offset)
                offset += size
            os.ftruncate(descriptor, entry["size"])
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        right = bool(digest.hexdigest() == entry["sha256"])
        if right:
            part.chmod(0o644)
            part.replace(self.folder / path)
            with self.lock:
                self.proven.add(path)
                if not self._small(path):
                    self.record(UNFINISHED)
        else:
            part.unlink()
        answer({"event": "file", "path": path, "right": right})
        return right

    def record(self, name: str) -> None:
        """Write down which files are proven so far."""
        files = [entry for path, entry in sorted(self.files.items()) if path in self.proven]
        self._write(name, json.dumps({**self.manifest, "files": files}) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.fsync(self.held)

    def end(self) -> None:
        """Call the folder complete."""
        missing = sorted(set(self.files) - self.proven)
        if missing:
            raise Fault(f"{self.folder} still lacks {', '.join(missing[:3])}", "run it again")
        # The head's own times and text. The manifest comes last: what changes later is newer than it.
        for path in self.files:
            self._retime(path)
        self._write(NAME, self.text)
        self._retime(NAME)
        for name in (UNFINISHED, f"{UNFINISHED}.tmp"):
            (self.folder / name).unlink(missing_ok=True)

    def _retime(self, path: str) -> None:
        time = self.times.get(path)
        with contextlib.suppress(PermissionError):
            if time is not None:
                os.utime(self.folder / path, ns=(time, time))


def answer(data: dict[str, Any]) -> None:
    """Say one thing to the sender."""
    with ANSWERS:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()


ANSWERS = threading.Lock()


def _inside(name: str) -> None:
    """Raise Fault for a path that is not one inside the folder: no sender writes elsewhere."""
    path = PurePosixPath(name)
    inside = bool(name) and not path.is_absolute() and ".." not in path.parts and str(path) == name
    if not inside or not name.isprintable() or path.parts[0].startswith(OURS):
        raise Fault(f"the sender names {name!r}, which is no path inside the folder")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        size = connection.recv_into(view)
        if not size:
            raise ConnectionError("the sender is gone")
        view = view[size:]


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    if path.exists() and not path.is_file():
        raise Fault(f"{path} is no file", "move it away there")
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != 22:
            raise
        return os.open(path, flags, 0o644)


def _write(descriptor: int, view: memoryview, size: int, offset: int) -> None:
    """Write `size` bytes at `offset`; a tail is written as whole pages and cut off afterwards."""
    end, done = -(-size // ALIGNED) * ALIGNED, 0
    while done < end:
        done += os.pwrite(descriptor, view[done:end], offset + done)


def _sha256(path: Path, tick: Callable[[], object] = lambda: None) -> Any:
    """Return the digest of a file; `tick` is called now and then."""
    digest = hashlib.sha256()
    buffer = Buffer()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = 0
        while size := os.readv(descriptor, [buffer.view]):
            digest.update(buffer.view[:size])
            blocks += 1
            if blocks % TICK_BLOCKS == 0:
                tick()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return digest


def _peak_kib() -> int:
    """Return this process's largest resident size (getrusage also counts whoever forked it)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0])


def _me() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


def _guarded(receiver: Receiver, connection: socket.socket) -> None:
    try:
        receiver.serve(connection)
    except (ConnectionError, TimeoutError) as error:
        answer({"event": "lost", "text": str(error)})
    except Fault as fault:
        answer(fault.data)
    except OSError as error:
        answer(_in_words(error, receiver.folder).data)
    except (KeyError, TypeError, ValueError) as error:
        answer(Fault(f"the sender said what cannot be: {error!r}").data)
    finally:
        connection.close()  # after the answer: the sender is to hear why


def _in_words(error: OSError, folder: Path) -> Fault:
    if error.errno in (28, 122):
        return Fault(f"{folder}: the disk is full", "make room there and run it again")
    return Fault(f"{error.filename or folder}: {error.strerror or error}")


class Orders:
    """The sender's lines on stdin. This process ends with the sender, whatever it does at that moment."""

    def __init__(self) -> None:
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._heard = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Return the next order."""
        return dict(json.loads(self._lines.get()))

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._heard.set()
            if line.strip():  # an empty one says: still here
                self._lines.put(line)
        os._exit(1)

    def _watch(self) -> None:
        while self._heard.wait(SILENCE_SECONDS):
            self._heard.clear()
        os._exit(1)


def _listen(receiver: Receiver) -> list[list[Any]]:
    places: list[list[Any]] = []
    for address in receiver.addresses:
        try:
            server = socket.create_server((address, 0), backlog=64)
        except OSError:
            continue  # a rail that is down here; the sender says which ones it uses
        places.append([address, server.getsockname()[1]])

        def accept(server: socket.socket = server) -> None:
            while True:
                connection, _ = server.accept()
                threading.Thread(target=_guarded, args=(receiver, connection), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
    if not places:
        raise Fault(
            f"none of {', '.join(receiver.addresses)} is an address of this machine",
            "site.yml, or the cable",
            69,
        )
    return places


def main() -> int:
    """Take orders from stdin until it ends."""
    os.umask(0o022)
    orders = Orders()
    folder = Path("/")
    try:
        order = orders.next()
        folder = Path(order["folder"])
        receiver = Receiver(order)
        wanted = receiver.prepare()
        places = _listen(receiver) if wanted else []
        answer({"event": "wanted", "files": wanted, "places": places})
        if orders.next().get("event") != "end":
            return 1
        receiver.end()
        answer({"event": "done", "peak_kib": _peak_kib()})
    except Fault as fault:
        answer(fault.data)
        return 1
    except OSError as error:
        answer(_in_words(error, folder).data)
        return 1
    return 0


if __name__ == "__main__":
    # Threads that wait for bytes do not keep the process: parts are on disk already.
    code = main()
    sys.stdout.flush()
    os._exit(code)
