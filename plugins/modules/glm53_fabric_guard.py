#!/usr/bin/python
"""Ansible module: the timed revert of a change of the rails: armed before it, confirmed or run after."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: glm53_fabric_guard
short_description: Back up the rails' files and addresses, and give them back unless confirmed
description:
  - "armed: keeps a backup, notes which of `watch` answer now, and starts a timer of systemd that gives
    everything back. It runs on the node, so it also works when nobody reaches the node any more."
  - "confirmed: stops the timer. reverted: does at once what the timer would have done."
  - "absent: removes `files` and gives the devices back what `record` says they had before the first change."
  - "It lives in /run: after a boot the files stand as they are."
options:
  state:
    description: What to do.
    choices: [armed, confirmed, reverted, absent]
    type: str
    required: true
  files: {description: "Files that the change writes or removes.", type: list, elements: str, default: []}
  restored: {description: "Files that are only ever restored.", type: list, elements: str, default: []}
  netdevs: {description: "The rails' devices.", type: list, elements: str, default: []}
  watch: {description: "Addresses whose loss would count.", type: list, elements: str, default: []}
  record: {description: "Keeps what was before the first change.", type: path, default: ""}
  seconds: {description: "When the timer runs out.", type: int, default: 180}
"""

FOLDER = Path("/run/glm53-fabric")
UNIT = "glm53-fabric-revert"
STATES = ("armed", "confirmed", "reverted", "absent")
DONE = "done"
"""What the script leaves in its marker when nothing failed."""


def run(*argv: str) -> str:
    """Return a command's output; RuntimeError with its own words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{shlex.join(argv)}` failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def answers(address: str) -> bool:
    """Say whether one of two pings comes back."""
    argv = ["ping", "-n", "-q", "-c", "2", "-i", "0.3", "-W", "1", address]
    return subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode == 0


def live(addresses: Sequence[dict[str, Any]], netdevs: Sequence[str]) -> dict[str, Any]:
    """Return `{netdev: {mtu, addresses}}` of what `ip -j address` shows of `netdevs`."""
    return {
        entry["ifname"]: {
            "mtu": entry["mtu"],
            "addresses": [
                f"{a['local']}/{a['prefixlen']}"
                for a in entry.get("addr_info", [])
                if a.get("family") == "inet"
            ],
        }
        for entry in addresses
        if entry.get("ifname") in netdevs
    }


def revert_script(folder: Path, files: dict[str, bool], before: dict[str, Any]) -> str:
    """Return the shell script that restores `files` (whether each was there) and the devices' `before`.

    Every line is tried, whatever became of the one before it; the marker at its end says what was reached.
    """
    devices = shlex.join(before)
    networkd = "networkctl reload" + (f"; networkctl reconfigure {devices}" if before else "")
    manager = "nmcli general reload conf; nmcli connection reload"
    firewall = "systemctl reload glm53-firewall.service"
    lines = ["#!/bin/sh", "# Gives the rails back what they had. Written by glm53_fabric_guard.", "failed="]
    for number, (path, was_there) in enumerate(files.items()):
        backup = shlex.quote(str(folder / f"file-{number}"))
        act = f"cp -a {backup} {shlex.quote(path)}" if was_there else f"rm -f {shlex.quote(path)}"
        lines.append(f'{act} || failed="$failed "{shlex.quote(path)}')
    lines += [
        'netplan generate || failed="$failed netplan"',
        f"if systemctl -q is-active systemd-networkd; then {networkd}; fi",
        f"if systemctl -q is-active NetworkManager; then {manager}; fi",
        f"if systemctl -q is-active glm53-firewall.service; then {firewall}; fi",
        "sleep 2",
    ]
    for netdev, state in before.items():
        name = shlex.quote(netdev)
        kept = "|".join(state["addresses"]) or "-"
        lines += [
            f"for address in $(ip -4 -o address show dev {name} | awk '{{print $4}}'); do",
            f'    case "$address" in {kept}) ;; *) ip address del "$address" dev {name} ;; esac',
            "done",
            f"ip link set {name} mtu {int(state['mtu'])}",
            *(f"ip address replace {address} dev {name}" for address in state["addresses"]),
        ]
    lines.append(f'echo "${{failed:-{DONE}}}" > {shlex.quote(str(folder / "reverted"))}')
    return "\n".join(lines) + "\n"


def arm(params: dict[str, Any], folder: Path = FOLDER) -> list[str]:
    """Back up, note who answers, start the timer; return who of `watch` answers now."""
    disarm()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    files = {path: Path(path).exists() for path in params["files"]}
    restored = {path: True for path in params["restored"] if Path(path).exists()}
    everything = {**files, **restored}
    for number, path in enumerate(everything):
        if everything[path]:
            shutil.copy2(path, folder / f"file-{number}")
    before = live(json.loads(run("ip", "-j", "address", "show")), params["netdevs"])
    record = Path(params["record"]) if params["record"] else None
    if record and not record.exists() and not any(files.values()):
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(before), encoding="utf-8")
    script = folder / "revert.sh"
    script.write_text(revert_script(folder, everything, before), encoding="utf-8")
    reached = [address for address in params["watch"] if answers(address)]
    (folder / "reached.json").write_text(json.dumps(reached), encoding="utf-8")
    run(
        "systemd-run",
        f"--unit={UNIT}",
        f"--on-active={params['seconds']}",
        "--timer-property=AccuracySec=1s",
        "--collect",
        "--quiet",
        "/bin/sh",
        str(script),
    )
    return reached


def give_back(params: dict[str, Any], check_mode: bool, folder: Path = FOLDER) -> bool:
    """Remove our files, give the devices back what the record says; return whether there was anything."""
    record = Path(params["record"])
    there = [path for path in params["files"] if Path(path).exists()]
    if check_mode or not (there or record.exists()):
        return bool(there or record.exists())
    before = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    script = folder / "revert.sh"
    script.write_text(revert_script(folder, dict.fromkeys(there, False), before), encoding="utf-8")
    run("/bin/sh", str(script))
    record.unlink(missing_ok=True)
    if problem := verdict((folder / "reverted").read_text(encoding="utf-8").strip(), "reverted"):
        raise RuntimeError(problem)
    shutil.rmtree(folder)
    return True


def disarm() -> None:
    """Stop the timer; the revert itself is left to end when it runs already."""
    subprocess.run(["systemctl", "stop", f"{UNIT}.timer"], capture_output=True, timeout=90, check=False)


def verdict(marker: str | None, state: str) -> str:
    """Return what is wrong with ending the guard in `state`, from the script's marker (None: none)."""
    if marker is None:
        return "" if state == "confirmed" else "the revert did not run"
    if marker != DONE:
        return (
            f"Found: giving the rails back failed for {marker}. Expected: everything as before. Fix: look"
            f" at `journalctl -u {UNIT}`; the backup is in {FOLDER}"
            ", `sh revert.sh` there repeats it"
        )
    if state == "confirmed":
        return (
            "Found: the time for confirming ran out: the rails have their old configuration again."
            " Expected: a confirmation within fabric_revert_seconds. Fix: run the playbook again, with more"
            " of them if the connection to this node is slow"
        )
    return ""


def finish(state: str, folder: Path = FOLDER) -> str:
    """End the guard; return what is wrong, empty when nothing is."""
    disarm()
    if state == "reverted" and not (folder / "reverted").exists():
        run("/bin/sh", str(folder / "revert.sh"))
    marker = folder / "reverted"
    left = marker.read_text(encoding="utf-8").strip() if marker.exists() else None
    if left in (None, DONE):  # else the backup is still needed
        shutil.rmtree(folder, ignore_errors=True)
    return verdict(left, state)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": list(STATES), "required": True},
            "files": {"type": "list", "elements": "str", "default": []},
            "restored": {"type": "list", "elements": "str", "default": []},
            "netdevs": {"type": "list", "elements": "str", "default": []},
            "watch": {"type": "list", "elements": "str", "default": []},
            "record": {"type": "path", "default": ""},
            "seconds": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    state = module.params["state"]
    try:
        if state == "absent":
            module.exit_json(changed=give_back(module.params, module.check_mode))
        if module.check_mode:
            module.exit_json(changed=False)
        if state == "armed":
            module.exit_json(changed=False, reached=arm(module.params))
        if not FOLDER.exists():
            module.exit_json(changed=False, armed=False)
        if problem := finish(state):
            module.fail_json(msg=problem)
    except RuntimeError as error:
        module.fail_json(
            msg=f"Found: {error}. Expected: it works. Fix: look at `systemctl status {UNIT}.timer`"
        )
    module.exit_json(changed=state == "reverted", armed=True)


if __name__ == "__main__":
    main()
