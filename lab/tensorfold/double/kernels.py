"""The kernel build: once for each cache, under a lock that a killed build leaves behind."""

import asyncio
from pathlib import Path

from .log import say
from .switches import Switches

NAME = "tensorfold_glm5_next"
POLL_SECONDS = 0.05
STILL_SECONDS = 60.0


async def build_kernels(folder: Path, switches: Switches) -> None:
    """Return when the kernels are in `folder`; waits for ever on a lock that nobody takes away.

    Raises OSError when the folder cannot be written.
    """
    place = folder / NAME
    built, lock = place / f"{NAME}.so", place / "lock"
    place.mkdir(parents=True, exist_ok=True)
    while not built.is_file():
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:
            await _wait_for_lock(lock, switches)
            continue
        say(f"building CUDA extension {NAME} (first start after an install or update; later starts reuse it)")
        await asyncio.sleep(switches.build_seconds)
        built.touch()
        lock.unlink(missing_ok=True)


async def _wait_for_lock(lock: Path, switches: Switches) -> None:
    say(
        f"CUDA extension {NAME} waits on the build lock {lock}; if no other build is running, a killed build"
        " left it: delete the file"
    )
    clock = asyncio.get_running_loop().time
    still = clock() + switches.scaled(STILL_SECONDS)
    told = False
    while lock.exists():
        if not told and clock() >= still:
            say(f"still waiting after 60 s on the build lock {lock}")
            told = True
        await asyncio.sleep(POLL_SECONDS)
