"""Loads an Ansible plugin by its file: Ansible finds them so too, and plugins/ is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parents[2]


def load(kind: str, name: str) -> ModuleType:
    """Return plugins/<kind>/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(
        f"plugin_{kind}_{name}", CHECKOUT / f"plugins/{kind}/{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
