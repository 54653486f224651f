"""Giving the nodes back."""

from __future__ import annotations

from lab.api import Lab
from tests.lab.conftest import HEAD, WORKER, Pair, etc_of, play
from tests.lab.test_10_bare import traces


def test_uninstall_gives_the_nodes_back_and_keeps_what_was_expensive(
    lab: Lab, bare: dict[str, str], pair: Pair
) -> None:
    """Prevents leftovers, and the loss of 200 GB of image and weights with them."""
    run = play(lab, "playbooks/uninstall.yml")
    assert run.code == 0, run.output[-3000:]
    assert traces(lab) == []
    for host in (HEAD, WORKER):
        assert etc_of(lab, host).splitlines() == bare[host].splitlines()
        assert pair.containers(host, running=False) == []
        assert "glm53/engine" in pair.sh(host, "docker", "images")
        assert "model.safetensors" in pair.sh(host, "ls", "/srv/glm53/models/SmolLM2-135M-Instruct")
