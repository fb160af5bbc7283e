"""Reads the small JSON and text files in which discern records its results.

If a file is not complete and of the expected form, an error names the file, what is wrong with it, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from discern.errors import DataError, DiscernError
from discern.parsing import json_value
from discern.storage.checksums import verify

_SHOWN = 3


class Record(BaseModel):
    """The required keys of a JSON object. Other keys are kept and not checked."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def read_text(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> str:
    """Read a text file, and compare it with its checksum if there is one.

    Raises:
        DiscernError: the file cannot be read, does not match its checksum, or is not UTF-8; of class `error`.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        reason = "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"
        raise error(f"{path} {reason}", hint=hint) from problem
    verify(path, content, error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is damaged: it is not UTF-8 text (byte {problem.start})", hint=hint) from problem


def read_lines(path: Path, *, hint: str) -> list[str]:
    """The lines of JSON lines, as `read_text` reads them. Texts in them may have other line breaks, such as U+2028.

    Raises:
        DataError: as for `read_text`.
    """
    text = read_text(path, hint=hint)
    return text.removesuffix("\n").split("\n") if text else []


def parse_json(text: str, path: Path, *, hint: str, error: type[DiscernError] = DataError) -> Any:
    """Parse a JSON text.

    Args:
        path: file that the text comes from, for messages.

    Raises:
        DiscernError: the text is not valid JSON; of class `error`.
    """
    if not text.strip():
        raise error(f"{path} is damaged: it is empty", hint=hint)
    try:
        return json_value(text)
    except JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{path} is damaged: it is not valid JSON ({problem.msg} at {where})", hint=hint) from problem


def read_object(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> dict[str, Any]:
    """Read a JSON object with any keys.

    Raises:
        DiscernError: the file is missing or damaged, or is not a JSON object; of class `error`.
    """
    found = parse_json(read_text(path, hint=hint, error=error), path, hint=hint, error=error)
    if not isinstance(found, dict):
        raise error(f"{path} is damaged: it holds {_kind(found)}, expected a JSON object", hint=hint)
    return found


def read_record(
    path: Path, form: type[Record], *, hint: str, version: int | None = None, error: type[DiscernError] = DataError
) -> dict[str, Any]:
    """Read a JSON object, and check that it has the required keys.

    Args:
        form: the required keys.
        version: version of the format, under the key `format`; None if the file has no such key.

    Raises:
        DiscernError: the file is missing or damaged, of another version, or lacks a key; of class `error`.
    """
    found = read_object(path, hint=hint, error=error)
    if version is not None and "format" in found and found["format"] != version:
        raise error(f"{path} has format {_short(found['format'])}; this version of discern reads {version}", hint=hint)
    with understood(path, hint=hint, error=error):
        form.model_validate(found)
    return found


@contextmanager
def understood(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> Iterator[None]:
    """Report errors in the block as damage of the file from which it builds something.

    Raises:
        DiscernError: something in the file is missing or invalid; of class `error`.
    """
    try:
        yield
    except ValidationError as problem:
        raise error(f"{path} is damaged: {reasons(problem)}", hint=hint) from problem
    except KeyError as problem:
        raise error(f"{path} is damaged: it has no {problem}", hint=hint) from problem
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as problem:
        raise error(f"{path} is damaged: {_short(problem)}", hint=hint) from problem


def reasons(problem: ValidationError) -> str:
    """The errors of pydantic, on one line."""
    found = [_reason(".".join(map(str, each["loc"])), each["msg"]) for each in problem.errors(include_url=False)]
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _reason(place: str, said: str) -> str:
    said = said.removeprefix("Value error, ")
    if said == "Field required":
        return f"'{place}' is missing"
    return f"'{place}': {said[:1].lower()}{said[1:]}" if place else said


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
