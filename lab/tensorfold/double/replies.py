"""Bodies of replies: chat, completion, response, and the events of a stream."""

import hashlib
import secrets
import time
from typing import Any

from .prompt import Ask, Reply
from .scheduler import Request

Json = dict[str, Any]


def usage(ask: Ask, request: Request, reasoning_tokens: int) -> Json:
    """The usage object of a reply."""
    return {
        "prompt_tokens": ask.prompt_tokens,
        "completion_tokens": request.said,
        "total_tokens": ask.prompt_tokens + request.said,
        "prompt_tokens_details": {"cached_tokens": request.cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def tensorfold(request: Request) -> Json:
    """The `tensorfold` object of a reply."""
    return {
        "prefill_s": round(request.prefill_seconds, 3),
        "decode_s": round(request.decode_seconds, 3),
        "cached": request.cached,
        "rounds": request.rounds,
        "drafted": request.drafted,
        "accepted": request.accepted,
        "tokens_per_round": round(request.said / request.rounds, 3) if request.rounds else 0.0,
        "sha256": hashlib.sha256("".join(request.pieces).encode()).hexdigest(),
        "policy": "double",
    }


class ChatBodies:
    """The bodies of one chat or text completion."""

    def __init__(self, model: str, ask: Ask, request: Request, reply: Reply, *, chat: bool) -> None:
        self._ask, self._request, self._reply, self._chat = ask, request, reply, chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> Json:
        """The body of a reply that is not streamed."""
        reasoning, content = "".join(self._reply.reasoning), "".join(self._reply.content)
        choice: Json = {"index": 0, "finish_reason": self._reply.finish}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": content}
            if self._ask.thinking:
                choice["message"]["reasoning_content"] = reasoning
        else:
            choice["text"] = content
        return self._body("", [choice]) | self._totals()

    def opening(self) -> Json | None:
        """The event that begins a stream of a chat."""
        return self._event({"role": "assistant", "content": ""}, None) if self._chat else None

    def piece(self, number: int, text: str) -> Json:
        """The event of the reply's token `number`."""
        if not self._chat:
            return self._event({"text": text}, None)
        thought = number < len(self._reply.reasoning)
        return self._event({"reasoning_content" if thought else "content": text}, None)

    def closing(self) -> Json:
        """The last event, with the totals."""
        return self._event({} if self._chat else {"text": ""}, self._reply.finish) | self._totals()

    def _totals(self) -> Json:
        reasoning = len(self._reply.reasoning)
        return {
            "usage": usage(self._ask, self._request, reasoning),
            "tensorfold": tensorfold(self._request),
        }

    def _event(self, delta: Json, finish: str | None) -> Json:
        choice = {"index": 0, "finish_reason": finish} | ({"delta": delta} if self._chat else delta)
        return self._body(".chunk" if self._chat else "", [choice])

    def _body(self, suffix: str, choices: list[Json]) -> Json:
        name = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": name + suffix, "choices": choices}


def response(model: str, ask: Ask, request: Request, reply: Reply) -> Json:
    """The body of /v1/responses."""
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if reply.finish == "stop" else "incomplete",
        "model": model,
        "output": [
            {
                "type": "message",
                "id": f"msg_{secrets.token_hex(12)}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "".join(reply.content), "annotations": []}],
            }
        ],
        "usage": {
            "input_tokens": ask.prompt_tokens,
            "output_tokens": request.said,
            "total_tokens": ask.prompt_tokens + request.said,
        },
        "tensorfold": tensorfold(request),
    }
