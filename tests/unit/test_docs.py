"""The documentation's links: a reader at night follows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", CHECKOUT / "images/README.md"]
PAGES += sorted((CHECKOUT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the names that a page's headings have as targets of links."""
    headings = [line.lstrip("#") for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere in this checkout."""
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        where = (page.parent / path).resolve() if path else page
        if not where.exists() or (anchor and anchor not in anchors(where)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Prevents a page or a section that was moved away under its links."""
    assert broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    """Prevents a check that finds every link good."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#one) [c](page.md#one-two) [d](none.md) [e](https://x/y)\n"
    )
    assert broken(page) == ["#one", "none.md"]
