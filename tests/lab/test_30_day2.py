"""Day two: systemctl, journalctl, the API as clients use it, and where the secret is not."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import openai
import pytest

from tests.lab.conftest import API, FORM_SECONDS, HEAD, MODEL, UNIT, WORKER, Pair, until


def client() -> openai.OpenAI:
    """Return the official client at the pair's endpoint, without retries: a retried failure would hide."""
    return openai.OpenAI(base_url=f"{API}/v1", api_key="none", max_retries=0, timeout=60)


def test_restart_returns_when_the_pair_serves_again(pair: Pair) -> None:
    """Prevents a restart that returns while nothing answers, which a script would take for done."""
    epoch = pair.epoch()
    pair.sh(HEAD, "systemctl", "restart", UNIT[HEAD], timeout=FORM_SECONDS)
    status = pair.status()
    assert (status["ready"], status["state"]) == (True, "serving")
    assert status["epoch"] > epoch
    assert "Paris" in pair.ask()
    assert pair.unit(HEAD, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_stop_ends_both_ranks_and_stays(pair: Pair) -> None:
    """Prevents a worker that keeps its memory after the head was stopped, and a pair that starts itself
    again.
    """
    pair.sh(HEAD, "systemctl", "stop", UNIT[HEAD])
    until(lambda: not pair.containers(WORKER, running=False), "the worker's rank is gone", 10)
    assert pair.containers(HEAD, running=False) == []
    assert pair.unit(HEAD, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert pair.unit(WORKER, "ActiveState") == {"ActiveState": "active"}
    assert pair.status(WORKER)["state"] == "waiting"
    assert pair.lab.exec(HEAD, ["glm53", "status"], check=False).returncode == 3
    pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=FORM_SECONDS)
    assert pair.status()["ready"]


def test_a_stop_waits_for_an_open_stream(pair: Pair) -> None:
    """Prevents replies that are cut in the middle by a planned restart."""
    stream = client().chat.completions.create(
        model=MODEL,
        stream=True,
        max_tokens=40,
        messages=[{"role": "user", "content": "Count from one to twenty."}],
    )
    pieces = iter(stream)
    next(pieces)
    pair.lab.exec(HEAD, ["systemctl", "stop", "--no-block", UNIT[HEAD]])
    rest = list(pieces)
    assert rest[-1].choices[0].finish_reason in ("length", "stop")
    until(lambda: pair.unit(HEAD, "ActiveState")["ActiveState"] == "inactive", "stopped", 60)
    pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=FORM_SECONDS)


@pytest.mark.parametrize("first", [HEAD, WORKER])
def test_either_node_may_come_first(pair: Pair, first: str) -> None:
    """Prevents a start order that an owner has to know."""
    second = WORKER if first == HEAD else HEAD
    for host in (HEAD, WORKER):
        pair.sh(host, "systemctl", "stop", UNIT[host])
    pair.sh(first, "systemctl", "start", "--no-block", UNIT[first])
    if first == HEAD:
        until(
            lambda: "waiting for spark-b (rank 1)" in str(pair.status()["reasons"]),
            "the head waits by name",
            20,
        )
        assert "waiting for spark-b" in pair.unit(HEAD, "StatusText")["StatusText"]
    else:
        until(
            lambda: pair.unit(WORKER, "ActiveState")["ActiveState"] == "active",
            "the worker is ready alone",
            20,
        )
    pair.sh(second, "systemctl", "start", "--no-block", UNIT[second])
    pair.serving()


def test_the_workers_restart_restarts_the_pair(pair: Pair) -> None:
    """Prevents a rank that was restarted alone: rank 0 would answer /v1/models and hang at every request."""
    epoch = pair.epoch()
    pair.sh(WORKER, "systemctl", "restart", UNIT[WORKER])
    assert pair.serving(after=epoch)["faults"] == 0
    assert "Paris" in pair.ask()


def test_the_openai_client_gets_models_chat_stream_and_the_right_error(pair: Pair) -> None:
    """Prevents an API that works with curl only."""
    assert MODEL in [model.id for model in client().models.list()]
    question: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the capital of France? Answer with one word."}
    ]
    reply = client().chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=24)
    assert "Paris" in (reply.choices[0].message.content or "")
    stream = client().chat.completions.create(
        model=MODEL, messages=question, temperature=0, max_tokens=24, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices)
    assert text == reply.choices[0].message.content
    long: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client().chat.completions.create(model=MODEL, messages=long, max_tokens=5)
    assert caught.value.status_code == 400
    assert "2048" in str(caught.value)


def test_the_journal_tells_the_story_of_a_start(pair: Pair) -> None:
    """Prevents a start that has to be guessed from a thousand lines."""
    pair.sh(HEAD, "systemctl", "restart", UNIT[HEAD], timeout=FORM_SECONDS)
    story = pair.journal(HEAD, "--since=-5min").split("lead is up")[-1].splitlines()
    told = "\n".join(story)
    for part in (
        "epoch ",
        "begins",
        "rank 0 on spark-a:",
        "gid_index=3",
        "rank 1 on spark-b:",
        "gid_index=5",
        "rails=2",
        "weights loaded in",
        "asking the canary question",
        f"serving {MODEL}",
        "endpoint=",
        "Paris",
    ):
        assert part in told, f"{part!r} is missing in:\n{told}"
    assert len(story) <= 30, told
    assert pair.unit(HEAD, "StatusText")["StatusText"].startswith("serving, epoch ")
    engine = pair.sh(HEAD, "journalctl", "-t", "glm53-rank0", "-o", "cat", "--no-pager", "-n", "400")
    assert "Application startup complete" in engine


def test_command_shows_what_runs(pair: Pair) -> None:
    """Prevents a command line in the documentation that is not the one that runs."""
    shown = json.loads(pair.sh(HEAD, "glm53", "command", "--json"))
    for host, who in ((HEAD, "rank 0 on spark-a"), (WORKER, "rank 1 on spark-b")):
        name = pair.containers(host)[0]
        real = json.loads(pair.sh(host, "docker", "inspect", name))[0]
        for argument in real["Config"]["Cmd"]:
            assert argument in shown[who]
        assert real["Image"] in shown[who]
        assert real["HostConfig"]["RestartPolicy"]["Name"] == "no"
        assert real["Config"]["User"] not in ("", "0", "root")


def test_the_token_is_nowhere_but_in_its_file(pair: Pair) -> None:
    """Prevents a secret in argv, environment, logs, or docker inspect."""
    token = pair.sh(HEAD, "head", "-1", "/etc/glm53/token").strip()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    script = (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; journalctl --no-pager -o cat;"
        " docker ps -aq | xargs -r docker inspect; cat /etc/glm53/*.yaml;"
        " find /var/lib/glm53 -name '*.json' -exec cat {} +"
    )
    for host in (HEAD, WORKER):
        everything = pair.sh(host, "sh", "-c", script)
        assert len(everything) > 10_000
        assert token not in everything


def test_the_gate_answers_each_question(pair: Pair) -> None:
    """Prevents a load balancer from sending traffic into a pair that is not ready."""

    def ask(path: str) -> tuple[int, str]:
        out = pair.sh(HEAD, "curl", "-s", "-w", "\n%{http_code}", f"http://127.0.0.1:8889{path}")
        body, _, code = out.rpartition("\n")
        return int(code), body

    assert ask("/live")[0] == 200
    assert ask("/ready")[0] == 200
    assert json.loads(ask("/status")[1])["state"] == "serving"
    assert "glm53_ready 1" in ask("/metrics")[1].splitlines()
    pair.sh(WORKER, "systemctl", "stop", UNIT[WORKER])
    until(lambda: ask("/ready")[0] == 503, "503 without the worker", 20)
    assert "spark-b" in ask("/ready")[1]
    assert ask("/live")[0] == 200
    pair.sh(WORKER, "systemctl", "start", UNIT[WORKER])
    pair.serving()


def test_a_unit_with_bad_settings_exits_78_and_does_not_loop(pair: Pair) -> None:
    """Prevents a restart loop that buries the one line that says what is wrong."""
    pair.sh(HEAD, "systemctl", "stop", UNIT[HEAD])
    pair.sh(HEAD, "cp", "-p", "/etc/glm53/settings.yaml", "/etc/glm53/settings.yaml.test")
    try:
        pair.sh(HEAD, "sed", "-i", "s/max_num_seqs: .*/max_num_seqs: none/", "/etc/glm53/settings.yaml")
        assert pair.lab.exec(HEAD, ["systemctl", "start", UNIT[HEAD]], check=False).returncode != 0
        until(lambda: pair.unit(HEAD, "ActiveState")["ActiveState"] == "failed", "failed", 20)
        assert pair.unit(HEAD, "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "78", "NRestarts": "0"}
        said = pair.journal(HEAD, "-n", "20")
        assert "the pair is down until this is mended" in said
        assert "vllm.max_num_seqs: found 'none'; expected int" in said
    finally:
        pair.sh(HEAD, "mv", "/etc/glm53/settings.yaml.test", "/etc/glm53/settings.yaml")
        pair.sh(HEAD, "systemctl", "reset-failed", UNIT[HEAD])
        pair.sh(HEAD, "systemctl", "start", UNIT[HEAD], timeout=FORM_SECONDS)


def test_the_api_is_not_on_the_fabric(pair: Pair) -> None:
    """Prevents a bind to every address when one was asked for."""
    listening = pair.sh(HEAD, "ss", "-Hltn", "sport = :8888").split()
    assert "10.78.0.1:8888" in listening
    assert not any(address in listening for address in ("0.0.0.0:8888", "*:8888", "10.77.0.1:8888"))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        opener.open(f"{API}/v1/models/nothing", timeout=10)
    assert caught.value.code == 404
