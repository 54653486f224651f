"""Says in words how a container ended: no end is a success unless this supervisor asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CODES = {
    0: "ended with 0, which is no success: nobody asked it to (vLLM's rank 0 does so when its engine dies)",
    1: "failed (exit 1)",
    2: "refused its arguments (exit 2)",
    125: "was not started by docker (exit 125)",
    126: "has a command that cannot be run (exit 126)",
    127: "has a command that the image lacks (exit 127)",
    134: "aborted (SIGABRT)",
    137: "was killed (SIGKILL): by the kernel for want of memory, or by hand",
    139: "crashed (SIGSEGV)",
    143: "was ended by SIGTERM that did not come from here",
}


def exit_text(state: Mapping[str, Any], *, host_restarted: bool = False) -> str:
    """Return what docker's `State` of an ended container means.

    `host_restarted`: the boot id is not the one of its start; 255 is then what docker writes for a container
    that was still running when the host went down.
    """
    code = int(state.get("ExitCode", -1))
    if host_restarted:
        return (
            f"the host went down under it (exit {code}); the last words are in the journal of the boot before"
        )
    if state.get("OOMKilled"):
        return "was killed by the kernel for want of memory (OOM)"
    if state.get("Error"):
        return f"could not run: {state['Error']}"
    return CODES.get(code, f"ended with exit code {code}")
