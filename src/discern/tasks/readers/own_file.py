"""A user's own table read into examples: which column is what, and what its labels are.

Columns that are not named are recognised by their names; what was chosen goes into the notes of a reading, to be shown
before any training. Every fault is an error that names file and line, since nobody but the user can put it right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from discern.data.problems import ProblemLog
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.examples import ClassificationExample, Label, QuestionExample, Reading, TaggingExample, label_counts
from discern.tasks.readers.answers import QuestionCollector
from discern.tasks.readers.files import parsed_json
from discern.tasks.readers.table import Row, Table, TableFormat, open_table, text_of, value_of, written

LabelKind = Literal["label", "labels", "number"]

TEXT_NAMES = (
    "text sentence review content comment document body utterance message abstract title "
    "premise question text_a sentence1 question1 text1"
).split()
WORDS_NAMES = "words tokens text sentence".split()
QUESTION_NAMES = "question query".split()
CONTEXT_NAMES = "context passage paragraph document text".split()
_LABEL = "label labels class category target sentiment stars rating score intent topic gold_label".split()
_PAIRS = {"text_a": "text_b", "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2", "text1": "text2"}
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ClassificationColumns:
    """Columns of texts and what they are; made by `classification_columns`.

    Attributes:
        kind: a label (one class), labels (several), or a number.
        separator: what parts several labels in one cell; None where a cell holds a JSON list.
    """

    text: str
    pair: str | None = None
    label: str | None = None
    kind: LabelKind = "label"
    separator: str | None = None


@dataclass(frozen=True, slots=True)
class TaggingColumns:
    """Columns of words and tags: lists, or texts parted by spaces."""

    words: str
    tags: str | None = None


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
    """Which columns of a training file are what, with the kind of its label; columns not given are recognised by their names.

    Every value is looked at to tell the kind: lists (or a separator given) are several labels; numbers of which one at least
    is not whole are numbers; anything else is a label. So stars from 1 to 5 are five classes unless `kind` is "number".

    Raises:
        ConfigError: a column does not exist or cannot be recognised, or no such kind.
        DataError: the file cannot be read.
    """
    if kind is not None and kind not in get_args(LabelKind):
        raise ConfigError(f"unknown kind of label '{kind}'", hint=did_you_mean(kind, get_args(LabelKind)))
    table = open_table(path, format)
    text = chosen_column(table, text, TEXT_NAMES, "--text", {label, pair})
    partner = _PAIRS.get(text.lower())
    pair = table.require(pair, "--pair") if pair else _named(table, [partner] if partner else [])
    label = chosen_column(table, label, _LABEL, "--label", {text, pair})
    if kind is None:
        kind = "labels" if separator is not None else _kind(table, label)
    return ClassificationColumns(text, pair, label, kind, separator)


def read_classification(
    path: Path, columns: ClassificationColumns, *, format: TableFormat | None = None, labelled: bool = True
) -> Reading[ClassificationExample]:
    """The examples of a table. Ids number the rows, from 0.

    Args:
        labelled: False leaves labels out, if the file has any.

    Raises:
        ConfigError: a column does not exist.
        DataError: no row, an empty text, a missing label, or a score that is not a finite number; with the line.
    """
    table = open_table(path, format)
    examples = tuple(classification_rows(table, columns, labelled=labelled))
    if not examples:
        raise DataError(f"{table.name} has a header and no row", hint="expected a row an example")
    notes = _column_notes(columns)
    counts = label_counts(examples)
    if counts:
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN])
        notes.append(f"{len(counts)} labels: {shown}{', ...' if len(counts) > _SHOWN else ''}")
    scores = [example.label for example in examples if isinstance(example.label, float)]
    if scores:
        notes.append(f"scores from {min(scores):g} to {max(scores):g}, mean {math.fsum(scores) / len(scores):.3g}")
    return Reading(examples, table.name, (), tuple(notes))


def classification_rows(
    table: Table, columns: ClassificationColumns, *, labelled: bool = True
) -> Iterator[ClassificationExample]:
    """As `read_classification`, one by one: a file of any size in bounded memory."""
    text = table.require(columns.text, "--text")
    pair = table.require(columns.pair, "--pair") if columns.pair else None
    label = table.require(columns.label, "--label") if columns.label and labelled else None
    for number, row in enumerate(table.rows):
        second = text_of(row, pair) if pair else None
        what = _label(row, label, columns) if label else None
        yield ClassificationExample(str(number), text_of(row, text), second, what)


def tagging_columns(
    path: Path, *, words: str | None = None, tags: str | None = None, format: TableFormat | None = None
) -> TaggingColumns:
    """Which columns hold words and tags; those not given are recognised by their names.

    Raises:
        ConfigError: a column does not exist or cannot be recognised.
    """
    table = open_table(path, format)
    words = chosen_column(table, words, WORDS_NAMES, "--words", {tags})
    tags = chosen_column(table, tags, "tags ner_tags labels pos_tags chunk_tags".split(), "--tags", {words})
    return TaggingColumns(words, tags)


def read_tagging(
    path: Path, columns: TaggingColumns, *, format: TableFormat | None = None, labelled: bool = True
) -> Reading[TaggingExample]:
    """The sentences of a table. Ids number the rows, from 0.

    Raises:
        ConfigError: a column does not exist.
        DataError: no row, a sentence without words, an empty word, or as many tags as words it is not; with the line.
    """
    table = open_table(path, format)
    examples = tuple(tagging_rows(table, columns, labelled=labelled))
    if not examples:
        raise DataError(f"{table.name} has a header and no row", hint="expected a row a sentence")
    return Reading(examples, table.name, (), tuple(_column_notes(columns)))


def tagging_rows(table: Table, columns: TaggingColumns, *, labelled: bool = True) -> Iterator[TaggingExample]:
    """As `read_tagging`, one by one."""
    words = table.require(columns.words, "--words")
    tags = table.require(columns.tags, "--tags") if columns.tags and labelled else None
    for number, row in enumerate(table.rows):
        said = _sequence(row, words)
        marked = _sequence(row, tags) if tags else None
        if marked is not None and len(marked) != len(said):
            raise DataError(
                f"{row.where}: {len(said)} words in '{words}' but {len(marked)} tags in '{tags}'", hint="every word needs a tag"
            )
        yield TaggingExample(str(number), said, marked)


def question_columns(
    path: Path,
    *,
    question: str | None = None,
    context: str | None = None,
    answer: str | None = None,
    start: str | None = None,
    format: TableFormat | None = None,
) -> QuestionColumns:
    """Which columns hold questions, contexts and answers; those not given are recognised by their names.

    Raises:
        ConfigError: a column does not exist or cannot be recognised.
    """
    table = open_table(path, format)
    question = chosen_column(table, question, QUESTION_NAMES, "--question", {context, answer, start})
    context = chosen_column(table, context, CONTEXT_NAMES, "--context", {question, answer, start})
    start = table.require(start, "--start") if start else _named(table, ["answer_start", "start"])
    answer = chosen_column(table, answer, "answer answers answer_text".split(), "--answer", {question, context, start})
    return QuestionColumns(question, context, answer, start)


def read_questions(
    path: Path,
    columns: QuestionColumns,
    *,
    format: TableFormat | None = None,
    labelled: bool = True,
    keep_unfound: bool = False,
) -> Reading[QuestionExample]:
    """The questions of a table. Ids number the rows, from 0. An empty answer means that the context holds none.

    An answer is looked for at its start if that is given, then nearest to it; otherwise the first place is taken. One that
    does not occur is counted and left out.

    Args:
        keep_unfound: as of `read_squad`.

    Raises:
        ConfigError: a column does not exist.
        DataError: no usable row, an empty question or context, a start that is no number; with the line.
    """
    table = open_table(path, format)
    asked, context = table.require(columns.question, "--question"), table.require(columns.context, "--context")
    answer = table.require(columns.answer, "--answer") if columns.answer and labelled else None
    start = table.require(columns.start, "--start") if columns.start and answer else None
    collector = QuestionCollector(keep_unfound, ProblemLog())
    for number, row in enumerate(table.rows):
        # The context is not stripped: starts count its characters.
        text_of(row, context)
        answers = list(_answers(row, answer, start)) if answer else []
        passage = str(value_of(row, context))
        example = QuestionExample(str(number), text_of(row, asked), passage, impossible=not answers if answer else None)
        collector.add(example, answers, row.where)
    if not collector.examples:
        shown = "; ".join(str(problem) for problem in collector.problems.summary()) or "a header and no row"
        raise DataError(
            f"{table.name} holds no question that can be used: {shown}", hint="an answer must occur in its context to the letter"
        )
    notes = _column_notes(columns)
    impossible = sum(example.impossible is True for example in collector.examples)
    if impossible:
        notes.append(f"{impossible:,} of {len(collector.examples):,} questions have no answer")
    return Reading(tuple(collector.examples), table.name, collector.problems.summary(), tuple(notes))


def question_rows(table: Table, columns: QuestionColumns) -> Iterator[QuestionExample]:
    """As `read_questions`, one by one and without answers."""
    asked, context = table.require(columns.question, "--question"), table.require(columns.context, "--context")
    for number, row in enumerate(table.rows):
        text_of(row, context)
        yield QuestionExample(str(number), text_of(row, asked), str(value_of(row, context)))


def _column_notes(columns: ClassificationColumns | TaggingColumns | QuestionColumns) -> list[str]:
    parts = [(field.name, getattr(columns, field.name)) for field in fields(columns)]
    return ["columns: " + ", ".join(f"{name} = {value}" for name, value in parts if value is not None)]


def _named(table: Table, names: Sequence[str]) -> str | None:
    lowered = {column.lower(): column for column in table.columns}
    return next((lowered[name] for name in names if name in lowered), None)


def chosen_column(table: Table, given: str | None, names: Sequence[str], option: str, others: set[str | None]) -> str:
    """The column given, or the one recognised by its name, or the only one that nothing else is.

    Raises:
        ConfigError: there is no such column, or none can be recognised.
    """
    if given is not None:
        return table.require(given, option)
    free = [column for column in table.columns if column not in others]
    found = _named(Table(table.name, table.format, tuple(free), table.rows), names)
    if found is None and len(free) == 1:
        found = free[0]
    if found is None:
        raise ConfigError(
            f"{table.name}: cannot tell which column {option} is; its columns: {', '.join(table.columns)}",
            hint=f"name it: {option} {free[0] if free else 'COLUMN'}",
        )
    return found


def _kind(table: Table, label: str) -> LabelKind:
    """The kind of a label, from every value of its column. NaN counts as a number: as a label it would be a class called nan."""
    numbers = whole = lists = count = 0
    for row in table.rows:
        value = value_of(row, label)
        count += 1
        lists += isinstance(value, (list, tuple)) or (isinstance(value, str) and _json_list(value) is not None)
        number = math.nan if isinstance(value, float) and math.isnan(value) else _number(written(value) or "")
        if number is not None:
            numbers += 1
            whole += math.isfinite(number) and number.is_integer()
    if lists and lists == count:
        return "labels"
    return "number" if count and numbers == count and whole < count else "label"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json_list(text: str) -> list[Any] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        value = parsed_json(text, "")
    except DataError:
        return None
    return value if isinstance(value, list) else None


def _label(row: Row, column: str, columns: ClassificationColumns) -> Label:
    value = value_of(row, column)
    if columns.kind == "number":
        text = written(value)
        number = _number(text) if text else None
        if number is None or not math.isfinite(number):
            shown = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)[:40]
            raise DataError(
                f"{row.where}: '{column}' is {shown}, expected a finite number",
                hint="take the row out, or --set task.label_kind=label for classes",
            )
        return number
    if columns.kind == "labels":
        return _labels(row, column, value, columns.separator)
    text = written(value)
    if text is None:
        raise DataError(
            f"{row.where}: '{column}' is a {type(value).__name__}, other rows have one label", hint="--set task.label_kind=labels"
        )
    if not text:
        raise DataError(f"{row.where}: '{column}' is empty", hint="take the row out, or give it a label")
    return text


def _labels(row: Row, column: str, value: Any, separator: str | None) -> tuple[str, ...]:
    if isinstance(value, str) and separator is not None:
        parts: list[Any] = value.split(separator)
    elif isinstance(value, str):
        found = _json_list(value) if value.strip() else []
        if found is None:
            raise DataError(
                f"{row.where}: '{column}' is no list: {value!r:.60}",
                hint="say what parts the labels: --set task.label_separator=';'",
            )
        parts = found
    else:
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
    names = [written(part) for part in parts]
    if None in names:
        raise DataError(f"{row.where}: '{column}' holds a list of lists", hint="expected a list of label names")
    return tuple(dict.fromkeys(name for name in names if name))


def _sequence(row: Row, column: str) -> tuple[str, ...]:
    """The words or tags of a cell: a list, a JSON list, or a text parted by white space."""
    value = value_of(row, column)
    if isinstance(value, str):
        found = _json_list(value)
        parts: list[Any] = value.split() if found is None else found
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        raise DataError(
            f"{row.where}: '{column}' is {value!r:.40}, expected a list or words parted by spaces", hint="choose another column"
        )
    said = tuple(written(part) or "" for part in parts)
    if not said:
        raise DataError(f"{row.where}: '{column}' is empty", hint="take the row out")
    if "" in said:
        raise DataError(
            f"{row.where}: '{column}' holds an empty entry at place {said.index('')}", hint="take it out, with its tag"
        )
    return said


def _answers(row: Row, column: str, start_column: str | None) -> Iterator[tuple[str, int | None]]:
    """Text and start of the answers of a row."""
    value: Any = value_of(row, column)
    starts: Any = value_of(row, start_column) if start_column else None
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start")
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    places = list(starts) if isinstance(starts, (list, tuple)) else [starts] * len(texts)
    if len(places) != len(texts):
        raise DataError(
            f"{row.where}: {len(texts)} answers but {len(places)} starts", hint="every answer needs a start, or none has one"
        )
    for answer, place in zip(texts, places, strict=True):
        text = written(answer)
        if text is None:
            raise DataError(
                f"{row.where}: '{column}' is {value!r:.60}, expected a text", hint="an answer is a text that its context holds"
            )
        if text:
            yield text, _start(row, place)


def _start(row: Row, value: Any) -> int | None:
    text = written(value)
    if not text:
        return None
    number = _number(text)
    if number is None or not number.is_integer():
        raise DataError(
            f"{row.where}: the start of the answer is {value!r:.40}, expected a whole number",
            hint="characters from 0, or leave it empty",
        )
    return int(number)
