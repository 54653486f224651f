"""Before anything is installed: check mode tells the truth, and wrong input changes nothing."""

from __future__ import annotations

import pytest

from lab.api import Lab
from lab.playbook import ROOT
from tests.lab.conftest import HEAD, WORKER, play

OURS = (
    "/etc/glm53",
    "/opt/glm53",
    "/usr/local/bin/glm53",
    "/etc/netplan/60-glm53-fabric.yaml",
    "/etc/systemd/system/glm53-head.service",
    "/etc/systemd/system/glm53-worker.service",
    "/home/spark/.ssh/glm53_ed25519",
)


def traces(lab: Lab) -> list[str]:
    """Return what of ours is on the hosts."""
    found = []
    for host in (HEAD, WORKER):
        found += [
            f"{host}:{path}"
            for path in OURS
            if lab.exec(host, ["test", "-e", path], check=False).returncode == 0
        ]
        if lab.exec(host, ["id", "glm53"], check=False).returncode == 0:
            found.append(f"{host}:user glm53")
    return found


def test_check_mode_on_bare_hosts_says_what_it_would_do_and_does_nothing(
    lab: Lab, bare: dict[str, str]
) -> None:
    """Prevents a dry run that fails half way on what a real run would have installed before, or that
    writes.
    """
    run = play(lab, "site.yml", "--check", "--diff")
    assert run.code == 0, run.output[-3000:]
    assert "would restart the pair" in run.output
    assert "would ask SmolLM2-135M-Instruct" in run.output
    said = " ".join(run.output.split())
    assert (
        "spark-b: model: 6 files, 290.3 MB to get from the head, 10.77.0.2, a rail that is not set up" in said
    )
    assert traces(lab) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            '{"glm53_vllm": {"max_num_seqs": 0, "kv_cache_memory": "128M"}}',
            "vllm.max_num_seqs: found 0; expected int >= 1",
        ),
        ('{"glm53_api_without_key": false}', "api.bind: found 'management' with no key"),
        ('{"glm53_modle_dir": "/x"}', "glm53_model_dir"),
        ('{"glm53_model_dir": "/srv/nowhere"}', "/srv/nowhere"),
        ('{"glm53_image": "nobody/nothing:1"}', "nobody/nothing:1"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_touched(lab: Lab, change: str, said: str) -> None:
    """Prevents a run that changes a host and then fails on a value that it could have read first."""
    run = play(lab, "site.yml", "-e", change)
    assert run.code != 0
    assert said in " ".join(run.output.split())
    assert traces(lab) == []


def test_the_unedited_example_says_what_to_fill_in(lab: Lab) -> None:
    """Prevents a newcomer's first run from failing with an ssh error for a host called CHANGE-ME."""
    assert (ROOT / "inventory/hosts.yml").read_text().count("CHANGE-ME") >= 2
    run = play(lab, "site.yml", "-i", str(ROOT / "inventory"), "--limit", "all")
    assert run.code != 0
    assert "CHANGE-ME" in run.output
    assert traces(lab) == []
