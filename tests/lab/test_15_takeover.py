"""Another recipe still runs on the hosts: it is named, stopped only when asked, and given back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lab.api import Lab
from lab.settings import IMAGE
from tests.lab.conftest import HEAD, WORKER, play, until
from tests.lab.test_10_bare import traces

CONTAINER = "glm53-flash-tf"
UNIT = "flash-watch.service"
RECORD = "/var/lib/glm53/taken-over.json"
SCRIPT = """#!/bin/sh
# Brings the rank back when it is gone.
while :; do docker inspect glm53-flash-tf >/dev/null 2>&1; sleep 30; done
"""
SERVICE = "[Service]\nExecStart=/usr/local/bin/flash-watch\n[Install]\nWantedBy=multi-user.target\n"


def container(lab: Lab) -> tuple[str, str]:
    """The recipe's container on the head: state and restart policy."""
    form = "{{.State.Status}} {{.HostConfig.RestartPolicy.Name}}"
    state, policy = lab.docker(HEAD, ["inspect", "-f", form, CONTAINER]).stdout.split()
    return state, policy


def unit(lab: Lab) -> tuple[str, str]:
    """The watchdog's unit on the worker: active and enabled."""
    words = [lab.exec(WORKER, ["systemctl", verb, UNIT], check=False) for verb in ("is-active", "is-enabled")]
    return words[0].stdout.strip(), words[1].stdout.strip()


RUNS = (("running", "unless-stopped"), ("active", "enabled"))
TAKEN = (("exited", "no"), ("inactive", "disabled"))


@pytest.fixture
def recipe(lab: Lab) -> Iterator[Lab]:
    """A container on the head that listens where the API will, and a watchdog's unit on the worker."""
    run = ["run", "-d", "--name", CONTAINER, "--restart", "unless-stopped", "--network", "host"]
    run += ["--stop-signal", "SIGKILL"]  # its first process ignores SIGTERM, as a follower of TensorFold does
    lab.docker(HEAD, [*run, "--entrypoint", "python3", IMAGE, "-m", "http.server", "8888", "-b", "10.78.0.1"])
    for path, text in (("/usr/local/bin/flash-watch", SCRIPT), (f"/etc/systemd/system/{UNIT}", SERVICE)):
        lab.exec(WORKER, ["tee", path], stdin=text)
    lab.exec(WORKER, ["chmod", "755", "/usr/local/bin/flash-watch"])
    lab.exec(WORKER, ["systemctl", "daemon-reload"])
    lab.exec(WORKER, ["systemctl", "enable", "--now", UNIT])
    until(lambda: "10.78.0.1:8888" in lab.exec(HEAD, ["ss", "-ltn"]).stdout, "the recipe listens", 30)
    yield lab
    lab.docker(HEAD, ["rm", "-f", CONTAINER], check=False)
    lab.exec(WORKER, ["systemctl", "disable", "--now", UNIT], check=False)
    lab.exec(WORKER, ["rm", "-f", "/usr/local/bin/flash-watch", f"/etc/systemd/system/{UNIT}"])
    lab.exec(WORKER, ["systemctl", "daemon-reload"])


def test_another_recipe_is_named_stopped_when_asked_and_given_back(recipe: Lab) -> None:
    """Prevents two engines in one memory, an owner's service stopped without leave, or lost for good."""
    lab = recipe
    refused = play(lab, "site.yml")
    said = " ".join(refused.output.split())
    assert refused.code != 0
    assert f"container {CONTAINER} (image {IMAGE}, running, restart policy unless-stopped)" in said
    assert "listens on 10.78.0.1:8888 (the API)" in said
    assert f"unit {UNIT} (active, enabled): starts {CONTAINER}" in said
    assert "glm53_take_over=true" in said
    assert (container(lab), unit(lab), traces(lab)) == (*RUNS, [])

    script = "exec sh -c 'while :; do sleep 30; done # glm53-flash-tf'"
    pid = lab.exec(WORKER, ["bash", "-c", f"({script}) >/dev/null 2>&1 & echo $!"]).stdout.strip()
    bare = play(lab, "playbooks/host.yml", "-e", "glm53_take_over=true")
    lab.exec(WORKER, ["kill", pid])
    assert bare.code != 0
    assert f"pid {pid} of root" in " ".join(bare.output.split())
    assert (container(lab), unit(lab), traces(lab), bare.changed) == (*RUNS, [], 0)

    check = play(lab, "playbooks/host.yml", "--check", "-e", "glm53_take_over=true")
    assert check.code == 0, check.output[-3000:]
    assert f"would stop container {CONTAINER}" in check.output
    assert f"would disable unit {UNIT}" in check.output
    assert (container(lab), unit(lab), traces(lab)) == (*RUNS, [])

    taken = play(lab, "playbooks/host.yml", "-e", "glm53_take_over=true")
    assert taken.code == 0, taken.output[-3000:]
    assert (container(lab), unit(lab)) == TAKEN
    for host, name in ((HEAD, CONTAINER), (WORKER, UNIT)):
        assert lab.exec(host, ["stat", "-c", "%U %a", RECORD]).stdout == "root 600\n"
        entries = json.loads(lab.exec(host, ["cat", RECORD]).stdout)["taken"]
        assert [(entry["name"], entry["done"]) for entry in entries] == [(name, True)]

    again = play(lab, "playbooks/host.yml", "-e", "glm53_take_over=true")
    assert (again.code, again.changed) == (0, 0), again.output[-3000:]

    back = play(lab, "playbooks/uninstall.yml")
    assert back.code == 0, back.output[-3000:]
    assert (container(lab), unit(lab), traces(lab)) == (*RUNS, [])
