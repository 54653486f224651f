"""Looks at this node's running rank and at the machine: memory, signs of life, now and then the GPU.

What follows from a look is decided elsewhere, with one exception: a rank that takes the last memory is
stopped here and at once, because a machine that freezes can ask nobody any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from glm53_service.cgroup import Cgroup, Usage, find_cgroup, kill_container, read_usage
from glm53_service.docker import DockerApi
from glm53_service.errors import UnavailableError
from glm53_service.gpu import clamped, read_gpus, spin_wait
from glm53_service.settings import Supervision
from glm53_service.story import event
from glm53_service.supervisor.memory import NEAR, guard_limit, guard_problem, memory_warning
from glm53_service.supervisor.ranks import Rank
from glm53_service.supervisor.service import Background
from glm53_service.supervisor.world import World
from glm53_service.system import GIB, read_memory
from glm53_service.vitals import Sign, Signs, Vitals, look

log = logging.getLogger(__name__)

GUARD_SECONDS = 0.5
NEAR_SECONDS = 0.1
SIGNS_SECONDS = 5.0
GPU_SECONDS = 60.0


class Watch:
    """Watches the rank of `node`.

    `times` are those of the running launch; `loading` and `busy` say whether it loads and whether requests
    run. `on_look` gets each look while a rank runs.
    """

    def __init__(
        self,
        world: World,
        docker: DockerApi,
        rank: Rank,
        *,
        node: str,
        times: Callable[[], Supervision],
        loading: Callable[[], bool],
        busy: Callable[[], bool],
        on_look: Callable[[Vitals, Sign], None],
    ) -> None:
        self._world, self._docker, self._rank, self._node = world, docker, rank, node
        self._times, self._loading, self._busy, self._on_look = times, loading, busy, on_look
        self._container, self._pid = "", 0
        self._cgroup: Cgroup | None = None
        self._signs: Signs | None = None
        self._warnings: dict[str, str] = {}
        self._suspects: dict[str, str] = {}
        self.vitals: Vitals | None = None

    def start(self, background: Background) -> None:
        """Begin to look; each look has its own rhythm, and a slow docker or GPU holds no other up."""
        for work in (self._guard(), self._look_for_signs(), self._look_at_gpus()):
            background.spawn(work)

    async def _guard(self) -> None:
        while True:
            await self._world.sleep(await self._guard_once())

    async def _guard_once(self) -> float:
        """Stop the rank if it must be; return in how many seconds to look again."""
        container = self._rank.running
        if container is None:
            return GUARD_SECONDS
        loading, times = self._loading(), self._times()
        memory = read_memory(self._world.root)
        problem = guard_problem(times, memory, node=self._node, loading=loading)
        if problem:
            if container == self._container and self._pid:
                kill_container(self._world.root, self._pid, container)
            await self._rank.stop_at_once(problem)
        near = memory.available < NEAR * guard_limit(times, loading=loading) * GIB
        return NEAR_SECONDS if near else GUARD_SECONDS

    async def _look_for_signs(self) -> None:
        while True:
            container = self._rank.running
            if container is None:
                self._forget()
            else:
                await self._look(container)
            await self._world.sleep(SIGNS_SECONDS)

    def _forget(self) -> None:
        self._container, self._pid, self._cgroup, self._signs, self.vitals = "", 0, None, None, None
        self._warnings, self._suspects = {}, {}

    async def _look(self, container: str) -> None:
        if container != self._container:
            self._forget()
            self._container = container
        if not self._pid:
            self._pid = await self._first_process(container)
            self._cgroup = find_cgroup(self._world.root, self._pid) if self._pid else None
        usage = read_usage(self._cgroup) if self._cgroup else Usage()
        memory, now = read_memory(self._world.root), self._world.clock()
        self._warn(
            {"memory": memory_warning(memory, loading=self._loading(), warned="memory" in self._warnings)},
            {"memory"},
        )
        signs = self._signs or Signs.first(now, usage, memory.available)
        self.vitals = look(signs, now, usage, memory.available, tuple(self._warnings.values()))
        self._signs, sign = signs.after(now, usage, memory.available)
        self._on_look(self.vitals, sign)

    async def _first_process(self, container: str) -> int:
        try:
            return int((await self._docker.inspect(container)).get("State", {}).get("Pid") or 0)
        except UnavailableError:
            return 0

    async def _look_at_gpus(self) -> None:
        while True:
            await self._world.sleep(GPU_SECONDS)
            if self._rank.running is None or not self._busy():
                continue
            gpus = await read_gpus(self._world.runner)
            found = {f"GPU {gpu.index}": clamped(gpu) or spin_wait(gpu) for gpu in gpus}
            # Two looks in a row: a clock that is just rising, or a wait of a moment, is nothing.
            self._warn(
                {name: text for name, text in found.items() if not text or self._suspects.get(name)},
                set(found),
            )
            self._suspects = found

    def _warn(self, found: Mapping[str, str], looked_at: set[str]) -> None:
        """Keep each warning of what was looked at; tell when it begins and when it ends."""
        for name in looked_at:
            text = found.get(name, "")
            if text and name not in self._warnings:
                log.warning(event(f"warning: {text}"))
            elif not text and self._warnings.pop(name, ""):
                log.info(event(f"the warning is over: {name}"))
            if text:
                self._warnings[name] = text
