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


def glm53_folder_differences(
    wanted: list[Mapping[str, Any]], found: list[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return, for each of the head's folders (glm53_manifest), in what way a node's own differs from it."""
    return [_differences(ours, theirs) for ours, theirs in zip(wanted, found, strict=True)]


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return which files are missing, replaced (another size or hash), retimed (another time), or doubtful.

    Doubtful is another time with a hash that is not known on both sides. `bytes` is what has to travel for
    certain. `room` is what it takes here meanwhile: an old file gives its room back only once the new one is
    complete.
    """
    ours, theirs = wanted["files"], found["files"]
    missing = sorted(name for name in ours if name not in theirs)
    both = sorted(name for name in ours if name in theirs)
    replaced = [name for name in both if _other_content(ours[name], theirs[name])]
    late = [n for n in both if n not in replaced and ours[n]["mtime"] != theirs[n]["mtime"]]
    retimed = [n for n in late if "sha256" in ours[n] and "sha256" in theirs[n]]
    doubtful = [name for name in late if name not in retimed]
    growth = sum(max(0, ours[name]["size"] - theirs[name]["size"]) for name in replaced)
    largest = max((ours[name]["size"] for name in replaced + doubtful), default=0)
    return {
        "name": found["name"],
        "path": found["path"],
        "exists": found["exists"],
        "missing": missing,
        "replaced": replaced,
        "doubtful": doubtful,
        "retimed": {name: ours[name]["mtime"] for name in retimed},
        "extra": sorted(name for name in theirs if name not in ours),
        "same": not missing and not replaced and not late,
        "bytes": sum(ours[name]["size"] for name in missing + replaced),
        "room": sum(ours[name]["size"] for name in missing) + growth + largest,
        "file_system": found["file_system"],
        "free_bytes": found["free_bytes"],
    }


def _other_content(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Say whether two files are known to differ in content."""
    return any(ours[k] != theirs[k] for k in ("size", "sha256") if k in ours and k in theirs)


def glm53_doubts(
    folders: list[Mapping[str, Any]], wanted: list[Mapping[str, Any]], found: list[list[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return `folders` with the `names` of the files that are doubtful on any of the nodes in `found`.

    An owner's own downloads have other times on each node. All nodes hash the same names, so that they can be
    compared.
    """
    doubts = [[part["doubtful"] for part in glm53_folder_differences(wanted, node)] for node in found]
    return [
        {**folder, "names": sorted({name for node in doubts for name in node[number]})}
        for number, folder in enumerate(folders)
    ]


def glm53_copies(differences: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the copies that make a node's folders the head's."""
    return [
        {"name": folder["name"], "path": folder["path"], "files": files}
        for folder in differences
        if (files := folder["missing"] + folder["replaced"] + folder["doubtful"])
    ]


def glm53_tight_file_systems(differences: list[Mapping[str, Any]], spare_gib: float) -> list[str]:
    """Return in words each file system without room for what has to come to it and `spare_gib` GiB more."""
    tight = []
    for number in dict.fromkeys(folder["file_system"] for folder in differences if not folder["same"]):
        folders = [f for f in differences if f["file_system"] == number and not f["same"]]
        need = sum(folder["room"] for folder in folders) + int(spare_gib * 1024**3)
        free = min(folder["free_bytes"] for folder in folders)
        if free < need:
            paths = " and ".join(folder["path"] for folder in folders)
            tight.append(f"{free / 1e9:.2f} GB free for {paths}, {need / 1e9:.2f} GB needed")
    return tight


def glm53_extra_files(differences: list[Mapping[str, Any]]) -> list[str]:
    """Return the files that the head has not, in words."""
    return [
        f"{len(folder['extra'])} files in {folder['path']} ({', '.join(folder['extra'][:3])})"
        for folder in differences
        if folder["extra"]
    ]


def glm53_wrong_files(differences: list[Mapping[str, Any]]) -> list[str]:
    """Return the files that are not the head's, by their whole path."""
    return [
        f"{folder['path']}/{name}"
        for folder in differences
        for name in [*folder["missing"], *folder["replaced"], *folder["doubtful"], *folder["retimed"]]
    ]


def glm53_incomplete(folders: list[Mapping[str, Any]], pins: list[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the head's own folders (glm53_manifest); `pins` say what they must hold."""
    problems = []
    for folder, pin in zip(folders, pins, strict=True):
        what = f"{folder['name']} {folder['path']}"
        if not folder["exists"]:
            problems.append(f"{what}: no such directory")
            continue
        problems += [f"{what}: {name} is missing or empty" for name in folder["lacking"]]
        if links := folder["dangling"]:
            problems.append(f"{what}: {len(links)} links lead nowhere ({', '.join(links[:3])})")
        for name, digest in (pin.get("sha256") or {}).items():
            own = folder["files"].get(name, {}).get("sha256", digest)
            if own != digest:
                problems.append(
                    f"{what}: {name} has SHA-256 {own[:12]}, the inventory's glm53_drafter.sha256 is"
                    f" {digest[:12]}"
                )
    return problems


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
                glm53_folder_differences,
                glm53_doubts,
                glm53_copies,
                glm53_tight_file_systems,
                glm53_extra_files,
                glm53_wrong_files,
                glm53_incomplete,
                glm53_foreign_rails,
                glm53_findings,
                glm53_reasons,
                glm53_doctor,
                glm53_measurements,
                glm53_unset_rails,
            )
        }
