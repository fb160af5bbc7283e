"""Text that every Python machine has: the documentation strings of its installed modules."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

_SKIPPED = {"test", "tests", "testing", "__pycache__", "idlelib", "lib2to3"}
_LEAST_CHARACTERS = 60
_LEAST_WORDS = 5
_CHARACTERS_PER_MARK = 1000
_ROLE = re.compile(r":[\w:+-]+:`([^`]*)`|``([^`]+)``|`([^`]+)`_?")
_PROMPT = re.compile(r"(>>>|\.\.\. |In \[|```|~~~)")
_KINDS: dict[type[ast.AST], str] = {ast.Module: "module", ast.ClassDef: "class"}
_BULLET = re.compile(r"([-*+•]|\d+[.)])\s+")


@dataclass(frozen=True)
class Collected:
    """The documentation that was found.

    Attributes:
        documents: prose, one paragraph per line, each paragraph once.
        kinds: the kind of object that each document describes: "module", "class" or "function".
        modules: number of files with documentation.
        packages: number of distributions and standard modules they belong to.
        characters: total number of characters.
    """

    documents: list[str]
    kinds: list[str]
    modules: int
    packages: int
    characters: int


def collect(limit: int, advance: Callable[[int], None]) -> Collected:
    """Documentation strings of the standard library and the installed packages, as prose; no module is imported.

    Files are read in an order that depends on their names alone, so that the first files are a sample of all.

    Args:
        limit: number of characters after which to stop.
        advance: called with the number of further characters found.
    """
    documents: list[str] = []
    kinds: list[str] = []
    seen: set[str] = set()
    packages: set[str] = set()
    modules = characters = 0
    for package, path in _files():
        found = 0
        for kind, docstring in _docstrings(path):
            # Documentation repeats itself, and held-out text must not occur in the training text: keep each paragraph once.
            fresh = [text for text in dict.fromkeys(_prose(docstring)) if text not in seen]
            seen.update(fresh)
            document = "\n".join(fresh)
            if len(document) >= _LEAST_CHARACTERS:
                documents.append(document)
                kinds.append(kind)
                found += len(document)
        if found:
            modules, characters = modules + 1, characters + found
            packages.add(package)
            advance(found)
        if characters >= limit:
            break
    return Collected(documents, kinds, modules, len(packages), characters)


def _files() -> list[tuple[str, Path]]:
    """Python files with the package that each belongs to, in the order of a hash of their names."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    found = []
    for root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            if "site-packages" not in parts and not _SKIPPED & set(parts) and not path.name.startswith("test_"):
                found.append((parts[0].removesuffix(".py"), "/".join(parts), path))
    found.sort(key=lambda item: blake2b(item[1].encode(), digest_size=8).digest())
    return [(package, path) for package, _, path in found]


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
            text = ast.get_docstring(node)
            if text:
                yield _KINDS.get(type(node), "function"), text


def _prose(docstring: str) -> list[str]:
    """The paragraphs of prose in a documentation string, without examples, tables and mark-up."""
    return [text for paragraph in _paragraphs(docstring) if (text := _plain(paragraph))]


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
    text = _ROLE.sub(lambda found: next(filter(None, found.groups()), "").rsplit(".", 1)[-1].lstrip("~!"), paragraph)
    text = " ".join(text.replace("**", "").replace("::", ":").split())
    letters = sum(character.isalpha() or character == " " for character in text)
    return text if len(text.split()) >= _LEAST_WORDS and letters >= 0.85 * len(text) else ""
