"""A request body as the engine reads it: prompt, budget, thinking; wrong ones are refused with HTTP 400."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import tokens
from .answers import THOUGHT, answer, spoilt

EFFORTS = {
    "none": "",
    "minimal": "Low",
    "low": "Low",
    "medium": "High",
    "high": "High",
    "xhigh": "Max",
    "max": "Max",
}
Body = Mapping[str, Any]


class BadRequestError(Exception):
    """HTTP 400: `message`, and the `code` and `param` that the error object has."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds when a request does not say: from the command line."""

    window: int
    max_tokens: int
    thinking: bool
    effort: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request that can be served; `max_tokens` is what is left of the window at most."""

    prompt: str
    question: str
    prompt_tokens: int
    max_tokens: int
    thinking: bool
    stream: bool
    background: bool

    def reply(self, fault: str) -> "Reply":
        """What will be said, cut at the budget."""
        content = spoilt(fault) if fault else answer(self.prompt, self.question)
        reasoning = THOUGHT if self.thinking and not fault else ""
        thought, said = tokens.pieces(reasoning), tokens.pieces(content)
        cut = len(thought) + len(said) > self.max_tokens
        thought = thought[: self.max_tokens]
        said = said[: self.max_tokens - len(thought)]
        return Reply(reasoning=thought, content=said, finish="length" if cut else "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply's tokens, reasoning first."""

    reasoning: list[str]
    content: list[str]
    finish: str


def read_chat(body: Body, defaults: Defaults) -> Ask:
    """The request in a body of /v1/chat/completions; raises BadRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages: expected a list with at least one message", param="messages")
    effort = thinking_effort(body, defaults)
    turns = [_turn(message) for message in messages]
    question = next((text for role, text in reversed(turns) if role == "user"), "")
    return _ask(body, render(turns, effort), question, bool(effort), defaults, "messages")


def read_completion(body: Body, defaults: Defaults) -> Ask:
    """The request in a body of /v1/completions; raises BadRequestError."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequestError("prompt: expected a string", param="prompt")
    return _ask(body, prompt, prompt, False, defaults, "prompt")


def render(turns: list[tuple[str, str]], effort: str) -> str:
    """The prompt's text: effort in front, an open think block at the end (an empty one without thinking)."""
    said = "".join(f"<|{role}|>{text}" for role, text in turns)
    head = f"<|system|>Reasoning Effort: {effort}" if effort else ""
    return f"[gMASK]<sop>{head}{said}<|assistant|><think>{'' if effort else '</think>'}"


def thinking_effort(body: Body, defaults: Defaults) -> str:
    """The template's name of the effort; empty when thinking is off. Raises BadRequestError."""
    template = body.get("chat_template_kwargs")
    if template is not None and not isinstance(template, dict):
        raise BadRequestError(
            "chat_template_kwargs: expected an object or null", param="chat_template_kwargs"
        )
    template = template or {}
    effort = body.get("reasoning_effort", template.get("reasoning_effort"))
    if effort is not None and effort not in EFFORTS:
        raise BadRequestError(
            f"reasoning_effort: expected one of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    wanted = template.get("enable_thinking", _thinking_word(template.get("thinking")))
    if wanted is None:
        wanted = defaults.thinking if effort is None else effort != "none"
    return (EFFORTS[effort or defaults.effort or "max"] or "Max") if wanted else ""


def turns_of(messages: Any) -> list[tuple[str, str]]:
    """Roles and texts of messages; raises BadRequestError."""
    if not isinstance(messages, list):
        raise BadRequestError("messages: expected a list", param="messages")
    return [_turn(message) for message in messages]


def _thinking_word(found: Any) -> bool | None:
    if isinstance(found, dict):
        return {"enabled": True, "disabled": False}.get(str(found.get("type")))
    return found if isinstance(found, bool) else None


def _turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError("messages: expected objects with role and content", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        return message["role"], "".join(str(part) for part in parts)
    if content is not None and not isinstance(content, str):
        raise BadRequestError("content: expected a string or a list of parts", param="messages")
    return message["role"], content or ""


def _ask(body: Body, prompt: str, question: str, thinking: bool, defaults: Defaults, param: str) -> Ask:
    if body.get("n") not in (None, 1):
        raise BadRequestError("n: only 1 is served", param="n")
    if body.get("logprobs"):
        raise BadRequestError("logprobs are not served", param="logprobs")
    budget = body.get("max_completion_tokens", body.get("max_tokens"))
    if budget is None:
        budget = defaults.max_tokens
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise BadRequestError("max_tokens: expected a positive integer", param="max_tokens")
    prompt_tokens = tokens.count(prompt)
    if prompt_tokens >= defaults.window:
        raise BadRequestError(
            f"This server's maximum context length is {defaults.window} tokens;"
            f" the prompt has {prompt_tokens}",
            code="context_length_exceeded",
            param=param,
        )
    return Ask(
        prompt=prompt,
        question=question,
        prompt_tokens=prompt_tokens,
        max_tokens=min(budget, defaults.window - prompt_tokens),
        thinking=thinking,
        stream=bool(body.get("stream")),
        background=body.get("priority") == "background",
    )
