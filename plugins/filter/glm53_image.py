"""Ansible filters: which image the pair runs, and, when the head builds it, what of and why."""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

IMAGES = Path(__file__).resolve().parents[2] / "images"


def glm53_image_plan(image: str, build: Mapping[str, Any], engine: str, folder: str) -> dict[str, Any]:
    """Return the image's `reference`; when the head builds it also its `inputs`, and the `build` as the
    module glm53_image_build takes it. `folder` is the inventory's.
    """
    if bool(image) == bool(build):
        found = (
            "both glm53_image and glm53_image_build" if image else "neither glm53_image nor glm53_image_build"
        )
        raise AnsibleFilterError(
            f"Found: {found}. Expected: one of them. Fix: glm53_image for an image that exists, by digest;"
            " glm53_image_build for one that the head builds"
        )
    if not build:
        return {"reference": str(image), "inputs": {}, "build": {}}
    errors = _package("errors")
    try:
        planned = _package("artifacts.build").plan_build(_plain(build), str(engine), Path(folder), IMAGES)
    except errors.ConfigError as error:
        raise AnsibleFilterError(str(error)) from error
    whole = {name: getattr(planned, name) for name in planned.__struct_fields__}
    files = {name: base64.b64encode(content).decode() for name, content in planned.files.items()}
    return {"reference": planned.reference, "inputs": planned.inputs, "build": whole | {"files": files}}


def glm53_build_reasons(found: Mapping[str, Any], inputs: Mapping[str, str]) -> list[str]:
    """Return why the head has to build, () when it has the image; `found` is what the module planned."""
    if found["built"]:
        return []
    newest = found["newest"]
    if not newest:
        return ["no image was built here yet"]
    drift = _package("artifacts.built").drift(newest["labels"], inputs)
    return list(drift) or [f"{newest['reference']} has lost its name"]


def _plain(value: Any) -> Any:
    """Return Ansible's own kinds of strings, lists and mappings as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def _package(name: str) -> Any:
    """Return a module of the package that runs on the nodes; the control host has it too."""
    try:
        return importlib.import_module(f"glm53_service.{name}")
    except ImportError as error:
        raise AnsibleFilterError(
            f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: Ansible runs from the"
            " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
        ) from error


class FilterModule:
    """Names the filters for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return filter name to function."""
        return {f.__name__: f for f in (glm53_image_plan, glm53_build_reasons)}
