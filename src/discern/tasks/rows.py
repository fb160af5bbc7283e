"""Users' files and published tables as examples: the role of each column, the kind of the labels, and an example of every row.

The columns and the kind of labels of a user's file are recognized before any training; if that fails, the error lists the
columns. Rows are read one by one, so that a file of any size can be predicted in bounded memory. Every fault of a user's file is
an error that names file and line, since only the user can correct it; malformed rows of a published data set are left out and
counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from discern.data.sources.documents import ProblemLog
from discern.data.tables import (
    LABEL_NAMES,
    MALFORMED,
    TEXT_NAMES,
    Row,
    Table,
    are_texts,
    clean_text,
    is_header,
    number_in,
    open_table,
    parsed_json,
    suffix_of,
    texts_of,
)
from discern.errors import ConfigError, DataError, counted, did_you_mean
from discern.tasks.base import (
    ClassificationExample,
    Label,
    Layout,
    QuestionExample,
    Reading,
    TaggingExample,
    label_counts,
    option_of,
)
from discern.tasks.readers.conll import read_conll
from discern.tasks.readers.questions import with_answers

Family = Literal["classification", "tagging", "questions"]
LabelKind = Literal["label", "labels", "number"]

USUAL_COLUMNS: dict[Family, dict[str, Sequence[str]]] = {
    "questions": {
        "question": ("question", "query"),
        "context": ("context", "passage", "paragraph", "document", "text"),
        "answer": ("answer", "answers", "answer_text"),
    },
    "tagging": {
        "words": ("words", "tokens", "text", "sentence"),
        "tags": ("tags", "ner_tags", "labels", "pos_tags", "chunk_tags"),
    },
    "classification": {"text": TEXT_NAMES, "label": LABEL_NAMES},
}
"""Usual names of the column of each role, likeliest first."""

_PARTNERS = {
    "text": "pair",
    "text_a": "text_b",
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "text1": "text2",
}
_STARTS = ("answer_start", "start")
COLUMN_SUFFIXES = (".conll", ".conllu", ".bio", ".iob")
"""Suffixes of files with one word per line."""
# Such as "a;b", but not "4,5, and so on".
_JOINED = re.compile(r"[^;|,\s]+ ?([;|,]) ?[^;|,\s]+(?: ?\1 ?[^;|,\s]+)*")
# Labels are not taken for classes if there are at least this many, and more than half as many as examples.
_TOO_MANY_CLASSES = 20


def has_word_per_line(path: Path, format: str | None) -> bool:
    """Whether a file has one word per line, by its given format or its name."""
    return format == "conll" or (format is None and suffix_of(path) in COLUMN_SUFFIXES)


def recognize_layout(
    path: Path,
    given: Mapping[str, str],
    *,
    format: str | None = None,
    kind: LabelKind | None = None,
    separator: str | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> tuple[Family, Layout]:
    """The family of the task that a training file is for, and the layout of the file.

    The columns that are given decide the family; without any, a file with question, context and answer is for question
    answering, one with words or tokens and tags for tagging, and any other for classification. The kind of the labels is
    recognized from all values: lists (or a given separator) are several labels; numbers are a score if at least one of them is
    not whole; anything else is one label. Stars from 1 to 5 are thus five classes unless `kind` is "number".

    Args:
        given: column of some roles.
        warn: receives a message about labels that may be several labels in one cell.

    Raises:
        ConfigError: columns are given for different families, a column does not exist, or it cannot be recognized.
        DataError: the file cannot be read, or has nearly as many labels as rows.
    """
    roles: dict[Family, tuple[str, ...]] = {
        "questions": ("question", "context", "answer", "start"),
        "tagging": ("words", "tags"),
        "classification": ("text", "pair", "label"),
    }
    named = [family for family, own in roles.items() if any(role in given for role in own)]
    if len(named) > 1:
        raise ConfigError(
            f"the columns are for different tasks: {' and '.join(named)}", hint="name the columns of one kind of task"
        )
    if has_word_per_line(path, format):
        if named not in ([], ["tagging"]):
            raise ConfigError(
                f"{path} has one word per line, which is for tagging, but the columns are for {named[0]}",
                hint="--words N --tags N; or for a table --set files.format=csv",
            )
        return "tagging", Layout(numbered_columns(path, given), "conll")
    table = open_table(path, format)
    family = named[0] if named else _family_of(table)
    columns = {role: table.require(name, option_of(role)) for role, name in given.items()}
    for role, names in USUAL_COLUMNS[family].items():
        columns[role] = columns.get(role) or choose_column(table, role, names, columns.values())
    partner = _PARTNERS.get(columns.get("text", "").lower())
    for role, names in (("pair", [partner] if partner else []), ("start", _STARTS if family == "questions" else ())):
        if role not in columns and (column := column_named(table, names, columns.values())):
            columns[role] = column
    if family == "classification":
        kind = kind or ("labels" if separator is not None else _label_kind(table, columns["label"], warn))
    # In the order of the roles, which messages show.
    ordered = {role: (columns[role],) for role in roles[family] if role in columns}
    return family, Layout(ordered, format, kind or "label", separator)


def numbered_columns(path: Path, given: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The columns of words and tags in a file with one word per line, which are numbers.

    By default the first and the last column; in CoNLL-U (.conllu) the form and the universal part of speech.

    Raises:
        ConfigError: a given column is not a number.
    """
    usual = {"words": "1", "tags": "3"} if suffix_of(path) == ".conllu" else {"words": "0", "tags": "-1"}
    columns = {**usual, **given}
    for role, column in columns.items():
        if not re.fullmatch(r"-?\d+", column):
            raise ConfigError(
                f"{path} has one word per line and numbered columns, but --{role} is '{column}'",
                hint=f"--{role} 0: counted from 0, or -1 for the last; for a table with a header --set files.format=csv",
            )
    return {role: (column,) for role, column in columns.items()}


def _family_of(table: Table) -> Family:
    columns = {column.lower() for column in table.columns}
    if all(columns.intersection(names) for names in USUAL_COLUMNS["questions"].values()):
        return "questions"
    if columns & {"words", "tokens"} and columns.intersection(USUAL_COLUMNS["tagging"]["tags"]):
        return "tagging"
    return "classification"


def _label_kind(table: Table, column: str, warn: Callable[[str], None]) -> LabelKind:
    """The kind of the labels, from all values of the column. NaN counts as a number, not as a class called 'nan'."""
    labels: Counter[str] = Counter()
    joined: Counter[str] = Counter()
    numbers = whole = lists = count = 0
    example = ""
    for row in table.rows:
        value = value_of(row, column)
        label = "nan" if isinstance(value, float) and math.isnan(value) else written(value)
        count += 1
        lists += isinstance(value, (list, tuple)) or (isinstance(value, str) and list_in(value) is not None)
        labels[label or ""] += 1
        if isinstance(value, str) and (match := _JOINED.fullmatch(value)):
            joined[match[1]] += 1
            example = example or value
        number = number_in(label or "")
        if number is not None:
            numbers += 1
            whole += math.isfinite(number) and number.is_integer()
    if lists and lists == count:
        return "labels"
    if count and numbers == count and whole < count:
        return "number"
    if joined and labels[""]:
        raise DataError(
            f"{table.name}: '{column}' is empty in {labels['']:,} of {count:,} rows, and '{example}' in another; are there "
            "several labels in a cell, or none?",
            hint=f"--label-separator '{joined.most_common(1)[0][0]}'; or give every row one label",
        )
    if len(labels) >= _TOO_MANY_CLASSES and 2 * len(labels) > count:
        advice = "--set files.label_kind=number for a score" if numbers == count else "choose another column: --label COLUMN"
        raise DataError(
            f"{table.name}: the column '{column}' has {len(labels):,} different labels in {count:,} rows, such as "
            f"'{next(iter(labels))}'; that is too many to treat as classes",
            hint=f"{advice}; if they are classes: --set files.label_kind=label",
        )
    if joined:
        separator = joined.most_common(1)[0][0]
        warn(
            f"the column '{column}' has labels such as '{example}', each treated as one class; if they are several labels: "
            f"--label-separator '{separator}'"
        )
    return "label"


E = TypeVar("E")
# With a larger fraction of malformed rows, a file is not one of the data set.
_MAX_MALFORMED = 0.05
_SHOWN = 8


def read_rows(
    path: Path,
    layout: Layout,
    make: Callable[[Table, Layout, ProblemLog], Iterator[tuple[E, str]]],
    *,
    labeled: bool = True,
) -> Reading[E]:
    """The examples of a whole table, with the places of their rows.

    Args:
        make: makes an example of each row, with its place.
        labeled: False for a file to predict: every malformed row is an error.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no rows, or one cannot be read.
    """
    problems = ProblemLog()
    malformed = problems if layout.published and labeled else None
    table = open_table(path, layout.format, header=layout.header, verbatim=layout.verbatim, malformed=malformed)
    rows = list(make(table, layout, problems))
    summary = problems.summary()
    left_out = sum(problem.count for problem in summary if problem.kind == MALFORMED)
    if not rows or left_out > max(10, _MAX_MALFORMED * len(rows)):
        shown = "; ".join(map(str, summary)) or "a header but no rows"
        raise DataError(f"{table.name} has no usable rows: {shown}", hint="expected one row per example; check the file")
    examples, places = zip(*rows, strict=True)
    return Reading(examples, table.name, summary, () if layout.published else (layout.describe(),), places)


def read_texts(path: Path, layout: Layout, labels: tuple[str, ...], *, labeled: bool = True) -> Reading[ClassificationExample]:
    """The texts of a table with their labels, which the notes count."""
    reading = read_rows(path, layout, partial(text_rows, labeled=labeled, labels=labels), labeled=labeled)
    counts = label_counts(reading.examples)
    scores = [example.label for example in reading.examples if isinstance(example.label, float)]
    notes = []
    if counts:
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:_SHOWN])
        notes.append(f"{counted(len(counts), 'label')}: {shown}{', ...' if len(counts) > _SHOWN else ''}")
    if scores:
        notes.append(f"scores from {min(scores):g} to {max(scores):g}, mean {math.fsum(scores) / len(scores):.3g}")
    return replace(reading, notes=(*reading.notes, *notes))


def read_tags(path: Path, layout: Layout, *, training: bool, labeled: bool = True) -> Reading[TaggingExample]:
    """The sentences of a table, or of a file with one word per line.

    Raises:
        ConfigError: a column does not exist, or words and tags of a training file are the same column.
        DataError: the file has no sentences, or one cannot be read.
    """
    if not has_word_per_line(path, layout.format):
        return read_rows(path, layout, partial(tagging_rows, labeled=labeled), labeled=labeled)
    if suffix_of(path) in (".csv", ".json", ".jsonl", ".parquet"):
        raise ConfigError(
            f"{path} is a table, judging by its name, but the training file has one word per line",
            hint="give all files in one format; `discern predict` takes any",
        )
    if layout.format != "conll":  # the training file is a table
        layout = replace(layout, columns=numbered_columns(path, {}))
    words, tags = (int(layout.columns[role][0]) for role in ("words", "tags"))
    reading = read_conll(path, word_column=words, tag_column=tags if labeled else None, characters=layout.characters)
    if labeled and all(example.words == example.tags for example in reading.examples):
        if training:
            raise ConfigError(
                f"{path}: the column of the tags ({tags}) is also that of the words ({words})",
                hint="a training file needs both: --words N --tags M",
            )
        # The last column is also the first: a file of words only.
        return replace(reading, examples=tuple(replace(example, tags=None) for example in reading.examples), notes=())
    return replace(reading, notes=(layout.describe(), *reading.notes))


def text_rows(
    table: Table, layout: Layout, problems: ProblemLog, *, labeled: bool, labels: tuple[str, ...] = ()
) -> Iterator[tuple[ClassificationExample, str]]:
    """A text or a pair of texts with its label for each row, and the place of the row.

    Args:
        labels: the labels of a published data set, or the lowest and the highest of its scores.
    """
    text = layout.column(table, "text")
    pair = layout.column(table, "pair") if "pair" in layout.columns else None
    column = layout.optional_column(table, "label") if labeled else None
    for number, row in enumerate(table.rows):
        label = None if column is None else _label(row, column, layout)
        if layout.published:
            if column is not None and (reason := _not_a_label(label, labels)):
                problems.add(MALFORMED, f"{row.where} ({reason})")
                continue
            # Some published files have empty texts, and their test files need a prediction for every row.
            first, second = (None if name is None else written(value_of(row, name)) or "" for name in (text, pair))
            if first == "" or second == "":
                problems.add("empty text, kept", row.where)
        else:
            first, second = (None if name is None else text_of(row, name) for name in (text, pair))
        yield ClassificationExample(str(number), first or "", second, label), row.where


def _not_a_label(label: Label, labels: tuple[str, ...]) -> str | None:
    if isinstance(label, float):
        low, high = map(float, labels)
        return None if low <= label <= high else f"score {label:g} is not between {low:g} and {high:g}"
    return f"label {label!r:.20} is not one of {', '.join(labels)}" if labels and label not in labels else None


def _label(row: Row, column: str, layout: Layout) -> Label:
    value = value_of(row, column)
    if layout.kind == "labels":
        return _labels(row, column, value, layout.separator)
    text = written(value)
    if layout.kind == "number":
        number = number_in(text) if text else None
        if number is None or not math.isfinite(number):
            shown = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)[:40]
            raise DataError(
                f"{row.where}: '{column}' is {shown}, expected a finite number",
                hint="remove the row, or --set files.label_kind=label for classes",
            )
        return number
    if text is None:
        raise DataError(
            f"{row.where}: '{column}' is a {type(value).__name__}, other rows have one label",
            hint="--set files.label_kind=labels",
        )
    if not text and not layout.published:
        raise DataError(f"{row.where}: '{column}' is empty", hint="remove the row, or give it a label")
    return text


def _labels(row: Row, column: str, value: Any, separator: str | None) -> tuple[str, ...]:
    if isinstance(value, str):
        parts = value.split(separator) if separator is not None else list_in(value) if value.strip() else []
        if parts is None:
            raise DataError(
                f"{row.where}: '{column}' is not a list: {value!r:.60}",
                hint="name the separator of the labels: --label-separator ';'",
            )
    else:
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
    names = [written(part) for part in parts]
    if None in names:
        raise DataError(f"{row.where}: '{column}' is a list of lists", hint="expected a list of label names")
    return tuple(dict.fromkeys(name for name in names if name))


def tagging_rows(table: Table, layout: Layout, problems: ProblemLog, *, labeled: bool) -> Iterator[tuple[TaggingExample, str]]:
    """The words of a sentence with their tags for each row, and the place of the row."""
    if table.format == "text":
        layout = layout.with_columns({"words": "text"})
    words = layout.column(table, "words")
    column = layout.optional_column(table, "tags") if labeled else None
    for number, row in enumerate(table.rows):
        sentence = _sequence(row, words, characters=layout.characters)
        tags = None if column is None else _sequence(row, column)
        if tags is not None and len(tags) != len(sentence):
            raise DataError(
                f"{row.where}: {len(sentence)} words in '{words}' but {len(tags)} tags in '{column}'",
                hint="every word needs a tag",
            )
        yield TaggingExample(str(number), sentence, tags), row.where


def _sequence(row: Row, column: str, *, characters: bool = False) -> tuple[str, ...]:
    """The words or tags of a cell: a list, a JSON list, a text split at white space, or the characters of a text."""
    value = value_of(row, column)
    if isinstance(value, str):
        parts = list_in(value)
        if parts is None:
            parts = list("".join(value.split())) if characters else value.split()
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        raise DataError(
            f"{row.where}: '{column}' is {value!r:.40}, expected a list, or words separated by spaces",
            hint="choose another column",
        )
    entries = tuple(written(part) or "" for part in parts)
    if not entries or "" in entries:
        where = f" has an empty entry at index {entries.index('')}" if entries else " is empty"
        raise DataError(f"{row.where}: '{column}'{where}", hint="remove it, or the row")
    return entries


def question_rows(table: Table, layout: Layout, problems: ProblemLog, *, labeled: bool) -> Iterator[tuple[QuestionExample, str]]:
    """A question about a context with its answers for each row, and the place of the row. An empty answer: there is none.

    An answer is searched for at its start if that is given, then nearest to it; otherwise its first occurrence is used. Answers
    that do not occur in their context are left out and counted.
    """
    question, context = layout.column(table, "question"), layout.column(table, "context")
    answer = layout.optional_column(table, "answer") if labeled else None
    start = layout.optional_column(table, "start") if answer else None
    for number, row in enumerate(table.rows):
        text_of(row, context)
        # The context is not stripped: starts count its characters.
        passage = clean_text(str(value_of(row, context)))
        answers = list(_answers(row, answer, start)) if answer else []
        example = QuestionExample(str(number), text_of(row, question), passage, impossible=not answers if answer else None)
        yield with_answers(example, answers, f"{row.where} question {number}", problems), row.where


def _answers(row: Row, column: str, start_column: str | None) -> Iterator[tuple[str, int | None]]:
    """Text and start of each answer: a text, a list of texts, or an object with `text` and `answer_start`."""
    value: Any = value_of(row, column)
    starts: Any = value_of(row, start_column) if start_column else None
    if isinstance(value, dict):
        value, starts = value.get("text"), value.get("answer_start")
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    positions = list(starts) if isinstance(starts, (list, tuple)) else [starts] * len(texts)
    if len(positions) != len(texts):
        raise DataError(
            f"{row.where}: {len(texts)} answers but {len(positions)} starts", hint="give a start for every answer, or for none"
        )
    for answer, position in zip(texts, positions, strict=True):
        text, start = written(answer), written(position)
        if text is None:
            raise DataError(
                f"{row.where}: '{column}' is {value!r:.60}, expected a text",
                hint="an answer is a text that occurs in its context",
            )
        number = number_in(start) if start else None
        if start and (number is None or not number.is_integer()):
            raise DataError(
                f"{row.where}: the start of the answer is {position!r:.40}, expected a whole number",
                hint="count characters from 0, or leave it empty",
            )
        if text:
            yield text, None if number is None else int(number)


def value_of(row: Row, column: str) -> Any:
    """The value of a column.

    Raises:
        DataError: a JSON record lacks the key.
    """
    if column not in row.values:
        raise DataError(
            f"{row.where}: no '{column}'; it has: {', '.join(map(str, row.values)) or 'nothing'}",
            hint=did_you_mean(column, row.values),
        )
    return row.values[column]


def text_of(row: Row, column: str) -> str:
    """The text of a column, stripped; numbers are converted to text.

    Raises:
        DataError: the value is missing, empty, or a list or object.
    """
    value = value_of(row, column)
    text = written(value)
    if text is None:
        raise DataError(
            f"{row.where}: '{column}' is a {type(value).__name__}, expected a text: {value!r:.60}", hint="choose another column"
        )
    if not text:
        hint = "remove the row, or give it a text; grep '[^[:space:]]' FILE removes the empty lines of plain text"
        raise DataError(f"{row.where}: '{column}' is empty", hint=hint)
    return text


def written(value: Any) -> str | None:
    """A cell as text: stripped; whole numbers without a point; empty for null and NaN; None for lists and objects."""
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict | tuple | bytes):
        return None
    is_whole = isinstance(value, float) and value.is_integer()
    return clean_text(str(int(value) if is_whole else value)).strip()


def list_in(text: str) -> list[Any] | None:
    """The JSON list in a text; None if the text is not one."""
    with suppress(DataError):
        if text.lstrip().startswith("[") and isinstance(value := parsed_json(text, ""), list):
            return value
    return None


def choose_column(table: Table, role: str, names: Sequence[str], taken: Collection[str] = ()) -> str:
    """The column of a role, recognized by its name; the only one without another role; or for "text", the only one of texts.

    Args:
        names: usual names, likeliest first.
        taken: columns that have another role.

    Raises:
        ConfigError: none can be recognized.
        DataError: the table has no header.
    """
    column = column_named(table, names, taken)
    if column is not None:
        return column
    if table.format in ("csv", "tsv") and not is_header(table.columns):
        raise DataError(
            f"{table.name}: the first line is not a header, as it is long or has numbers: {', '.join(table.columns):.80}",
            hint="write the names of the columns above it, for example: text,label (with the delimiter of the file)",
        )
    free = [column for column in table.columns if column not in taken]
    if len(free) > 1 and role == "text":
        free = [column for column, cells in texts_of(table).items() if column in free and are_texts(cells)]
    if len(free) == 1:
        return free[0]
    raise ConfigError(
        f"{table.name}: cannot recognize the column for {option_of(role)}; its columns: {', '.join(table.columns)}",
        hint=f"name it: {option_of(role)} COLUMN",
    )


def column_named(table: Table, names: Sequence[str], taken: Collection[str]) -> str | None:
    """The first of some names, in lower case, that a column has; None without one."""
    lowered = {column.lower(): column for column in table.columns if column not in taken}
    return next((lowered[name] for name in names if name in lowered), None)
