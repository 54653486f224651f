"""Ansible action: the nodes' configuration, read on the control host by the code that will read it there."""

from __future__ import annotations

import sys
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):  # type: ignore[misc]
    """Validates rendered settings.yaml and node.yaml texts; nothing is sent to a node."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the effective settings, every default written out; fail with all problems of both files."""
        super().run(tmp, task_vars)
        try:
            from glm53_service.errors import ConfigError
            from glm53_service.node import load_node
            from glm53_service.settings import dump, load_settings, pair_problems, warnings
        except ImportError as error:
            raise AnsibleActionFail(
                f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: it runs from the"
                " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
            ) from error
        problems: list[str] = []
        settings: dict[str, Any] = {}
        hurts: list[str] = []
        try:
            if text := self._task.args["settings"]:  # only the head has settings
                wanted = load_settings(text, "settings.yaml (from your inventory)")
                settings, hurts = dump(wanted), list(warnings(wanted))
                problems += pair_problems(wanted, int(self._task.args["nodes"]))
        except ConfigError as error:
            problems.append(str(error))
        try:
            load_node(self._task.args["node"], "node.yaml (from your inventory)")
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            return {"failed": True, "msg": "\n".join(problems), "changed": False}
        for hurt in hurts:
            self._display.warning(hurt)
        return {"changed": False, "settings": settings, "hurts": hurts}
