"""The image is asked before a pair that serves is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53_service.engines.base import ContainerSpec
from glm53_service.errors import UnavailableError
from glm53_service.precheck import ask_image
from tests.unit.doubles import make_settings
from tests.unit.pair import Pair, quick, run_pair

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


def test_a_flag_that_the_image_does_not_know_leaves_the_pair_alone(tmp_path: Path) -> None:
    """Prevents a pair that is stopped for settings with which it cannot come back."""

    async def story(pair: Pair) -> None:
        await pair.both_serve()
        docker, asked = pair.docker["a"], pair.docker["a"].checks
        wrong = make_settings(tmp_path / "model", vllm={"max_model_len": 4096})
        docker.parser = (2, "exited")
        with pytest.raises(UnavailableError, match="the image refuses the arguments"):
            await ask_image(pair.node("a"), wrong, docker, pair.world("a"))
        assert docker.checks == asked + 1
        status = pair.service["a"].status()
        assert (status.ready, status.epoch) == (True, 1)
        assert pair.running() == (1, 1)
        assert [c.spec.name for c in docker.containers.values()] == ["glm53-rank0"]

    run_pair(tmp_path, story)


def test_what_was_asked_before_the_restart_is_not_asked_at_the_start(tmp_path: Path) -> None:
    """Prevents a start that asks once more, and a check whose container a supervisor takes for a leftover."""

    async def story(pair: Pair) -> None:
        docker, labels = pair.docker["a"], []
        create = docker.create

        async def noted(spec: ContainerSpec) -> str:
            labels.append(spec.labels)
            return await create(spec)

        docker.create = noted  # type: ignore[method-assign]
        same = make_settings(tmp_path / "model", api={"port": pair.api.port}, gate={"port": pair.gate})
        assert await ask_image(pair.node("a"), same, docker, pair.world("a")) == ""
        assert labels == [{"glm53.check": "unit"}]
        await pair.both_serve()
        assert docker.checks == 1

    run_pair(tmp_path, story)


def test_a_state_folder_that_is_not_there_yet_costs_a_question_only(tmp_path: Path) -> None:
    """Prevents a traceback before the first start: the folder is made by systemd when the unit first runs."""

    async def story(pair: Pair) -> None:
        (tmp_path / "a").write_text("in the way")
        settings = make_settings(tmp_path / "model")
        for asked in (1, 2):
            assert await ask_image(pair.node("a"), settings, pair.docker["a"], pair.world("a")) == ""
            assert pair.docker["a"].checks == asked

    run_pair(tmp_path, story)
