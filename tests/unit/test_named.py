"""What the package's texts send an operator to: variables, units, files, playbooks and pages that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from glm53_service.doctor import daemons
from tests.unit.plugin_loader import CHECKOUT
from tests.unit.sources import parsed

PACKAGE = CHECKOUT / "glm53_service"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "gate.py")
"""The gate's `glm53_` names are metrics."""

KEY_FILES = {"glm53_ed25519", "glm53_known_hosts"}
"""In the account's .ssh folder."""

VARIABLE = re.compile(r"\bglm53_(?!service\b)[a-z0-9_]+")
UNIT = re.compile(r"\bglm53-[a-z-]+\.(?:service|timer|target)\b")
FILE = re.compile(r"\b60-?glm53[a-z.-]*[a-z]")
PLAYBOOK = re.compile(r"\bplaybooks/[a-z_]+\.yml|\bsite\.yml")
PAGE = re.compile(r"\bdocs/[a-z-]+\.md")


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that are no docstrings; the fixed parts of one with holes each for itself."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def named(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return each name that fits, and a module that says it."""
    return {
        name: str(path.relative_to(PACKAGE))
        for path in MODULES
        for text in texts(parsed(path.read_text(encoding="utf-8")))
        for name in pattern.findall(text)
    }


def defaults(role: str) -> set[str]:
    """Return the variables of a role."""
    return set(yaml.safe_load((CHECKOUT / f"roles/{role}/defaults/main.yml").read_text(encoding="utf-8")))


def installed() -> str:
    """Return what the roles install where: their variables, defaults and tasks."""
    paths = sorted((CHECKOUT / "roles").glob("*/[dtv]*/*.yml"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_a_variable_in_a_text_is_one_of_the_inventorys() -> None:
    """Prevents advice that the preflight then refuses as an unknown variable."""
    known = defaults("glm53")
    found = named(VARIABLE)
    assert {name: where for name, where in found.items() if name not in known | KEY_FILES} == {}
    assert {"glm53_unattended_exclude", "glm53_clock_cap_mhz", "glm53_fabric_rails"} <= set(found)


@pytest.mark.parametrize("pattern", [UNIT, FILE], ids=["units", "files"])
def test_a_unit_or_file_in_a_text_is_one_that_a_role_installs(pattern: re.Pattern[str]) -> None:
    """Prevents `systemctl restart` of a unit, or a look into a file, that no node has."""
    found, text = named(pattern), installed()
    templates = {path.stem for path in (CHECKOUT / "templates").iterdir()}
    assert {name: where for name, where in found.items() if name not in templates and name not in text} == {}
    assert found


@pytest.mark.parametrize("pattern", [PLAYBOOK, PAGE], ids=["playbooks", "pages"])
def test_a_playbook_or_page_in_a_text_is_there(pattern: re.Pattern[str]) -> None:
    """Prevents a reader at night who is sent to a page that was renamed."""
    found = named(pattern)
    assert {name: where for name, where in found.items() if not (CHECKOUT / name).is_file()} == {}
    assert found


def test_the_doctor_looks_at_what_the_tuning_sets() -> None:
    """Prevents a doctor that asks for more, or less, than the roles can set."""
    tuning = yaml.safe_load((CHECKOUT / "roles/tuning/defaults/main.yml").read_text(encoding="utf-8"))
    assert list(daemons.SLEEP) == tuning["tuning_sleep_units"]
    spared = tuning["tuning_unattended_packages"]
    assert [name for name in daemons.CAREFUL if not any(name in entry for entry in spared)] == []


def test_a_name_that_does_not_exist_would_be_found(tmp_path: Path) -> None:
    """Prevents these checks from passing because they read nothing."""
    code = parsed('"""glm53_not_this"""\nfix = f"set glm53_warp: {x}, see glm53-warp.service"')
    assert [VARIABLE.findall(text) for text in texts(code)] == [["glm53_warp"], []]
    assert [UNIT.findall(text) for text in texts(code)] == [[], ["glm53-warp.service"]]
