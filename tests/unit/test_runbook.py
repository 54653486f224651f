"""docs/runbook.md against the messages in the code: whoever reads one at night finds its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.plugin_loader import CHECKOUT
from tests.unit.sources import parsed

PACKAGE = CHECKOUT / "glm53_service"
MODULES = (
    *sorted((PACKAGE / "supervisor").glob("*.py")),
    *(PACKAGE / "engines" / name for name in ("health.py", "tensorfold.py", "vllm.py")),
    *(
        PACKAGE / "artifacts/images" / f"{name}.py"
        for name in ("credentials", "pull", "reference", "refusals")
    ),
    *(PACKAGE / name for name in ("canary.py", "drafter.py", "gpu.py", "recovery.py")),
)

PARTS = (
    ", ~ GiB more are page cache",
    "and ~ W",
    "Fix: run site.yml, which brings",
    "Shelf ~ holds",
    "Unknown quantization method",
    "in epoch ~",
    "cannot be read: ~",
    "epoch ~ rank ~",
    "glm53 channel",
    "ended without its supervisor",
    "host went down",
    "import sys",
    "its licence is accepted",
    "its start failed",
    "supervisor ~ ~",
    "is ~ here",
    "start ~: ~",
    "rank 0: ~",
    "~ (rank ~)",
    "waiting for ~: ~",
    "~; the largest processes",
    "~, accepted by ",
    "no space left on device|",
    "toomanyrequests|",
    "no matching manifest|",
    "x509|",
    "proxyconnect|",
    "unauthorized|",
    "manifest.*",
    "no such host|",
    "2.3 GB more on each node",
    "one request at a time where",
    "2 drafted tokens a step",
    "no drafts: one token",
)
"""Sentences there that are a piece of a message, or none that is shown: costs, labels, programs, docker's
words.
"""

WHO = re.compile(r"^(waiting for [A-Z]: |[A-Z]: |canary: |idle check: |warning: |start \d: )")
"""What the code puts before a message elsewhere."""

HOLE = "~"


def said_by(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each string of three words or more, holes as HOLE; no docstring, hint or log."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        log = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event"
        hint = isinstance(node, ast.keyword) and node.arg == "hint"
        if log or hint:
            skipped |= {id(inner) for inner in ast.walk(node)}
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(inner) for inner in node.values}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr | ast.Constant) or id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
        else:
            text = node.value if isinstance(node.value, str) else ""
        if text.count(" ") >= 2 and re.search(r"[a-z]{2}", text):
            yield node.lineno, text


def messages() -> list[tuple[str, str]]:
    """Return (place, text) of every message that a person may see."""
    return [
        (f"{path.relative_to(PACKAGE)}:{line}", text)
        for path in MODULES
        for line, text in said_by(parsed(path.read_text(encoding="utf-8")))
    ]


def rows() -> list[list[str]]:
    """Return the cells of every row of the runbook's tables of three columns."""
    lines = (CHECKOUT / "docs/runbook.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        for line in lines
        if line[:1] == "|"
    ]
    return [row for row in cells if len(row) == 3 and not row[0].startswith("--")]


def pattern(text: str, hole: str) -> re.Pattern[str] | None:
    """Return `text` with its holes open; None when it says too little to be known by."""
    pieces = re.split(hole, text)
    said = "".join(pieces)
    return re.compile(".*".join(map(re.escape, pieces)), re.DOTALL) if len(said) > 8 and " " in said else None


QUOTED = [WHO.sub("", quoted) for row in rows() for quoted in re.findall(r"`([^`]+)`", row[0])]
QUOTATIONS = [found for quoted in QUOTED if (found := pattern(quoted, r"\.\.\.|\b[A-Z]\b|<\w+>|\d+"))]


def has_row(message: str) -> bool:
    """Return whether a quotation fits the message, or the message the quotation; either may have holes."""
    own = pattern(message, HOLE)
    return any(found.search(message) for found in QUOTATIONS) or any(own and own.search(q) for q in QUOTED)


def test_every_message_has_a_row() -> None:
    """Prevents a word in `glm53 status` at night that no page explains."""
    bare = [
        f"{where}: {text}"
        for where, text in messages()
        if not text.strip().startswith(PARTS) and not has_row(text)
    ]
    assert bare == []


def test_the_parts_are_still_in_the_code() -> None:
    """Prevents an excuse that outlives its sentence and hides another one."""
    said = [text for _, text in messages()]
    assert [part for part in PARTS if not any(part in text for text in said)] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_a_row_says_what_was_done_and_what_to_do(row: list[str]) -> None:
    """Prevents a row that names a fault and leaves the reader alone with it."""
    assert all(row)


def test_a_message_without_a_row_would_be_found(tmp_path: Path) -> None:
    """Prevents this check from passing because it reads nothing."""
    tree = parsed('raise UnavailableError(f"the moon is {size} too near", hint="no row for this one")')
    ((_, text),) = said_by(tree)
    assert text == "the moon is ~ too near"
    assert not has_row(text)
    assert len(messages()) > 60
