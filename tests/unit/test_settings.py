"""settings.yaml and node.yaml: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm53_service.errors import ConfigError
from glm53_service.node import load_node
from glm53_service.settings import dump, load_settings, settings_from
from tests.unit.doubles import settings_text

MODEL = Path("/srv/models/unit")


def problems(**changes: Any) -> tuple[str, ...]:
    """Return what is wrong with the settings after `changes`."""
    with pytest.raises(ConfigError) as caught:
        load_settings(settings_text(MODEL, **changes), "settings.yaml")
    assert caught.value.exit_code == 78
    return caught.value.problems


def test_valid_settings_survive_the_way_to_a_follower() -> None:
    """Prevents a value that is lost or changed between the head's file and a follower's rank."""
    settings = load_settings(settings_text(MODEL), "settings.yaml")
    assert (settings.vllm.max_model_len, settings.canary.max_tokens, settings.api.port) == (4097, 11, 18888)
    assert settings_from(dump(settings), "start message") == settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm": {"max_num_seq": 3}}, "vllm.max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        ({"vllm": {"max_num_seqs": 0}}, "vllm.max_num_seqs: found 0; expected int >= 1"),
        (
            {"vllm": {"kv_cache_dtype": "nvfp4"}},
            "vllm.kv_cache_dtype: found 'nvfp4'; expected one of auto, fp8",
        ),
        ({"vllm": {"max_model_len": "4k"}}, "vllm.max_model_len: found '4k'; expected int"),
        (
            {"vllm": {"extra_args": ["--port=9000"]}},
            "vllm.extra_args: found --port, which the supervisor sets",
        ),
        (
            {"vllm": {"extra_env": {"HF_TOKEN": "x"}}},
            "vllm.extra_env: found HF_TOKEN; a secret in the environment",
        ),
        ({"vllm": {"kv_cache_memory": None}}, "vllm.kv_cache_memory: missing; on the CPU"),
        ({"api": {"bind": "management"}}, "api.bind: found 'management' with no key"),
        ({"api": {"bind": "0.0.0.0"}}, "api.bind: found '0.0.0.0'; expected one of loopback, management"),
        ({"gate": {"port": 18888}}, "gate.port: found 18888, the API's own port"),
        ({"canary": {"expect": "("}}, "canary.expect: found '(', not a regular expression"),
        (
            {"canary": {"long_lines": 205}},
            "canary.long_lines: found 205, which take up to 4111 tokens with the answer; the window has",
        ),
        ({"engine": "sglang"}, "engine: found 'sglang'; expected one of tensorfold, vllm"),
        ({"cluster": "My Pair"}, "cluster: found 'My Pair'"),
        (
            {"supervision": {"lease_seconds": 0.1}},
            "supervision.lease_seconds: found 0.1, expected at least three",
        ),
        ({"supervision": {"stop_grace_seconds": 300}}, "supervision.stop_grace_seconds: found 300"),
        ({"supervision": {"peer_lost_seconds": 0.2}}, "supervision.peer_lost_seconds: found 0.2"),
        ({"model": {"path": "models/x"}}, "model.path: found 'models/x'"),
        ({"image": None}, "image: found None"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict[str, Any], said: str) -> None:
    """Prevents a start that dies in the engine minutes later because of a value that was wrong from the
    first.
    """
    (problem,) = problems(**changes)
    assert problem.startswith(said)


def test_every_fault_is_listed_at_once() -> None:
    """Prevents mending a file one error a run."""
    found = problems(vllm={"max_num_seqs": -1, "dtype": "int4"}, colour="red")
    assert [line.split(":")[0] for line in found] == ["colour", "vllm.max_num_seqs", "vllm.dtype"]


@pytest.mark.parametrize("text", ["", "- a\n", "version: [1\n"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    """Prevents a traceback for a truncated file."""
    with pytest.raises(ConfigError):
        load_settings(text, "settings.yaml")


NODE = """
version: 1
cluster: unit
node: {node}
nodes:
  - {{node: a, management: 10.9.0.1, fabric: [10.8.0.1, 10.8.1.1]}}
  - {{node: b, management: 10.9.0.2, fabric: {fabric}}}
"""


def test_rank_is_the_place_in_the_list() -> None:
    """Prevents ranks that depend on anything but the inventory's order."""
    node = load_node(NODE.format(node="b", fabric="[10.8.0.2, 10.8.1.2]"), "node.yaml")
    assert (node.rank, node.lead.node, [peer.node for peer in node.followers]) == (1, "a", ["b"])


def test_the_way_to_the_gpu_is_the_nodes_own() -> None:
    """Prevents a way that site.yml found from being dropped, or misspelt and then ignored."""
    text = NODE.format(node="b", fabric="[10.8.0.2, 10.8.1.2]")
    assert load_node(text, "node.yaml").gpu_mode == "gpus"
    assert load_node(text + "gpu_mode: cdi\n", "node.yaml").gpu_mode == "cdi"
    with pytest.raises(ConfigError, match="gpu_mode"):
        load_node(text + "gpu_mode: magic\n", "node.yaml")


@pytest.mark.parametrize(
    ("node", "fabric", "said"),
    [
        ("c", "[10.8.0.2, 10.8.1.2]", "node: found 'c', expected one of the nodes: a, b"),
        ("a", "[10.8.0.2]", "nodes: a has 2, b has 1 fabric addresses"),
        ("a", "[10.8.0.2/24, 10.8.1.2]", "nodes[1].fabric: found '10.8.0.2/24', expected an IPv4 address"),
        ("a", "['fe80::1', 10.8.1.2]", "nodes[1].fabric: found 'fe80::1', expected an IPv4 address"),
        ("a", "[10.8.0.1, 10.8.1.2]", "nodes[1].fabric: found 10.8.0.1, which a has already"),
    ],
)
def test_a_wrong_node_file_is_refused(node: str, fabric: str, said: str) -> None:
    """Prevents two nodes with one address, and a LAN name where a fabric address belongs."""
    with pytest.raises(ConfigError) as caught:
        load_node(NODE.format(node=node, fabric=fabric), "node.yaml")
    assert caught.value.problems[0].startswith(said)


def test_one_machine_is_refused_with_the_reason() -> None:
    """Prevents a single host that loads for minutes and then runs out of memory."""
    with pytest.raises(ConfigError, match="does not fit one machine"):
        load_node(NODE.format(node="a", fabric="[10.8.0.2, 10.8.1.2]").rsplit("  - ", 1)[0], "node.yaml")
