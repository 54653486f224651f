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
import secrets
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 4 << 20
NAME = ".glm53-manifest.json"
UNFINISHED = ".glm53-manifest.unfinished.json"
ALIGNED = 4096
IDLE_SECONDS = 120.0
"""A connection that says nothing for so long is dead."""


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
        self.lock = threading.Lock()
        self.proven: set[str] = set()

    # What is there

    def look(self) -> dict[str, Any]:
        """Return what is there by name and size, and the free bytes; nothing is read, made or held."""
        sizes = {}
        for path in self.files:
            with contextlib.suppress(OSError):
                sizes[path] = (self.folder / path).stat().st_size
        where = self.folder
        while not where.exists():
            where = where.parent
        free = os.statvfs(where)
        return {"event": "looked", "there": sizes, "free": free.f_bavail * free.f_frsize}

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
            raise Fault(
                f"{self.folder} cannot be written by {_me()}", f"there: sudo chown -R {_me()}: {self.folder}"
            )
        self._extra()
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

    def _known(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for name in (NAME, UNFINISHED):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found |= {e["path"]: e for e in json.loads((self.folder / name).read_bytes())["files"]}
        return found

    def _there(self, entry: dict[str, Any], known: dict[str, dict[str, Any]]) -> bool:
        path = str(entry["path"])
        target = self.folder / path
        try:
            if target.stat().st_size != entry["size"]:
                return False
            before = known.get(path, {})
            small = entry["size"] <= 64 << 20 and not path.endswith(".safetensors")
            if before.get("sha256") == entry["sha256"] and before.get("size") == entry["size"] and not small:
                return True
            answer({"event": "checking", "path": path, "size": entry["size"]})
            return bool(_sha256(target).hexdigest() == entry["sha256"])
        except OSError:
            return False

    def part(self, path: str) -> Path:
        """Return where an unfinished file grows; its name is of its content."""
        target = self.folder / path
        return target.with_name(f".{target.name}.{self.files[path]['sha256'][:16]}.incomplete")

    def _part_size(self, path: str) -> int:
        part = self.part(path)
        size = part.stat().st_size if part.exists() else 0
        return size - size % ALIGNED if size <= self.files[path]["size"] else 0

    # What comes

    def serve(self, connection: socket.socket) -> None:
        """Take files from one connection until it is closed."""
        connection.settimeout(IDLE_SECONDS)
        nonce = secrets.token_bytes(32)
        connection.sendall(nonce)
        proof = hmac.new(self.secret, nonce, hashlib.sha256).digest()
        if not hmac.compare_digest(_exactly(connection, 32), proof):
            connection.close()
            return
        connection.sendall(b"+")
        buffer = Buffer()
        with contextlib.closing(connection):
            while (length := int.from_bytes(_exactly(connection, 4), "big")) != 0:
                head = json.loads(_exactly(connection, length))
                self._take(connection, buffer, str(head["path"]), int(head["offset"]))

    def _take(self, connection: socket.socket, buffer: Buffer, path: str, offset: int) -> None:
        entry, part = self.files[path], self.part(path)
        part.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open(part)
        try:
            os.ftruncate(descriptor, offset)
            digest = _sha256(part) if offset else hashlib.sha256()
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
        right = digest.hexdigest() == entry["sha256"]
        if right:
            part.chmod(0o644)
            part.replace(self.folder / path)
            with self.lock:
                self.proven.add(path)
                self.record(UNFINISHED)
        else:
            part.unlink()
        answer({"event": "file", "path": path, "right": right})

    def record(self, name: str) -> None:
        """Write down which files are proven so far."""
        files = [entry for path, entry in sorted(self.files.items()) if path in self.proven]
        self._write(name, json.dumps({**self.manifest, "files": files}) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)
        os.fsync(self.held)

    def end(self) -> None:
        """Call the folder complete."""
        missing = sorted(set(self.files) - self.proven)
        if missing:
            raise Fault(f"{self.folder} still lacks {', '.join(missing[:3])}", "run it again")
        # The head's own text and times: who compares the nodes by size and time finds them equal.
        self._write(NAME, self.text)
        (self.folder / UNFINISHED).unlink(missing_ok=True)
        for path, time in self.times.items():
            with contextlib.suppress(PermissionError):
                os.utime(self.folder / path, ns=(time, time))


def answer(data: dict[str, Any]) -> None:
    """Say one thing to the sender."""
    with ANSWERS:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()


ANSWERS = threading.Lock()


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


def _sha256(path: Path) -> Any:
    digest = hashlib.sha256()
    buffer = Buffer()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while size := os.readv(descriptor, [buffer.view]):
            digest.update(buffer.view[:size])
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
    except OSError as error:
        full = error.errno in (28, 122)
        text = "the disk is full" if full else str(error)
        answer(Fault(f"{receiver.folder}: {text}", "make room there and run it again" if full else "").data)
    except (KeyError, ValueError) as error:
        answer(Fault(f"the sender said what cannot be: {error!r}").data)


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
    orders = sys.stdin.buffer
    try:
        order = json.loads(orders.readline())
        receiver = Receiver(order)
        if order["look"]:
            answer(receiver.look())
            return 0
        wanted = receiver.prepare()
        places = _listen(receiver) if wanted else []
        answer({"event": "wanted", "files": wanted, "places": places})
        if json.loads(orders.readline() or b"{}").get("event") != "end":
            return 1
        receiver.end()
        answer({"event": "done", "peak_kib": _peak_kib()})
    except Fault as fault:
        answer(fault.data)
        return 1
    return 0


if __name__ == "__main__":
    # Threads that wait for bytes do not keep the process: parts are on disk already.
    code = main()
    sys.stdout.flush()
    os._exit(code)
