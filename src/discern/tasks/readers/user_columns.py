"""The roles of the columns of a user's table, and the kind of its labels, both decided before any training.

Columns that are not given are recognized by their names; if that fails, the error lists the columns of the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from discern.data.sources.base import TEXT_NAMES, ending
from discern.data.sources.table import LABEL_NAMES, delimiter_of, is_header
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.readers.files import suffix_of
from discern.tasks.readers.table import (
    Table,
    TableFormat,
    list_in,
    number_in,
    one_object,
    open_table,
    value_of,
    written,
)

LabelKind = Literal["label", "labels", "number"]
_JOINED = re.compile(r"[^;|,\s]+ ?([;|,]) ?[^;|,\s]+(?: ?\1 ?[^;|,\s]+)*")  # such as "a;b", but not "4,5, and so on"

WORDS_NAMES = "words tokens text sentence".split()
QUESTION_NAMES = "question query".split()
CONTEXT_NAMES = "context passage paragraph document text".split()
_ANSWER_NAMES = "answer answers answer_text".split()
_TAG_NAMES = "tags ner_tags labels pos_tags chunk_tags".split()
_OTHER_TASKS = {
    "answers": {"--question": QUESTION_NAMES, "--context": CONTEXT_NAMES, "--answer": _ANSWER_NAMES},
    "tags": {"--words": WORDS_NAMES, "--tags": _TAG_NAMES},
}
_PAIRS = {"text_a": "text_b", "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2", "text1": "text2"}


@dataclass(frozen=True, slots=True)
class ClassificationColumns:
    """Columns of classification and regression, made by `classification_columns`.

    Attributes:
        kind: 'label' (one class), 'labels' (several classes), or 'number'.
        separator: separator of several labels in one cell; None if the cells contain JSON lists.
    """

    text: str
    pair: str | None = None
    label: str | None = None
    kind: LabelKind = "label"
    separator: str | None = None


@dataclass(frozen=True, slots=True)
class TaggingColumns:
    """Columns of words and tags, which are lists or texts separated by spaces."""

    words: str
    tags: str | None = None


@dataclass(frozen=True, slots=True)
class NumberedColumns:
    """Columns of a file with one word per line, from 0; negative numbers count from the right. See `numbered_columns`."""

    words: int = 0
    tags: int = -1


@dataclass(frozen=True, slots=True)
class QuestionColumns:
    """Columns of questions; `answer` is a text, a list of texts, or an object with `text` and `answer_start`."""

    question: str
    context: str
    answer: str | None = None
    start: str | None = None


def classification_columns(
    path: Path,
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    kind: LabelKind | None = None,
    separator: str | None = None,
    format: TableFormat | None = None,
) -> ClassificationColumns:
    """The columns of a training file and the kind of its labels; columns that are not given are recognized by their names.

    The kind is recognized from all values: lists (or a given separator) are several labels; numbers are a score if at least one
    of them is not whole; anything else is one label. Stars from 1 to 5 are thus five classes unless `kind` is "number".

    Raises:
        ConfigError: a column does not exist or cannot be recognized, or the kind is unknown.
        DataError: the file cannot be read.
    """
    if kind is not None and kind not in get_args(LabelKind):
        raise ConfigError(f"unknown kind of label '{kind}'", hint=did_you_mean(kind, get_args(LabelKind)))
    table = open_table(path, format)
    text = chosen_column(table, text, TEXT_NAMES, "--text", {label, pair})
    partner = _PAIRS.get(text.lower())
    pair = table.require(pair, "--pair") if pair else _named(table, [partner] if partner else [])
    label = chosen_column(table, label, LABEL_NAMES, "--label", {text, pair})
    if kind is None:
        kind = "labels" if separator is not None else _kind(table, label)
    return ClassificationColumns(text, pair, label, kind, separator)


def tagging_columns(
    path: Path, *, words: str | None = None, tags: str | None = None, format: TableFormat | None = None
) -> TaggingColumns:
    """The columns of words and tags; those that are not given are recognized by their names.

    Raises:
        ConfigError: a column does not exist or cannot be recognized.
    """
    table = open_table(path, format)
    words = chosen_column(table, words, WORDS_NAMES, "--words", {tags})
    tags = chosen_column(table, tags, _TAG_NAMES, "--tags", {words})
    return TaggingColumns(words, tags)


def numbered_columns(path: Path, *, words: str | None = None, tags: str | None = None) -> NumberedColumns:
    """The columns of words and tags in a file with one word per line, given by number.

    By default the first and the last column; in CoNLL-U (.conllu) the form and the universal part of speech.

    Raises:
        ConfigError: a given column is not a number.
    """
    usual = NumberedColumns(1, 3) if suffix_of(path) == ".conllu" else NumberedColumns()
    return NumberedColumns(_place(path, words, "--words", usual.words), _place(path, tags, "--tags", usual.tags))


def _place(path: Path, given: str | None, option: str, usual: int) -> int:
    try:
        return usual if given is None else int(given)
    except ValueError:
        raise ConfigError(
            f"{path} has one word per line and numbered columns, but {option} is '{given}'",
            hint=f"{option} {usual}: counted from 0, or -1 for the last; for a table with a header --set files.format=csv",
        ) from None


def question_columns(
    path: Path,
    *,
    question: str | None = None,
    context: str | None = None,
    answer: str | None = None,
    start: str | None = None,
    format: TableFormat | None = None,
) -> QuestionColumns:
    """The columns of questions, contexts and answers; those that are not given are recognized by their names.

    Raises:
        ConfigError: a column does not exist or cannot be recognized.
    """
    table = open_table(path, format)
    question = chosen_column(table, question, QUESTION_NAMES, "--question", {context, answer, start})
    context = chosen_column(table, context, CONTEXT_NAMES, "--context", {question, answer, start})
    start = table.require(start, "--set files.start") if start else _named(table, ["answer_start", "start"])
    answer = chosen_column(table, answer, _ANSWER_NAMES, "--answer", {question, context, start})
    return QuestionColumns(question, context, answer, start)


def _named(table: Table, names: Sequence[str]) -> str | None:
    lowered = {column.lower(): column for column in table.columns}
    return next((lowered[name] for name in names if name in lowered), None)


def chosen_column(table: Table, given: str | None, names: Sequence[str], option: str, others: set[str | None]) -> str:
    """The given column, or the one recognized by its name, or the only one without another role.

    Raises:
        ConfigError: the column does not exist, or none can be recognized.
    """
    if given is not None:
        return table.require(given, option)
    free = [column for column in table.columns if column not in others]
    found = _named(Table(table.name, table.format, tuple(free), table.rows), names)
    if found is None:
        _refuse_other_layout(table)
        if len(free) == 1:
            return free[0]
        hint = f"name it: {option} COLUMN"
        for purpose, roles in _OTHER_TASKS.items():
            columns = {role: _named(table, known) for role, known in roles.items()}
            if option in ("--text", "--label") and None not in columns.values():
                hint += f"; to fine-tune on {purpose}: " + " ".join(f"{role} {column}" for role, column in columns.items())
        raise ConfigError(
            f"{table.name}: cannot recognize the column for {option}; its columns: {', '.join(table.columns)}", hint=hint
        )
    return found


def _refuse_other_layout(table: Table) -> None:
    """Raise a DataError if the first line of a table is not a header, or if a JSON file is one object."""
    if table.format in ("csv", "tsv"):
        first = table.columns[0]
        mark = delimiter_of(first) if len(table.columns) == 1 else None
        if mark is not None:
            raise DataError(
                f"{table.name} has a single column, but its first line has several separated by '{mark}': {first!r:.80}",
                hint="name the file .csv, or --set files.format=csv; for prediction --format csv",
            )
        if not is_header(table.columns):
            raise DataError(
                f"{table.name}: the first line is not a header, as it is long or has numbers: {', '.join(table.columns):.80}",
                hint="write the names of the columns above it, for example: text,label (with the delimiter of the file)",
            )
    elif table.format == "jsonl" and ending(table.name) == "json" and len(list(islice(table.rows, 2))) == 1:
        raise one_object(table.name)


def _kind(table: Table, label: str) -> LabelKind:
    """The kind of the labels, from all values of the column. NaN counts as a number, not as a class called 'nan'."""
    numbers = whole = lists = count = empty = 0
    joined = None
    for row in table.rows:
        value = value_of(row, label)
        count += 1
        empty += written(value) == ""
        joined = joined or (_JOINED.fullmatch(value) if isinstance(value, str) else None)
        lists += isinstance(value, (list, tuple)) or (isinstance(value, str) and list_in(value) is not None)
        number = math.nan if isinstance(value, float) and math.isnan(value) else number_in(written(value) or "")
        if number is not None:
            numbers += 1
            whole += math.isfinite(number) and number.is_integer()
    if empty and joined is not None:
        raise DataError(
            f"{table.name}: '{label}' is empty in {empty:,} of {count:,} rows, and '{joined[0]}' in another; are there several "
            "labels in a cell, or none?",
            hint=f"--set files.label_separator='{joined[1]}'; or give every row one label",
        )
    if lists and lists == count:
        return "labels"
    return "number" if count and numbers == count and whole < count else "label"
