#!/usr/bin/python
"""Ansible module: how many bytes a pull would bring to this node, by the registry's manifest; reads only."""

from __future__ import annotations

import platform
import stat
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.glm53_docker import docker_get
from ansible.module_utils.glm53_registry import Registry, Unknown, split_reference

DOCUMENTATION = """
module: glm53_image_size
short_description: Read how much an image by digest is
description: Asks for the manifest alone. What comes in the way makes the size unknown, and fails nothing.
options:
  reference: {description: "NAME@sha256:DIGEST.", type: str, required: true}
  user: {description: "User at the registry.", type: str, default: ""}
  token_file: {description: "File on the node, mode 600, with the token.", type: str, default: ""}
"""

ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}


def login_of(user: str, token_file: str) -> tuple[str, str] | None:
    """Return the login, None without one; Unknown for a file that a pull would refuse."""
    if not (user and token_file):
        return None
    path = Path(token_file)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise Unknown(f"{path} is open to others")
        return user, path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Unknown(f"{path}: {error.strerror}") from None


def size_of(reference: str, user: str, token_file: str) -> dict[str, Any]:
    """Return `bytes` (0: not known, and `why`) and `registry`."""
    registry, repository, digest = split_reference(reference)
    try:
        _, info = docker_get("/info")
        login = login_of(user, token_file)
        machine = platform.machine()
        size = Registry(registry, info or {}, login=login).size(
            repository, digest, ARCHITECTURES.get(machine, machine)
        )
    except (Unknown, OSError, ValueError) as error:
        return {"bytes": 0, "why": str(error), "registry": registry}
    return {"bytes": size, "why": "", "registry": registry}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "reference": {"type": "str", "required": True},
            "user": {"type": "str", "default": ""},
            "token_file": {"type": "str", "default": "", "no_log": False},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **size_of(**module.params))


if __name__ == "__main__":
    main()
