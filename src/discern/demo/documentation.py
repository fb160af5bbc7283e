"""Text that every Python machine has: the documentation strings of its installed modules."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

_SKIPPED = {"site-packages", "test", "tests", "testing", "__pycache__", "idlelib", "lib2to3"}
_LEAST_CHARACTERS = 60
_LEAST_WORDS = 5
_CHARACTERS_PER_MARK = 1000
_ROLE = re.compile(r"(?::[\w:+-]+:)?`+([^`]+)`+_?")
_PROMPT = re.compile(r"(>>>|\.\.\. |In \[|```|~~~)")
_KINDS: dict[type[ast.AST], str] = {ast.Module: "module", ast.ClassDef: "class"}
_BULLET = re.compile(r"([-*+•]|\d+[.)])\s+")


def collect(limit: int, advance: Callable[[int], None]) -> list[dict[str, str]]:
    """Documentation strings of the standard library and the installed packages, as prose; no module is imported.

    Files are read in an order that depends on their names alone, so that the first files are a sample of all.

    Args:
        limit: number of characters after which to stop.
        advance: called with the number of further characters found.

    Returns:
        For each documentation string its `text`, one paragraph per line, each paragraph once in the whole; the `kind` of object
        that it describes: "module", "class" or "function"; and the `module`, as the path of its file.
    """
    modules: dict[str, Path] = {}
    for root in {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}:
        for path in root.rglob("*.py"):
            module = path.relative_to(root)
            if not _SKIPPED & {*module.parts} and not path.name.startswith("test_"):
                modules[module.as_posix()] = path

    records: list[dict[str, str]] = []
    seen = {""}  # what is not prose becomes ""
    characters = 0
    for name in sorted(modules, key=lambda name: blake2b(name.encode(), digest_size=8).digest()):
        for kind, docstring in _docstrings(modules[name]):
            # Documentation repeats itself, and held-out text must not occur in the training text: keep each paragraph once.
            fresh = [text for text in dict.fromkeys(map(_plain, _paragraphs(docstring))) if text not in seen]
            seen.update(fresh)
            document = "\n".join(fresh)
            if len(document) >= _LEAST_CHARACTERS:
                records.append({"text": document, "kind": kind, "module": name})
                characters += len(document)
                advance(len(document))
        if characters >= limit:
            break
    return records


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Documentation strings of a file, each with the kind of its object.

    There are none if the file contains little documentation, or cannot be read or parsed.
    """
    try:
        source = path.read_text(encoding="utf-8")
        if source.count('"""') * _CHARACTERS_PER_MARK < len(source):
            return  # too little documentation to be worth parsing
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield _KINDS.get(type(node), "function"), ast.get_docstring(node) or ""


def _paragraphs(docstring: str) -> Iterator[str]:
    """The paragraphs of a documentation string, with their lines joined.

    An example is left out up to the next blank line, and so are the lines after a `::` that are indented further.
    """
    lines: list[str] = []
    indent, example, literal = 0, False, sys.maxsize
    for line in [*docstring.splitlines(), ""]:
        text = line.strip()
        here = len(line) - len(line.lstrip())
        example = bool(text) and (example or _PROMPT.match(text) is not None)
        literal = sys.maxsize if text and here <= literal else literal
        bullet = _BULLET.match(text)
        if lines and (not text or example or bullet or here != indent):
            yield " ".join(lines)
            lines = []
        if text and not example and here <= literal:
            start = bullet.end() if bullet else 0
            lines.append(text[start:])
            indent = here + start
            literal = here if text.endswith("::") else literal


def _plain(paragraph: str) -> str:
    """The paragraph without mark-up; empty if it is not prose."""
    text = _ROLE.sub(lambda role: role[1].rsplit(".", 1)[-1].lstrip("~!"), paragraph)
    text = " ".join(text.replace("**", "").replace("::", ":").split())
    letters = sum(character.isalpha() or character == " " for character in text)
    return text if len(text.split()) >= _LEAST_WORDS and letters >= 0.85 * len(text) else ""
