"""What is in the pair's way, decided from what a node shows, in the shapes that owners reported."""

from __future__ import annotations

from typing import Any

import pytest

from glm53_service.foreign import Claim, Finding, claims, findings
from glm53_service.node import load_node
from glm53_service.settings import settings_from

TF = "c" * 64
RECIPES = ("glm53-flash-tf", "glm-5.3-flash")
API = Claim(port=8765, addresses=("10.9.0.1",), use="the API")
RENDEZVOUS = Claim(port=29551, addresses=("10.1.0.1",), use="the ranks' rendezvous")


def container(name: str = "glm53-flash-tf", **change: Any) -> dict[str, Any]:
    """The recipe's container: made with a GPU, running, no restart policy."""
    return {
        "id": TF,
        "name": name,
        "image": "example/tensorfold@sha256:1",
        "state": "running",
        "exit_code": 0,
        "policy": "no",
        "ours": False,
        "gpu": True,
        "published": [],
        "auto_remove": False,
        "swarm": "",
        **change,
    }


def holder(pid: int = 4242, **change: Any) -> dict[str, Any]:
    """A process: python3 of alice's, from a login."""
    return {
        "pid": pid,
        "command": "python3",
        "user": "alice",
        "container": "",
        "unit": "",
        "scope": "",
        "terminal": "",
        **change,
    }


def listener(port: int, address: str, **change: Any) -> dict[str, Any]:
    """Somebody who listens."""
    return {"port": port, "address": address, "holder": holder(**change)}


def unit(name: str, *mentions: str, **change: Any) -> dict[str, Any]:
    """A unit that runs and starts at boot."""
    found = {"name": name, "scope": "", "active": True, "enabled": True, "managed": True}
    return {**found, "mentions": list(mentions), **change}


def look(*claimed: Claim, **seen: list[dict[str, Any]]) -> list[Finding]:
    """The findings on a node that shows only this."""
    empty: dict[str, list[dict[str, Any]]] = {
        part: [] for part in ("containers", "listeners", "units", "jobs", "scripts")
    }
    return list(findings({**empty, **seen}, claimed or (API, RENDEZVOUS), RECIPES))


def test_the_recipes_container_is_named_with_its_ports() -> None:
    """Prevents a second engine in one memory: the recipe's rank 0 as it runs, in the host's network."""
    [found] = look(
        containers=[container()],
        listeners=[
            listener(8765, "0.0.0.0", container=TF),
            listener(29551, "10.1.0.1", container=TF),
        ],
    )
    assert (found.kind, found.id, found.refusal) == ("container", TF, "")
    assert found.line() == (
        "container glm53-flash-tf (image example/tensorfold@sha256:1, running, restart policy no): has the"
        " GPU, listens on 0.0.0.0:8765 (the API), listens on 10.1.0.1:29551 (the ranks' rendezvous). To end"
        " it: `docker stop glm53-flash-tf`"
    )


def test_a_restart_policy_has_to_go_too() -> None:
    """Prevents a container that docker brings back at the next boot, beside ours."""
    [found] = look(containers=[container(policy="unless-stopped")])
    assert found.fix == "docker update --restart=no glm53-flash-tf && docker stop glm53-flash-tf"


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"state": "exited"}, False),
        ({"state": "exited", "policy": "unless-stopped"}, False),
        ({"state": "exited", "policy": "always"}, True),
        ({"state": "exited", "policy": "on-failure", "exit_code": 137}, True),
        ({"state": "exited", "policy": "on-failure"}, False),
        ({"state": "restarting", "policy": "always"}, True),
        ({"gpu": False}, False),
        ({"gpu": False, "published": [{"port": 8765, "address": "0.0.0.0"}]}, True),
        ({"gpu": False, "published": [{"port": 8765, "address": "::"}]}, True),
        ({"gpu": False, "published": [{"port": 8765, "address": "127.0.0.1"}]}, False),
        ({"gpu": False, "published": [{"port": 9000, "address": "0.0.0.0"}]}, False),
        ({"ours": True}, False),
    ],
)
def test_only_what_holds_or_will_hold_something_of_ours_counts(change: dict[str, Any], counts: bool) -> None:
    """Prevents touching an owner's other containers, and overlooking one that comes back by itself."""
    assert bool(look(containers=[container("other", **change)])) is counts


def test_a_spared_container_may_keep_the_gpu_but_no_port_of_ours() -> None:
    """Prevents an owner who must choose between monitoring and this project."""
    monitor = container("dcgm", published=[{"port": 9400, "address": "0.0.0.0"}])
    seen: dict[str, Any] = {"listeners": [], "jobs": [], "scripts": [], "containers": [monitor]}
    seen["units"] = [unit("dcgm.service", "dcgm")]
    assert len(findings(seen, (API,), RECIPES, ["other"])) == 2
    assert findings(seen, (API,), RECIPES, ["dcgm"]) == ()
    monitor["published"].append({"port": 8765, "address": "0.0.0.0"})
    assert findings(seen, (API,), RECIPES, ["dcgm"])[1].why == ("listens on 0.0.0.0:8765 (the API)",)


@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ({"auto_remove": True}, "stopping it removes it", "docker stop glm53-flash-tf"),
        ({"swarm": "llm"}, "docker swarm's service llm", "docker service scale llm=0"),
        ({"state": "paused"}, "it is paused", "docker unpause glm53-flash-tf && docker stop glm53-flash-tf"),
    ],
)
def test_containers_that_cannot_come_back_are_refused(change: dict[str, Any], said: str, fix: str) -> None:
    """Prevents a take-over that destroys what it promised to give back."""
    [found] = look(containers=[container(**change)])
    assert said in found.refusal
    assert found.fix == fix


def test_a_unit_gives_back_its_own_throw_away_container() -> None:
    """Prevents refusing the commonest unit there is: ExecStart=docker run --rm."""
    found = look(
        containers=[container(auto_remove=True)],
        units=[unit("flash.service", "glm53-flash-tf", enabled=False)],
    )
    assert [(f.kind, f.refusal) for f in found] == [("unit", ""), ("container", "")]
    assert found[0].what == "unit flash.service (active)"


def test_triggers_stop_before_what_they_trigger_and_units_before_containers() -> None:
    """Prevents a watchdog's timer that starts again what was just stopped."""
    found = look(
        containers=[container("vllm_node", policy="always")],
        units=[
            unit("watch.service", "vllm_node", enabled=False, active=False),
            unit("start.service", "vllm_node"),
            unit("watch.timer", "vllm_node"),
        ],
    )
    assert [f.name for f in found] == ["watch.timer", "start.service", "vllm_node"]


def test_a_unit_of_an_uninvolved_container_is_left_alone() -> None:
    """Prevents disabling a database because docker starts it as well."""
    assert look(containers=[container("db", gpu=False)], units=[unit("db.service", "db")]) == []


def test_a_recipes_unit_counts_without_its_container() -> None:
    """Prevents a boot at which the old recipe starts beside the pair, when it is merely stopped now."""
    [found] = look(units=[unit("tf.service", "glm-5.3-flash", active=False)])
    assert (found.what, found.fix) == ("unit tf.service (enabled)", "sudo systemctl disable --now tf.service")


def test_a_users_unit_is_named_with_its_owner() -> None:
    """Prevents overlooking user units with linger, and promising what needs the owner's login."""
    [found] = look(units=[unit("tf.service", "glm53-flash-tf", scope="alice")])
    assert (found.scope, found.refusal) == ("alice", "")
    assert found.fix == "sudo systemctl --user -M alice@ disable --now tf.service"
    [offline] = look(units=[unit("tf.service", "glm53-flash-tf", scope="alice", managed=False, active=False)])
    assert offline.refusal == "alice's own systemd does not run"


def test_a_units_listener_is_the_units() -> None:
    """Prevents naming a process that its unit would start again."""
    [found] = look(
        listeners=[listener(8765, "10.9.0.1", unit="jupyter.service")],
        units=[unit("jupyter.service")],
    )
    assert (found.kind, found.name) == ("unit", "jupyter.service")
    assert found.why == ("listens on 10.9.0.1:8765 (the API)",)


def test_a_process_in_tmux_is_named_and_refused() -> None:
    """Prevents killing what nothing can start again; its owner is told the command."""
    [found] = look(listeners=[listener(29551, "10.1.0.1", terminal="tmux")])
    assert found.line() == (
        "process python3 (pid 4242 of alice, in tmux): listens on 10.1.0.1:29551 (the ranks' rendezvous);"
        " cannot be given back: nothing could start it again. To end it: `sudo kill 4242`"
    )


def test_a_watchdog_script_is_named_unless_its_unit_is() -> None:
    """Prevents a watchdog in a login session that brings the recipe back during the night."""
    script = {"script": "/home/alice/watch.sh", "mentions": ["glm53-flash-tf"]}
    [bare] = look(scripts=[{**script, "holder": holder(7, command="bash", terminal="screen")}])
    assert bare.what == "script /home/alice/watch.sh (pid 7 of alice, in screen)"
    both = look(
        scripts=[{**script, "holder": holder(7, unit="watch.service")}],
        units=[unit("watch.service", "glm53-flash-tf")],
    )
    assert [f.kind for f in both] == ["unit"]


def test_a_cron_line_is_named_and_left_to_its_owner() -> None:
    """Prevents editing somebody's crontab, and a night in which it starts the recipe again."""
    [found] = look(jobs=[{"file": "/etc/cron.d/flash", "line": 3, "mentions": ["glm53-flash-tf"]}])
    assert (found.kind, found.refusal) == ("job", "we edit nobody's jobs")
    assert found.fix == "sudo sed -i '3s/^/# /' /etc/cron.d/flash"


def test_docker_itself_and_systemd_are_never_stopped() -> None:
    """Prevents stopping docker because its proxy listens, or a user's whole session."""
    published = container("web", gpu=False, published=[{"port": 8765, "address": "0.0.0.0"}])
    proxy = listener(8765, "0.0.0.0", command="docker-proxy", unit="docker.service")
    found = look(containers=[published], listeners=[proxy], units=[unit("docker.service")])
    assert [(f.kind, f.name) for f in found] == [("container", "web")]
    [socket] = look(listeners=[listener(8765, "::", pid=1, command="systemd")])
    assert (socket.refusal, socket.fix) == (
        "systemd itself listens, for a socket unit",
        "systemctl list-sockets",
    )


def test_our_own_pair_is_in_nobodys_way() -> None:
    """Prevents a second run that refuses because the pair serves."""
    assert (
        look(
            containers=[container("glm53-rank0", ours=True)],
            listeners=[
                listener(8765, "10.9.0.1", container=TF),
                listener(29551, "10.1.0.1", command="glm53", unit="glm53-head.service"),
            ],
            units=[unit("glm53-head.service", "glm-5.3-flash")],
        )
        == []
    )


def test_each_node_claims_what_it_listens_on() -> None:
    """Prevents a refusal of the worker because of a port that only the head needs, or of another address."""
    settings = settings_from(
        {
            "version": 1,
            "cluster": "probe",
            "image": "example/engine@sha256:" + "a" * 64,
            "model": {"path": "/data/model", "name": "M"},
            "api": {"port": 8765},
            "gate": {"port": 8766, "bind": "management"},
            "tensorfold": {"rendezvous_port": 29777},
        },
        "test",
    )
    node = load_node(
        "version: 1\ncluster: probe\nnode: n-a\nsupervisor_port: 29888\nnodes:\n"
        "- {node: n-a, management: 10.9.0.1, fabric: [10.1.0.1, 10.2.0.1]}\n"
        "- {node: n-b, management: 10.9.0.2, fabric: [10.1.0.2, 10.2.0.2]}\n",
        "test",
    )
    found = {name: [(c.port, c.addresses) for c in held] for name, held in claims(settings, node).items()}
    assert found == {
        "n-a": [
            (8765, ("127.0.0.1",)),
            (8766, ("127.0.0.1", "10.9.0.1")),
            (29888, ("10.1.0.1", "10.2.0.1", "10.9.0.1")),
            (29777, ("10.1.0.1",)),
        ],
        "n-b": [(8766, ("127.0.0.1", "10.9.0.2"))],
    }
