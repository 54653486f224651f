"""Ansible filters: the plan of what has to be moved, made by the code that makes it on the head."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def _package(name: str) -> Any:
    """Return a module of the package that runs on the nodes; the control host has it too."""
    try:
        return importlib.import_module(f"glm53_service.{name}")
    except ImportError as error:
        raise AnsibleFilterError(
            f"Found: {sys.executable} cannot import glm53_service ({error}). Expected: Ansible runs from the"
            " project's own environment. Fix: `make venv`, then .venv/bin/ansible-playbook"
        ) from error


def _folders(data: list[Mapping[str, Any]]) -> list[Any]:
    import msgspec

    folder = _package("artifacts.folders").Folder
    return [msgspec.convert(_plain(entry), folder) for entry in data]


def _plain(value: Any) -> Any:
    """Return Ansible's value as Python's own: its tagged strings are none for a strict reader."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def glm53_incomplete(seen: Mapping[str, Any], folders: list[Mapping[str, Any]], node: str) -> list[str]:
    """Return what is wrong with the head's own folders; `seen` is what glm53_weights read there."""
    place_of = _package("artifacts.plan").place_of
    pairs = zip(_folders(folders), seen["looks"], strict=True)
    return [
        problem
        for folder, look in pairs
        for problem in _package("artifacts.folders").incomplete(folder, place_of(node, look))
    ]


def glm53_plan(
    hosts: list[str], hostvars: Mapping[str, Any], folders: list[Mapping[str, Any]], image: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the plan for `hosts`, the head first, of which each has `__plan_seen` (glm53_weights).

    `image` has its `reference`, and what a registry says of it when it was asked: `bytes`, `why`.

    `lines` for a person; `adopt`: the folders of the head that have no manifest; `todo`: the workers that
    something is to be done on; `extra` and `tight`: by node, what is in the way there.
    """
    plan = _package("artifacts.plan")
    head, *workers = hosts
    seen = {host: hostvars[host]["__plan_seen"] for host in hosts}
    over = {host: _over(seen[head]["ways"], hostvars[host], hostvars[head]) for host in workers}
    snapshots = [
        plan.Snapshot(
            want=folder.want,
            head=plan.place_of(head, seen[head]["looks"][number]),
            workers=[(plan.place_of(host, seen[host]["looks"][number]), over[host]) for host in workers],
        )
        for number, folder in enumerate(_folders(folders))
    ]
    spare = _package("artifacts.disk").SPARE_BYTES
    steps = plan.plan(snapshots, rates=seen[head]["rates"], spare=spare)
    images = _image_steps(hosts, hostvars, image, over, seen[head]["rates"], spare)
    return {
        "lines": [str(step) for step in (*steps, *images)],
        "adopt": [s.want.what for s in snapshots if s.head.manifest is None],
        "todo": [host for host in workers if any(s.node == host and not s.settled for s in steps)],
        "extra": {host: [str(s) for s in steps if s.node == host and s.extra] for host in hosts},
        "tight": {host: [str(s) for s in steps if s.node == host and not s.room] for host in hosts},
    }


def _image_steps(
    hosts: list[str],
    hostvars: Mapping[str, Any],
    image: Mapping[str, Any],
    over: Mapping[str, str],
    rates: Mapping[str, float],
    spare: int,
) -> tuple[Any, ...]:
    """Return the image's steps; none while a docker does not answer, which other tasks complain of."""
    plan, reference = _package("artifacts.images.plan"), _package("artifacts.images.reference")
    dockers = {host: _plain(hostvars[host]["__glm53_found"]["docker"]) for host in hosts}
    if not all(docker["answers"] for docker in dockers.values()):
        return ()
    name, (head, *workers) = str(image["reference"]), hosts
    wanted = dockers[head]["image"]
    tag = _package("artifacts.content").local_tag(_package("artifacts.content").image_content(wanted or {}))
    places = {
        host: plan.ImagePlace(
            node=str(host),
            inspect=wanted if host == head else docker["shipped"].get(tag) or docker["image"],
            free=int(docker["free_bytes"]),
        )
        for host, docker in dockers.items()
    }
    pullable = reference.PULLABLE.fullmatch(name)
    return tuple(
        plan.plan_image(
            name,
            reference.parse_reference(name).registry if pullable else "",
            image.get("bytes") or str(image.get("why") or plan.LOCAL_ONLY),
            places[head],
            [(places[host], over[host]) for host in workers],
            rates=rates,
            spare=spare,
        )
    )


def _over(ways: Mapping[str, Any], worker: Mapping[str, Any], head: Mapping[str, Any]) -> str:
    """Return the path to a worker in words; before the rails are set up, the kernel's is another one."""
    rails = [str(rail["netdev"]) for rail in head["glm53_fabric_rails"]]
    routes = []
    for rail in worker["glm53_fabric_rails"]:
        address = str(rail["address"]).split("/", maxsplit=1)[0]
        way = ways.get(address) or {}
        if way.get("netdev") in rails:
            routes.append(str(_package("artifacts.route").route_of(address, way["netdev"], way)))
        else:
            routes.append(f"{address}, a rail that is not set up yet")
    return str(_package("artifacts.plan").from_head(routes))


def glm53_logins(workers: list[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the login account and the ssh port of each worker."""
    return {
        str(worker): {
            "name": str(hostvars[worker]["__glm53_found"]["account"]["name"]),
            "port": int(hostvars[worker].get("ansible_port") or 22),
        }
        for worker in workers
    }


def glm53_shipped(results: list[Mapping[str, Any]]) -> list[str]:
    """Return what each copy did (results of `glm53 ship --json`, followed), for a person."""
    progress = _package("artifacts.progress")
    return [
        f"{e['what']} on {e['node']}: {e['files']} files, {progress.gigabytes(e['bytes'])} in"
        f" {progress.duration(e['seconds'])}, to {'; '.join(e['over'])}"
        for result in results
        for e in result.get("events", [])
        if e.get("event") == "result"
    ]


def glm53_prune_lines(events: list[Mapping[str, Any]]) -> list[str]:
    """Return what `glm53 prune --json` found, for a person: sizes, names, what became of each, and notes."""
    gigabytes = _package("artifacts.progress").gigabytes
    items = [e for e in events if e["event"] == "item"]
    lines = [f"{gigabytes(e['bytes'])} {e['kind']} {e['name']} {e['result'] or ''}".rstrip() for e in items]
    notes = [f"note: {note}" for e in events if e["event"] == "result" for note in e["notes"]]
    removed = any(e["result"] for e in items)
    return lines + (["remove: -e glm53_prune=true"] if lines and not removed else []) + notes


class FilterModule:
    """Names the filters for Ansible."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return filter name to function."""
        return {
            function.__name__: function
            for function in (glm53_incomplete, glm53_plan, glm53_logins, glm53_shipped, glm53_prune_lines)
        }
