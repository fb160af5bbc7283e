"""Reads tables of the user into examples.

The notes list the columns, so that they can be shown before any training. Every fault is an error that names file and line,
since only the user can correct it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from discern.data.sources.problems import ProblemLog
from discern.errors import DataError
from discern.tasks.examples import ClassificationExample, Label, QuestionExample, Reading, TaggingExample, label_counts
from discern.tasks.readers.answers import QuestionCollector
from discern.tasks.readers.files import clean_text
from discern.tasks.readers.table import Row, Table, TableFormat, list_in, number_in, open_table, text_of, value_of, written
from discern.tasks.readers.user_columns import ClassificationColumns, QuestionColumns, TaggingColumns
from discern.wording import counted

_SHOWN = 8


def read_classification(
    path: Path, columns: ClassificationColumns, *, format: TableFormat | None = None, labeled: bool = True
) -> Reading[ClassificationExample]:
    """The examples of a table. Ids are row numbers from 0.

    Args:
        labeled: False: do not read labels.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no rows, a text is empty, a label is missing, or a score is not a finite number.
    """
    table, places = _noting_places(open_table(path, format))
    examples = tuple(classification_rows(table, columns, labeled=labeled))
    if not examples:
        raise DataError(f"{table.name} has a header but no rows", hint="expected one row per example")
    notes = _column_notes(columns)
    counts = label_counts(examples)
    if counts:
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN])
        notes.append(f"{counted(len(counts), 'label')}: {shown}{', ...' if len(counts) > _SHOWN else ''}")
    scores = [example.label for example in examples if isinstance(example.label, float)]
    if scores:
        notes.append(f"scores from {min(scores):g} to {max(scores):g}, mean {math.fsum(scores) / len(scores):.3g}")
    return Reading(examples, table.name, (), tuple(notes), tuple(places))


def classification_rows(table: Table, columns: ClassificationColumns, *, labeled: bool = True) -> Iterator[ClassificationExample]:
    """Like `read_classification`, but one by one, so that a file of any size fits into memory."""
    text = table.require(columns.text, "--text")
    pair = table.require(columns.pair, "--pair") if columns.pair else None
    label = table.require(columns.label, "--label") if columns.label and labeled else None
    for number, row in enumerate(table.rows):
        second = text_of(row, pair) if pair else None
        what = _label(row, label, columns) if label else None
        yield ClassificationExample(str(number), text_of(row, text), second, what)


def read_tagging(
    path: Path, columns: TaggingColumns, *, format: TableFormat | None = None, labeled: bool = True
) -> Reading[TaggingExample]:
    """The sentences of a table. Ids are row numbers from 0.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no rows, a sentence has no words, a word is empty, or the numbers of words and tags differ.
    """
    table, places = _noting_places(open_table(path, format))
    examples = tuple(tagging_rows(table, columns, labeled=labeled))
    if not examples:
        raise DataError(f"{table.name} has a header but no rows", hint="expected one row per sentence")
    return Reading(examples, table.name, (), tuple(_column_notes(columns)), tuple(places))


def tagging_rows(
    table: Table, columns: TaggingColumns, *, labeled: bool = True, characters: bool = False
) -> Iterator[TaggingExample]:
    """Like `read_tagging`, but one by one.

    Args:
        characters: every character of a text is a word; lists are read unchanged.
    """
    words = table.require(columns.words, "--words")
    tags = table.require(columns.tags, "--tags") if columns.tags and labeled else None
    for number, row in enumerate(table.rows):
        sentence = _sequence(row, words, characters=characters)
        marked = _sequence(row, tags) if tags else None
        if marked is not None and len(marked) != len(sentence):
            raise DataError(
                f"{row.where}: {len(sentence)} words in '{words}' but {len(marked)} tags in '{tags}'",
                hint="every word needs a tag",
            )
        yield TaggingExample(str(number), sentence, marked)


def read_questions(
    path: Path,
    columns: QuestionColumns,
    *,
    format: TableFormat | None = None,
    labeled: bool = True,
    keep_unfound: bool = False,
) -> Reading[QuestionExample]:
    """The questions of a table. Ids are row numbers from 0. An empty answer means that the context contains none.

    An answer is searched for at its start if that is given, then nearest to it; otherwise its first occurrence is used. Answers
    that do not occur in their context are left out and counted.

    Args:
        keep_unfound: keep questions without an answer that occurs in the context, see `read_squad`.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no usable rows, a question or context is empty, or a start is not a number.
    """
    table = open_table(path, format)
    asked, context = table.require(columns.question, "--question"), table.require(columns.context, "--context")
    answer = table.require(columns.answer, "--answer") if columns.answer and labeled else None
    start = table.require(columns.start, "--set files.start") if columns.start and answer else None
    collector = QuestionCollector(keep_unfound, ProblemLog())
    for number, row in enumerate(table.rows):
        # The context is not stripped: starts count its characters.
        text_of(row, context)
        answers = list(_answers(row, answer, start)) if answer else []
        passage, none_given = clean_text(str(value_of(row, context))), not answers if answer else None
        collector.add(QuestionExample(str(number), text_of(row, asked), passage, impossible=none_given), answers, row.where)
    if not collector.examples:
        shown = "; ".join(str(problem) for problem in collector.problems.summary()) or "a header but no rows"
        raise DataError(f"{table.name} has no usable questions: {shown}", hint="an answer must occur in its context exactly")
    notes = _column_notes(columns)
    impossible = sum(example.impossible is True for example in collector.examples)
    if impossible:
        notes.append(f"{impossible:,} of {len(collector.examples):,} questions have no answer")
    return Reading(tuple(collector.examples), table.name, collector.problems.summary(), tuple(notes))


def question_rows(table: Table, columns: QuestionColumns) -> Iterator[QuestionExample]:
    """Like `read_questions`, but one by one and without answers."""
    asked, context = table.require(columns.question, "--question"), table.require(columns.context, "--context")
    for number, row in enumerate(table.rows):
        text_of(row, context)
        yield QuestionExample(str(number), text_of(row, asked), clean_text(str(value_of(row, context))))


def _noting_places(table: Table) -> tuple[Table, list[str]]:
    """The table, and a list to which reading a row appends its place."""
    places: list[str] = []

    def rows() -> Iterator[Row]:
        for row in table.rows:
            places.append(row.where)
            yield row

    return replace(table, rows=rows()), places


def _column_notes(columns: ClassificationColumns | TaggingColumns | QuestionColumns) -> list[str]:
    parts = {field.name: getattr(columns, field.name) for field in fields(columns)}
    kind, separator = parts.pop("kind", "label"), parts.pop("separator", None)
    several = "several labels" + (f", separated by '{separator}'" if separator is not None else "")
    holds = {"number": " (a number)", "labels": f" ({several})"}.get(kind, "")
    named = ", ".join(f"{role} = '{column}'" for role, column in parts.items() if column is not None)
    return [f"columns: {named}{holds}"]


def _label(row: Row, column: str, columns: ClassificationColumns) -> Label:
    value = value_of(row, column)
    if columns.kind == "number":
        text = written(value)
        number = number_in(text) if text else None
        if number is None or not math.isfinite(number):
            shown = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)[:40]
            raise DataError(
                f"{row.where}: '{column}' is {shown}, expected a finite number",
                hint="remove the row, or --set files.label_kind=label for classes",
            )
        return number
    if columns.kind == "labels":
        return _labels(row, column, value, columns.separator)
    text = written(value)
    if text is None:
        raise DataError(
            f"{row.where}: '{column}' is a {type(value).__name__}, other rows have one label",
            hint="--set files.label_kind=labels",
        )
    if not text:
        raise DataError(f"{row.where}: '{column}' is empty", hint="remove the row, or give it a label")
    return text


def _labels(row: Row, column: str, value: Any, separator: str | None) -> tuple[str, ...]:
    if isinstance(value, str) and separator is not None:
        parts: list[Any] = value.split(separator)
    elif isinstance(value, str):
        found = list_in(value) if value.strip() else []
        if found is None:
            raise DataError(
                f"{row.where}: '{column}' is not a list: {value!r:.60}",
                hint="name the separator of the labels: --set files.label_separator=';'",
            )
        parts = found
    else:
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
    names = [written(part) for part in parts]
    if None in names:
        raise DataError(f"{row.where}: '{column}' is a list of lists", hint="expected a list of label names")
    return tuple(dict.fromkeys(name for name in names if name))


def _sequence(row: Row, column: str, *, characters: bool = False) -> tuple[str, ...]:
    """The words or tags of a cell: a list, a JSON list, a text split at white space, or the characters of a text."""
    value = value_of(row, column)
    if isinstance(value, str):
        found = list_in(value)
        words = value.split()
        parts: list[Any] = found if found is not None else list("".join(words)) if characters else words
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        raise DataError(
            f"{row.where}: '{column}' is {value!r:.40}, expected a list, or words separated by spaces",
            hint="choose another column",
        )
    entries = tuple(written(part) or "" for part in parts)
    if not entries:
        raise DataError(f"{row.where}: '{column}' is empty", hint="remove the row")
    if "" in entries:
        raise DataError(f"{row.where}: '{column}' has an empty entry at index {entries.index('')}", hint="remove it with its tag")
    return entries


def _answers(row: Row, column: str, start_column: str | None) -> Iterator[tuple[str, int | None]]:
    """Text and start of each answer in a row."""
    value: Any = value_of(row, column)
    starts: Any = value_of(row, start_column) if start_column else None
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start")
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    places = list(starts) if isinstance(starts, (list, tuple)) else [starts] * len(texts)
    if len(places) != len(texts):
        raise DataError(
            f"{row.where}: {len(texts)} answers but {len(places)} starts", hint="give a start for every answer, or for none"
        )
    for answer, place in zip(texts, places, strict=True):
        text = written(answer)
        if text is None:
            raise DataError(
                f"{row.where}: '{column}' is {value!r:.60}, expected a text",
                hint="an answer is a text that occurs in its context",
            )
        if text:
            yield text, _start(row, place)


def _start(row: Row, value: Any) -> int | None:
    text = written(value)
    if not text:
        return None
    number = number_in(text)
    if number is None or not number.is_integer():
        raise DataError(
            f"{row.where}: the start of the answer is {value!r:.40}, expected a whole number",
            hint="count characters from 0, or leave it empty",
        )
    return int(number)
