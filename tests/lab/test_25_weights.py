"""The weights on the worker: what is equal stays, what differs is replaced, and then nothing is left."""

from __future__ import annotations

from lab.api import Lab
from lab.settings import MODEL_DIR
from tests.lab.conftest import HEAD, WORKER, Pair, play

EQUAL, DAMAGED = f"{MODEL_DIR}/model.safetensors", f"{MODEL_DIR}/tokenizer.json"


def test_files_of_another_time_are_compared_and_only_other_content_travels(lab: Lab, pair: Pair) -> None:
    """Prevents a whole checkpoint over the fabric because a copy has other times; and damage that stays."""
    before = pair.sh(WORKER, "stat", "-c", "%i", EQUAL)
    pair.sh(WORKER, "touch", "-d", "@1000000000", EQUAL)
    pair.sh(
        WORKER,
        "sh",
        "-c",
        f"printf X | dd of={DAMAGED} bs=1 seek=9 conv=notrunc && touch -d @1000000000 {DAMAGED}",
    )
    run = play(lab, "playbooks/artifacts.yml")
    assert run.code == 0, run.output[-3000:]
    assert "2 files have other times" in " ".join(run.output.split())
    assert f"{MODEL_DIR}: 1 files at" in run.output
    assert pair.sh(WORKER, "stat", "-c", "%i", EQUAL) == before
    for path in (EQUAL, DAMAGED):
        here, there = (pair.sh(host, "sha256sum", path) for host in (HEAD, WORKER))
        assert here == there
    again = play(lab, "playbooks/artifacts.yml")
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]
    assert "other times" not in again.output
