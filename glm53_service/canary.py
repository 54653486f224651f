"""Asks rank 0 the questions that decide whether the pair may be called ready."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp

from glm53_service.settings import Settings

PROBE_SECONDS = 3.0

STRANGE_ANSWERS = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""What reading an answer of another shape than the engine's raises: the API's fault, not the supervisor's."""


class Api:
    """Rank 0's HTTP API, as a client that owns one session.

    Answers are values; nothing here raises for a dead server.
    """

    def __init__(self, address: str) -> None:
        self._base = f"http://{address}"
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_SECONDS))

    async def close(self) -> None:
        """Give the connections back."""
        await self._session.close()

    async def up(self) -> bool:
        """Return whether the API answers /health (that says nothing of the other ranks).

        A 401 or 403 is an answer too: what it means is judged afterwards.
        """
        status, _ = await self.health()
        return status in (200, 401, 403)

    async def health(self) -> tuple[int, str]:
        """Return status and body of /health; status 0 when there is no answer."""
        try:
            async with self._session.get(f"{self._base}/health") as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, ""

    async def metrics(self) -> str:
        """Return the engine's Prometheus text; empty when it does not give any."""
        try:
            async with self._session.get(f"{self._base}/metrics") as response:
                return await response.text(errors="replace") if response.status == 200 else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

    async def canary(
        self, settings: Settings, options: dict[str, Any], *, seconds: float, lines: int = 0
    ) -> tuple[str, str]:
        """Return (answer, problem) of the question after `lines` lines of text, which has so many `seconds`.

        The problem is empty only when the model id and the answer are the ones expected.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._canary(settings, options, long_prompt(settings.canary.prompt, lines))
        except TimeoutError:
            return "", f"no answer within {seconds:g} s"
        except (aiohttp.ClientError, OSError, *STRANGE_ANSWERS) as error:
            return "", f"the API failed: {type(error).__name__}: {error}"

    async def _canary(self, settings: Settings, options: dict[str, Any], prompt: str) -> tuple[str, str]:
        unlimited = aiohttp.ClientTimeout(total=None)  # the caller's limit is the only one
        async with self._session.get(f"{self._base}/v1/models", timeout=unlimited) as response:
            listed = await response.json()
        ids = [entry["id"] for entry in listed["data"]]
        if settings.model.name not in ids:
            return "", f"/v1/models lists {', '.join(ids) or 'nothing'}, expected {settings.model.name}"
        body = {
            "model": settings.model.name,
            "temperature": 0,
            "max_tokens": settings.canary.max_tokens,
            "messages": [{"role": "user", "content": prompt}],
            **options,
        }
        async with self._session.post(
            f"{self._base}/v1/chat/completions", json=body, timeout=unlimited
        ) as response:
            if response.status != 200:
                return "", f"HTTP {response.status}: {(await response.text())[:200]}"
            answer = reply_text(await response.json())
        broken = degenerate(answer)
        if broken:
            return answer, broken
        if not re.search(settings.canary.expect, answer):
            return answer, f"answered {answer[:120]!r}, expected /{settings.canary.expect}/"
        return answer, ""


GOODS = ("copper rings", "blue lamps", "oak boards", "glass jars", "wool coats", "iron nails", "clay pots")


def long_prompt(prompt: str, lines: int) -> str:
    """Return `prompt` after `lines` lines of a made-up stock list: no two alike, the same at every start."""
    stock = [
        f"Shelf {n} holds {n * 37 % 211 + 2} {GOODS[n % 7]} and {n * 53 % 97 + 2} {GOODS[(n + 3) % 7]}."
        for n in range(1, lines + 1)
    ]
    return "\n".join([*stock, *([""] if stock else []), prompt])


LOOP = re.compile(r"(\S.{0,39}?)\1{11}", re.DOTALL)
"""A piece of text twelve times in a row, wherever it begins: no answer to a canary has that."""

RULES = frozenset("-=_*#|~ \n")
"""What lines are drawn with; those may be long."""


def degenerate(answer: str) -> str:
    """Return why an answer is garbage whatever was asked; empty when it may be language."""
    words = answer.split()
    if not words:
        return "answered nothing"
    if len(answer.strip()) > 1 and len(set(answer.strip())) == 1:
        return f"answered one character over and over: {answer[:40]!r}"
    if len(words) > 2 and len(set(words)) == 1:
        return f"answered one word over and over: {answer[:40]!r}"
    loops = (loop[1] for loop in LOOP.finditer(answer) if not RULES.issuperset(loop[1]))
    looped = next(loops, "")
    return f"answered {looped!r} over and over: {answer[:40]!r}" if looped else ""


def reply_text(completion: dict[str, Any]) -> str:
    """Return what the model said: its content, and its reasoning where a parser put the text there."""
    message = completion["choices"][0]["message"]
    parts = (message.get("content"), message.get("reasoning_content") or message.get("reasoning"))
    return "\n".join(part for part in parts if part)
