#!/usr/bin/python
"""Ansible module: the pair's token file. Line 1 is the current token, line 2 the previous one."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_token
short_description: Make, rotate, read or copy the pair's token
description: Run it with no_log, for it returns the token so that the workers can be given the same one.
options:
  path: {description: "The token file, root 0600.", type: path, required: true}
  value: {description: "Write this; else keep the file's own or make one.", type: str, default: ""}
  rotate: {description: "Make a new token; the current one becomes the previous.", type: bool, default: false}
"""

TOKEN = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """Return 64 random hex digits: 256 bits, the size of the HMAC it keys."""
    return secrets.token_hex(32)


def wanted_text(current: str, value: str, rotate: bool) -> str:
    """Return what the file must hold: `value` when given, else the tokens it has, or fresh ones."""
    if value:
        return value.strip() + "\n"
    tokens = [line for line in current.split() if TOKEN.fullmatch(line)]
    if rotate:
        return "\n".join([new_token(), *tokens[:1]]) + "\n"
    return current if tokens and current.split()[0] == tokens[0] else new_token() + "\n"


def write(path: Path, text: str) -> None:
    """Write the file for root alone, whole or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".token.", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="ascii") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    Path(name).rename(path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "value": {"type": "str", "default": "", "no_log": True},
            "rotate": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    current = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    wanted = wanted_text(current, module.params["value"], module.params["rotate"])
    loose = path.exists() and path.stat().st_mode & 0o777 != 0o600
    changed = wanted != current or loose
    if changed and not module.check_mode:
        write(path, wanted)
    # In check mode a token that was only thought up must not reach the workers' comparison.
    module.exit_json(changed=changed, value=current if module.check_mode else wanted)


if __name__ == "__main__":
    main()
