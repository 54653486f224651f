"""What owners of such pairs have reported of starts, restarts and settings, with the values they reported.

Long times are scaled; each test says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from glm53_service.artifacts.draft import read_draft_files
from glm53_service.engines import engine_for
from glm53_service.engines.base import LineKind
from glm53_service.engines.tensorfold_log import NCCL_MEMORY
from glm53_service.errors import GaveUpError
from glm53_service.settings import Supervision
from glm53_service.supervisor.decide import Action, Phase, decide
from glm53_service.supervisor.world import World
from tests.unit.doubles import FakeContainer
from tests.unit.fixtures import (
    LICENCE,
    launch_of,
    place,
    settings_of,
    tensorfold_data,
    vllm_data,
    with_dflash2,
)
from tests.unit.pair import Pair, quick, run_pair
from tests.unit.test_decide import snapshot
from tests.unit.test_pair_engines import HEALTH, tensorfold

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


class Told:
    """A notifier that keeps what it is told (glm53_service.notify.Notifier)."""

    watchdog_seconds = None

    def __init__(self) -> None:
        self.said: list[str] = []

    def ready(self) -> None:
        """Keep READY=1."""
        self.said.append("ready")

    def stopping(self) -> None:
        """Keep STOPPING=1."""
        self.said.append("stopping")

    def status(self, text: str) -> None:
        """Keep nothing: a status is no promise."""


def listened_to(monkeypatch: pytest.MonkeyPatch) -> dict[str, Told]:
    """Return what each node's supervisor tells systemd, from now on."""
    told = {"a": Told(), "b": Told()}
    plain = Pair.world

    def world(self: Pair, name: str) -> World:
        return dataclasses.replace(plain(self, name), notifier=told[name])  # type: ignore[arg-type]

    monkeypatch.setattr(Pair, "world", world)
    return told


async def gives_up(pair: Pair) -> GaveUpError:
    """Start the pair and return with what words its head gave up."""
    pair.start("a")
    pair.start("b")
    with pytest.raises(GaveUpError) as caught:
        await asyncio.wait_for(pair.tasks["a"], 20)
    await pair.until(lambda: pair.running() == (0, 0), "no rank is left")
    return caught.value


def starts(pair: Pair, node: str) -> int:
    """Return how many rank containers were started on `node`."""
    return pair.docker[node].history.count("start")


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_an_engine_that_always_exits_with_1_is_given_up(tmp_path: Path, when: str) -> None:
    """Prevents 35 restarts in a row, each of which leaks memory until the machine must be unplugged: exit 1,
    20 s (here: 0.2) into every start, or after every READY.
    """

    async def story(pair: Pair) -> None:
        open_api = pair.docker["a"].on_start
        assert open_api is not None
        ends = set()

        async def start(container: FakeContainer) -> None:
            if when == "serving":
                await open_api(container)

            async def end() -> None:
                await asyncio.sleep(0.2)
                if when == "serving":
                    await pair.until(lambda: pair.service["a"].status().ready, "ready")
                name = next(n for n, c in pair.docker["a"].containers.items() if c is container)
                await pair.docker["a"].exit(name, 1)

            ends.add(asyncio.create_task(end()))

        pair.docker["a"].on_start = start
        error = await gives_up(pair)
        assert (starts(pair, "a"), starts(pair, "b")) == (4, 4)
        assert error.exit_code == 70  # systemd starts no unit anew that ended so
        assert "gave up: 4 engine faults within" in error.message
        assert "rank 0 exited with code 1" in error.message
        assert len(pair.evidence("a")) >= 1

    tensorfold(tmp_path, story, supervision={"faults_allowed": 4})


def test_ways_out_that_never_help_end_too(tmp_path: Path) -> None:
    """Prevents a passing fault that does not pass from being tried for ever, because a retry is no fault."""

    async def story(pair: Pair) -> None:
        async def start(container: FakeContainer) -> None:
            pair.docker["a"].last_words = [f"RuntimeError: {NCCL_MEMORY}"]
            container.code, container.state = 1, "exited"
            container.exited.set()

        pair.docker["a"].on_start = start
        await gives_up(pair)
        assert starts(pair, "a") == 2 * 3  # as it was, once more, without the split; then a fault

    tensorfold(tmp_path, story, supervision={"faults_allowed": 2})


def test_systemd_hears_ready_once_and_only_after_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a unit that is "active" while its engine was refused a window and nothing has answered: under
    systemd the refit and the first answer come before READY, as by hand.
    """
    told = listened_to(monkeypatch)

    async def story(pair: Pair) -> None:
        open_api, windows = pair.docker["a"].on_start, []

        async def start(container: FakeContainer) -> None:
            command = container.spec.command
            windows.append(command[command.index("--context") + 1])
            if len(windows) == 1:
                pair.docker["a"].said = [
                    "tensorfold: CUDA startup memory budget cannot fit requested context 1048576; estimated"
                    " largest fitting prompt-plus-reply window: 393216 tokens across the ranks."
                ]
                container.code, container.state = 1, "exited"
                container.exited.set()
                return
            pair.api.health = {**HEALTH, "context_length": 393_216}
            assert open_api is not None
            await open_api(container)

        pair.docker["a"].on_start = start
        pair.api.hangs = True
        pair.start("a")
        pair.start("b")
        await pair.until(lambda: bool(pair.api.asked), "the first question is asked")
        assert windows == ["1048576", "393216"]
        assert told["a"].said == []
        assert told["b"].said == ["ready"]  # a worker is: it waits for its head
        pair.api.hangs = False
        await pair.serving(2)
        assert told["a"].said == ["ready"]

    tensorfold(tmp_path, story)


@pytest.mark.parametrize("when", ["loading", "serving"])
@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_restart_of_rank_1_alone_restarts_the_group(tmp_path: Path, when: str, code: int) -> None:
    """Prevents a rank that is restarted beside the old other one, with whatever code it ends: it can never
    join that one again.
    """

    async def story(pair: Pair) -> None:
        open_api = pair.docker["a"].on_start
        if when == "loading":
            pair.docker["a"].on_start = None
        pair.start("a")
        pair.start("b")
        if when == "loading":
            await pair.until(lambda: pair.running() == (1, 1), "both load")
        else:
            await pair.serving(1)
        first = {node: pair.docker[node].running()[0] for node in "ab"}
        pair.docker["a"].on_start = open_api
        await pair.docker["b"].exit(first["b"], code)
        await pair.serving(2)
        assert [first[node] in pair.docker[node].containers for node in "ab"] == [False, False]
        assert starts(pair, "a") == starts(pair, "b") == 2

    run_pair(tmp_path, story)


@pytest.mark.parametrize("answer", ["refused", 500, 503])
def test_ten_failed_probes_while_it_loads_kill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | int
) -> None:
    """Prevents a head that is killed in the middle of its compilation, by the check that is for a served
    pair; its worker would wait for it for ever.
    """
    monkeypatch.setattr("glm53_service.supervisor.epoch.API_POLL_SECONDS", 0.02)
    probes: list[int] = []

    async def story(pair: Pair) -> None:
        plain, open_api = pair.api._health, pair.docker["a"].on_start
        assert open_api is not None

        async def health(request: Any) -> Any:
            probes.append(1)
            pair.api.health_status = 200 if len(probes) > 10 or answer == "refused" else int(answer)
            return await plain(request)

        monkeypatch.setattr(pair.api, "_health", health)
        opened = set()

        async def late(container: FakeContainer) -> None:
            async def wait() -> None:
                await asyncio.sleep(0.4)
                await open_api(container)

            opened.add(asyncio.create_task(wait()))

        if answer == "refused":
            pair.docker["a"].on_start = late
        await pair.both_serve()
        assert "kill" not in pair.docker["a"].history + pair.docker["b"].history
        assert answer == "refused" or len(probes) > 10

    run_pair(tmp_path, story)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_nodes_may_boot_five_minutes_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Prevents a pair that is down after a power cut, because one machine checked its disks for 5 minutes."""
    jump = [0.0]
    plain = Pair.world

    def world(self: Pair, name: str) -> World:
        return dataclasses.replace(plain(self, name), clock=lambda: time.monotonic() + jump[0])

    monkeypatch.setattr(Pair, "world", world)

    async def story(pair: Pair) -> None:
        pair.start(order[0])
        said = {"a": "waiting for b (rank 1): not heard of yet", "b": "127.0.1.1 does not answer"}[order[0]]
        await pair.until(lambda: said in str(pair.service[order[0]].status().reasons), said)
        jump[0] = 300.0
        await asyncio.sleep(0.7)  # more than a tick of either: the wait is seen to be long
        assert not pair.tasks[order[0]].done()
        assert said in pair.service[order[0]].status().reasons[0]
        pair.start(order[1])
        await pair.serving(1)
        assert pair.service["a"].status().faults == 0

    run_pair(tmp_path, story)


def test_a_rank_may_build_its_kernels_a_minute_longer_than_the_other() -> None:
    """Prevents the end of a first start whose ranks compile at different speeds: 60 s apart; and rank 0's
    repeated wait from counting as a sign of life when rank 1 has died in its build.
    """
    engine = engine_for(settings_of(tensorfold_data()))
    build = (
        "[tensorfold] building CUDA extension glm53_kda (first start after an install or update; later starts"
        " reuse it)"
    )
    assert engine.read_line(build).kind is LineKind.PROGRESS
    waits = "[tensorfold] rank 0 finished loading; waiting for rank 1 (60 s)"
    assert engine.read_line(waits).kind is LineKind.WAITING
    starting = snapshot(Phase.STARTING)
    for quiet in (60.0, 300.0, 899.0):
        assert decide(dataclasses.replace(starting, quiet=quiet), Supervision()).action is Action.NONE


SHELL = {
    "MAX_MODEL_LEN": "1",
    "MAX_NUM_SEQS": "1",
    "GPU_MEM_UTIL": "0.1",
    "PORT": "1",
    "SPEC_METHOD": "none",
    "ABLIT": "1",
    "DRAFTER": "none",
    "PARALLEL": "1",
    "CONTEXT": "1",
    "KV": "bf16",
    "DENSE": "bf16",
    "VISION": "0",
    "MEMORY_RESERVE_GIB": "2",
    "TF_GLM_KV": "bf16",
    "TENSORFOLD_MEMORY_RESERVE_GIB": "2",
    "NCCL_IB_GID_INDEX": "0",
    "NCCL_IB_HCA": "mlx5_9",
    "GLOO_SOCKET_IFNAME": "eth9",
    "VLLM_HOST_IP": "192.0.2.9",
    "HF_HOME": "/elsewhere",
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("data", [with_dflash2(), vllm_data()], ids=["tensorfold", "vllm"])
def test_what_a_shell_exports_reaches_no_rank(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], rank: int
) -> None:
    """Prevents a forgotten export from winning over the inventory, on one node, after the next login."""

    def body() -> dict[str, Any]:
        settings = settings_of(data)
        return engine_for(settings).container(launch_of(settings), place(rank), "sha256:i").api()

    before = body()
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    assert body() == before
    assert not [v for v in before["Env"] if v in {f"{name}={value}" for name, value in SHELL.items()}]


@pytest.mark.parametrize(
    ("engine", "last"),
    [
        ("tensorfold", "tensorfold serve: error: unrecognized arguments: --no-such-flag"),
        ("tensorfold", "tensorfold serve: error: argument --prefill-pass: invalid int value: '8k'"),
        ("vllm", "vllm: error: unrecognized arguments: --no-such-flag"),
        ("vllm", "vllm: error: argument --block-size: invalid int value: '8k'"),
    ],
)
def test_an_argument_that_the_image_does_not_know_starts_nothing(
    tmp_path: Path, engine: str, last: str
) -> None:
    """Prevents a load of minutes that ends with a usage message, and a restart loop over a typing error."""

    async def story(pair: Pair) -> None:
        pair.docker["a"].parser, pair.docker["a"].said = (2, "exited"), ["usage: ...", last]
        pair.start("a")
        pair.start("b")
        said = f"rank 0: the image refuses the arguments: {last}"
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        assert starts(pair, "a") + starts(pair, "b") == 0
        assert pair.service["a"].status().faults == 0

    tensorfold(tmp_path, story) if engine == "tensorfold" else run_pair(tmp_path, story)


@pytest.mark.parametrize("fault", ["absent", "other bytes"])
def test_a_drafter_on_rank_0_only_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Prevents ranks with different settings: the engine finds it out after minutes, or drafts at half the
    acceptance.
    """
    for node, weights in (("a", b"weights"), ("b", b"wEights")):
        folder = tmp_path / f"draft-{node}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    if fault == "absent":
        (tmp_path / "draft-b/model.safetensors").unlink()

    def on_its_node(folder: Path, state: Path, *, node: str, rank: int) -> Any:
        return read_draft_files(tmp_path / f"draft-{'ab'[rank]}", state, node=node, rank=rank)

    monkeypatch.setattr("glm53_service.supervisor.ranks.read_draft_files", on_its_node)
    drafter = {"request": "dflash2", "path": str(tmp_path / "draft-a"), "licence": LICENCE}

    async def story(pair: Pair) -> None:
        pair.api.health = {**HEALTH, "streams": {"max": 4}}
        pair.start("a")
        pair.start("b")
        said = {"absent": "model.safetensors: No such file", "other bytes": "has SHA-256 "}[fault]
        await pair.until(lambda: said in pair.service["a"].status().last_end, said)
        assert pair.service["a"].status().last_end.startswith("b (rank 1): DFlash2 in ")
        assert starts(pair, "a") + starts(pair, "b") == 0
        (tmp_path / "draft-b/model.safetensors").write_bytes(b"weights")
        await pair.until(lambda: pair.service["a"].status().ready, "serving once it is mended")

    tensorfold(tmp_path, story, drafter=drafter)


def test_ranks_that_the_engine_calls_unequal_are_told_what_to_do() -> None:
    """Prevents a traceback as the only word about ranks that were started with different settings."""
    engine = engine_for(settings_of(tensorfold_data()))
    said = (
        "RuntimeError: the two ranks were started with different settings (drafter): rank 0 [1], rank 1 [0]"
    )
    assert "run site.yml" in engine.advice(said)
