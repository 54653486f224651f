"""Rank 0's HTTP API: routes and errors as TensorFold's, plain HTTP."""

import json
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from . import tokens
from .faults import Faults
from .health import health, metrics
from .log import say
from .prompt import (
    Ask,
    BadRequestError,
    Body,
    Defaults,
    Reply,
    read_chat,
    read_completion,
    render,
    thinking_effort,
    turns_of,
)
from .replies import ChatBodies, response
from .scheduler import Request, Scheduler

MIB = 1024**2
COMPACT = json.JSONEncoder(separators=(",", ":")).encode
STOCK_LIMIT_MIB = 32
CHAT_LIMIT_MIB = 96
STORED_RESPONSES = 1024
RETRY_SECONDS = 5


class BusyError(Exception):
    """More requests wait than TF_GLM_MAX_QUEUED lets: HTTP 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the API says of the server."""

    names: tuple[str, ...]
    parallel: int
    max_queued: int | None
    defaults: Defaults


class Api:
    """The application. Requests go to the scheduler; everything else is answered at once."""

    def __init__(self, served: Served, scheduler: Scheduler, faults: Faults) -> None:
        self._served = served
        self._scheduler = scheduler
        self._faults = faults
        self._stored: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def application(self) -> web.Application:
        """The aiohttp application: one handler, since TensorFold chooses by the path's end."""
        app = web.Application(client_max_size=CHAT_LIMIT_MIB * MIB)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(_name_server)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.method == "GET":
                return self._get(request.path)
            if request.method == "DELETE" and request.path.startswith("/v1/responses/"):
                return self._stored_response(request.path, delete=True)
            if request.method == "POST":
                return await self._post(request)
        except BadRequestError as error:
            return refusal(400, error.message, code=error.code, param=error.param)
        except BusyError:
            refused = refusal(429, "too many requests are waiting; try again", kind="rate_limit_error")
            refused.headers["Retry-After"] = str(RETRY_SECONDS)
            return refused
        return not_found()

    # -- reading -------------------------------------------------------------------------------------------

    def _get(self, path: str) -> web.Response:
        scheduler, window = self._scheduler, self._served.defaults.window
        match path:
            case "/v1/models" | "/models":
                names = (self._faults.model_id,) if self._faults.model_id else self._served.names
                data = [{"id": name, "object": "model", "owned_by": "tensorfold"} for name in names]
                return answer({"object": "list", "data": data})
            case "/health" | "/v1/health":
                return self._health()
            case "/metrics" | "/v1/metrics":
                text = metrics(scheduler, window, self._served.parallel)
                return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})
        if path.startswith("/v1/responses/"):
            return self._stored_response(path, delete=False)
        return not_found()

    def _health(self) -> web.Response:
        if self._faults.health == "401":
            refused = refusal(401, "an API key is needed")
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        if self._faults.health == "reduced":
            return answer({"status": "ok"})
        return answer(health(self._scheduler, self._served.defaults.window, self._served.parallel))

    def _stored_response(self, path: str, *, delete: bool) -> web.Response:
        name = path.removeprefix("/v1/responses/")
        if name not in self._stored:
            return not_found()
        if not delete:
            return answer(self._stored[name])
        del self._stored[name]
        return answer({"id": name, "object": "response", "deleted": True})

    # -- asking --------------------------------------------------------------------------------------------

    async def _post(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.endswith("/v1/chat/completions"):
            body = await read_body(request, CHAT_LIMIT_MIB)
            return await self._complete(request, read_chat(body, self._served.defaults), chat=True)
        if path.endswith("/v1/completions"):
            body = await read_body(request, CHAT_LIMIT_MIB)
            return await self._complete(request, read_completion(body, self._served.defaults), chat=False)
        match path:
            case "/v1/responses":
                return await self._respond(await read_body(request, STOCK_LIMIT_MIB))
            case "/tokenize" | "/v1/tokenize":
                return self._tokenize(await read_body(request, STOCK_LIMIT_MIB))
            case "/detokenize" | "/v1/detokenize":
                return detokenize(await read_body(request, STOCK_LIMIT_MIB))
        return not_found()

    def _queue(self, ask: Ask) -> tuple[Request, Reply]:
        """Queue what is asked; raises BusyError past the cap, RuntimeError once the ranks are out of step."""
        cap = self._served.max_queued
        scheduler = self._scheduler
        foreground = len(scheduler.active) + sum(not request.background for request in scheduler.waiting)
        if cap is not None and not ask.background and foreground >= scheduler.lanes + cap:
            raise BusyError
        reply = ask.reply(self._faults.reply)
        request = Request(
            prompt=ask.prompt,
            prompt_tokens=ask.prompt_tokens,
            pieces=[*reply.reasoning, *reply.content],
            reserve=ask.prompt_tokens + ask.max_tokens,
            background=ask.background,
        )
        scheduler.add(request)
        return request, reply

    async def _complete(self, http: web.Request, ask: Ask, *, chat: bool) -> web.StreamResponse:
        try:
            request, reply = self._queue(ask)
        except RuntimeError as error:
            return failed(error)
        bodies = ChatBodies(self._served.names[0], ask, request, reply, chat=chat)
        try:
            if ask.stream:
                return await self._stream(http, request, bodies)
            async for _ in request.replies():
                pass
            return answer(bodies.whole())
        except RuntimeError as error:
            return failed(error, logged=True)
        finally:
            self._scheduler.end(request)

    async def _stream(self, http: web.Request, request: Request, bodies: ChatBodies) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Connection": "close"})
        stream.force_close()
        await stream.prepare(http)
        try:
            if opening := bodies.opening():
                await stream.write(event(opening))
            number = 0
            async for text in request.replies():
                await stream.write(event(bodies.piece(number, text)))
                number += 1
            await stream.write(event(bodies.closing()))
        except RuntimeError as error:
            await stream.write(event({"error": {"message": str(error), "type": "server_error"}}))
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    async def _respond(self, body: Body) -> web.Response:
        if body.get("stream"):
            raise BadRequestError("the double does not stream responses", param="stream")
        found = body.get("input")
        messages = [{"role": "user", "content": found}] if isinstance(found, str) else found
        chat = {"messages": messages, "max_tokens": body.get("max_output_tokens")}
        ask = read_chat(chat, self._served.defaults)
        try:
            request, reply = self._queue(ask)
        except RuntimeError as error:
            return failed(error)
        try:
            async for _ in request.replies():
                pass
        except RuntimeError as error:
            return failed(error, logged=True)
        finally:
            self._scheduler.end(request)
        made = response(self._served.names[0], ask, request, reply)
        if body.get("store", True):
            self._stored[made["id"]] = made
            while len(self._stored) > STORED_RESPONSES:
                self._stored.popitem(last=False)
        return answer(made)

    def _tokenize(self, body: Body) -> web.Response:
        if "messages" in body:
            text = render(turns_of(body["messages"]), thinking_effort(body, self._served.defaults))
            if not body.get("add_generation_prompt", True):
                text = text.rpartition("<|assistant|>")[0]
        elif isinstance(body.get("prompt"), str):
            text = ("[gMASK]<sop>" if body.get("add_special_tokens", True) else "") + body["prompt"]
        else:
            raise BadRequestError("prompt: expected a string, or messages", param="prompt")
        ids = tokens.encode(text)
        made = {"count": len(ids), "max_model_len": self._served.defaults.window, "tokens": ids}
        if body.get("return_token_strs"):
            made["token_strs"] = [tokens.decode([number]) for number in ids]
        return answer(made)


def detokenize(body: Body) -> web.Response:
    """The text of token ids."""
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids):
        raise BadRequestError("tokens: expected a list of integers", param="tokens")
    try:
        return answer({"prompt": tokens.decode(ids)})
    except ValueError as error:
        raise BadRequestError(str(error), param="tokens") from None


async def read_body(request: web.Request, limit_mib: int) -> Mapping[str, Any]:
    """The JSON object in a body; raises BadRequestError for anything else, and for one that is too large."""
    too_large = BadRequestError(f"request body exceeds the {limit_mib} MiB limit")
    if (request.content_length or 0) > limit_mib * MIB:
        raise too_large
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except ValueError:
        raise BadRequestError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body is not a JSON object")
    return body


def answer(body: Mapping[str, Any], status: int = 200) -> web.Response:
    """A JSON body, without spaces."""
    return web.json_response(body, status=status, dumps=COMPACT)


def event(body: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + COMPACT(body).encode() + b"\n\n"


def refusal(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    kind: str = "invalid_request_error",
) -> web.Response:
    """An error object; code and param only where there are any."""
    error = {"message": message, "type": kind, "code": code, "param": param}
    return answer({"error": {k: v for k, v in error.items() if v is not None}}, status=status)


def not_found() -> web.Response:
    """404, whose error is a word and not an object."""
    return answer({"error": "not found"}, status=404)


def failed(error: Exception, *, logged: bool = False) -> web.Response:
    """500 of a generation that failed; it is on the log once."""
    if not logged:
        text = f"request error: {type(error).__name__}: {error}"
        say(f"{text}\n{''.join(traceback.format_exception(error))}".rstrip())
    return answer({"error": {"message": str(error)}}, status=500)


async def _name_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "tensorfold-double"
