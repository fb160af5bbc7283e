"""The pages name files, and symbols in them, that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ROOTS = (ROOT, ROOT / "src", ROOT / "src" / "discern")
# `corruption/masking.py: uniform`, `quota`
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|j2|html|js))(?:: ([A-Za-z_][\w.]*))?`")
# What a page's own commands write, for example `demo/report.html`.
WRITTEN = re.compile(r"^(?:demo|OUT|RUN)/")


def missing(text: str) -> list[str]:
    """Return what a text names and the repository lacks."""
    found = []
    for path, symbol in NAMED.findall(text):
        if WRITTEN.match(path):
            continue
        files = [root / path for root in ROOTS if (root / path).is_file()]
        if not files:
            found.append(path)
        elif symbol:
            source = files[0].read_text(encoding="utf-8")
            defined = (rf"(?m)^\s*(?:(?:async )?def|class) {part}\b|^\s*{part}\b.*[:=]" for part in symbol.split("."))
            if not all(re.search(pattern, source) for pattern in defined):
                found.append(f"{path}: {symbol}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_symbols_exist(page: Path) -> None:
    assert not missing(page.read_text(encoding="utf-8"))


def test_a_name_that_does_not_exist_is_found() -> None:
    assert missing("`corruption/masking.py: uniform` `corruption/nothing.py` `corruption/masking.py: nowhere`") == (
        ["corruption/nothing.py", "corruption/masking.py: nowhere"]
    )
