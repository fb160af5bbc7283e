"""Markdown for model cards. Labels, names and remarks are untrusted; in a card they are escaped to plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# Line ends, control characters, and what reorders text: a card is shown by web pages and terminals.
_LAYOUT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_INVISIBLE = re.compile("[\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKUP = re.compile(r"([\\`*\[\]{}~]|(?<!\w)_|_(?!\w))")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def escaped(value: object) -> str:
    """Text in running Markdown, on one line: no link, no emphasis, no HTML comes of it."""
    text = _plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", text)


def code(value: object) -> str:
    """Text as a code span, whatever backticks it holds."""
    text = _plain(value)
    if not text.strip():
        return "(empty)"
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def markdown_table(heading: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> str:
    """A table in Markdown; its cells are Markdown too."""
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def quoted(card: str) -> str:
    """Third-party Markdown as a quotation, without its front matter; HTML in it is shown, not interpreted."""
    body = card.strip()
    if body.startswith("---\n") and (end := body.find("\n---", 3)) > 0:
        body = body[end + 4 :].strip()
    lines, fence = [], ""
    for line in body.splitlines():
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence:
            line = line.replace("<", "&lt;")
        lines.append(f"> {_INVISIBLE.sub('', _LAYOUT.sub(' ', line))}".rstrip())
    return "\n".join(lines)


def _plain(value: object) -> str:
    return _INVISIBLE.sub("\ufffd", _LAYOUT.sub(" ", str(value)))


def _cell(value: object) -> str:
    return _LAYOUT.sub(" ", str(value)).replace("|", "\\|")
