"""Renders a role's files as its tasks do, with its own defaults and variables, into a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.plugin_loader import CHECKOUT

OWNER = {"owner": "root", "group": "root"}
PLACE = {"path": "{{ folder }}{{ item.path }}", **OWNER}
FOLDER = {"path": "{{ folder }}{{ item.path | dirname }}", **OWNER, "mode": "0755"}


def render(folder: Path, role: str, files: str, variables: dict[str, Any]) -> None:
    """Write the files of the role's variable `files` (glm53_files' own form) below `folder`, checked.

    It runs in a network namespace of its own, for nft's check asks the kernel.
    """
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(CHECKOUT / f"roles/{role}/{part}/main.yml") for part in ("defaults", "vars")],
        "tasks": [
            {
                "name": "Render",
                "glm53_files": {"folders": [FOLDER], "files": ["{{ item | combine(place) }}"]},
                "vars": {"place": PLACE},
                "loop": f"{{{{ {files} }}}}",
                "loop_control": {"label": "{{ item.path }}"},
            }
        ],
    }
    (folder / "play.yml").write_text(json.dumps([play]))
    (folder / "variables.json").write_text(json.dumps(variables))
    argv = ["unshare", "--net", sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,"]
    argv += [str(folder / "play.yml"), "-e", f"@{folder}/variables.json", "-e", f"folder={folder}"]
    done = subprocess.run(
        [*argv, "-e", f"ansible_python_interpreter={sys.executable}"],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg")},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
