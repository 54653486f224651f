"""Reads large files once, for their hash, without leaving them in memory that the GPU needs."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

BLOCK = 4 << 20
"""Bytes a read: a multiple of every disk's block, large enough to keep an NVMe busy."""

THREADS = 4
"""Files read at once: hashing a file is one core's work, at 1.5 to 2.5 GB/s with SHA instructions."""

Count = Callable[[int], None]


def hash_file(path: Path, count: Count = lambda _: None) -> str:
    """Return the file's SHA-256; `count` gets the bytes of each read. OSError as it comes.

    Read past the page cache (O_DIRECT) where the filesystem can; elsewhere the pages that this brought in are
    given back. Both keep the memory that CUDA may use free.
    """
    digest = hashlib.sha256()
    for piece in pieces(path):
        digest.update(piece)
        count(len(piece))
    return digest.hexdigest()


def git_sha1(path: Path) -> str:
    """Return git's name of the file's content (`git hash-object`): the hub gives it for small files."""
    size = path.stat().st_size
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for piece in pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def pieces(path: Path) -> Iterator[memoryview]:
    """Yield the file's content; each piece is valid until the next one is asked for."""
    descriptor = _open(path)
    # A direct read faults in the whole buffer, whatever comes: 4 MiB for each of ten thousand small files.
    pages = -(-os.fstat(descriptor).st_size // mmap.PAGESIZE)
    try:
        with mmap.mmap(-1, min(BLOCK, max(pages, 1) * mmap.PAGESIZE)) as buffer, memoryview(buffer) as view:
            while True:
                try:
                    size = os.readv(descriptor, [view])
                except OSError as error:
                    # Some filesystems take the flag at open and refuse the read.
                    if error.errno != 22 or not _is_direct(descriptor):
                        raise
                    os.close(descriptor)
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    continue
                if not size:
                    return
                with view[:size] as piece:
                    yield piece
    finally:
        if not _is_direct(descriptor):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != 22:  # EINVAL: no O_DIRECT here (older tmpfs, some FUSE)
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def hash_files(
    paths: Iterable[Path], count: Count = lambda _: None, *, threads: int = THREADS
) -> Iterator[tuple[Path, str | OSError]]:
    """Yield each path with its SHA-256, or with why it cannot be read, in the order in which they are done.

    `count` is called from several threads.
    """

    def one(path: Path) -> tuple[Path, str | OSError]:
        try:
            return path, hash_file(path, count)
        except OSError as error:
            return path, error

    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        pending = {pool.submit(one, path) for path in paths}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in pending:
                future.cancel()
