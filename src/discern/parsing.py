"""JSON and TOML that others wrote: whatever is wrong with a text, there is one exception to catch.

The readers of the standard library raise a RecursionError for lists in lists, and a bare ValueError for a number of more than
4300 digits; tomllib takes minutes over a key of thousands of parts.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

# Possessive, and beginning at the start of a word: the time is linear in the text.
_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]++[ \t]*+\.[ \t]*+){100}")


def json_value(text: str | bytes) -> Any:
    """What a JSON text stands for; NaN and infinities are let through.

    Raises:
        JSONDecodeError: it is no JSON, or nested too deeply, or holds a number of more than 4300 digits.
        UnicodeDecodeError: bytes that are not UTF-8.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (RecursionError, ValueError) as problem:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise json.JSONDecodeError(_reason(problem), shown, 0) from problem


def toml_tables(text: str) -> dict[str, Any]:
    """What a TOML text holds.

    Raises:
        TOMLDecodeError: it is no TOML, or nested too deeply, or holds a number of more than 4300 digits.
    """
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key in it has more than 100 parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError) as problem:
        raise tomllib.TOMLDecodeError(_reason(problem)) from problem


def _reason(problem: Exception) -> str:
    return "it is nested too deeply" if isinstance(problem, RecursionError) else "a number in it has more than 4300 digits"
