"""The one door to other programs."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Sequence

from glm53_service.errors import CommandError, UnavailableError

log = logging.getLogger(__name__)

Runner = Callable[[Sequence[str]], Awaitable[str]]
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
TIMEOUT_SECONDS = 10.0


async def run(argv: Sequence[str], *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Return the standard output of `argv`, run without a shell, without input, in a minimal environment.

    UnavailableError says what was run (copy-pasteable) and why it gave nothing; CommandError, one of them,
    that it ended by itself with another code than 0.
    """
    shown = shlex.join(argv)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
        )
    except OSError as error:
        raise UnavailableError(f"`{shown}` cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(timeout_seconds):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnavailableError(f"`{shown}` gave no answer within {timeout_seconds:g} s") from None
    said = out.decode(errors="replace")
    if process.returncode:
        why = err.decode(errors="replace").strip()
        message = f"`{shown}` ended with {process.returncode}: {why}"
        raise CommandError(message, code=process.returncode, out=said, err=why)
    return said
