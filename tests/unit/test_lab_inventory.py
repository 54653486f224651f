"""The generated inventory, parsed by a YAML parser."""

from pathlib import Path

import pytest
import yaml

from lab.inventory import Yaml, dump, write
from lab.settings import hosts


@pytest.mark.parametrize(
    "value",
    [
        "10.78.0.1",
        "no",
        "on",
        "1",
        "1e3",
        "128M",
        "a: b",
        "# c",
        "",
        "- d",
        "Null",
        "0x1f",
        "1_000",
        "12:30:45",
        "{x}",
    ],
)
def test_strings_stay_strings(value: str) -> None:
    """Prevents YAML from reading a string as a number, a truth value, a comment or a mapping."""
    assert yaml.safe_load(dump({"key": value})) == {"key": value}


def test_nested_values_come_back_the_same() -> None:
    """Prevents wrong indentation of lists in mappings and mappings in lists, and empty ones."""
    value: Yaml = {"a": [{"b": 1, "c": [True, None]}, "x"], "d": {"e": {}, "f": [], "g": 1.5}}
    assert yaml.safe_load(dump(value)) == value


def test_groups_rails_and_strict_host_keys(tmp_path: Path) -> None:
    """Prevents an inventory whose first host is not the head, or that would accept any host key."""
    write(tmp_path, hosts(3), Path("/s/ssh"))
    groups = yaml.safe_load((tmp_path / "hosts.yml").read_text())
    assert list(groups["head"]["hosts"]) == ["spark-a"]
    assert list(groups["workers"]["hosts"]) == ["spark-b", "spark-c"]
    assert groups["workers"]["hosts"]["spark-c"] == {
        "ansible_host": "10.78.0.3",
        "glm53_fabric_rails": [
            {"netdev": "enp1s0f0np0", "address": "10.77.0.3/24"},
            {"netdev": "enP2p1s0f0np0", "address": "10.77.1.3/24"},
        ],
    }
    variables = yaml.safe_load((tmp_path / "group_vars/all.yml").read_text())
    assert variables["ansible_user"] == "spark"
    assert "UserKnownHostsFile=/s/ssh/known_hosts" in variables["ansible_ssh_common_args"].split()
    assert "StrictHostKeyChecking=yes" in variables["ansible_ssh_common_args"].split()
    assert variables["glm53_vllm"]["extra_env"] == {"TORCHDYNAMO_DISABLE": "1"}
