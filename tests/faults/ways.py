"""Ways to hurt a pair, and to heal it: each returns a function of the pair."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable

from tests.faults.harness import CALM_SECONDS, OPENER, ready, status
from tests.lab.conftest import HEAD, UNIT, WORKER, Pair

GIB_ABOVE = 0.8
"""How far the guard of a drill is below the machine's memory: what leaks is 1.6 GB."""


def folder(pair: Pair, host: str) -> str:
    """Return the double's folder in the cache of the image that runs, as the host sees it."""
    return pair.sh(host, "sh", "-c", "ls -dt /var/lib/glm53/cache/*/tf-double | head -1").strip()


def live(fault: str, host: str = HEAD, *, request: bool = False) -> Callable[[Pair], object]:
    """Return an injection of a fault that begins while the pair serves, with a request running if wanted."""

    def inject(pair: Pair) -> None:
        path = folder(pair, host)
        pair.sh(host, "sh", "-c", f"echo '{fault}' > {path}/control")
        if request:
            time.sleep(0.3)  # the double reads the file every 0.1 s
            threading.Thread(target=ask, daemon=True).start()

    return inject


def ask() -> None:
    """Send one long request and forget its answer."""
    now = status()
    body = {
        "model": now["model"],
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Write 300 words."}],
    }
    url = f"{now['endpoint']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        OPENER.open(request, timeout=60).read()
    except OSError:
        return


def starting(lines: str, host: str = HEAD) -> Callable[[Pair], object]:
    """Return an injection into the next start: the double's switches on one host, then a restart."""

    def inject(pair: Pair) -> None:
        path = folder(pair, host)
        pair.sh(host, "sh", "-c", f"printf '{lines}\\n' > {path}/env; chmod 644 {path}/env")
        restart(pair)

    return inject


def restart(pair: Pair) -> None:
    """Restart the head's unit; systemd's start limit counts restarts by hand too."""
    pair.sh(HEAD, "systemctl", "reset-failed", UNIT[HEAD], check=False)
    pair.sh(HEAD, "systemctl", "restart", "--no-block", UNIT[HEAD])


def guarded(key: str, value: float | None = None) -> Callable[[Pair], object]:
    """Return a preparation that sets a memory guard, GIB_ABOVE below what is available now unless given."""

    def prepare(pair: Pair) -> None:
        kib = int(pair.sh(HEAD, "awk", "/^MemAvailable:/ {print $2}", "/proc/meminfo"))
        gib = kib / 1024**2 - GIB_ABOVE if value is None else value
        pair.sh(HEAD, "sed", "-i", f"s/{key}: .*/{key}: {gib:.2f}/", "/etc/glm53/settings.yaml")
        epoch = status()["epoch"]
        restart(pair)
        ready(epoch)

    return prepare


def healed(pair: Pair) -> None:
    """Take every switch of the double away."""
    for host in (HEAD, WORKER):
        pair.sh(
            host,
            "sh",
            "-c",
            "rm -f /var/lib/glm53/cache/*/tf-double/env /var/lib/glm53/cache/*/tf-double/nccl*",
        )


def sh(host: str, *argv: str) -> Callable[[Pair], object]:
    """Return an injection that runs a command on a host."""
    return lambda pair: pair.sh(host, *argv, check=False)


def kill_rank(host: str) -> Callable[[Pair], object]:
    """Return an injection that kills a rank's container."""
    return lambda pair: pair.sh(host, "docker", "kill", pair.containers(host)[0])


def kill_supervisor(host: str) -> Callable[[Pair], object]:
    """Return an injection that ends a supervisor as the OOM killer does."""
    return lambda pair: pair.sh(host, "systemctl", "kill", "-s", "KILL", UNIT[host])


def power_on(host: str) -> Callable[[Pair], object]:
    """Return a cure: power."""
    return lambda pair: pair.lab.power_on(host)


def pause(host: str, seconds: float) -> Callable[[Pair], object]:
    """Return an injection that stops a supervisor's process for less than a lease."""
    script = f"p=$(systemctl show -P MainPID {UNIT[host]}); kill -STOP $p; sleep {seconds}; kill -CONT $p"
    return sh(host, "sh", "-c", script)


def burn(pair: Pair) -> None:
    """Keep both cores busy for the time that is watched."""
    del pair
    for _ in range(2):
        subprocess.Popen(["timeout", str(int(CALM_SECONDS)), "sh", "-c", "while :; do :; done"])


def freeze(host: str, *, request: bool = False) -> Callable[[Pair], object]:
    """Return an injection that freezes a rank's processes, as a GPU that never comes back does."""

    def inject(pair: Pair) -> None:
        if request:
            threading.Thread(target=ask, daemon=True).start()
            time.sleep(0.3)
        pair.sh(host, "docker", "pause", pair.containers(host)[0])

    return inject


def taken_port(pair: Pair) -> None:
    """Give the API's port to another program between two starts."""
    server = "python3 -m http.server 8888 --bind 10.78.0.1"
    script = f"systemctl stop glm53-head; systemd-run --unit g5-taken {server}; sleep 0.3"
    pair.sh(
        HEAD,
        "sh",
        "-c",
        f"{script}; systemctl reset-failed glm53-head; systemctl start --no-block glm53-head",
    )
