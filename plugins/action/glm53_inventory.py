"""Ansible action: is the inventory filled in, complete and free of misspelt names? Control host only."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

PLACEHOLDER = "CHANGE-ME"
OPENINGS = {"glm53_api_open_from": "glm53_api_bind", "glm53_gate_open_from": "glm53_gate_bind"}
"""The variables that open a port, and those that make it listen on the management network."""

CONNECTION_VARIABLES = ("ansible_host", "ansible_user", "ansible_port")


def group_problems(groups: Mapping[str, list[str]]) -> list[str]:
    """Return what is wrong with the groups `head` and `workers`."""
    head, workers = list(groups.get("head", [])), list(groups.get("workers", []))
    problems = []
    if len(head) != 1:
        problems.append(
            f"group head: found {', '.join(head) or 'no host'}; expected exactly one. Fix: name the"
            " machine that serves the API under `head: hosts:` in your inventory, and pass it with -i"
        )
    if not workers:
        problems.append(
            "group workers: found no host; expected at least one: this model does not fit one machine."
            " Fix: name the other Spark under `workers: hosts:` in your inventory"
        )
    if both := sorted(set(head) & set(workers)):
        problems.append(
            f"groups: found {', '.join(both)} in head and in workers; expected each host in one of them"
        )
    return problems


def walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield every scalar in `value` with its place in words: glm53_fabric_rails[0].address."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from walk(inner, f"{place}[{index}]")
    else:
        yield place, value


def placeholder_problems(host: str, variables: Mapping[str, Any]) -> list[str]:
    """Return each value of `host` that still is the example's placeholder."""
    return [
        f"{host}: {place} is still {value}"
        for name in variables
        if name.startswith("glm53_") or name in CONNECTION_VARIABLES
        for place, value in walk(variables[name], name)
        if isinstance(value, str) and PLACEHOLDER in value
    ]


def placeholder_lines(folders: list[Path]) -> list[str]:
    """Return file and line of every placeholder below `folders`, so that the reader can open them."""
    files = sorted({f for folder in folders for f in folder.rglob("*.y*ml")})
    return [
        f"{file}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PLACEHOLDER in line.split("#", 1)[0]
    ]


def unknown_names(variables: Mapping[str, Any], known: list[str]) -> list[str]:
    """Return a refusal for each glm53_ name that nothing reads, with the nearest that something does."""
    problems = []
    for name in sorted(n for n in variables if n.startswith("glm53_") and n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see roles/glm53/defaults/main.yml for all names"
        problems.append(f"{name}: nothing reads this variable; {hint}")
    return problems


def rail_problems(rails: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the rails of all hosts together (host -> glm53_fabric_rails)."""
    problems = [p for host, value in rails.items() for p in _one_host(host, value)]
    if problems:
        return problems
    counts = {host: len(value) for host, value in rails.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{host} has {count}" for host, count in counts.items())
        return [f"glm53_fabric_rails: {found}; expected the same number of rails on every node"]
    for index in range(next(iter(counts.values()), 0)):
        networks = {
            host: ipaddress.IPv4Interface(value[index]["address"]).network for host, value in rails.items()
        }
        if len(set(networks.values())) > 1:
            found = ", ".join(f"{host} is in {network}" for host, network in networks.items())
            problems.append(f"glm53_fabric_rails[{index}]: {found}; expected one subnet a rail on all nodes")
    return problems + _twice(rails)


def _one_host(host: str, rails: Any) -> list[str]:
    example = "for example [{netdev: enp1s0f0np0, address: 10.77.0.1/24}]"
    if not isinstance(rails, list) or not 1 <= len(rails) <= 2:
        return [
            f"{host}: glm53_fabric_rails: found {rails!r}; expected a list of one or two rails, {example}"
        ]
    problems = []
    for index, rail in enumerate(rails):
        place = f"{host}: glm53_fabric_rails[{index}]"
        if not isinstance(rail, Mapping) or set(rail) != {"netdev", "address"}:
            problems.append(f"{place}: found {rail!r}; expected the keys netdev and address, {example}")
            continue
        try:
            interface = ipaddress.IPv4Interface(str(rail["address"]))
            if "/" not in str(rail["address"]) or interface.network.num_addresses < 4:
                raise ValueError("no usable prefix length")
        except ValueError:
            problems.append(
                f"{place}.address: found {rail['address']!r}; expected an IPv4 address with its prefix"
                " length, for example 10.77.0.1/24 (the fabric is IPv4)"
            )
    return problems


def _twice(rails: Mapping[str, Any]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for host, value in rails.items():
        for rail in value:
            address = str(rail["address"]).split("/")[0]
            if address in seen:
                problems.append(
                    f"{host}: glm53_fabric_rails: {address} is given to {seen[address]} too; expected"
                    " every address once"
                )
            seen[address] = host
        devices = [rail["netdev"] for rail in value]
        if len(set(devices)) != len(devices):
            problems.append(
                f"{host}: glm53_fabric_rails: {devices[0]} appears twice; expected one address a device"
            )
    return problems


def overlap_problems(rails: Mapping[str, Any], management: Mapping[str, str]) -> list[str]:
    """Return each rail whose network has a management address in it (host -> address): that link would go."""
    problems = []
    for host, value in rails.items():
        for index, rail in enumerate(value):
            network = ipaddress.IPv4Interface(str(rail["address"])).network
            problems += [
                f"{host}: glm53_fabric_rails[{index}]: {network} has the management address {address} of"
                f" {other} in it; expected a network of its own, or that link is lost. Fix: choose another"
                for other, address in management.items()
                if _is_in(address, network)
            ]
    return problems


def _is_in(address: str, network: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:  # a name: only its address would tell
        return False


def opening_problems(host: str, variables: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with who may reach the API and the gate."""
    problems = []
    firewall = boolean(variables.get("glm53_firewall", True), strict=False)
    for name, bind in OPENINGS.items():
        sources = variables.get(name) or []
        if not isinstance(sources, list):
            return [f"{host}: {name}: found {sources!r}; expected a list, for example [192.168.1.0/24]"]
        for source in sources:
            try:
                ipaddress.ip_network(str(source))
            except ValueError:
                problems.append(
                    f"{host}: {name}: found {source!r}; expected an address or a network, for example"
                    " 192.168.1.20 or 192.168.1.0/24 (all bits behind the prefix are 0)"
                )
        if variables.get(bind) == "management" and firewall and not sources:
            problems.append(
                f"{host}: {bind} is management, but {name} is empty, so the firewall lets nobody in. Fix: say"
                f" who may, for example {name}: [192.168.1.0/24] (0.0.0.0/0 is everybody), or set"
                " glm53_firewall: false"
            )
    return problems


def image_problems(variables: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with where the engine's image comes from."""
    image, build = variables.get("glm53_image"), variables.get("glm53_image_build")
    if bool(image) != bool(build):
        return []
    found = "both are set" if image else "neither is set"
    return [
        f"glm53_image, glm53_image_build: {found}; expected one of them. Fix: glm53_image for an image that"
        " exists, by digest; glm53_image_build for one that the head builds"
    ]


def _management(host: str, variables: Mapping[str, Any]) -> str:
    return str(variables.get("glm53_management_address") or variables.get("ansible_host") or host)


def known_names(checkout: Path) -> list[str]:
    """Return every variable that the site's role documents."""
    specs = yaml.safe_load((checkout / "roles/glm53/meta/argument_specs.yml").read_text(encoding="utf-8"))
    return sorted(specs["argument_specs"]["main"]["options"])


class ActionModule(ActionBase):  # type: ignore[misc]
    """Reads the inventory as Ansible sees it; nothing is sent to a node."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Fail with everything that must be filled in or mended, each with its place and fix."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        problems = group_problems(task_vars["groups"])
        hosts = [h for group in ("head", "workers") for h in task_vars["groups"].get(group, [])]
        raw = {host: task_vars["hostvars"].raw_get(host) for host in hosts}
        unfilled = [p for host, variables in raw.items() for p in placeholder_problems(host, variables)]
        if unfilled:
            folders = [Path(str(v["inventory_dir"])) for v in raw.values() if v.get("inventory_dir")]
            lines = [f"fill in {line}" for line in placeholder_lines(folders)]
            problems += lines or [f"{p}; expected your own value" for p in unfilled]
        known = known_names(Path(__file__).resolve().parents[2])
        names = {n: None for variables in raw.values() for n in variables if isinstance(n, str)}
        problems += unknown_names(names, known)
        if hosts and not unfilled:
            rails = {host: task_vars["hostvars"][host].get("glm53_fabric_rails") for host in hosts}
            wrong = rail_problems(rails)
            management = {host: _management(host, task_vars["hostvars"][host]) for host in hosts}
            problems += wrong or overlap_problems(rails, management)
            problems += image_problems(task_vars["hostvars"][hosts[0]])
            problems += [p for host in hosts for p in opening_problems(host, task_vars["hostvars"][host])]
        if problems:
            heading = "The inventory cannot be used yet; nothing was touched."
            return {"failed": True, "changed": False, "msg": "\n- ".join([heading, *problems])}
        return {"changed": False}
