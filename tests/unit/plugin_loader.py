"""Loads an Ansible plugin by its file: Ansible finds them so too, and plugins/ is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import ansible.module_utils

CHECKOUT = Path(__file__).resolve().parents[2]
MODULE_UTILS = str(CHECKOUT / "plugins/module_utils")


def load(kind: str, name: str) -> ModuleType:
    """Return plugins/<kind>/<name>.py as a module; it finds plugins/module_utils as it would on a node."""
    if MODULE_UTILS not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(MODULE_UTILS)
    spec = importlib.util.spec_from_file_location(
        f"plugin_{kind}_{name}", CHECKOUT / f"plugins/{kind}/{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module
