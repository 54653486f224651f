"""The TensorFold double's HTTP API, asked of one pair that serves."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.double_ranks import Ranks, until

LONG = "Write 200 words"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A pair that serves three requests at once and lets two wait."""
    ranks = Ranks(tmp_path_factory.mktemp("api"))
    try:
        ranks.serve("--alias", "other-name", env={"TF_GLM_MAX_QUEUED": "2"})
        yield ranks
    finally:
        ranks.close()


def idle(pair: Ranks) -> dict[str, Any]:
    """The health of the pair once nothing runs."""
    found: dict[str, Any] = until(lambda: not (h := pair.health())["busy"] and h, "nothing runs")
    return found


def test_models(pair: Ranks) -> None:
    """Prevents a check of the model id from being tested on another shape."""
    expected = [
        {"id": name, "object": "model", "owned_by": "tensorfold"} for name in ("unit-glm", "other-name")
    ]
    assert pair.get("/v1/models").json == {"object": "list", "data": expected}
    assert pair.get("/models").text == pair.get("/v1/models").text


def test_health_of_an_idle_pair(pair: Ranks) -> None:
    """Prevents fields that 0.6.0 does not have from being relied on."""
    health = idle(pair)
    tokens = {"prompt_tokens", "cached_tokens", "completion_tokens", "drafted", "accepted"}
    totals = tokens | {"requests", "rounds", "prefill_seconds", "decode_seconds"}
    others = {"ok", "backend", "busy", "requests_running", "context_length"}
    concurrent = {"streams", "pool_tokens", "pool_free_tokens", "kept_prompts", "iteration_s"}
    assert set(health) == {f"{name}_total" for name in totals} | others | concurrent
    assert (health["ok"], health["backend"], health["context_length"]) == (True, "tensorfold", 65536)
    assert health["streams"] == {"decoding": 0, "prefilling": 0, "filling": 0, "paused": 0, "max": 3}
    assert health["iteration_s"] == 0.0
    assert pair.get("/v1/health").status == 200


def test_chat_without_thinking(pair: Ranks) -> None:
    """Prevents a canary on the double from reading another body than an OpenAI one."""
    body = pair.chat().json
    choice = body["choices"][0]
    assert choice == {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "Paris"},
    }
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert {"rounds", "drafted", "accepted", "sha256", "policy"} <= set(body["tensorfold"])
    again = pair.chat().json
    assert again["tensorfold"]["sha256"] == body["tensorfold"]["sha256"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == body["usage"]["prompt_tokens"] - 1


def test_reasoning_is_apart_and_uses_the_budget(pair: Ranks) -> None:
    """Prevents an empty content from being called a fault when the budget went into thinking."""
    on: dict[str, Any] = {"chat_template_kwargs": {}}
    full = pair.chat(**on).json["choices"][0]
    assert full["message"]["reasoning_content"]
    assert full["message"]["content"] == "Paris"
    cut = pair.chat(**on, max_tokens=5).json["choices"][0]
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", "")
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": {"type": "disabled"}}}):
        assert "reasoning_content" not in pair.chat(**{**on, **off}).json["choices"][0]["message"]


def test_a_stream(pair: Ranks) -> None:
    """Prevents a front that counts events from being tested on another stream."""
    answer = pair.chat(stream=True, chat_template_kwargs={})
    lines = [line for line in answer.text.splitlines() if line]
    assert answer.headers["Connection"] == "close"
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "Paris"
    assert "".join(d.get("reasoning_content", "") for d in deltas).startswith("They ask")
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [i for i, event in enumerate(events) if "usage" in event] == [len(events) - 1]
    assert "tensorfold" in events[-1]


def test_completions_and_responses(pair: Ranks) -> None:
    """Prevents routes of the table from being missing."""
    body = pair.post("/v1/completions", {"prompt": "2+2=", "max_tokens": 8}).json
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "4")
    made = pair.post("/v1/responses", {"input": "2+3=", "max_output_tokens": 64}).json
    assert made["output"][0]["content"][0]["text"] == "5"
    path = f"/v1/responses/{made['id']}"
    assert pair.get(path).json == made
    assert pair.call(path, method="DELETE").json["deleted"] is True
    assert pair.get(path).status == 404


def test_a_word_in_a_long_prompt_is_found(pair: Ranks) -> None:
    """Prevents the long canary from having no right answer."""
    text = "The code word is kestrel. " + "All work and no play. " * 2000 + "What is the code word?"
    assert pair.said(text) == "kestrel"


def test_tokenize_and_back(pair: Ranks) -> None:
    """Prevents counts that differ from those of the window check."""
    found = pair.post(
        "/tokenize", {"prompt": "the end", "add_special_tokens": False, "return_token_strs": True}
    ).json
    assert (found["count"], found["max_model_len"]) == (3, 65536)
    assert "".join(found["token_strs"]) == "the end"
    assert pair.post("/v1/detokenize", {"tokens": found["tokens"]}).json == {"prompt": "the end"}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    counted = pair.post(
        "/v1/tokenize", {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    ).json["count"]
    assert counted == pair.chat().json["usage"]["prompt_tokens"]


def test_a_prompt_beyond_the_window(pair: Ranks) -> None:
    """Prevents the error that clients look for from having another code or status."""
    answer = pair.chat("x1" * 40000)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        "messages",
        "invalid_request_error",
    )
    assert error["message"].startswith("This server's maximum context length is 65536 tokens")


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/chat/completions", b"not json"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"messages": []}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "n": 2}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "chat_template_kwargs": "x"}'),
        ("/v1/completions", b'{"prompt": ["a", "b"]}'),
        ("/tokenize", b"{}"),
        ("/detokenize", b'{"tokens": [9999999]}'),
    ],
)
def test_what_is_malformed_is_400(pair: Ranks, path: str, data: bytes) -> None:
    """Prevents a client's mistake from looking like a fault of the server."""
    answer = pair.call(path, data)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


def test_anything_else_is_404_with_a_word(pair: Ranks) -> None:
    """Prevents `error` from being read as an object everywhere."""
    for path in ("/", "/v1/messages", "/v1/decisions", "/v1/chat/completions"):
        answer = pair.get(path)
        assert (answer.status, answer.text) == (404, '{"error":"not found"}')
    assert pair.post("/v1/messages", {}).status == 404


def test_a_body_that_is_too_large_is_400(pair: Ranks) -> None:
    """Prevents 413 from being expected: the limit is told with 400, before the body is sent."""
    with socket.create_connection(("127.0.0.1", pair.port), 10) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 34000000\r\n\r\n")
        answer = connection.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 400")
    assert "request body exceeds the 32 MiB limit" in answer


def test_lanes_a_queue_and_its_cap(pair: Ranks) -> None:
    """Prevents waiting requests from being invisible, and a full queue from being anything but 429."""
    idle(pair)
    before = pair.health()["completion_tokens_total"]
    begun = pair.begin(*[f"{LONG} {number}" for number in range(5)])
    health = until(
        lambda: (h := pair.health())["requests_running"] == 5 and lanes(h) == 3 and h, "all are in"
    )
    assert metric(pair, "tensorfold:requests_waiting") == 2
    assert health["busy"]
    assert health["pool_free_tokens"] < health["pool_tokens"]
    assert 0 <= health["iteration_s"] < 5
    refused = pair.chat()
    assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
    until(lambda: pair.health()["completion_tokens_total"] > before, "tokens move during a reply")
    assert pair.chat(priority="background").status == 200
    assert [future.result().status for future in begun] == [200] * 5


def test_totals_move_when_a_request_ends_but_for_tokens(pair: Ranks) -> None:
    """Prevents a stall verdict from watching a counter that stands still during every reply."""
    before = idle(pair)
    future = pair.begin(LONG)[0]
    during = until(
        lambda: (
            (h := pair.health())["completion_tokens_total"] > before["completion_tokens_total"] + 50 and h
        ),
        "tokens move",
    )
    still = [name for name in before if name.endswith("_total") and name != "completion_tokens_total"]
    assert {name: during[name] for name in still} == {name: before[name] for name in still}
    assert future.result().status == 200
    after = idle(pair)
    assert all(after[name] > before[name] for name in still if name != "cached_tokens_total")


def test_a_client_that_goes_away_ends_its_request(pair: Ranks) -> None:
    """Prevents abandoned requests from holding lanes."""
    idle(pair)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Write 900 words"}], "max_tokens": 9000}
    ).encode()
    with socket.create_connection(("127.0.0.1", pair.port), 10) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: pair.health()["streams"]["decoding"] == 1, "it runs")
    until(lambda: not pair.health()["busy"], "it is gone")


def test_metrics(pair: Ranks) -> None:
    """Prevents names that Prometheus will not find, and an iteration_s that is not there."""
    answer = pair.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    names = set(re.findall(r"^# TYPE (\S+) \w+$", answer.text, re.MULTILINE))
    assert {
        "tensorfold:requests_running",
        "tensorfold:requests_waiting",
        "tensorfold:generation_tokens_total",
        "tensorfold:num_requests_running",
        "tensorfold:request_latency_seconds",
        "tensorfold:time_to_first_token_seconds",
        "tensorfold_health:completion_tokens_total",
        "tensorfold_health:streams",
        "tensorfold_health:pool_free_tokens",
    } <= names
    assert "iteration_s" not in answer.text
    for line in answer.text.splitlines():
        assert re.fullmatch(r"# TYPE \S+ \w+|[a-z_:0-9]+(\{[^{}]*\})? [-+.\de]+", line)


def lanes(health: dict[str, Any]) -> int:
    """Requests that are not waiting."""
    return int(health["streams"]["decoding"] + health["streams"]["prefilling"])


def metric(pair: Ranks, name: str) -> float:
    """A value of /metrics."""
    found = re.search(rf"^{name} (\S+)$", pair.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else -1.0
