#!/usr/bin/python
"""Ansible module: our line of an account's authorized_keys.

Every other line stays, whatever its comment says.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_authorized_key
short_description: Ensure or remove our line in authorized_keys
options:
  path: {description: "The authorized_keys file.", type: path, default: ~/.ssh/authorized_keys}
  comment: {description: "Marks our line, with the options that only we set.", type: str, required: true}
  key: {description: "Type and body of the public key; empty removes the line.", type: str, default: ""}
  options: {description: "Options in front of the key; they begin as in OURS.", type: str, default: ""}
"""

OURS = 'restrict,from="'
"""How our line begins.

A comment alone is no mark: the owner's own key may have the same one, and losing it locks out.
"""


def is_ours(line: str, comment: str) -> bool:
    """Return whether a line of authorized_keys is the one that this module wrote."""
    return line.startswith(OURS) and line.rstrip().endswith(" " + comment)


def with_line(text: str, comment: str, line: str) -> str:
    """Return `text` with our line (it ends in `comment`) replaced by `line`, added, or removed when empty."""
    kept = [old for old in text.splitlines() if not is_ours(old, comment)]
    return "".join(entry + "\n" for entry in [*kept, *([line] if line else [])])


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "~/.ssh/authorized_keys"},
            "comment": {"type": "str", "required": True},
            "key": {"type": "str", "default": "", "no_log": False},
            "options": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    path, comment = Path(module.params["path"]).resolve(), module.params["comment"]
    if module.params["key"] and not module.params["options"].startswith(OURS):
        module.fail_json(msg=f"options: found {module.params['options']!r}, expected a beginning of {OURS!r}")
    parts = [module.params["options"], module.params["key"], comment] if module.params["key"] else []
    line = " ".join(part for part in parts if part)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    present = line in before.splitlines() if line else False
    after = before if present else with_line(before, comment, line)
    if after != before and not module.check_mode:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".authorized_keys.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(after)
        Path(name).rename(path)
    module.exit_json(
        changed=after != before,
        diff={"before_header": str(path), "after_header": str(path), "before": before, "after": after},
    )


if __name__ == "__main__":
    main()
