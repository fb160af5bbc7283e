"""Markdown for generated parts: placeholders, tables, code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", flags=re.M)


def fill(page: str, parts: Mapping[str, str], name: str) -> str:
    """The page with each `<!-- generated: NAME -->` replaced by the part of that name.

    Raises:
        KeyError: a page asks for a part that nothing generates.
    """

    def part(found: re.Match[str]) -> str:
        if found[1] not in parts:
            raise KeyError(f"{name} asks for '{found[1]}', but only {', '.join(sorted(parts))} are generated")
        return parts[found[1]]

    return _PLACE.sub(part, page)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Inline code; nothing for nothing."""
    return f"`{text}`" if text else ""


def block(text: str, language: str = "text") -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def prose(text: str) -> str:
    """A sentence from the code as Markdown: 'words' are code, `[CLS]` is no link, `<doc>` no HTML and `*` no emphasis."""
    parts = re.sub(r"(?<!\w)'([\w.+-]+)'(?!\w)", r"`\1`", text).split("`")
    parts[::2] = [re.sub(r"([\[\]<>*_])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))
