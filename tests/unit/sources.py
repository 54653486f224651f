"""Reads Python source for tests that hold the code to something."""

from __future__ import annotations

import ast
import gc


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of `text`.

    Without garbage collection meanwhile: a finaliser's warning makes pytest parse source too, and Python
    before 3.11.8 loses count when one parse runs inside another (SystemError: recursion depth mismatch).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()
