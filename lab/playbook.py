"""How the lab's own programs and tests call the project's playbooks: as a person would, with the
checkout's Ansible.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lab.api import Lab

ROOT = Path(__file__).resolve().parent.parent
ANSIBLE = Path(sys.executable).with_name("ansible-playbook")


def playbook(lab: Lab, name: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return argv and environment of a run of playbook `name` against the lab; it belongs into the folder
    ROOT.
    """
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    return [str(ANSIBLE), name, "-i", str(lab.inventory), *arguments], environment
