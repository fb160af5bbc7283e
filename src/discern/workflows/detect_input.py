"""What is to be judged: the texts of a file or of standard input, one by one; and sentences whose wrong words are known."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.errors import DataError, did_you_mean
from discern.tasks.readers.files import COMPRESSED, clean_text, numbered_lines, parsed_json, stream_lines

_JSON_LINES = (".jsonl", ".ndjson")
_OPEN, _CLOSE = "[[", "]]"
_EXAMPLE = '{"text": "The chef eight it.", "wrong": [[9, 14]]}'


@dataclass(frozen=True)
class InputText:
    """A text to judge.

    Attributes:
        where: it stands, for messages.
        number: of its line, from 1.
        text: without the end of the line; empty where the line is.
    """

    where: str
    number: int
    text: str


@dataclass(frozen=True)
class WrongSpan:
    """A word, or several, that does not belong.

    Attributes:
        start, end: in characters of the text.
        kind: of mistake; "" where the file does not say.
    """

    start: int
    end: int
    kind: str = ""


@dataclass(frozen=True)
class CheckedText(InputText):
    """A text whose wrong words are known.

    Attributes:
        wrong: where they are, in order.
    """

    wrong: tuple[WrongSpan, ...] = ()


def read_texts(source: Path, field: str | None = None) -> Iterator[InputText]:
    """One text a line, plain or of JSON lines, from a file that may be compressed; an empty line is an empty text.

    Args:
        source: `-` is standard input.
        field: of JSON lines, the one that holds the text; None: "text" in files named .jsonl or .ndjson, and plain text
            otherwise.

    Raises:
        DataError: while it is read, with the line: not UTF-8, not JSON, no such field.
    """
    field = _field(source, field)
    for where, number, line in _lines(source):
        plain = field is None or not line.strip()
        yield InputText(where, number, line if plain else _text(_record(line, where), str(field), where))


def read_checked(source: Path, field: str | None = None) -> Iterator[CheckedText]:
    """Sentences with their wrong words, one a line; empty lines are passed over.

    Plain text has [[double brackets]] around each wrong word. JSON lines have the text, and under "wrong" a list of
    [start, end] in characters, or of {"start": 9, "end": 14, "kind": "homophone"}.

    Args:
        source: as of `read_texts`.
        field: as of `read_texts`.

    Raises:
        DataError: while it is read, with the line: as of `read_texts`, or brackets or spans that make no sense.
    """
    field = _field(source, field)
    for where, number, line in _lines(source):
        if not line.strip():
            continue
        if field is None:
            text, spans = _from_brackets(line, where)
        else:
            record = _record(line, where)
            text, spans = _text(record, field, where), _spans(record, where)
        _check(spans, text, where)
        yield CheckedText(where, number, text, tuple(sorted(spans, key=lambda span: (span.start, span.end))))


def _lines(source: Path) -> Iterator[tuple[str, int, str]]:
    name = "standard input" if str(source) == "-" else str(source)
    lines: Iterable[tuple[int, str]] = stream_lines(sys.stdin.buffer, name) if str(source) == "-" else numbered_lines(source)
    for number, line in lines:
        yield f"{name}:{number}", number, line


def _field(source: Path, field: str | None) -> str | None:
    """The field of the text, or None where the lines are plain."""
    if field is not None:
        return field
    ending = next((ending for ending in reversed(source.suffixes) if ending.lower() not in COMPRESSED), "")
    return "text" if ending.lower() in _JSON_LINES else None


def _record(line: str, where: str) -> dict[str, Any]:
    record = parsed_json(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, expected an object", hint=f"like {_EXAMPLE}")
    return record


def _text(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(
            f"{where}: no field '{field}'; its fields: {', '.join(record) or 'none'}",
            hint=f"name the one that holds the text: --text-field NAME ({did_you_mean(field, record)})" if record else None,
        )
    if not isinstance(record[field], str):
        raise DataError(f"{where}: '{field}' is no text but {str(record[field])[:40]}", hint="expected a string in quotes")
    return clean_text(record[field])


def _spans(record: dict[str, Any], where: str) -> list[WrongSpan]:
    wrong = record.get("wrong")
    if not isinstance(wrong, list):
        said = "no list 'wrong'" if "wrong" not in record else f"'wrong' is {str(wrong)[:40]}, no list"
        raise DataError(f"{where}: {said} of the words that are", hint=f"like {_EXAMPLE}; [] where none is")
    return [_span(value, where) for value in wrong]


def _span(value: Any, where: str) -> WrongSpan:
    kind = ""
    if isinstance(value, dict):
        kind = value.get("kind", "")
        value = [value.get("start"), value.get("end")]
    whole = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    if not whole or not isinstance(kind, str):
        raise DataError(f"{where}: {str(value)[:40]} is no span", hint="expected [start, end] in characters, as in " + _EXAMPLE)
    return WrongSpan(value[0], value[1], kind)


def _check(wrong: list[WrongSpan], text: str, where: str) -> None:
    for span in wrong:
        if not 0 <= span.start < span.end <= len(text) or not text[span.start : span.end].strip():
            raise DataError(
                f"{where}: span {span.start} to {span.end} holds no word of a text of {len(text)} characters",
                hint="count characters from 0, the end is the place after the last",
            )


def _from_brackets(line: str, where: str) -> tuple[str, list[WrongSpan]]:
    """The text without the brackets, and where they stood."""
    spans: list[WrongSpan] = []
    text, rest = "", line
    while _OPEN in rest:
        before, _, rest = rest.partition(_OPEN)
        word, closed, rest = rest.partition(_CLOSE)
        if not closed or _OPEN in word or not word.strip():
            said = "are not closed" if not closed else f"hold '{word}'"
            raise DataError(
                f"{where}: the brackets at character {len(text) + len(before) + 1} {said}; "
                "expected one wrong word in each [[pair]]",
                hint="a text that has such brackets of its own goes into JSON lines: " + _EXAMPLE,
            )
        text += before
        spans.append(WrongSpan(len(text), len(text) + len(word)))
        text += word
    return text + rest, spans
