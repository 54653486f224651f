"""Ansible filters: what the playbooks compute from the inventory and from what the nodes answered."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError


def glm53_path(relative: str) -> str:
    """Return the absolute path of `relative` in this checkout, wherever the run was started."""
    return str(Path(__file__).resolve().parents[2] / relative)


def glm53_ip(interface: str) -> str:
    """Return the address of `address/prefix`."""
    return str(interface).split("/", maxsplit=1)[0]


def glm53_nodes(hosts: list[str], hostvars: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return node.yaml's list of nodes, in the order of `hosts`, which is rank order."""
    nodes = []
    for host in hosts:
        variables = hostvars[host]
        management = variables.get("glm53_management_address") or variables.get("ansible_host") or host
        rails = variables.get("glm53_fabric_rails") or []
        node: dict[str, Any] = {
            "node": str(host),
            "management": str(management),
            "fabric": [glm53_ip(rail["address"]) for rail in rails],
            "netdevs": [str(rail["netdev"]) for rail in rails],
        }
        # An empty value is no value: NCCL reads an empty index as 0.
        if str(variables.get("glm53_fabric_hca") or "").strip():
            node["hca"] = str(variables["glm53_fabric_hca"]).strip()
        if str(variables.get("glm53_fabric_gid_index", "")).strip():
            node["gid_index"] = int(variables["glm53_fabric_gid_index"])
        nodes.append(node)
    return nodes


def glm53_targets(
    workers: list[str], hostvars: Mapping[str, Any], netdevs: list[str], mtu: int
) -> list[dict[str, Any]]:
    """Return what the head probes: each worker's address on each rail, by a login too, as copying uses it.

    `netdevs` are the head's own devices, in rail order.
    """
    return [
        {
            "node": str(worker),
            "address": glm53_ip(rail["address"]),
            "netdev": netdev,
            "mtu": int(mtu),
            "before": _addresses_now(hostvars[worker], rail["netdev"]),
            "ssh": True,
            "user": hostvars[worker]["__glm53_found"]["account"]["name"],
            "port": int(hostvars[worker].get("ansible_port") or 22),
        }
        for worker in workers
        for netdev, rail in zip(netdevs, hostvars[worker]["glm53_fabric_rails"], strict=True)
    ]


def _addresses_now(variables: Mapping[str, Any], netdev: str) -> list[str]:
    found = variables["__glm53_found"].get("netdevs", {}).get(netdev, {})
    return [glm53_ip(address) for address in found.get("addresses", [])]


def glm53_known_hosts(workers: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Return known_hosts lines: each worker's own host key under its name and all of its addresses."""
    lines = []
    for worker in workers:
        variables = hostvars[worker]
        node = glm53_nodes([worker], hostvars)[0]
        login = str(variables.get("ansible_host") or worker)
        names = list(dict.fromkeys([str(worker), login, node["management"], *node["fabric"]]))
        port = int(variables.get("ansible_port") or 22)
        patterns = names if port == 22 else [f"[{name}]:{port}" for name in names]
        lines.append(f"{','.join(patterns)} {variables['__glm53_found']['host_key']}")
    return lines


def glm53_image_tag(inspect: Mapping[str, Any] | None) -> str:
    """Return the tag under which an image is shipped to the workers, empty for no image."""
    content = glm53_image_content(inspect)
    return str(_package("artifacts.content").local_tag(content)) if content else ""


def glm53_image_content(inspect: Mapping[str, Any] | None) -> str:
    """Return an image's content id, empty for no image."""
    return str(_package("artifacts.content").image_content(inspect)) if inspect else ""


def _package(name: str) -> Any:
    """Return a module of the package that runs on the nodes; the control host has it too."""
    try:
        return importlib.import_module(f"glm53_service.{name}")
    except ImportError as error:
        raise AnsibleFilterError(
            f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: Ansible runs from the"
            " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
        ) from error


def glm53_doctor(texts: list[str]) -> dict[str, Any]:
    """Return the examinations of all nodes (`glm53 doctor --json`) side by side: a `table` for a person, the
    worst first, and the `errors` in short.
    """
    examination = _package("doctor.examination")
    nodes = [examination.read_examination(text, f"node {number}") for number, text in enumerate(texts)]
    findings = [*examination.compare(nodes), *(finding for node in nodes for finding in node.findings)]
    errors = [f"{f.node}: {f.id}, {f.measured}" for f in findings if f.level == "error"]
    return {"table": "\n".join(examination.table(findings)), "errors": errors}


def glm53_foreign_rails(
    rails: list[Mapping[str, Any]], definitions: list[Mapping[str, Any]], mtu: int
) -> dict[str, Any]:
    """Return which rails other netplan files define: `adopted` alike, or `conflicts` in words.

    A file without an MTU gives the device the kernel's 1500 at the next boot, whatever it has now.
    """
    adopted, conflicts = [], []
    for rail in rails:
        others = [d for d in definitions if d["netdev"] == rail["netdev"]]
        wrong = [d for d in others if list(d["addresses"]) != [rail["address"]] or d["kind"] != "ethernets"]
        conflicts += [
            f"{d['file']} ({d['kind']}) gives {d['netdev']} {', '.join(d['addresses']) or 'no address'}, the"
            f" inventory {rail['address']}"
            for d in wrong
        ]
        otherwise = [d for d in others if d not in wrong and int(d["mtu"]) != int(mtu)]
        conflicts += [
            f"{d['file']} ({d['kind']}) gives {d['netdev']} MTU {d['mtu']}, the inventory {mtu}: set"
            f" glm53_fabric_mtu: {d['mtu']}, or that file's mtu to {mtu}"
            for d in otherwise
        ]
        if others and not wrong and not otherwise:
            adopted.append(rail["netdev"])
    return {"adopted": adopted, "conflicts": conflicts}


def glm53_findings(
    seen: Mapping[str, Any], claims: list[Mapping[str, Any]], recipes: list[str], spared: list[str]
) -> list[dict[str, Any]]:
    """Return what is in the way on a node (glm53_service.foreign), each with one readable line."""
    foreign = _package("foreign")
    wanted = [foreign.Claim(port=c["port"], addresses=tuple(c["addresses"]), use=c["use"]) for c in claims]
    return [
        {name: getattr(found, name) for name in ("kind", "name", "id", "scope", "refusal")}
        | {"line": found.line()}
        for found in foreign.findings(seen, wanted, recipes, spared)
    ]


def glm53_measurements(nodes: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what to measure one after the other: each worker's rails with the head, both directions."""
    head, *workers = nodes
    return [
        {"rail": number, "server": target["node"], "client": source["node"]}
        for worker in workers
        for number in range(min(len(head["fabric"]), len(worker["fabric"])))
        for source, target in ((head, worker), (worker, head))
    ]


def glm53_reasons(hosts: list[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Return, with the host's name, everything on any host that makes a restart of the pair necessary."""
    return [f"{host}: {why}" for host in hosts for why in hostvars[host].get("node_restart_reasons", [])]


def glm53_unset_rails(
    rails: list[Mapping[str, Any]], netdevs: Mapping[str, Any], mtu: int
) -> list[dict[str, Any]]:
    """Return the rails, with their MTU, whose device does not have the address and MTU that it should."""
    return [
        {**rail, "mtu": int(mtu)}
        for rail in rails
        if rail["address"] not in netdevs.get(rail["netdev"], {}).get("addresses", [])
        or netdevs[rail["netdev"]]["mtu"] != int(mtu)
    ]


class FilterModule:
    """Names the filters for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return filter name to function."""
        return {
            function.__name__: function
            for function in (
                glm53_path,
                glm53_ip,
                glm53_nodes,
                glm53_targets,
                glm53_known_hosts,
                glm53_image_content,
                glm53_image_tag,
                glm53_foreign_rails,
                glm53_findings,
                glm53_reasons,
                glm53_doctor,
                glm53_measurements,
                glm53_unset_rails,
            )
        }
