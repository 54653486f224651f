"""Lines on stdout and stderr, unbuffered, as a container's log shows them."""

import faulthandler
import sys


def say(text: str) -> None:
    """One start-up or status line of the engine, with its prefix, on stdout."""
    print(f"[tensorfold] {text}", flush=True)


def own(text: str) -> None:
    """One line of the double itself: what it was told to do wrong. TensorFold prints nothing like it."""
    print(f"[tensorfold-double] {text}", file=sys.stderr, flush=True)


def dump_stacks() -> None:
    """The stack of every thread on stderr, without prefix, as the watchdog and SIGUSR1 print it."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
