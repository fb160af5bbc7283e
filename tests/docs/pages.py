"""What the pages contain: their blocks, links, headings and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("docs", "benchmarks", "examples")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in _FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
_FENCE = re.compile(r"^(`{3,}|~{3,})([\w{}.-]*)[^\n]*\n(.*?)^\1\s*$", flags=re.S | re.M)
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
_SHELL = {"", "console", "sh", "bash"}


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each block of code."""
    return [(language, body) for _, language, body in _FENCE.findall(text)]


def prose(text: str) -> str:
    """A page without its blocks and its inline code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def links(text: str) -> list[str]:
    """Targets of the links that lead to other pages or places on this one."""
    return [target for target in _LINK.findall(prose(text)) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as code hosts and Sphinx make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", text), flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `discern ...` in the blocks for a shell, up to a pipe or a redirection."""
    for language, body in blocks(text):
        if language not in _SHELL:
            continue
        for line in body.replace("\\\n", " ").splitlines():
            yield from _of_line(line)


def _of_line(line: str) -> Iterator[list[str]]:
    if not re.search(r"(^|[|&;] *|\$ )discern |-m discern ", line) or "..." in line:
        return
    lexer = shlex.shlex(re.sub(r"^\$ ", "", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = [*lexer, ";"]
    while words:
        at = next(index for index, word in enumerate(words) if set(word) <= set("|&;<>"))
        command, words = words[:at], words[at + 1 :]
        if "discern" in command:
            yield command[command.index("discern") + 1 :]
