"""Ranks of the TensorFold double as real processes on loopback, under the name that the image gives it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lab.tensorfold.checkpoint import write_checkpoint, write_drafter
from lab.tensorfold.image import PROGRAM

BUDGET_SECONDS = 20.0
QUICK = {
    "TF_DOUBLE_LOAD_SECONDS": "0.05",
    "TF_DOUBLE_BUILD_SECONDS": "0.05",
    "TF_DOUBLE_ROUND_SECONDS": "0.02",
    "TF_DOUBLE_DECODE_RATE": "400",
}
FRANCE = "What is the capital of France?"


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return the condition's first true value; the budget is no measure."""
    deadline = time.monotonic() + BUDGET_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"never: {what}")
        time.sleep(0.02)
    return value


def quiet_port() -> int:
    """A free port that no outgoing connection gets: from below the range that the kernel takes those from."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def let_pass(seconds: float) -> None:
    """Return after a while in which nothing is expected to happen."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, "time passes")


class Answer:
    """An HTTP answer."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.status, self.headers, self.text = status, headers, text

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Ranks:
    """A checkpoint, a drafter, and the ranks that were started with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.drafter = folder / "model-a", folder / "drafter-a"
        write_checkpoint(self.model)
        write_drafter(self.drafter)
        (folder / "tensorfold").symlink_to(PROGRAM)
        self.port, self.master_port = quiet_port(), quiet_port()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def environment(self, rank: int, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """A rank's environment: its own cache folder, everything quick."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.folder),
            "TORCH_EXTENSIONS_DIR": str(self.cache(rank) / "torch_extensions"),
            "TF_DOUBLE_DIR": str(self.cache(rank) / "tf-double"),
            **QUICK,
            **(changes or {}),
        }

    def cache(self, rank: int) -> Path:
        """What is mounted at /cache in a rank's container."""
        return self.folder / f"cache-{rank}"

    def arguments(self, rank: int, *extra: str) -> list[str]:
        """The recipe's arguments of a rank; `extra` come last and win."""
        argv = ["serve", str(self.model), "--tp", "2", "--rank", str(rank), "--master", "127.0.0.1"]
        argv += ["--master-port", str(self.master_port), "--drafter", str(self.drafter)]
        argv += ["--context", "65536", "--parallel", "3", "--max-tokens", "512"]
        if rank == 0:
            argv += ["--name", "unit-glm", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*argv, *extra]

    def start(self, rank: int, *extra: str, env: Mapping[str, str] | None = None) -> None:
        """Start one rank."""
        with self.log_path(rank).open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "tensorfold", *self.arguments(rank, *extra)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self.environment(rank, env),
            )

    def start_both(self, *extra: str, env: Mapping[str, str] | None = None) -> None:
        """Start rank 1, then rank 0, as the recipe does, with the same environment."""
        self.start(1, *extra, env=env)
        self.start(0, *extra, env=env)

    def serve(self, *extra: str, env: Mapping[str, str] | None = None) -> None:
        """Start both and return when the API answers and the follower follows."""
        self.start_both(*extra, env=env)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the API answers and the follower follows."""
        until(lambda: self.up() or not self.running(0), "the API answers")
        assert self.running(0), self.log(0) + self.log(1)
        self.wait_line(1, "following rank 0")

    def up(self) -> bool:
        """Whether the API answers."""
        try:
            return self.get("/v1/models").status == 200
        except OSError:
            return False

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def log(self, rank: int) -> str:
        """What a rank has printed."""
        return self.log_path(rank).read_text(errors="replace")

    def wait_line(self, rank: int, pattern: str) -> re.Match[str]:
        """Return the first match in a rank's output, once there is one."""
        found: re.Match[str] = until(
            lambda: re.search(pattern, self.log(rank), re.MULTILINE), f"{pattern!r} of rank {rank}"
        )
        return found

    def code(self, rank: int) -> int:
        """The exit code of a rank that is expected to end."""
        return self.processes[rank].wait(BUDGET_SECONDS)

    def running(self, rank: int) -> bool:
        return self.processes[rank].poll() is None

    def resident_mb(self, rank: int) -> int:
        """Memory that a rank really uses."""
        pages = Path(f"/proc/{self.processes[rank].pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize() // 1024**2

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def control(self, rank: int, line: str) -> None:
        """Begin a fault and return when the rank says so."""
        before = self.log(rank).count("fault")
        folder = self.cache(rank) / "tf-double"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "control").write_text(f"{line}\n")
        until(lambda: self.log(rank).count("fault") > before or not self.running(rank), f"fault {line}")

    def call(self, path: str, data: bytes | None = None, *, method: str | None = None) -> Answer:
        """One request; an HTTP error is an answer too."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=BUDGET_SECONDS) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read().decode())

    def get(self, path: str) -> Answer:
        return self.call(path)

    def post(self, path: str, body: Any) -> Answer:
        return self.call(path, json.dumps(body).encode())

    def chat(self, text: str = FRANCE, **more: Any) -> Answer:
        """One chat without thinking, unless `more` says so."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "chat_template_kwargs": {"enable_thinking": False},
            **more,
        }
        return self.post("/v1/chat/completions", body)

    def said(self, text: str = FRANCE, **more: Any) -> str:
        """The content of the reply."""
        content: str = self.chat(text, **more).json["choices"][0]["message"]["content"]
        return content

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/health").json
        return found

    def begin(self, *texts: str, **more: Any) -> list[Future[Answer]]:
        """Chats in the background; a test may leave them behind."""
        begun = []
        for text in texts:
            future: Future[Answer] = Future()
            Thread(target=self._fill, args=(future, text, more), daemon=True).start()
            begun.append(future)
        return begun

    def _fill(self, future: Future[Answer], text: str, more: Mapping[str, Any]) -> None:
        try:
            future.set_result(self.chat(text, **more))
        except OSError as error:
            future.set_exception(error)

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()
