"""What the templates become: rendered by Ansible itself, written by our module, then parsed and checked."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm53_service.node import load_node
from glm53_service.settings import load_settings
from tests.unit.plugin_loader import CHECKOUT, load

files = load("modules", "glm53_files")

INVENTORY = {
    "head": {
        "hosts": {
            "n-a": {
                "glm53_management_address": "10.9.0.1",
                "glm53_fabric_rails": [{"netdev": "x0", "address": "10.1.0.1/24"}],
            }
        }
    },
    "workers": {
        "hosts": {
            "n-b": {
                "glm53_management_address": "10.9.0.2",
                "glm53_fabric_rails": [{"netdev": "y0", "address": "10.1.0.2/24"}],
            }
        }
    },
    "all": {
        "vars": {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "glm53_cluster": "probe",
            "glm53_device": "cpu",
            "glm53_image": "example/engine:1",
            "glm53_model_dir": "/data/model",
            "glm53_model_name": "Model-X",
            "glm53_api_port": 9999,
            "glm53_vllm": {"kv_cache_memory": "64M", "max_num_seqs": 3},
            "glm53_fabric_mtu": 4000,
        }
    },
}

PLAY = [
    {
        "hosts": "head:workers",
        "gather_facts": False,
        "roles": ["glm53"],
        "vars": {
            "node_settings": "{{ __glm53_settings }}",
            "node_identity": "{{ __glm53_node }}",
            "__fabric_written": "{{ glm53_fabric_rails | glm53_rendered_rails([], glm53_fabric_mtu) }}",
        },
        "tasks": [
            {
                "name": "Render",
                "glm53_files": {
                    "files": [
                        {
                            "path": "{{ target }}/{{ inventory_hostname }}-" + name,
                            "content": "{{ lookup('ansible.builtin.template', glm53_templates_dir ~ '/"
                            + name
                            + ".j2') }}",
                            "owner": "root",
                            "group": "root",
                            "mode": "0600",
                        }
                        for name in (
                            "settings.yaml",
                            "node.yaml",
                            "60-glm53-fabric.yaml",
                            "glm53-head.service",
                            "glm53-worker.service",
                        )
                    ]
                },
            }
        ],
    }
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every template of both nodes."""
    if os.getuid() != 0:
        pytest.skip("the files belong to root")
    folder = tmp_path_factory.mktemp("rendered")
    (folder / "hosts.yml").write_text(json.dumps(INVENTORY))
    (folder / "play.yml").write_text(json.dumps(PLAY))
    argv = [
        sys.executable,
        "-m",
        "ansible.cli.playbook",
        "-i",
        str(folder / "hosts.yml"),
        str(folder / "play.yml"),
        "-e",
        f"target={folder}",
    ]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg")}
    first = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT, env=environment, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    # What a shell exports, by the names of the recipes' settings, renders nothing else.
    exported = environment | dict.fromkeys(("MAX_MODEL_LEN", "PARALLEL", "PORT", "GLM53_API_PORT"), "1")
    again = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT, env=exported, check=False)
    assert again.stdout.count("changed=0") == 2, again.stdout
    return folder


def test_the_service_accepts_the_rendered_configuration(rendered: Path) -> None:
    """Defect: a number becomes a string on its way through the template, and the unit exits 78."""
    settings = load_settings((rendered / "n-a-settings.yaml").read_text(), "settings.yaml")
    assert (settings.cluster, settings.api.port, settings.vllm.max_num_seqs) == ("probe", 9999, 3)
    assert (settings.model.path, settings.model.name) == ("/data/model", "Model-X")
    node = load_node((rendered / "n-b-node.yaml").read_text(), "node.yaml")
    assert (node.node, node.rank, node.lead.management, node.me.fabric) == (
        "n-b",
        1,
        "10.9.0.1",
        ("10.1.0.2",),
    )


def test_the_netplan_file_sets_only_the_rails(rendered: Path) -> None:
    """Defect: the boot waits for the fabric, the address goes with the carrier, or IPv6 moves the GIDs."""
    document = yaml.safe_load((rendered / "n-b-60-glm53-fabric.yaml").read_text())
    assert document == {
        "network": {
            "version": 2,
            "ethernets": {
                "y0": {
                    "renderer": "networkd",
                    "addresses": ["10.1.0.2/24"],
                    "dhcp4": False,
                    "dhcp6": False,
                    "accept-ra": False,
                    "ignore-carrier": True,
                    "optional": True,
                    "link-local": [],
                    "mtu": 4000,
                }
            },
        }
    }


def unit(path: Path) -> dict[str, dict[str, str]]:
    """A unit file as sections of keys."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return {name: dict(parser[name]) for name in parser.sections()}


@pytest.mark.parametrize(("name", "verb"), [("head", "lead"), ("worker", "follow")])
def test_the_units(rendered: Path, name: str, verb: str) -> None:
    """Defect: a unit lacks what the supervisor needs of systemd, or systemd finds fault with a key."""
    path = rendered / f"n-a-glm53-{name}.service"
    sections = unit(path)
    service: dict[str, Any] = sections["Service"]
    expected = {
        "Type": "notify",
        "User": "glm53",
        "ExecStart": f"/opt/glm53/current/bin/glm53 {verb}",
        "ExecStopPost": "/opt/glm53/current/bin/glm53 cleanup",
        "LoadCredential": "cluster-token:/etc/glm53/token",
        "RestartPreventExitStatus": "70 78",
        "WatchdogSec": "30",
        "TimeoutStartSec": "infinity",
        "RuntimeDirectory": "glm53",
        "StateDirectory": "glm53",
    }
    assert {key: service.get(key) for key in expected} == expected
    assert "multi-user.target" in sections["Unit"]["After"]
    assert sections["Install"]["WantedBy"] == "multi-user.target"
    text = path.read_text().replace("/opt/glm53/current/bin/glm53", "/bin/true")
    files.check_units([{"path": f"/etc/systemd/system/glm53-{name}.service", "content": text}])


def test_the_units_differ_only_in_their_part(rendered: Path) -> None:
    """Defect: a change of one unit is forgotten in the other."""
    head, worker = (unit(rendered / f"n-a-glm53-{name}.service") for name in ("head", "worker"))
    for sections in (head, worker):
        del sections["Unit"]["Description"], sections["Service"]["ExecStart"]
    assert head == worker


def test_hardening_keys_are_sorted(rendered: Path) -> None:
    """Defect: a key is set twice, far apart."""
    text = (rendered / "n-a-glm53-head.service").read_text()
    block = text.split("CapabilityBoundingSet", 1)[1].split("[Install]")[0]
    keys = [line.split("=")[0] for line in block.splitlines()[1:] if line and not line.startswith("#")]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("api", "options"), [("1.41", []), ("1.47", []), ("1.48", ["--platform", "linux/arm64"]), ("0", [])]
)
def test_an_image_is_saved_for_the_workers_platform_where_docker_can(api: str, options: list[str]) -> None:
    """Prevents an archive that refers to another platform's blobs, which are not in it: loading it fails."""
    variables = yaml.safe_load((CHECKOUT / "roles/images/vars/main.yml").read_text())
    expression = {"msg": variables["__images_save_options"]}
    given = {
        "images_architectures": {"aarch64": "arm64"},
        "images_architecture": "aarch64",
        "images_save_api": api,
    }
    argv = [sys.executable, "-m", "ansible.cli.adhoc", "localhost", "-c", "local", "-m", "debug"]
    argv += ["-a", json.dumps(expression), "-e", json.dumps(given)]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout.partition("=>")[2])["msg"] == options
