"""Reads the small files in which discern writes down what it made: each is whole and of the expected form, or an error says
which file, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from discern.checksums import verify
from discern.errors import DataError, DiscernError
from discern.parsing import json_value

_SHOWN = 3


class Record(BaseModel):
    """What a JSON object must hold for its readers; further keys are kept and not looked at."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def read_text(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> str:
    """A text file, compared with its checksum where there is one.

    Raises:
        DiscernError: it cannot be read, is not what was written, or is not UTF-8; of class `error`.
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


def parse_json(text: str, path: Path, *, hint: str, error: type[DiscernError] = DataError) -> Any:
    """The value that a JSON text stands for.

    Args:
        path: the file that it comes from.

    Raises:
        DiscernError: it is none; of class `error`.
    """
    if not text.strip():
        raise error(f"{path} is damaged: it is empty", hint=hint)
    try:
        return json_value(text)
    except JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{path} is damaged: it is not valid JSON ({problem.msg} at {where})", hint=hint) from problem


def read_object(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> dict[str, Any]:
    """A JSON object, whatever it holds.

    Raises:
        DiscernError: the file is missing or damaged, or holds something else; of class `error`.
    """
    found = parse_json(read_text(path, hint=hint, error=error), path, hint=hint, error=error)
    if not isinstance(found, dict):
        raise error(f"{path} is damaged: it holds {_kind(found)}, expected a JSON object", hint=hint)
    return found


def read_record(
    path: Path, form: type[Record], *, hint: str, version: int | None = None, error: type[DiscernError] = DataError
) -> dict[str, Any]:
    """A JSON object that holds what its readers need.

    Args:
        form: what it must hold.
        version: of the format, under the key `format`; None: it has no such key.

    Raises:
        DiscernError: the file is missing or damaged, of another version, or lacks something; of class `error`.
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
        DiscernError: something in the file is missing or makes no sense; of class `error`.
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
