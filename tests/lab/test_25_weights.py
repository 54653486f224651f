"""Weights from a hub to the head and on to the worker, beside a pair that serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.api import Lab
from lab.settings import ACCOUNT, MACHINE_ADDRESS
from tests.lab.conftest import HEAD, WORKER, Pair, play
from tests.unit.hub_server import COMMIT, HubServer, Repository, serving
from tests.unit.snapshots import REPOSITORY, model_files

FOLDER = "/srv/weights/unit/glm"
FILES = model_files(4, size=3_000_000)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """A hub on the machine's own address in the lab."""
    server = HubServer({REPOSITORY: Repository(files=FILES)})
    with serving(server, MACHINE_ADDRESS, MACHINE_ADDRESS):
        yield server


@pytest.fixture
def variables(hub: HubServer, tmp_path: Path) -> str:
    """Arguments of a run for another model than the one that is served."""
    path = tmp_path / "variables.json"
    source = {"repository": REPOSITORY, "revision": COMMIT}
    values = {
        "glm53_model_dir": FOLDER,
        "glm53_model_source": source,
        "glm53_hub_environment": {"HF_ENDPOINT": hub.url},
    }
    path.write_text(json.dumps(values))
    return f"@{path}"


def sums(pair: Pair, host: str) -> dict[str, str]:
    """Return the SHA-256 of each file on `host`, and its owner."""
    out = pair.sh(host, "sh", "-c", f"cd {FOLDER} && find . -type f | sort | xargs sha256sum")
    return {line.split()[1]: line.split()[0] for line in out.splitlines()}


def test_download_beside_a_serving_pair(lab: Lab, pair: Pair, hub: HubServer, variables: str) -> None:
    """Prevents a download that needs a stopped pair, makes files of root, or makes a release current."""
    before, current = pair.status(), pair.sh(HEAD, "readlink", "/opt/glm53/current")
    checked = play(lab, "playbooks/download.yml", "-e", variables, "--check")
    assert checked.code == 0, checked.output[-3000:]
    assert pair.lab.exec(HEAD, ["test", "-e", FOLDER], check=False).returncode == 1
    run = play(lab, "playbooks/download.yml", "-e", variables)
    assert run.code == 0, run.output[-3000:]
    assert len(sums(pair, HEAD)) == len(FILES) + 1
    assert pair.sh(HEAD, "find", "/srv/weights/unit", "!", "-user", ACCOUNT) == ""
    asked = len(hub.asked)
    again = play(lab, "playbooks/download.yml", "-e", variables)
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]
    assert len(hub.asked) == asked
    after = pair.status()
    assert (after["epoch"], after["since"]) == (before["epoch"], before["since"])
    assert pair.sh(HEAD, "readlink", "/opt/glm53/current") == current


def test_prepare_brings_them_to_the_worker(lab: Lab, pair: Pair, variables: str) -> None:
    """Prevents a copy that starves a serving pair, one that is not the head's, and one that is made twice."""
    before = pair.status()
    refused = play(lab, "playbooks/prepare.yml", "-e", variables)
    assert refused.code != 0
    assert "the pair is serving: a copy at full speed would starve its requests" in refused.output
    slow = ("-e", variables, "-e", '{"glm53_ship_limit_mb": 40}')
    run = play(lab, "playbooks/prepare.yml", *slow)
    assert run.code == 0, run.output[-3000:]
    assert sums(pair, WORKER) == sums(pair, HEAD)
    again = play(lab, "playbooks/prepare.yml", *slow)
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]
    after = pair.status()
    assert (after["epoch"], after["since"]) == (before["epoch"], before["since"])


def test_a_flipped_bit_is_found_and_mended_alone(
    lab: Lab, pair: Pair, hub: HubServer, variables: str
) -> None:
    """Prevents weights that are wrong on one node for ever: found there by every byte, sent again alone."""
    shard = f"{FOLDER}/model-00002-of-00004.safetensors"
    pair.sh(WORKER, "sh", "-c", f"printf x | dd of={shard} bs=1 seek=1500000 conv=notrunc")
    assert pair.lab.exec(WORKER, ["glm53", "verify", FOLDER], check=False).returncode == 0
    found = pair.lab.exec(WORKER, ["glm53", "verify", "--full", FOLDER], check=False)
    assert found.returncode == 65
    assert "1 wrong\n  - model-00002-of-00004.safetensors: its content has the hash" in found.stdout
