"""`make soak`: an hour of mixed load on the TensorFold double, in which nothing may be found wrong.

Phases follow each other: users who ask short and long things, streams that are broken off, more requests at
once than there are slots, wrong requests, prompts that fill for seconds, a pool that is full, and silence, in
which the pair asks itself. Every phase is drawn from a seeded generator, so a run can be had again. A moment
in which the gate was not ready, or an epoch that ended, is a false alarm.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from lab.api import Lab
from lab.playbook import ROOT, playbook
from tests.bench import cpu_ticks, unit_pids
from tests.faults.harness import GATE, ready, stamp
from tests.faults.ways import live
from tests.lab.conftest import HEAD, WORKER, Pair

SEED = 53
LOOK_SECONDS = 0.5
WORDS = ("copper", "lamp", "river", "seven", "glass", "under", "train", "winter")


@dataclass
class Soak:
    """What a soak has seen so far. `requests` counts by kind, `wrong` are answers that should not be."""

    ends: float
    model: str
    base: str
    epoch: int
    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    looks: int = 0
    answered: set[float] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.ends


async def soak(pair: Pair, seconds: float, *, seed: int = SEED) -> Soak:
    """Load the serving pair for `seconds` and return what was seen."""
    now = ready()
    if now is None:
        raise SystemExit("soak: the pair does not serve")
    seen = Soak(ends=time.monotonic() + seconds, model=now["model"], base=now["endpoint"], epoch=now["epoch"])
    chance = random.Random(seed)
    limit = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=limit) as session:
        watcher = asyncio.create_task(watch(session, seen))
        while not seen.over:
            phase = chance.choice((users, users, burst, slow_prefill, full_pool, silence, silence))
            await phase(pair, session, seen, chance)
        watcher.cancel()
    return seen


# Phases


async def users(_: Pair, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Three users who ask, read, think and ask again for a minute."""
    ends = min(seen.ends, time.monotonic() + 60)

    async def one(mine: random.Random) -> None:
        while time.monotonic() < ends:
            await mine.choice(ASKS)(session, seen, mine)
            await asyncio.sleep(mine.expovariate(1.0))

    await asyncio.gather(*(one(random.Random(chance.random())) for _ in range(3)))


async def burst(_: Pair, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Twelve requests at once: most of them wait."""
    await asyncio.gather(*(chat(session, seen, random.Random(chance.random())) for _ in range(12)))


async def slow_prefill(pair: Pair, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Prompts that take six seconds to fill, as a million tokens take a quarter of an hour."""
    await switched(pair, "slow_prefill=6", session, seen, chance)


async def full_pool(pair: Pair, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A pool for one request: the others wait, and that is not stuck."""
    await switched(pair, "full_pool", session, seen, chance)


async def switched(
    pair: Pair, fault: str, session: aiohttp.ClientSession, seen: Soak, chance: random.Random
) -> None:
    """Three requests under a switch of the double."""
    await asyncio.to_thread(live(fault), pair)
    await asyncio.sleep(0.3)
    await asyncio.gather(*(chat(session, seen, random.Random(chance.random())) for _ in range(3)))
    await asyncio.to_thread(live("clear"), pair)
    await asyncio.sleep(0.3)


async def silence(_: Pair, session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Nobody asks for half a minute."""
    del session, chance
    await asyncio.sleep(max(0.0, min(32.0, seen.ends - time.monotonic())))


# Requests


def body(seen: Soak, text: str, **more: Any) -> dict[str, Any]:
    """Return a chat request."""
    return {"model": seen.model, "messages": [{"role": "user", "content": text}], **more}


async def post(session: aiohttp.ClientSession, seen: Soak, kind: str, data: Any, expected: int = 200) -> str:
    """Post a chat request, note an answer of another status than `expected`, and return its text."""
    seen.requests[kind] += 1
    try:
        async with session.post(f"{seen.base}/chat/completions", json=data) as response:
            text = await response.text()
            if response.status != expected:
                seen.wrong.append(f"{kind}: HTTP {response.status}: {text[:100]}")
            return text
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        return ""


async def chat(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A question with an answer of some words."""
    words = chance.randint(5, 120)
    text = await post(session, seen, "chat", body(seen, f"Write {words} words.", max_tokens=400))
    if text and "word1" not in text:
        seen.wrong.append(f"chat: {text[:100]}")


async def stream(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """The same, streamed."""
    data = body(seen, f"Write {chance.randint(20, 200)} words.", max_tokens=400, stream=True)
    if "[DONE]" not in await post(session, seen, "stream", data):
        seen.wrong.append("stream: no [DONE]")


async def broken_off(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A stream whose client goes away."""
    seen.requests["broken off"] += 1
    data = body(seen, "Write 400 words.", max_tokens=800, stream=True)
    async with session.post(f"{seen.base}/chat/completions", json=data) as response:
        await response.content.read(chance.randint(1, 2000))


async def long_prompt(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """Some ten thousand words before the question."""
    text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(2_000, 20_000)))
    await post(session, seen, "long prompt", body(seen, f"{text}. What is 7 + 5?", max_tokens=20))


async def wrong(session: aiohttp.ClientSession, seen: Soak, chance: random.Random) -> None:
    """A request that the engine refuses."""
    data = chance.choice(({"messages": "no list"}, body(seen, "x", n=2)))
    await post(session, seen, "wrong", data, expected=400)


ASKS: tuple[Callable[[aiohttp.ClientSession, Soak, random.Random], Awaitable[None]], ...] = (
    chat,
    chat,
    stream,
    broken_off,
    long_prompt,
    wrong,
)


# What is watched


async def watch(session: aiohttp.ClientSession, seen: Soak) -> None:
    """Look at the gate twice a second, for ever."""
    while True:
        async with session.get(GATE) as response:
            now = await response.json()
        seen.looks += 1
        seen.answered.add(now["answered_at"])
        if not now["ready"] or now["epoch"] != seen.epoch:
            at = datetime.now(UTC)
            seen.alarms.append(f"{at:%H:%M:%S} epoch {now['epoch']} {now['state']}: {now['reasons']}")
            seen.epoch = now["epoch"]
        await asyncio.sleep(LOOK_SECONDS)


def memory_mib(pair: Pair, host: str) -> float:
    """Return the PSS of the supervisor's unit."""
    pids = unit_pids(pair, host)
    script = "/^Pss:/ {sum += $2} END {print sum}"
    return int(pair.sh(host, "awk", script, *(f"/proc/{pid}/smaps_rollup" for pid in pids))) / 1024


def report(pair: Pair, seconds: float) -> int:
    """Soak, print what was seen, and return 1 when there was a false alarm or a wrong answer."""
    began, hosts = time.monotonic(), (HEAD, WORKER)
    before = {host: (memory_mib(pair, host), cpu_ticks(pair, host)) for host in hosts}
    seen = asyncio.run(soak(pair, seconds))
    took = time.monotonic() - began
    print(f"{stamp()}, {took / 60:.1f} min on the double")
    print("requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(seen.requests.items())))
    print(f"looks at the gate: {seen.looks}; right idle checks: {len(seen.answered) - 1}")
    for host, (mib, ticks) in before.items():
        share = (cpu_ticks(pair, host) - ticks) / took
        after = memory_mib(pair, host)
        print(f"supervisor on {host}: PSS {mib:.1f} MiB before, {after:.1f} after, {share:.2f} % of a core")
    print(f"false alarms: {len(seen.alarms)}", *seen.alarms[:20], sep="\n  ")
    print(f"wrong answers: {len(seen.wrong)}", *seen.wrong[:20], sep="\n  ")
    return 1 if seen.alarms or seen.wrong else 0


def main() -> int:
    """Set the pair up on the double and soak it."""
    parser = argparse.ArgumentParser(description="an hour of mixed load on the TensorFold double")
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    lab = Lab()
    lab.up()
    argv, environment = playbook(lab, "site.yml", "-e", "@lab/tensorfold/variables.yml")
    if subprocess.run(argv, cwd=ROOT, env=environment, check=False, stdout=sys.stderr).returncode:
        return 1
    return report(Pair(lab), minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
