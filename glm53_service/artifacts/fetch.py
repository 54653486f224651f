"""One file from the hub to its place: continued where it stopped, hashed as it comes, put in place."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import random
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from glm53_service.artifacts.disk import FULL, trouble
from glm53_service.artifacts.hashing import pieces
from glm53_service.artifacts.hub import Refused, Stopped
from glm53_service.artifacts.layout import Layout
from glm53_service.artifacts.manifest import Entry
from glm53_service.artifacts.progress import gigabytes
from glm53_service.errors import ArtifactError, BusyError
from glm53_service.settings import Source

TRIES = 8
"""Failures of one file in a row, without a byte in between, until the download gives up."""

LONGEST_PAUSE_SECONDS = 60.0
FLUSH_BYTES = 256 << 20
"""After so many bytes a file's pages are written out and given back."""

LONGEST_NAME_BYTES = 200
"""Of a file's own name in that of its unfinished file: a file system takes 255 in all."""


class Client(Protocol):
    """What a download asks of the hub."""

    def fetch(self, source: Source, entry: Entry, file: BinaryIO, have: int) -> None:
        """Append the bytes of `entry` from offset `have` to `file`; Refused says why it ended early."""


class Sink(io.RawIOBase):
    """A file that is hashed as it grows; `entry`'s hash is compared in the end."""

    def __init__(self, path: Path, entry: Entry, count: Callable[[int], None], stop: threading.Event) -> None:
        super().__init__()
        self._entry, self._count, self._stop = entry, count, stop
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(_open_alone(path), "r+b", buffering=0)
        self._path = path
        self._flushed = 0
        if path.stat().st_size > entry.size:
            self._file.truncate(0)
        self._begin()

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return self._file.tell()

    def write(self, data: Any) -> int:
        """Append, hash and count."""
        if self._stop.is_set():
            raise Stopped
        if self.size + len(data) > self._entry.size:
            raise ArtifactError(
                f"{self._entry.path}: more comes than the {self._entry.size} bytes that were listed",
                hint="a proxy or mirror in between changes files: HTTPS_PROXY, HF_ENDPOINT",
            )
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            view = view[written:]
        self._hash(data)
        self._count(len(data))
        if self.size - self._flushed >= FLUSH_BYTES:
            self._give_back()
        return len(data)

    def tell(self) -> int:
        """Return where the next byte goes."""
        return self.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; only the client does, before it truncates."""
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Cut, and hash what is left anew."""
        before = self._path.stat().st_size
        at = self._file.truncate(self.size if size is None else size)
        self._count(at - before)
        self._begin()
        return at

    def finish(self) -> Entry | None:
        """Write everything out; return the entry with its SHA-256, or None when the content is not its."""
        self._give_back()
        if self.size != self._entry.size:
            return None
        if self._entry.git_sha1 and self._sha1.hexdigest() != self._entry.git_sha1:
            return None
        sha256 = self._sha256.hexdigest()
        if self._entry.sha256 and sha256 != self._entry.sha256:
            return None
        return msgspec.structs.replace(self._entry, sha256=sha256)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _begin(self) -> None:
        self._sha256 = hashlib.sha256()
        self._sha1 = hashlib.sha1(b"blob %d\0" % self._entry.size, usedforsecurity=False)
        if self._path.stat().st_size:
            for piece in pieces(self._path):
                self._hash(piece)
        self._file.seek(0, os.SEEK_END)

    def _hash(self, data: Any) -> None:
        self._sha256.update(data)
        if self._entry.git_sha1:
            self._sha1.update(data)

    def _give_back(self) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size


def _open_alone(path: Path) -> int:
    """Return `path` opened for writing by nobody else: snapshots of one cache share their blobs."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path} is no file", hint="move it away")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == status.st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BusyError(f"{path} is being written by another run", hint="wait until it ends") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the other run has just put it in place, or removed it


class Fetcher:
    """Fetches single files of one snapshot. `pause` sleeps for seconds; it ends early when stopped."""

    def __init__(
        self,
        client: Client,
        layout: Layout,
        source: Source,
        *,
        stop: threading.Event,
        count: Callable[[int], None],
        say: Callable[[str], None],
        pause: Callable[[float], object],
    ) -> None:
        self._client, self._layout, self._source = client, layout, source
        self._stop, self._count, self._say, self._pause = stop, count, say, pause

    def fetch(self, entry: Entry) -> Entry:
        """Return `entry` with its SHA-256 once it is in place; Glm53Error says why it cannot be had."""
        part, sent_wrong = part_of(self._layout, entry), 0
        try:
            while True:
                with contextlib.closing(Sink(part, entry, self._count, self._stop)) as sink:
                    if sink.size < entry.size or not entry.size:
                        self._transfer(entry, sink)
                    done = sink.finish()
                    if done is not None:
                        place(self._layout, entry, part)
                        return done
                    self._count(-part.stat().st_size)
                    part.unlink()
                sent_wrong += 1
                if sent_wrong > 2:
                    raise ArtifactError(
                        f"{entry.path}: what came is not what {self._source} lists, three times",
                        hint="a proxy or mirror in between changes files: HTTPS_PROXY, HF_ENDPOINT",
                    )
                self._say(f"{entry.path}: the content was wrong; it is fetched anew")
        except OSError as error:
            missing = ""
            if error.errno in FULL:
                have = part.stat().st_size if part.exists() else 0
                missing = f"{gigabytes(entry.size - have)} of {entry.path} are"
            raise trouble(error, part.parent, missing=missing) from None

    def _transfer(self, entry: Entry, sink: Sink) -> None:
        failures = 0
        while True:
            have = sink.size
            try:
                self._client.fetch(self._source, entry, cast(BinaryIO, sink), have)
                return
            except Refused as refused:
                if not refused.again:
                    raise refused.error from None
                failures = 1 if sink.size > have else failures + 1
                if failures >= TRIES:
                    raise refused.error from None
                seconds = max(refused.wait_seconds, min(2.0**failures, LONGEST_PAUSE_SECONDS))
                seconds *= random.uniform(1.0, 1.3)  # spreads retries, nothing secret
                self._say(f"{entry.path}: {refused.error.message}; again in {seconds:.0f} s")
                self._pause(seconds)
                if self._stop.is_set():
                    raise Stopped from None


def part_of(layout: Layout, entry: Entry) -> Path:
    """Return where an unfinished file grows: the name is of its content, so no other revision continues it.

    In a hub cache it is the name that the client's older versions use, so what they left goes on.
    """
    if layout.hub is not None:
        return layout.blobs(entry.etag)[0].with_suffix(".incomplete")
    target = layout.folder / entry.path
    return target.with_name(f".{_short(target.name)}.{entry.etag[:16]}.incomplete")


def _short(name: str) -> str:
    if len(name.encode()) <= LONGEST_NAME_BYTES:
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def place(layout: Layout, entry: Entry, part: Path) -> None:
    """Put the finished `part` in place in one step; a wrong or dangling file there is replaced.

    Never written through a link into a file whose name does not say that it is this content.
    """
    target = layout.folder / entry.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part.chmod(0o644)
    if layout.hub is None:
        part.replace(target)
        _sync(target.parent)
        return
    blob = layout.blobs(entry.etag)[0]
    leads = target.resolve() if target.is_symlink() else blob
    if leads.name == entry.etag and leads != blob and leads.exists() and os.access(leads.parent, os.W_OK):
        with contextlib.suppress(OSError):  # another filesystem: then the model's own blob takes over
            part.replace(leads)
            _sync(leads.parent)
            return
    part.replace(blob)
    link(target, blob)
    _sync(blob.parent)


def link(target: Path, blob: Path) -> None:
    """Make `target` a relative link to `blob`, in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{_short(target.name)}.link")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(blob, target.parent))
    temporary.replace(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
