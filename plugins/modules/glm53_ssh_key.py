#!/usr/bin/python
"""Ansible module: the copying key pair and its known_hosts, in the home of the account that Ansible uses."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_ssh_key
short_description: Ensure an ed25519 key pair and a known_hosts file of our own
options:
  key: {description: "Private key; the public one lies beside it.", type: path, required: true}
  comment: {description: "Comment of a new key.", type: str, required: true}
  known_hosts: {description: "The known_hosts file.", type: path, required: true}
  lines: {description: "Its whole content.", type: list, elements: str, default: []}
"""


def make_key(key: Path, comment: str) -> None:
    """Make the pair; the private key is readable for its account alone."""
    key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(key)],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def write(path: Path, text: str) -> None:
    """Replace `path` in one step."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        handle.write(text)
    Path(name).rename(path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "key": {"type": "path", "required": True, "no_log": False},
            "comment": {"type": "str", "required": True},
            "known_hosts": {"type": "path", "required": True},
            "lines": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    key, known_hosts = Path(module.params["key"]), Path(module.params["known_hosts"])
    public = Path(f"{key}.pub")
    text = "".join(line + "\n" for line in module.params["lines"])
    before = known_hosts.read_text(encoding="utf-8") if known_hosts.exists() else ""
    missing = not (key.exists() and public.exists())
    if missing and key.exists() != public.exists():
        module.fail_json(
            msg=f"Found only one half of the key pair {key}. Expected: both, or none. Fix: remove it and"
            " run again; a new pair is made and authorised."
        )
    if not module.check_mode:
        if missing:
            make_key(key, module.params["comment"])
        if text != before:
            write(known_hosts, text)
    module.exit_json(
        changed=missing or text != before,
        public_key=" ".join(public.read_text(encoding="utf-8").split()[:2]) if public.exists() else "",
        diff={
            "before_header": str(known_hosts),
            "after_header": str(known_hosts),
            "before": before,
            "after": text,
        },
    )


if __name__ == "__main__":
    main()
