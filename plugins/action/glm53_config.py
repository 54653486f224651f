"""Ansible action: the nodes' configuration, read on the control host by the code that will read it there."""

from __future__ import annotations

import sys
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


def read(settings: str, node: str, nodes: int) -> tuple[dict[str, Any], list[str]]:
    """Return what settings.yaml (only the head has one) and node.yaml come to, and every problem of both."""
    import msgspec

    from glm53_service.artifacts.folders import needed_folders, unused_drafter
    from glm53_service.errors import ConfigError
    from glm53_service.foreign import claims
    from glm53_service.node import load_node
    from glm53_service.settings import dump, load_settings, pair_problems, warnings

    found: dict[str, Any] = {"settings": {}, "hurts": [], "folders": [], "unused_drafter": "", "claims": {}}
    problems: list[str] = []
    wanted = peers = None
    try:
        if settings:
            wanted = load_settings(settings, "settings.yaml (from your inventory)")
            problems += pair_problems(wanted, nodes)
    except ConfigError as error:
        problems.append(str(error))
    try:
        peers = load_node(node, "node.yaml (from your inventory)")
    except ConfigError as error:
        problems.append(str(error))
    if wanted and peers:
        found["settings"] = dump(wanted)
        found["hurts"] = list(warnings(wanted))
        found["folders"] = msgspec.to_builtins(needed_folders(wanted))
        found["unused_drafter"] = unused_drafter(wanted)
        found["claims"] = msgspec.to_builtins(claims(wanted, peers))
    return found, problems


class ActionModule(ActionBase):  # type: ignore[misc]
    """Validates rendered settings.yaml and node.yaml texts; nothing is sent to a node."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the effective settings, every default written out, and what they need of the nodes.

        `folders` of weights, `claims` of ports. Fails with all problems of both files.
        """
        super().run(tmp, task_vars)
        arguments = self._task.args
        try:
            found, problems = read(arguments["settings"], arguments["node"], int(arguments["nodes"]))
        except ImportError as error:
            raise AnsibleActionFail(
                f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: it runs from the"
                " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
            ) from error
        if problems:
            return {"failed": True, "msg": "\n".join(problems), "changed": False}
        for hurt in found["hurts"]:
            self._display.warning(hurt)
        return {"changed": False, **found}
