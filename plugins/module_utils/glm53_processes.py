"""For our Ansible modules on a node: who listens, and who a process is, from /proc. Root sees everybody's."""

from __future__ import annotations

import contextlib
import pwd
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CONTAINER = re.compile(r"docker[-/]([0-9a-f]{64})")
INTERPRETER = re.compile(r"^(?:(?:ba|da|z|k)?sh|python[0-9.]*)$")


def listening(text: str, ports: Iterable[int]) -> Iterator[tuple[int, str, str]]:
    """Yield port, address and socket inode of each listener in /proc/net/tcp or tcp6; proc(5), state 0A."""
    wanted = set(ports)
    for line in text.splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].partition(":")
        if words[3] == "0A" and int(port, 16) in wanted:
            yield int(port, 16), address_of(host), words[9]


def address_of(text: str) -> str:
    """Return an address as the kernel prints it in hex words of the machine's own byte order."""
    raw = b"".join(struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8))
    if len(raw) == 16 and raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def place_of(cgroups: str) -> dict[str, str]:
    """Return the container of a process with this /proc/PID/cgroup, or else its unit and whose it is."""
    container = CONTAINER.search(cgroups)
    if container:
        return {"container": container[1], "unit": "", "uid": ""}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            services = [part for part in path.split("/") if part.endswith(".service")]
            user = next((s for s in services if s.startswith("user@")), "")
            if services and services[-1] != user:
                uid = user.removeprefix("user@").removesuffix(".service")
                return {"container": "", "unit": services[-1], "uid": uid}
    return {"container": "", "unit": "", "uid": ""}


def account(uid: int) -> str:
    """Return an account's name, its number when it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def status_of(proc: Path, pid: int) -> dict[str, str]:
    """Return /proc/PID/status as words; empty when the process is gone."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def ancestors(proc: Path, pid: int) -> list[tuple[int, str]]:
    """Return number and name of a process and of all that it came from."""
    found: list[tuple[int, str]] = []
    while pid > 0 and (status := status_of(proc, pid)):
        found.append((pid, status.get("Name", "")))
        pid = int(status.get("PPid", "0"))
    return found


def holder_of(proc: Path, pid: int) -> dict[str, Any]:
    """Return who a process is: name, account, container or unit, and the terminal that keeps it."""
    status = status_of(proc, pid)
    try:
        place = place_of((proc / str(pid) / "cgroup").read_text(encoding="utf-8"))
    except OSError:
        place = place_of("")
    names = [name for _, name in ancestors(proc, pid)]
    return {
        "pid": pid,
        "command": status.get("Name", ""),
        "user": account(int(status.get("Uid", "0").split()[0])),
        "container": place["container"],
        "unit": place["unit"],
        "scope": account(int(place["uid"])) if place["uid"] else "",
        "terminal": next((t for t in ("tmux", "screen") for n in names if n.lower().startswith(t)), ""),
    }


def pids(proc: Path) -> list[int]:
    """Return the processes there are."""
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def read_listeners(proc: Path, ports: list[int]) -> list[dict[str, Any]]:
    """Return who listens on `ports`, in this network namespace; each port, address and process once."""
    sockets: dict[str, tuple[int, str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for port, address, inode in listening((proc / "net" / name).read_text(), ports):
                sockets[f"socket:[{inode}]"] = (port, address)
    found: dict[tuple[int, str], int] = {}
    for pid in pids(proc) if sockets else []:
        with contextlib.suppress(OSError):
            for link in (proc / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    port, address = sockets.get(str(link.readlink()), (0, ""))
                    if port:
                        found.setdefault((port, address), pid)
    return [
        {"port": port, "address": address, "holder": holder_of(proc, pid)}
        for (port, address), pid in sorted(found.items())
    ]


def script_of(proc: Path, pid: int) -> tuple[Path | None, str]:
    """Return the script file that an interpreter runs, or the text after -c."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        folder = (proc / str(pid) / "cwd").readlink()
    except OSError:
        return None, ""
    if not INTERPRETER.match(Path(words[0]).name.lstrip("-")) or any("ansible" in w.lower() for w in words):
        return None, ""
    for index, word in enumerate(words[1:], 1):
        if word == "-c":
            return None, " ".join(words[index + 1 : index + 2])
        if word == "-m":
            break
        if word and not word.startswith("-"):
            return folder / word, ""
    return None, ""
