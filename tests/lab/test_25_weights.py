"""Weights from a hub to the head and on to the worker, beside a pair that serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.api import Lab
from lab.settings import ACCOUNT, MACHINE_ADDRESS, MODEL_DIR
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


def words(output: str) -> str:
    """Return an output without Ansible's line breaks."""
    return " ".join(output.split())


def sums(pair: Pair, host: str, folder: str = FOLDER) -> dict[str, str]:
    """Return the SHA-256 of each file on `host`."""
    out = pair.sh(host, "sh", "-c", f"cd {folder} && find . -type f | sort | xargs sha256sum")
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
    refused = play(lab, "playbooks/prepare.yml", "-e", variables, "-e", '{"glm53_ship_limit_mb": 0}')
    assert refused.code != 0
    assert "the pair is serving: a copy at full speed would starve its requests" in words(refused.output)
    run = play(lab, "playbooks/prepare.yml", "-e", variables)
    assert run.code == 0, run.output[-3000:]
    assert sums(pair, WORKER) == sums(pair, HEAD)
    again = play(lab, "playbooks/prepare.yml", "-e", variables)
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
    mended = play(lab, "playbooks/artifacts.yml", "-e", variables)
    assert mended.code == 0, mended.output[-3000:]
    assert "model on spark-b: 1 files" in words(mended.output)
    assert sums(pair, WORKER) == sums(pair, HEAD)


OWN = "/srv/weights/own/glm"


def test_a_workers_own_copy_is_taken_over(lab: Lab, pair: Pair, tmp_path: Path) -> None:
    """Prevents 164 GiB sent to a worker that has them, an engine that loads a stranger's file, and weights
    that the service cannot read.

    Neither side has a manifest, the times differ, one file is rotten, one is not the head's, and a folder is
    closed.
    """
    made = "mkdir -p {0} && cp -r {1}/. {0} && rm {0}/.glm53-manifest.json && chown -R {2} /srv/weights/own"
    for host, owner in ((HEAD, "root"), (WORKER, ACCOUNT)):
        pair.sh(host, "sh", "-ec", made.format(OWN, FOLDER, owner))
    shard = f"{OWN}/model-00001-of-00004.safetensors"
    pair.sh(
        WORKER, "sh", "-ec", f"printf x | dd of={shard} bs=1 seek=900000 conv=notrunc; touch -d @7 {OWN}/*"
    )
    pair.sh(
        WORKER,
        "sh",
        "-ec",
        f"touch {OWN}/old.safetensors; chmod 0750 /srv/weights/own; chgrp root /srv/weights/own",
    )
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"glm53_model_dir": OWN}))
    extra = play(lab, "playbooks/artifacts.yml", "-e", f"@{path}")
    assert extra.code != 0
    assert "1 files there that the head has not (old.safetensors)" in words(extra.output)
    pair.sh(WORKER, "rm", f"{OWN}/old.safetensors")
    closed = play(lab, "playbooks/artifacts.yml", "-e", f"@{path}")
    assert closed.code != 0
    assert "the account glm53 cannot read /srv/weights/own." in words(closed.output)
    assert "`sudo setfacl -m u:glm53:x FOLDER`" in words(closed.output)
    assert pair.lab.exec(HEAD, ["test", "-e", f"{OWN}/.glm53-manifest.json"], check=False).returncode == 1
    pair.sh(WORKER, "chmod", "0755", "/srv/weights/own")
    run = play(lab, "playbooks/artifacts.yml", "-e", f"@{path}")
    assert run.code == 0, run.output[-3000:]
    assert "model on spark-b: 1 files, 3.0 MB" in words(run.output)
    assert sums(pair, WORKER, OWN) == sums(pair, HEAD, OWN)
    assert pair.sh(HEAD, "stat", "-c", "%U", f"{OWN}/.glm53-manifest.json").strip() == "root"
    again = play(lab, "playbooks/artifacts.yml", "-e", f"@{path}")
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]


def test_a_run_with_everything_in_place_reads_no_weights(lab: Lab, pair: Pair) -> None:
    """Prevents 176 GB read at every run: a file's time of access would show it, as the last line proves."""
    weights = f"{MODEL_DIR}/model.safetensors"
    for host in (HEAD, WORKER):
        pair.sh(host, "touch", "-a", "-d", "@1000", weights)
    run = play(lab, "playbooks/artifacts.yml")
    assert (run.code, run.changed) == (0, 0), run.output[-3000:]
    for host in (HEAD, WORKER):
        assert pair.sh(host, "stat", "-c", "%X", weights).strip() == "1000"
        pair.sh(host, "dd", f"if={weights}", "of=/dev/null", "bs=4096", "count=1")
        assert pair.sh(host, "stat", "-c", "%X", weights).strip() != "1000"


def test_prune_lists_and_removes_only_when_told(lab: Lab, pair: Pair) -> None:
    """Prevents a disk full of what old runs left, and a prune that takes more or touches the pair."""
    before, left = pair.status(), f"{MODEL_DIR}/.w.safetensors.0123456789abcdef.incomplete"
    kept = {host: pair.sh(host, "ls", MODEL_DIR) for host in (HEAD, WORKER)}
    for host in (HEAD, WORKER):
        pair.sh(host, "touch", "-d", "3 days ago", left)
    listed = play(lab, "playbooks/prune.yml")
    assert (listed.code, listed.changed) == (0, 0), listed.output[-3000:]
    assert words(listed.output).count(f"unfinished {left}") == 2
    checked = play(lab, "playbooks/prune.yml", "-e", "glm53_prune=true", "--check")
    assert (checked.code, checked.changed) == (0, 2), checked.output[-3000:]
    assert [pair.lab.exec(host, ["test", "-e", left]).returncode for host in (HEAD, WORKER)] == [0, 0]
    removed = play(lab, "playbooks/prune.yml", "-e", "glm53_prune=true")
    assert (removed.code, removed.changed) == (0, 2), removed.output[-3000:]
    for host in (HEAD, WORKER):
        assert pair.lab.exec(host, ["test", "-e", left], check=False).returncode == 1
        assert pair.sh(host, "ls", MODEL_DIR) == kept[host]
    after = pair.status()
    assert (after["epoch"], after["since"], after["ready"]) == (before["epoch"], before["since"], True)
