"""Parsing of untrusted JSON and TOML; every error in the text raises the same exception.

The readers of the standard library raise a RecursionError for lists in lists, and a bare ValueError for a number of more than
4300 digits; tomllib takes minutes over a key of thousands of parts.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import Any

# Possessive, and beginning at the start of a word: the time is linear in the text.
_LONG_KEY = re.compile(r"(?<![\w.-])(?:[\w-]++[ \t]*+\.[ \t]*+){100}")


# The escape of a byte in a file name that is not UTF-8. JSON can read it; TOML has no such escape.
_BYTE = re.compile(r"\\udc([89a-f][0-9a-f])")
_STAND_INS = 0x10FE00
_STAND_IN = re.compile(f"[{chr(_STAND_INS + 0x80)}-{chr(_STAND_INS + 0xFF)}]")


def json_value(text: str | bytes) -> Any:
    """Parse a JSON text; NaN and infinities are accepted.

    Raises:
        JSONDecodeError: it is not JSON, is nested too deeply, or has a number of more than 4300 digits.
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
    """Parse a TOML text.

    Raises:
        TOMLDecodeError: it is not TOML, is nested too deeply, or has a number of more than 4300 digits.
    """
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key in it has more than 100 parts")
    try:
        if _BYTE.search(text):
            return dict(_with_bytes(tomllib.loads(_BYTE.sub(lambda found: chr(_STAND_INS + int(found[1], 16)), text))))
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError) as problem:
        raise tomllib.TOMLDecodeError(_reason(problem)) from problem


def _with_bytes(value: Any) -> Any:
    """A value in which bytes that are not UTF-8 are represented as in Python's file names."""
    if isinstance(value, str):
        return _STAND_IN.sub(lambda found: chr(0xDC00 + ord(found[0]) - _STAND_INS), value)
    if isinstance(value, dict):
        return {_with_bytes(key): _with_bytes(item) for key, item in value.items()}
    return [_with_bytes(item) for item in value] if isinstance(value, list) else value


def _reason(problem: Exception) -> str:
    return "it is nested too deeply" if isinstance(problem, RecursionError) else "a number in it has more than 4300 digits"


def is_number(value: object) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
