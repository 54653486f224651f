"""The inventory check: what is missing, wrong or misspelt is named with its place and its fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugin_loader import CHECKOUT, load

inventory = load("action", "glm53_inventory")
KNOWN = inventory.known_names(CHECKOUT)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, ["group head: found no host", "group workers: found no host"]),
        ({"head": ["a", "b"], "workers": ["c"]}, ["group head: found a, b"]),
        ({"head": ["a"], "workers": ["a", "b"]}, ["found a in head and in workers"]),
        ({"head": ["a"], "workers": ["b", "c"]}, []),
    ],
)
def test_groups(groups: dict[str, list[str]], words: list[str]) -> None:
    """Defect: an inventory without a head skips every play and ends green."""
    problems = inventory.group_problems(groups)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_the_example_inventory_is_refused_with_file_and_line() -> None:
    """Defect: an unedited example reaches ssh, which only says that a name cannot be resolved."""
    lines = inventory.placeholder_lines([CHECKOUT / "inventory"])
    assert [line.split(": ")[-2].split(":")[-1].strip() for line in lines if "hosts.yml" in line] == [
        "ansible_host",
        "ansible_host",
    ]
    assert any("all.yml" in line and "glm53_model_dir: /CHANGE-ME" in line for line in lines)


def test_a_placeholder_in_depth_is_found() -> None:
    """Defect: only top-level values are looked at."""
    variables = {"glm53_fabric_rails": [{"netdev": "x", "address": "CHANGE-ME"}], "other": "CHANGE-ME"}
    assert inventory.placeholder_problems("n", variables) == [
        "n: glm53_fabric_rails[0].address is still CHANGE-ME"
    ]


@pytest.mark.parametrize(
    ("name", "near"), [("glm53_api_prot", "glm53_api_port"), ("glm53_modeldir", "glm53_model_dir")]
)
def test_a_misspelt_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    """Defect: a misspelt variable silently leaves the default."""
    [problem] = inventory.unknown_names({name: 1, "glm53_image": 1, "ansible_host": 1}, KNOWN)
    assert name in problem
    assert near in problem


def rails(*addresses: str) -> list[dict[str, str]]:
    """Rails with these addresses."""
    return [{"netdev": f"d{number}", "address": address} for number, address in enumerate(addresses)]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"a": rails("10.1.0.1/24"), "b": rails("10.1.0.2/24", "10.2.0.2/24")}, "same number of rails"),
        ({"a": rails("10.1.0.1/24"), "b": rails("10.2.0.2/24")}, "one subnet a rail"),
        ({"a": rails("10.1.0.1/24"), "b": rails("10.1.0.1/24")}, "every address once"),
        ({"a": rails("10.1.0.1"), "b": rails("10.1.0.2/24")}, "prefix"),
        ({"a": rails("fd00::1/64"), "b": rails("fd00::2/64")}, "the fabric is IPv4"),
        ({"a": rails("10.1.0.1/24"), "b": None}, "one or two rails"),
        ({"a": [{"device": "x"}], "b": rails("10.1.0.2/24")}, "keys netdev and address"),
        (
            {
                "a": [rails("10.1.0.1/24")[0], {"netdev": "d0", "address": "10.2.0.1/24"}],
                "b": rails("10.1.0.2/24", "10.2.0.2/24"),
            },
            "appears twice",
        ),
    ],
)
def test_wrong_rails_are_named(value: dict[str, Any], word: str) -> None:
    """Defect: a wrong rail shows only as an engine that hangs at its first collective."""
    problems = inventory.rail_problems(value)
    assert problems
    assert all(word in problem for problem in problems)


def test_right_rails_pass() -> None:
    """Defect: the check refuses what it should accept."""
    value = {"a": rails("10.1.0.1/24", "10.2.0.1/24"), "b": rails("10.1.0.2/24", "10.2.0.2/24")}
    assert inventory.rail_problems(value) == []


def test_example_names_are_known() -> None:
    """Defect: the example inventory teaches a name that the check refuses."""
    for file in (CHECKOUT / "inventory/group_vars/all.yml", CHECKOUT / "inventory/hosts.yml"):
        names = {word.strip("#: ") for line in file.read_text().splitlines() for word in line.split()[:2]}
        used = {name for name in names if name.startswith("glm53_")}
        assert used <= set(KNOWN)


def specs(role: Path) -> dict[str, Any]:
    """The options of a role's argument specification."""
    data = yaml.safe_load((role / "meta/argument_specs.yml").read_text())
    options: dict[str, Any] = data["argument_specs"]["main"]["options"]
    return options


@pytest.mark.parametrize("role", sorted((CHECKOUT / "roles").iterdir()), ids=lambda path: str(path.name))
def test_specification_and_defaults_agree(role: Path) -> None:
    """Defect: the manual (defaults) and the check (specification) say different things."""
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert {name: option.get("default") for name, option in specs(role).items()} == defaults
    assert all(name.startswith(f"{role.name}_") for name in defaults)


def words(text: str) -> set[str]:
    """The names in a text."""
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("role", sorted((CHECKOUT / "roles").iterdir()), ids=lambda path: str(path.name))
def test_a_role_reads_no_other_roles_variables(role: Path) -> None:
    """Defect: a role works only beside another, because it reads that one's variables.

    Messages name glm53_ variables, for those are what an owner sets; expressions may not.
    """
    others = [other.name for other in (CHECKOUT / "roles").iterdir() if other != role]
    names = {name: other for other in others for name in specs(CHECKOUT / "roles" / other)}
    for file in [*role.rglob("tasks/*.yml"), *role.rglob("vars/*.yml")]:
        text = file.read_text()
        inside = words(" ".join(re.findall(r"{{.*?}}", text, re.DOTALL)))
        assert not {n for n in names if n in inside}, file
        assert not {n for n in words(text) if names.get(n, "glm53") != "glm53"}, file
