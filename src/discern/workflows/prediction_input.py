"""What is to be predicted: the examples of a file or of standard input, one by one, read as the training file was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from discern.errors import ConfigError, DataError
from discern.tasks import tasks as registry
from discern.tasks.base import Definition, Task
from discern.tasks.conll import ConllSource
from discern.tasks.examples import TaggingExample
from discern.tasks.readers.files import numbered_lines
from discern.tasks.readers.own_columns import (
    CONTEXT_NAMES,
    QUESTION_NAMES,
    TEXT_NAMES,
    WORDS_NAMES,
    ClassificationColumns,
    QuestionColumns,
    TaggingColumns,
    chosen_column,
    numbered_columns,
)
from discern.tasks.readers.own_file import classification_rows, question_rows, tagging_rows
from discern.tasks.readers.table import Table, TableFormat, open_table
from discern.tasks.readers.tagging import COLUMN_ENDINGS, ending_of, read_conll

InputFormat = TableFormat | Literal["conll"]

_ROLES = {"tags": ("words",), "spans": ("question", "context")}
_TABLES = {".csv", ".parquet", ".jsonl", ".ndjson"}
_LOOKED_AT = 1000


def input_examples(
    task: Task[Any], record: Mapping[str, Any], path: Path, columns: Mapping[str, str], format: InputFormat | None
) -> Iterator[Any]:
    """The examples of a file without regard to labels: in bounded memory, unless it is in a named task's own format.

    Args:
        record: of the task, as finetuned.json has it.
        path: `-` is standard input.
        columns: by what they hold ("text", "pair", "words", "question", "context"); those not given are called as in the
            training file, or recognised by their names.
        format: where content and name do not tell.

    Raises:
        ConfigError: a column does not exist, or is none of what the task reads.
        DataError: the file cannot be read; while it is read: a row without a text, and the like, with the line.
    """
    definition = known_definition(task)
    _check_roles(task, record, columns)
    if format == "conll" and task.labels.kind != "tags":
        raise ConfigError(f"--format conll is for tagging, and '{task.name}' is none", hint="leave it out")
    source = record.get("source") or {}
    if task.labels.kind == "tags" and (format == "conll" or (format is None and _is_conll(path, record, source))):
        if str(path) == "-":
            raise ConfigError(
                "columns are read from a file, and this is standard input",
                hint="write them to a file and give its name; plain text, CSV and JSON lines may come from standard input",
            )
        if definition is not None:
            return iter(definition.source.read(path, "test", labelled=False).examples)
        return iter(read_conll(path, word_column=_word_column(path, source, columns), tag_column=None).examples)
    official: DataError | ConfigError | None = None
    if definition is not None and task.labels.kind != "tags" and not columns and format is None and _may_be_official(path):
        try:
            return iter(definition.source.read(path, "test", labelled=False).examples)
        except (DataError, ConfigError) as problem:
            official = problem
    names = definition.source.text_names() if definition is not None else ()
    characters = definition is not None and isinstance(definition.source, ConllSource) and definition.source.characters
    try:
        table = open_table(path, cast(TableFormat | None, format or _format_of_training(record, source, path)))
        if task.labels.kind == "tags" and table.format == "text":
            return _words_of_lines(table, characters=characters)
        # What has numbers for columns has no names for those of a table.
        trained = source.get("columns") or {} if source.get("format") != "conll" else {}
        return _rows(task, table, {**trained, **columns}, names)
    except (DataError, ConfigError) as problem:
        # Of a file that is named like the official ones the task's own reader says best what is wrong.
        raise (official if official is not None and {".tsv", ".json"} & set(path.suffixes) else problem) from None


def blocks(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The examples, `size` at a time."""
    while block := list(islice(examples, size)):
        yield block


def known_definition(task: Task[Any]) -> Definition[Any] | None:
    """What the registry holds of a task, reading as its settings say; None of a task of one's own."""
    if task.name not in registry.names():
        return None
    definition: Definition[Any] = registry.load(task.name)
    return replace(definition, source=definition.source.configured(task.config))


def _check_roles(task: Task[Any], record: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    roles = _ROLES.get(task.labels.kind, ("text", "pair"))
    if roles == ("text", "pair") and "columns" in (source := record.get("source") or {}) and not source["columns"].get("pair"):
        roles = ("text",)
    wrong = next((role for role in columns if role not in roles), None)
    if wrong is not None:
        raise ConfigError(
            f"--{wrong} is given, but '{task.name}' was fine-tuned on {' and '.join(roles)}",
            hint=" ".join(f"--{role} COLUMN" for role in roles),
        )


def _rows(task: Task[Any], table: Table, columns: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Iterator[Any]:
    """The rows of a table; which column is what is settled before the first of them is read."""
    if task.labels.kind == "tags":
        words = chosen_column(table, columns.get("words"), WORDS_NAMES, "--words", set())
        return tagging_rows(table, TaggingColumns(words), labelled=False)
    if task.labels.kind == "spans":
        question = chosen_column(table, columns.get("question"), QUESTION_NAMES, "--question", {columns.get("context")})
        context = chosen_column(table, columns.get("context"), CONTEXT_NAMES, "--context", {question})
        return question_rows(table, QuestionColumns(question, context))
    text, pair = columns.get("text"), columns.get("pair")
    # The lines of a plain text have no other name.
    text = None if table.format == "text" and pair is None and len(names) < 2 else text
    first, *second = [[name.lower() for name in each] for each in names] or [TEXT_NAMES]
    text = chosen_column(table, text, first, "--text", {pair})
    if pair is not None or second:
        pair = chosen_column(table, pair, second[0] if second else (), "--pair", {text})
    return classification_rows(table, ClassificationColumns(text, pair), labelled=False)


def _words_of_lines(table: Table, *, characters: bool) -> Iterator[TaggingExample]:
    """A sentence a line, its words parted by white space; or every character a word."""
    for number, row in enumerate(table.rows):
        words = str(row.values["text"]).split()
        yield TaggingExample(str(number), tuple("".join(words) if characters else words))


def _word_column(path: Path, source: Mapping[str, Any], columns: Mapping[str, str]) -> int:
    """Where the words stand in a file with a word a line: as said, else as in the training file, else as is usual."""
    if "words" not in columns and source.get("format") == "conll":
        return int(source["columns"]["words"])
    return numbered_columns(path, words=columns.get("words")).words


def _format_of_training(record: Mapping[str, Any], source: Mapping[str, Any], path: Path) -> InputFormat | None:
    """What the training file was said to be, for files that are named alike."""
    said: InputFormat | None = source.get("format")
    trained = (record.get("files") or {}).get("train")
    return said if said and trained and Path(trained).suffix == path.suffix else None


def _may_be_official(path: Path) -> bool:
    return str(path) != "-" and path.suffix.lower() not in {".csv", ".parquet"}


def _is_conll(path: Path, record: Mapping[str, Any], source: Mapping[str, Any]) -> bool:
    """Whether a file has a word a line: by its name, as the training file that is named alike, or because blank lines part
    lines of equally many columns."""
    if str(path) == "-" or ending_of(path) in _TABLES:
        return False
    if ending_of(path) in COLUMN_ENDINGS:
        return True
    if _format_of_training(record, source, path) == "conll":
        return True
    lines = [line.strip() for _, line in islice(numbered_lines(path), _LOOKED_AT)]
    while lines and not lines[-1]:
        lines.pop()
    filled = [line for line in lines if line and not line.startswith("-DOCSTART-")]
    counts = {len(line.split("\t") if "\t" in line else line.split()) for line in filled}
    return len(counts) == 1 and len(filled) < len(lines) and not filled[0].startswith(("{", "["))
