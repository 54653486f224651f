"""What goes wrong with a pair of the TensorFold double that serves: switches, signals, killed peers."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.double_ranks import Ranks, let_pass, until

LONG = "Write 100 words"
LATCH = "the two ranks are out of step after an error; restart both"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks that are not started yet."""
    found = Ranks(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A pair that serves, for faults that can end."""
    found = Ranks(tmp_path_factory.mktemp("faults"))
    try:
        found.serve(env={"TF_GLM_MULTI_WATCHDOG_S": "25", "TF_DOUBLE_TIME_SCALE": "0.02"})
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a test began on the shared pair."""
    yield
    if "pair" in request.fixturenames:
        shared: Ranks = request.getfixturevalue("pair")
        for rank in (0, 1):
            shared.control(rank, "clear")
        until(lambda: not shared.health()["busy"], "nothing runs")


def stacks(ranks: Ranks, rank: int) -> int:
    """How many times a rank has printed its stacks."""
    return ranks.log(rank).count("(most recent call first)")


# -- faults that can end, on one pair ----------------------------------------------------------------------


def test_hang(pair: Ranks) -> None:
    """Prevents a hang that shows otherwise than on real ranks: 200, iteration_s growing, tokens standing."""
    pair.control(0, "hang")
    assert pair.health()["iteration_s"] == 0.0
    pair.begin("2+2")
    first = until(lambda: (h := pair.health())["iteration_s"] > 0.3 and h, "iteration_s grows")
    second = until(lambda: (h := pair.health())["iteration_s"] > 0.6 and h, "iteration_s grows on")
    assert (first["ok"], first["busy"]) == (True, True)
    assert second["completion_tokens_total"] == first["completion_tokens_total"]
    assert second["streams"] == first["streams"]
    until(lambda: stacks(pair, 0) >= 2, "the watchdog prints stacks again and again")
    assert pair.up()


def test_a_silent_peer_is_a_hang_and_shows_only_under_work(pair: Ranks) -> None:
    """Prevents an idle pair with a silent follower from looking ill before anyone asks it."""
    pair.control(1, "silent")
    idle = pair.health()
    assert (idle["ok"], idle["busy"], idle["iteration_s"]) == (True, False, 0.0)
    pair.begin("2+2")
    until(lambda: pair.health()["iteration_s"] > 0.3, "rank 0 hangs")
    assert pair.running(1)


def test_frozen_tokens(pair: Ranks) -> None:
    """Prevents iteration_s from being the only sign that is looked at."""
    pair.control(0, "frozen")
    pair.begin("2+2")
    first = until(lambda: (h := pair.health())["busy"] and h, "it runs")
    let_pass(0.5)
    second = pair.health()
    assert second["iteration_s"] < 0.3
    assert second["requests_running"] == 1
    assert second["completion_tokens_total"] == first["completion_tokens_total"]


@pytest.mark.parametrize(
    ("fault", "content"), [("bangs", "!" * 64), ("empty", ""), ("repeated", " ".join(["the"] * 64))]
)
def test_collapsed_replies(pair: Ranks, fault: str, content: str) -> None:
    """Prevents garbage from passing for an answer."""
    pair.control(0, fault)
    assert pair.said() == content
    assert pair.said(chat_template_kwargs={}) == content
    pair.control(0, "clear")
    assert pair.said() == "Paris"


def test_slow_prefill_freezes_tokens_but_not_iterations(pair: Ranks) -> None:
    """Prevents a long prompt from being taken for a stall: 125 s, here at a fiftieth."""
    pair.control(0, "slow_prefill=125")
    future = pair.begin("2+2")[0]
    seen = until(lambda: (h := pair.health())["streams"]["prefilling"] == 1 and h, "it fills")
    for _ in range(20):
        health = pair.health()
        assert health["iteration_s"] < 0.3
        assert health["completion_tokens_total"] == seen["completion_tokens_total"]
    assert future.result().json["tensorfold"]["prefill_s"] >= 2.4


def test_a_full_pool_makes_requests_wait_while_tokens_move(pair: Ranks) -> None:
    """Prevents legitimate waiting from being taken for a stall."""
    pair.control(0, "full_pool=2048")
    begun = pair.begin(*[f"{LONG} {number}" for number in range(3)], max_tokens=1500)
    until(lambda: pair.health()["requests_running"] == 3, "three are there")
    waiting = re.compile(r"^tensorfold:requests_waiting 2$", re.MULTILINE)
    # One moment after they came: a request is there before it has its place in the pool.
    until(lambda: waiting.search(pair.get("/metrics").text), "one has the pool, two wait")
    health = pair.health()
    assert health["pool_tokens"] == 2048
    assert health["streams"]["decoding"] + health["streams"]["prefilling"] == 1
    until(lambda: pair.health()["completion_tokens_total"] > health["completion_tokens_total"], "tokens move")
    pair.control(0, "clear")
    assert [future.result().status for future in begun] == [200] * 3


def test_health_with_keys(pair: Ranks) -> None:
    """Prevents a 401 or a reduced body from being taken for a dead server."""
    pair.control(0, "health_401")
    refused = pair.get("/health")
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    pair.control(0, "health_reduced")
    assert pair.get("/health").text == '{"status":"ok"}'
    assert pair.said() == "Paris"
    pair.control(0, "clear")


def test_a_wrong_model_id(pair: Ranks) -> None:
    """Prevents any answer of /v1/models from passing."""
    pair.control(0, "model_id=somebody-else")
    assert [entry["id"] for entry in pair.get("/v1/models").json["data"]] == ["somebody-else"]


def test_stacks_of_both_ranks_by_usr1(pair: Ranks) -> None:
    """Prevents evidence from lacking stacks that the engine would have given."""
    before = stacks(pair, 0), stacks(pair, 1)
    for rank in (0, 1):
        pair.signal(rank, signal.SIGUSR1)
    until(lambda: stacks(pair, 0) > before[0] and stacks(pair, 1) > before[1], "both print stacks")
    assert pair.said() == "Paris"


def test_a_fault_that_does_not_exist_is_named(pair: Ranks) -> None:
    """Prevents a drill with a misspelt fault from passing."""
    pair.control(0, "hangs")
    assert "[tensorfold-double] no such fault: hangs" in pair.log(0)


def test_a_leak_is_real_and_bounded(pair: Ranks) -> None:
    """Prevents a memory guard from being tested on memory that nobody uses, or on all there is."""
    before = pair.resident_mb(1)
    pair.control(1, "leak=200:40")
    until(lambda: pair.resident_mb(1) - before >= 38, "40 MB are used")
    let_pass(0.5)  # 100 MB more without the bound
    assert pair.resident_mb(1) - before < 60


def test_an_abandoned_request_stays_while_the_iteration_hangs(pair: Ranks) -> None:
    """Prevents a probe that gives up from making a stalled pair look idle."""
    pair.control(0, "hang")
    body = b'{"messages": [{"role": "user", "content": "2+2"}]}'
    with socket.create_connection(("127.0.0.1", pair.port), 10) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: pair.health()["iteration_s"] > 0.1, "it hangs")
    until(lambda: pair.health()["iteration_s"] > 0.5, "it hangs on")
    assert pair.health()["requests_running"] == 1


def test_half_a_line_is_not_a_fault(pair: Ranks) -> None:
    """Prevents a fault from being lost, or another begun, because the file was read half written."""
    path = pair.cache(0) / "tf-double" / "control"
    path.write_text("bangs")
    for _ in range(20):
        assert pair.said() == "Paris"
    path.write_text("bangs\n")
    until(lambda: not path.exists(), "the file is taken")
    assert pair.said() == "!" * 64


# -- faults that do not end --------------------------------------------------------------------------------


def test_the_out_of_step_latch_shows_in_requests_only(ranks: Ranks) -> None:
    """Prevents a pair that fails every request from being called healthy by its fields."""
    ranks.serve()
    future = ranks.begin(LONG)[0]
    until(lambda: ranks.health()["streams"]["decoding"] == 1, "it runs")
    ranks.control(0, "out_of_step")
    assert future.result().status == 500
    ranks.wait_line(0, r"^\[tensorfold\] request error: RuntimeError: ")
    refused = ranks.chat()
    assert (refused.status, refused.json) == (500, {"error": {"message": LATCH}})
    health = ranks.health()
    assert (health["ok"], health["busy"], health["iteration_s"]) == (True, False, 0.0)
    ranks.control(0, "clear")
    assert ranks.chat().status == 500
    assert f"request error: RuntimeError: {LATCH}\nTraceback" in ranks.log(0)


def test_an_open_stream_gets_its_error_as_an_event(ranks: Ranks) -> None:
    """Prevents a failed stream under HTTP 200 from looking whole."""
    ranks.serve(env={"TF_DOUBLE_FAULT": "out_of_step"})
    assert ranks.chat(stream=True).status == 500
    ranks.close()
    ranks.serve()
    future = ranks.begin(LONG, stream=True)[0]
    until(lambda: ranks.health()["completion_tokens_total"] > 0, "tokens move")
    ranks.control(0, "out_of_step")
    answer = future.result()
    events = [line for line in answer.text.splitlines() if line]
    assert answer.status == 200
    assert '"type":"server_error"' in events[-2]
    assert events[-1] == "data: [DONE]"


def test_a_lost_message_ends_rank_1_and_hangs_rank_0(ranks: Ranks) -> None:
    """Prevents rank 1's own words for being out of step from going unread."""
    ranks.serve()
    ranks.control(0, "skip_message")
    ranks.begin("2+2")
    assert ranks.code(1) == 1
    told = (
        r"RuntimeError: rank 1: expected rank 0's message (\d+), received number (\d+): the ranks are out of"
    )
    found = ranks.wait_line(1, told)
    assert int(found[2]) == int(found[1]) + 1
    until(lambda: ranks.health()["iteration_s"] > 0.3, "rank 0 hangs")


def test_an_idle_rank_0_does_not_notice_that_its_peer_was_killed(ranks: Ranks) -> None:
    """Prevents /health from being the proof of a pair, and a lone restarted rank from ever joining."""
    ranks.serve()
    ranks.signal(1, signal.SIGKILL)
    assert ranks.code(1) == -signal.SIGKILL
    health = ranks.health()
    assert (health["ok"], health["busy"], health["iteration_s"]) == (True, False, 0.0)
    ranks.start(1)
    ranks.wait_line(1, "rank 1 of 2")
    ranks.begin("2+2")
    until(lambda: ranks.health()["iteration_s"] > 0.5, "the next request hangs")
    assert ranks.running(1)
    assert "following" not in ranks.log(1)
    assert ranks.up()


def test_with_roce_a_killed_peer_latches_rank_0(ranks: Ranks) -> None:
    """Prevents the failure of a small gather from looking like a hang for ever."""
    env = {"TF_GLM_COMM": "roce", "TF_ROCE_WAIT_S": "50", "TF_DOUBLE_TIME_SCALE": "0.02"}
    ranks.serve(env=env)
    ranks.signal(1, signal.SIGKILL)
    answer = ranks.chat()
    assert answer.status == 500
    assert re.match(
        r"RoCE all-gather failed \(sequence \d+, peer 1, hca 0\)", answer.json["error"]["message"]
    )
    assert "wait limit 50 s (TF_ROCE_WAIT_S)" in ranks.log(0)
    assert ranks.chat().json["error"]["message"] == LATCH
    assert ranks.running(0)


@pytest.mark.parametrize("roce", [False, True], ids=["nccl", "roce"])
def test_a_follower_in_the_middle_of_work_when_rank_0_is_killed(ranks: Ranks, roce: bool) -> None:
    """Prevents the follower's end from being waited for: in an NCCL collective it waits for ever."""
    env = {"TF_GLM_COMM": "roce", "TF_ROCE_WAIT_S": "60"} if roce else {}
    ranks.serve(env={**env, "TF_DOUBLE_TIME_SCALE": "0.02", "TF_GLM_MULTI_WATCHDOG_S": "15"})
    ranks.begin(LONG)
    until(lambda: ranks.health()["streams"]["decoding"] == 1, "it runs")
    ranks.signal(0, signal.SIGKILL)
    until(lambda: stacks(ranks, 1) >= 1, "its watchdog prints stacks")
    if roce:
        assert ranks.code(1) == 1
        assert "RuntimeError: RoCE all-gather failed" in ranks.log(1)
    else:
        assert ranks.running(1)


def test_an_idle_follower_ends_with_1_when_rank_0_is_killed(ranks: Ranks) -> None:
    """Prevents a follower's exit code from being read as its own fault."""
    ranks.serve()
    ranks.signal(0, signal.SIGKILL)
    assert ranks.code(1) == 1
    assert re.search(r"Traceback.*ConnectionError", ranks.log(1), re.DOTALL)


def test_sigterm_of_rank_0_cuts_requests_and_is_clean(ranks: Ranks) -> None:
    """Prevents a drain from being expected of the engine, and followers from ending well."""
    ranks.serve("--spill-gib", "1", "--snapshot-dir", "none")
    future = ranks.begin("Write 90000 words", max_tokens=60000)[0]
    until(lambda: ranks.health()["streams"]["decoding"] == 1, "it runs")
    ranks.signal(0, signal.SIGTERM)
    assert ranks.code(0) == 0
    assert isinstance(future.exception(5), OSError)
    assert re.search(r"\[tensorfold\] spill: shutdown flush done in [\d.]+ s\n$", ranks.log(0))


def test_a_follower_has_no_handler_for_sigterm(ranks: Ranks) -> None:
    """Prevents `docker stop` of a follower from being anything but its time-out: PID 1 without a handler."""
    ranks.serve(env={"TF_DOUBLE_PID1": "1"})
    ranks.signal(1, signal.SIGTERM)
    assert ranks.said() == "Paris"
    assert ranks.running(1)
    ranks.signal(0, signal.SIGTERM)
    assert (ranks.code(0), ranks.code(1)) == (0, 1)


def test_the_watchdog_ends_the_rank_when_told_to(ranks: Ranks) -> None:
    """Prevents the recipe's exit switch from doing nothing."""
    env = {
        "TF_GLM_MULTI_WATCHDOG_EXIT": "1",
        "TF_GLM_MULTI_WATCHDOG_S": "15",
        "TF_DOUBLE_TIME_SCALE": "0.02",
    }
    ranks.serve(env={**env, "TF_DOUBLE_FAULT_RANK0": "hang"})
    ranks.begin("2+2")
    assert ranks.code(0) == 1
    assert stacks(ranks, 0) == 1


def test_a_serial_server_shows_less(ranks: Ranks) -> None:
    """Prevents iteration_s from being needed: with one request at a time there is none, and no watchdog."""
    ranks.serve("--parallel", "1", env={"TF_GLM_MULTI_WATCHDOG_S": "6", "TF_DOUBLE_TIME_SCALE": "0.02"})
    ranks.control(0, "hang")
    ranks.begin("2+2", "2+3")
    health = until(lambda: (h := ranks.health())["requests_running"] == 2 and h, "both are there")
    assert health["busy"]
    assert {"iteration_s", "streams", "pool_tokens"}.isdisjoint(health)
    assert re.search(r"^tensorfold:requests_waiting 1$", ranks.get("/metrics").text, re.MULTILINE)
    let_pass(0.5)  # four times the watchdog's limit
    assert stacks(ranks, 0) == 0


def test_crash_while_serving(ranks: Ranks) -> None:
    """Prevents an exit with code 0 of a serving rank from being taken for a stop that somebody asked for."""
    ranks.serve()
    ranks.control(0, "crash=0")
    assert ranks.code(0) == 0
    assert ranks.code(1) == 1
