"""Texts to read, from a file, standard input or Python, and the words of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from discern.data.sources.streams import shown_name
from discern.data.tables import clean_text, numbered_lines, parsed_json, suffix_of
from discern.errors import DataError


@dataclass(frozen=True)
class InputText:
    """A text to read.

    Attributes:
        where: its origin, for messages.
        number: line number, from 1.
        text: the line without its end; may be empty.
    """

    where: str
    number: int
    text: str


def numbered(texts: Iterable[str]) -> Iterator[InputText]:
    """Texts from Python, which messages call "text 1", "text 2" and so on."""
    return (InputText(f"text {number}", number, text) for number, text in enumerate(texts, 1))


def read_texts(source: Path, field: str | None = None, *, option: str = "--text-field") -> Iterator[InputText]:
    """One text per line, from plain text or JSON lines, possibly compressed; an empty line is an empty text.

    Args:
        source: file; `-` is standard input.
        field: field of the text in JSON lines; None: "text" in files named .jsonl or .ndjson, plain text in others.
        option: option of the command that names the field, for messages.

    Raises:
        DataError: raised while reading, with the line: it is not UTF-8 or not JSON, or has no such field.
    """
    for place, record in read_records(source, field, option):
        yield InputText(place.where, place.number, place.text if record is None else record["text"])


def read_records(source: Path, field: str | None, option: str) -> Iterator[tuple[InputText, dict[str, Any] | None]]:
    """The lines of a file, each with its JSON object, whose text is under "text"; None for plain text and empty lines.

    Raises the errors of `read_texts`.
    """
    if field is None and suffix_of(source) in (".jsonl", ".ndjson"):
        field = "text"
    for number, line in numbered_lines(source):
        where = f"{shown_name(source)}:{number}"
        if field is None or not line.strip():
            yield InputText(where, number, line), None
            continue
        record = parsed_json(line, where)
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(
                f"{where}: no field '{field}' with a text in {line.strip()!r:.60}",
                hint=f"name the field of the text: {option} NAME",
            )
        yield InputText(where, number, line), record | {"text": clean_text(text)}


Span = tuple[int, int]


# A run of letters, marks and digits with the apostrophes inside it, or any other character.
_LETTERS = r"[\p{L}\p{M}\p{N}_&&[^\p{Han}]]+"
_WORD = Split(Regex(rf"{_LETTERS}(?:['\u2019]{_LETTERS})*|\S"), "removed", invert=True)


def words_of(text: str) -> list[Span]:
    """(start, end) of each word in characters, in order: a run of letters, marks and digits, with the apostrophes inside it.

    Every Han ideograph is a word, and so is every other character that is not white space. In other scripts without spaces,
    such as Thai, whole phrases are words.
    """
    return [span for _, span in _WORD.pre_tokenize_str(text)]


def overlapping(words: Sequence[Span], span: Span) -> list[int]:
    """Indices of the words that share a character with a span."""
    return [number for number, (start, end) in enumerate(words) if start < span[1] and span[0] < end]
