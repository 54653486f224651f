"""The engine's own watchdog: stacks on stderr when an iteration or a message that is owed takes too long."""

import asyncio
import os
from collections.abc import Callable

from .environment import Environment
from .log import dump_stacks
from .switches import Switches


async def watch(age: Callable[[], float], environment: Environment, switches: Switches) -> None:
    """Dump every thread's stack each time `age` has grown by TF_GLM_MULTI_WATCHDOG_S; 0 turns it off.

    With TF_GLM_MULTI_WATCHDOG_EXIT=1 the process ends with code 1 after the first.
    """
    limit = switches.scaled(environment["TF_GLM_MULTI_WATCHDOG_S"])
    if not limit:
        return
    dumped = 0
    while True:
        await asyncio.sleep(min(1.0, limit / 4))
        due = int(age() / limit)
        if due > dumped:
            dump_stacks()
            if environment["TF_GLM_MULTI_WATCHDOG_EXIT"] == "1":
                os._exit(1)
        dumped = due
