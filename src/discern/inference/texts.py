"""Texts to check, read from a file or standard input; sentences whose wrong words are marked; the words of a text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator
from tokenizers import Tokenizer

from discern.data.sources.streams import shown_name
from discern.data.tables import clean_text, numbered_lines, parsed_json, suffix_of
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import DataError, did_you_mean
from discern.progress import Progress
from discern.storage.checksums import Record, understood

_JSON_LINES = (".jsonl", ".ndjson")
_OPEN, _CLOSE = "[[", "]]"
_EXAMPLE = '{"text": "The chef eight it.", "wrong": [[9, 14]]}'


@dataclass(frozen=True)
class InputText:
    """A text to check.

    Attributes:
        where: its origin, for messages.
        number: line number, from 1.
        text: the line without its end; may be empty.
    """

    where: str
    number: int
    text: str


class TextReport:
    """Warns about texts that are read in several windows, and about a high fraction of unknown tokens.

    Args:
        window_size: number of tokens of text that the model reads at a time.
    """

    def __init__(self, tokenizer: Tokenizer, window_size: int, progress: Progress, warn: Callable[[str], None]) -> None:
        self._unknown = UnknownTokens(tokenizer)
        self._window_size, self._progress, self._warn = window_size, progress, warn
        self._texts = self._longer = 0

    def add(self, where: str, tokens: Sequence[str]) -> None:
        """Count the tokens of a text; warn about the first one that is read in several windows."""
        self._texts += 1
        self._unknown.add_tokens(tokens)
        if len(tokens) > self._window_size:
            self._longer += 1
            if self._longer == 1:
                self._warn(
                    f"{where}: {len(tokens):,} tokens, and the model was trained on {self._window_size:,} at a time: read in "
                    "overlapping windows, each token where it has most context"
                )

    def finish(self) -> None:
        """Report the number of such texts, if there are several, and the unknown tokens."""
        if self._longer > 1:
            self._warn(f"{self._longer:,} of {self._texts:,} texts were read in several windows")
        self._unknown.report(self._progress.note, self._warn)


@dataclass(frozen=True)
class WrongSpan:
    """One or more wrong words.

    Attributes:
        start, end: position in the text, in characters.
        kind: kind of mistake; "" if the file names none.
    """

    start: int
    end: int
    kind: str = ""


@dataclass(frozen=True)
class CheckedText(InputText):
    """A text whose wrong words are marked.

    Attributes:
        wrong: spans of the wrong words, in order.
    """

    wrong: tuple[WrongSpan, ...] = ()


def read_texts(source: Path, field: str | None = None, *, option: str = "--text-field") -> Iterator[InputText]:
    """One text per line, from plain text or JSON lines, possibly compressed; an empty line is an empty text.

    Args:
        source: file; `-` is standard input.
        field: field of the text in JSON lines; None: "text" in files named .jsonl or .ndjson, plain text in others.
        option: option of the command that names the field, for messages.

    Raises:
        DataError: raised while reading, with the line: it is not UTF-8 or not JSON, or has no such field.
    """
    field = _field(source, field)
    name, lines = input_lines(source)
    for number, line in lines:
        where = f"{name}:{number}"
        plain = field is None or not line.strip()
        yield InputText(where, number, line if plain else _text(_record(line, where), str(field), where, option))


def read_checked(source: Path, field: str | None = None) -> Iterator[CheckedText]:
    """Sentences with marked wrong words, one per line; empty lines are skipped.

    Plain text has [[double brackets]] around each wrong word. JSON lines have the text, and under "wrong" a list of
    [start, end] in characters, or of {"start": 9, "end": 14, "kind": "homophone"}.

    Args:
        source: as in `read_texts`.
        field: as in `read_texts`.

    Raises:
        DataError: raised while reading, with the line: as in `read_texts`, or its brackets or spans are invalid.
    """
    field = _field(source, field)
    name, lines = input_lines(source)
    for number, line in lines:
        where = f"{name}:{number}"
        if not line.strip():
            continue
        if field is None:
            text, spans = _from_brackets(line, where)
        else:
            record = _record(line, where)
            text = _text(record, field, where)
            spans = _spans(record, text, where)
        yield CheckedText(where, number, text, tuple(sorted(spans, key=lambda span: (span.start, span.end))))


def input_lines(source: Path) -> tuple[str, Iterator[tuple[int, str]]]:
    """The name of a file for messages, and its numbered lines; `-` is standard input."""
    return shown_name(source), numbered_lines(source)


def _field(source: Path, field: str | None) -> str | None:
    """The field of the text; None for plain text."""
    if field is not None:
        return field
    return "text" if suffix_of(source) in _JSON_LINES else None


def _record(line: str, where: str) -> dict[str, Any]:
    record = parsed_json(line, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, expected an object", hint=f"like {_EXAMPLE}")
    return record


def _text(record: dict[str, Any], field: str, where: str, option: str = "--text-field") -> str:
    if field not in record:
        raise DataError(
            f"{where}: no field '{field}'; its fields: {', '.join(record) or 'none'}",
            hint=f"name the field of the text: {option} NAME ({did_you_mean(field, record)})" if record else None,
        )
    if not isinstance(record[field], str):
        raise DataError(f"{where}: '{field}' is not a text but {str(record[field])[:40]}", hint="expected a string in quotes")
    return clean_text(record[field])


def _as_object(span: Any) -> Any:
    """A span [start, end] as an object."""
    return dict(zip(("start", "end", "kind"), span, strict=False)) if isinstance(span, list) and len(span) < 4 else span


class _Span(Record):
    start: int
    end: int
    kind: str = ""


class _WrongWords(Record):
    wrong: list[Annotated[_Span, BeforeValidator(_as_object)]]


def _spans(record: dict[str, Any], text: str, where: str) -> list[WrongSpan]:
    with understood(where, hint=f"like {_EXAMPLE}; [] if no word is wrong"):
        spans = [WrongSpan(each.start, each.end, each.kind) for each in _WrongWords.model_validate(record).wrong]
    for span in spans:
        if not 0 <= span.start < span.end <= len(text) or not text[span.start : span.end].strip():
            raise DataError(
                f"{where}: span {span.start} to {span.end} has no word of the text of {len(text)} characters",
                hint="count characters from 0; the end is the position after the last character",
            )
    return spans


def _from_brackets(line: str, where: str) -> tuple[str, list[WrongSpan]]:
    """The text without the brackets, and the spans that were in brackets."""
    spans: list[WrongSpan] = []
    text, rest = "", line
    while _OPEN in rest:
        before, _, rest = rest.partition(_OPEN)
        word, closed, rest = rest.partition(_CLOSE)
        if not closed or _OPEN in word or not word.strip():
            problem = "are not closed" if not closed else f"contain '{word}'"
            raise DataError(
                f"{where}: the brackets at character {len(text) + len(before) + 1} {problem}; "
                "expected one wrong word in each [[pair]]",
                hint="for texts with such brackets of their own, use JSON lines: " + _EXAMPLE,
            )
        text += before
        spans.append(WrongSpan(len(text), len(text) + len(word)))
        text += word
    return text + rest, spans


Span = tuple[int, int]
_APOSTROPHES = "'\u2019"


def words_of(text: str) -> list[Span]:
    """(start, end) of each word in characters, in order: a run of letters, marks and digits, with the apostrophes inside it.

    Every Han ideograph is a word, and so is every other character that is not white space. In other scripts without spaces,
    such as Thai, whole phrases are words.
    """
    spans: list[Span] = []
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        end = start + 1
        if _joins(text[start]):
            while end < len(text) and (_joins(text[end]) or _inside(text, end)):
                end += 1
        spans.append((start, end))
        start = end
    return spans


def overlapping(words: Sequence[Span], span: Span) -> list[int]:
    """Indices of the words that share a character with a span."""
    return [number for number, (start, end) in enumerate(words) if start < span[1] and span[0] < end]


def _joins(character: str) -> bool:
    return (unicodedata.category(character)[0] in "LMN" and not _is_han(character)) or character == "_"


def _inside(text: str, place: int) -> bool:
    return text[place] in _APOSTROPHES and place + 1 < len(text) and _joins(text[place + 1])


def _is_han(character: str) -> bool:
    return character >= "\u2e80" and unicodedata.name(character, "").startswith("CJK ")
