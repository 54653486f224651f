"""Ansible filters: what the host's and the fabric's roles compute from the inventory and what was found."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def glm53_openings(openings: list[Mapping[str, Any]], version: int) -> list[dict[str, Any]]:
    """Return the openings (port, sources) whose sources are of IP `version`, without those that have none."""
    kept = [
        {
            "port": int(opening["port"]),
            "sources": [str(s) for s in opening["sources"] if ipaddress.ip_network(s).version == version],
        }
        for opening in openings
    ]
    return [opening for opening in kept if opening["sources"]]


def glm53_ports(settings: Mapping[str, Any], supervisor_port: int) -> list[int]:
    """Return every TCP port of ours: API, gate, supervisors, and both engines' rendezvous."""
    try:
        from glm53_service.settings.tensorfold import Tensorfold
        from glm53_service.settings.vllm import Vllm
    except ImportError as error:
        raise AnsibleFilterError(
            f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: Ansible runs from the"
            " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
        ) from error
    rendezvous = [
        settings[name].get("rendezvous_port", engine().rendezvous_port)
        for name, engine in (("tensorfold", Tensorfold), ("vllm", Vllm))
    ]
    ports = [settings["api"]["port"], settings["gate"]["port"], supervisor_port, *rendezvous]
    return sorted({int(port) for port in ports})


def glm53_ufw_commands(
    ufw: Mapping[str, Any],
    devices: list[str],
    fabric_peers: list[str],
    management_peers: list[str],
    supervisor_port: int,
    openings: list[Mapping[str, Any]],
) -> list[str]:
    """Return ufw's commands for what our table lets in and ufw does not yet; none when it is switched off."""
    if not ufw["active"]:
        return []
    rules = [f"allow in on {device} from {peer}" for device in devices for peer in fabric_peers]
    rules += [f"allow from {peer} to any port {supervisor_port} proto tcp" for peer in management_peers]
    rules += [f"allow from {s} to any port {o['port']} proto tcp" for o in openings for s in o["sources"]]
    return [f"sudo ufw {rule}" for rule in rules if f"ufw {rule}" not in ufw["added"]]


def glm53_rendered_rails(
    rails: list[Mapping[str, Any]], networkmanager: list[str], mtu: int
) -> list[dict[str, Any]]:
    """Return the rails with MTU and renderer: who manages a device now goes on managing it."""
    return [
        {
            **rail,
            "mtu": int(mtu),
            "renderer": "NetworkManager" if rail["netdev"] in networkmanager else "networkd",
        }
        for rail in rails
    ]


def glm53_rail_sysctls(rails: list[Mapping[str, Any]]) -> dict[str, str]:
    """Return what rails that share a subnet need, by path below /proc/sys; nothing when each has its own.

    Without it one port answers ARP for the other's address (arp_ignore), asks with it (arp_announce), and a
    reply that comes back on the other port is dropped (rp_filter): Documentation/networking/ip-sysctl.
    """
    networks = [ipaddress.IPv4Interface(rail["address"]).network for rail in rails]
    if len(set(networks)) == len(networks):
        return {}
    wanted = {"arp_ignore": "1", "arp_announce": "2", "rp_filter": "2"}
    return {f"net/ipv4/conf/{r['netdev']}/{key}": value for r in rails for key, value in wanted.items()}


def glm53_lost(
    problems: Mapping[str, str], targets: list[Mapping[str, Any]], answered: list[str]
) -> list[str]:
    """Return the problems (address to text) of targets that answered before the change, here or elsewhere."""
    known = {t["address"]: {t["address"], *t["before"]} for t in targets}
    return [text for address, text in problems.items() if known[address] & set(answered)]


def glm53_docker_packages(found: Mapping[str, Any], gpu: bool) -> list[str]:
    """Return the packages to install for what a node lacks; one that no source has begins with "no ".

    An engine that is there is kept, whichever it is: docker.io over docker-ce removes the other.
    """
    candidates, missing = found["candidates"], []
    engines = [name for name in ("docker-ce", "docker.io") if name in found["packages"]]
    if not engines and not found["docker"]["answers"]:
        if "docker-ce" in candidates:
            missing += ["docker-ce", "docker-ce-cli", "containerd.io"]
        else:
            missing += ["docker.io" if "docker.io" in candidates else "no source for docker"]
    if gpu and not found["toolkit"]["version"]:
        name = "nvidia-container-toolkit"
        missing.append(name if name in candidates else f"no source for {name}")
    return missing


def glm53_parity(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return in what the nodes (name to found) differ: engine, container toolkit, driver."""

    def said(node: Mapping[str, Any]) -> dict[str, str]:
        driver = [f"{n} {v}" for n, v in sorted(node["packages"].items()) if n.startswith("nvidia-driver-")]
        return {
            "docker": str(node["docker"].get("version", "none")),
            "nvidia-container-toolkit": node["toolkit"]["version"] or "none",
            "nvidia-container-runtime mode": node["toolkit"]["mode"] or "none",
            "driver": ", ".join(driver) or "none",
        }

    values = {name: said(node) for name, node in found.items()}
    return [
        f"{key}: " + ", ".join(f"{name} has {values[name][key]}" for name in values)
        for key in next(iter(values.values()), {})
        if len({value[key] for value in values.values()}) > 1
    ]


def glm53_prefixed(values: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the mapping with `prefix` before each key."""
    return {prefix + key: value for key, value in values.items()}


class FilterModule:
    """Names the filters for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return filter name to function."""
        return {
            function.__name__: function
            for function in (
                glm53_openings,
                glm53_ports,
                glm53_ufw_commands,
                glm53_rendered_rails,
                glm53_rail_sysctls,
                glm53_lost,
                glm53_docker_packages,
                glm53_parity,
                glm53_prefixed,
            )
        }
