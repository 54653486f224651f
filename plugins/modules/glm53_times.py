#!/usr/bin/python
"""Ansible module: modification times of files that are equal otherwise, so that none is compared again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_times
short_description: Set modification times
options:
  folders:
    description: "path; retimed: seconds since the epoch by the file's name. Links are followed."
    type: list
    elements: dict
    required: true
"""


def late(folders: Sequence[Mapping[str, Any]]) -> list[tuple[Path, int]]:
    """Return each file whose time is not the wanted one, with that."""
    wanted = [(Path(f["path"]) / name, int(time)) for f in folders for name, time in f["retimed"].items()]
    return [(path, time) for path, time in wanted if int(path.stat().st_mtime) != time]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"folders": {"type": "list", "elements": "dict", "required": True}},
        supports_check_mode=True,
    )
    todo = late(module.params["folders"])
    if not module.check_mode:
        for path, time in todo:
            os.utime(path, (path.stat().st_atime, time))
    module.exit_json(changed=bool(todo), retimed=[str(path) for path, _ in todo])


if __name__ == "__main__":
    main()
