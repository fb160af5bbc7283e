"""Wording that messages of all parts share."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Commands, which work for everybody; a setting with its value; any other option, perhaps with the name of its value.
_SPOKEN = re.compile(
    r"(?P<command>`[^`]*`|\b(?:discern|hf|pip) [a-z]+ [^;,`\n]*)"
    r"|--set (?P<quote>'?)(?P<key>[\w.]+)=(?P<value>'[^']*'|\[[^'\n]*\]|[^\s,;)']+)(?P=quote)"
    r"|--(?P<option>[a-z][a-z-]*)(?P<of> [A-Z]+\b)?"
)
_LITERAL = re.compile(r"[-\d.]+(e-?\d+)?|True|False|[A-Z]+|\W.*")


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, which gets an "s" unless the count is 1: "1 row", "1,024 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def in_python(message: str, names: Mapping[str, str] | None = None) -> str:
    """A message about options of the command line, such as `--set` and `--dev FILE`, for callers of a Python function.

    Args:
        names: parameters that are called differently than the options, by option.
    """

    def spoken(found: re.Match[str]) -> str:
        if found["command"]:
            return found["command"]
        if key := found["key"]:
            value = {"true": "True", "false": "False"}.get(found["value"], found["value"])
            return f'settings={{"{key}": ' + (value if _LITERAL.fullmatch(value) else f'"{value}"') + "}"
        option = {"set": "settings", "as": "form", **(names or {})}.get(found["option"], found["option"].replace("-", "_"))
        return option + (found["of"] or "").replace(" ", "=")

    return _SPOKEN.sub(spoken, message)
