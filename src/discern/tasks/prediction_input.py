"""Input of predictions: the examples of a file or of standard input, one by one, read like the training file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Any, Literal, cast

from discern.data.sources.base import TEXT_NAMES
from discern.errors import ConfigError, DataError
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, Labels, Task
from discern.tasks.classification import Classification
from discern.tasks.conll import COLUMN_SUFFIXES, ConllSource, read_conll
from discern.tasks.examples import Reading, TaggingExample
from discern.tasks.questions import Questions
from discern.tasks.readers.files import numbered_lines, suffix_of
from discern.tasks.readers.table import Table, TableFormat, open_table, text_of, written
from discern.tasks.readers.user_columns import (
    CONTEXT_NAMES,
    QUESTION_NAMES,
    WORDS_NAMES,
    ClassificationColumns,
    QuestionColumns,
    TaggingColumns,
    chosen_column,
    numbered_columns,
)
from discern.tasks.readers.user_file import classification_rows, question_rows, tagging_rows
from discern.tasks.tagging import Tagging

InputFormat = TableFormat | Literal["conll"]

_ROLES = {"tags": ("words",), "spans": ("question", "context")}
_TABLES = {".csv", ".parquet", ".jsonl", ".ndjson"}
_LOOKED_AT = 1000
_SPAN_TAG = re.compile(r"O|[BIESLUM]-\S+")
_PREFIXES = frozenset("BIESLUM")
# A character alone, or with its position in its word.
_CHARACTER = re.compile(r".\d*")


def input_examples(
    task: Task[Any],
    record: Mapping[str, Any],
    path: Path,
    columns: Mapping[str, str],
    format: InputFormat | None,
    note: Callable[[str], None],
) -> Iterator[tuple[Any, Any]]:
    """The examples of a file, without labels, each with its own id or None.

    Tables are read in bounded memory, files in a named task's format as a whole.

    Args:
        record: record of the task in finetuned.json.
        path: path of the file; `-` is standard input.
        columns: columns by role ("text", "pair", "words", "question", "context"); by default those of the training file, or
            recognized by their names.
        format: format of the file; None: recognized by content and name.
        note: receives messages about rows that were left out or corrected, and about the chosen format of ambiguous files.

    Raises:
        ConfigError: a column does not exist, or its role is not one of the task's.
        DataError: the file or one of its rows cannot be read.
    """
    if task.labels.kind == "vectors":
        raise ConfigError(
            f"'{task.name}' predicts no labels: the model was trained for text embeddings",
            hint="discern embed MODEL INPUT --out vectors.npy",
        )
    definition = known_definition(task)
    if definition is not None and not isinstance(task, Classification | Tagging | Questions):
        if columns or format is not None or str(path) == "-":
            raise ConfigError(
                f"'{task.name}' only reads its own format", hint="give a file of that format, without --format and columns"
            )
        return _noted(definition.source.read(path, "test", labeled=False), path, note)
    _check_roles(task, record, columns, definition)
    tags, source = task.labels.kind == "tags", record.get("source") or {}
    if format == "conll" and not tags:
        raise ConfigError(f"--format conll is for tagging, but '{task.name}' is not a tagging task", hint="leave it out")
    characters = definition is not None and isinstance(definition.source, ConllSource) and definition.source.characters
    if tags and (format == "conll" or (format is None and _is_conll(task, path, record, characters=characters))):
        if format is None and suffix_of(path) not in COLUMN_SUFFIXES:
            note(f"{path.name}: read with one word per line; for one sentence per line: --format text")
        return _noted(_word_per_line(definition, path, source, columns), path, note)
    official: DataError | ConfigError | None = None
    if definition is not None and not tags and not columns and format is None and _may_be_official(path):
        try:
            return _noted(definition.source.read(path, "test", labeled=False), path, note)
        except (DataError, ConfigError) as problem:
            official = problem
    names = definition.source.text_names() if definition is not None else ()
    try:
        trained_format = _format_of_training(record, path)
        usual = None if trained_format == "conll" else trained_format  # this file has no columns, unlike the training file
        table = open_table(path, cast(TableFormat | None, format or usual))
        if tags and table.format == "text":
            if format is None and str(path) != "-":
                note(f"{path.name}: read as plain text with one sentence per line; for one word per line: --format conll")
            return ((example, None) for example in _words_of_lines(table, characters=characters))
        # Numbered columns have no names that a table could have.
        trained = source.get("columns") or {} if source.get("format") != "conll" else {}
        return _with_ids(table, _reader(task, table, {**trained, **columns}, names, characters=characters))
    except (DataError, ConfigError) as problem:
        # For a file with the suffix of the official files, the error of the task's own reader is more helpful.
        raise (official if official is not None and {".tsv", ".json"} & set(path.suffixes) else problem) from None


def blocks(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The examples in lists of `size`."""
    while block := list(islice(examples, size)):
        yield block


def known_definition(task: Task[Any]) -> Definition[Any] | None:
    """The registered definition of a task, configured by its settings; None for a task from the user's own files."""
    if task.name not in registry.names():
        return None
    definition: Definition[Any] = registry.load(task.name)
    return replace(definition, source=definition.source.configured(task.config))


def _check_roles(
    task: Task[Any], record: Mapping[str, Any], columns: Mapping[str, str], definition: Definition[Any] | None
) -> None:
    roles = _ROLES.get(task.labels.kind, ("text", "pair"))
    if roles == ("text", "pair") and definition is not None and len(definition.source.text_names()) == 1:
        roles = ("text",)
    if roles == ("text", "pair") and "columns" in (source := record.get("source") or {}) and not source["columns"].get("pair"):
        roles = ("text",)
    wrong = next((role for role in columns if role not in roles), None)
    if wrong is not None:
        raise ConfigError(
            f"--{wrong} is given, but '{task.name}' was fine-tuned on {' and '.join(roles)}",
            hint=" ".join(f"--{role} COLUMN" for role in roles),
        )


def _noted(reading: Reading[Any], path: Path, note: Callable[[str], None]) -> Iterator[tuple[Any, Any]]:
    """The examples of a reading with the ids that the file gives them, after noting its problems."""
    for problem in reading.problems:
        note(f"{path.name}: {problem}")
    are_numbers = all(example.id == str(number) for number, example in enumerate(reading.examples))
    return ((example, None if are_numbers else example.id) for example in reading.examples)


def _with_ids(table: Table, read: Callable[[Table], Iterator[Any]]) -> Iterator[tuple[Any, Any]]:
    """The example of each row with the value of the column `id`; None if there is none."""
    rows, again = tee(table.rows)
    ids = (row.values.get("id") for row in again)
    examples = read(replace(table, rows=rows))
    return (
        (example, value if isinstance(value, int) else written(value) or None)
        for example, value in zip(examples, ids, strict=True)
    )


def _reader(
    task: Task[Any], table: Table, columns: Mapping[str, Any], names: Sequence[Sequence[str]], *, characters: bool
) -> Callable[[Table], Iterator[Any]]:
    """Reads the rows of a table one by one; its columns are chosen now."""
    if task.labels.kind == "tags":
        words = chosen_column(table, columns.get("words"), WORDS_NAMES, "--words", set())
        return partial(tagging_rows, columns=TaggingColumns(words), labeled=False, characters=characters)
    if task.labels.kind == "spans":
        question = chosen_column(table, columns.get("question"), QUESTION_NAMES, "--question", {columns.get("context")})
        context = chosen_column(table, columns.get("context"), CONTEXT_NAMES, "--context", {question})
        return partial(question_rows, columns=QuestionColumns(question, context))
    text, pair = columns.get("text"), columns.get("pair")
    # The column of a plain text has no name.
    text = None if table.format == "text" and pair is None and len(names) < 2 else text
    first, *second = [[name.lower() for name in each] for each in names] or [[]]
    text = chosen_column(table, text, first if second else [*first, *TEXT_NAMES], "--text", {pair})
    if pair is not None or second:
        pair = chosen_column(table, pair, second[0] if second else (), "--pair", {text})
    return partial(classification_rows, columns=ClassificationColumns(text, pair), labeled=False)


def _words_of_lines(table: Table, *, characters: bool) -> Iterator[TaggingExample]:
    """One sentence per line, its words separated by white space, or with every character as a word."""
    for number, row in enumerate(table.rows):
        words = text_of(row, "text").split()
        yield TaggingExample(str(number), tuple("".join(words) if characters else words))


def _word_per_line(
    definition: Definition[Any] | None, path: Path, source: Mapping[str, Any], columns: Mapping[str, str]
) -> Reading[Any]:
    """The sentences of a file with one word per line."""
    if str(path) == "-":
        raise ConfigError(
            "CoNLL columns cannot be read from standard input",
            hint="write them to a file; plain text, CSV and JSON lines can be read from standard input",
        )
    if definition is not None:
        known = definition.source
        # The first column of CoNLL-U has numbers.
        chosen = "words" in columns or (suffix_of(path) == ".conllu" and isinstance(known, ConllSource) and not known.word_column)
        if not chosen:
            return known.read(path, "test", labeled=False)
        characters = isinstance(known, ConllSource) and known.characters
        return read_conll(path, word_column=_word_column(path, {}, columns), tag_column=None, characters=characters)
    return read_conll(path, word_column=_word_column(path, source, columns), tag_column=None)


def _word_column(path: Path, source: Mapping[str, Any], columns: Mapping[str, str]) -> int:
    """Column of the words in a file with one word per line: the given one, or that of the training file, or the default."""
    if "words" not in columns and source.get("format") == "conll":
        return int(source["columns"]["words"])
    return numbered_columns(path, words=columns.get("words")).words


def _format_of_training(record: Mapping[str, Any], path: Path) -> InputFormat | None:
    """The given format of the training file, for files with the same suffix."""
    format: InputFormat | None = (record.get("source") or {}).get("format")
    trained = (record.get("files") or {}).get("train")
    return format if format and trained and Path(trained).suffix == path.suffix else None


def _may_be_official(path: Path) -> bool:
    return _can_be_read_twice(path) and path.suffix.lower() not in {".csv", ".parquet"}


def _can_be_read_twice(path: Path) -> bool:
    """Whether what is read to recognize a file can be read again: not so for standard input, nor for a pipe."""
    return str(path) != "-" and path.is_file()


def _is_conll(task: Task[Any], path: Path, record: Mapping[str, Any], *, characters: bool) -> bool:
    """Whether a file has one word per line.

    That is so by its suffix, or because every line ends in a tag (or is a character, if words are characters). If a training
    file with the same suffix had one word per line, it is enough that all lines have one column, or that there are several
    with equally many. Blank lines are no criterion: plain text may have them too.
    """
    if str(path) == "-" or suffix_of(path) in _TABLES:
        return False
    if suffix_of(path) in COLUMN_SUFFIXES:
        return True
    if not _can_be_read_twice(path) or _is_parquet(path):
        return False
    lines = [line.strip() for _, line in islice(numbered_lines(path), _LOOKED_AT)]
    filled = [line for line in lines if line and not line.startswith(("-DOCSTART-", "# "))]
    if characters and filled and all(_CHARACTER.fullmatch(line) for line in filled):
        return True
    rows = [line.split("\t") if "\t" in line else line.split() for line in filled]
    widths = {len(row) for row in rows}
    if _format_of_training(record, path) == "conll" and len(widths) == 1 and (widths == {1} or len(rows) > 1):
        return True
    return widths in ({2}, {3}, {4}, {5}) and all(_is_tag(row[-1], task.labels) for row in rows)


def _is_parquet(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:  # what cannot be read is an error of the reader
        return file.read(4) == b"PAR1"
    return False


def _is_tag(word: str, labels: Labels) -> bool:
    """Whether a word is a tag of the task, or has the form of one."""
    if word in labels.names or labels.scheme == "none":
        return word in labels.names
    return bool(_SPAN_TAG.fullmatch(word)) or ("B" in labels.names and word in _PREFIXES)
