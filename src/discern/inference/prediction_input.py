"""Input of predictions: the examples of a file or of standard input, one by one, read like the training file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, tee
from pathlib import Path
from typing import Any, Literal

from discern.data.tables import TableFormat, numbered_lines, open_table, suffix_of
from discern.errors import ConfigError
from discern.tasks import known_definition
from discern.tasks.base import Layout, Reading, Task
from discern.tasks.readers.conll import read_conll
from discern.tasks.readers.questions import FORMATS
from discern.tasks.rows import COLUMN_SUFFIXES, USUAL_COLUMNS, choose_column, numbered_columns, written

InputFormat = TableFormat | Literal["conll"]

_LOOKED_AT = 1000
_SPAN_TAG = re.compile(r"O|[BIESLUM]-\S+")
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

    Tables are read in bounded memory, files in other formats as a whole.

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
    definition = known_definition(task.name)
    if definition is not None and definition.reader is not None:
        if columns or format is not None or str(path) == "-":
            raise ConfigError(
                f"'{task.name}' only reads its own format", hint="give a file of that format, without --format and columns"
            )
        return _noted(definition.reader(path, False), path, note)
    if task.labels.kind == "vectors":
        raise ConfigError(
            f"'{task.name}' predicts no labels: the model was trained for text embeddings",
            hint="discern embed MODEL INPUT --out vectors.npy",
        )
    roles = {"tags": ("words",), "spans": ("question", "context")}.get(
        task.labels.kind, ("text", "pair") if task.labels.pairs or not record.get("layout") else ("text",)
    )
    tags, layout, suffix = task.labels.kind == "tags", Layout.of_record(record.get("layout")), suffix_of(path)
    if wrong := [role for role in columns if role not in roles]:
        raise ConfigError(
            f"--{wrong[0]} is given, but '{task.name}' was fine-tuned on {' and '.join(roles)}",
            hint=" ".join(f"--{role} COLUMN" for role in roles),
        )
    if format == "conll" and (not tags or str(path) == "-"):
        raise ConfigError(
            f"--format conll is for files to tag, but {'this is standard input' if tags else f'{task.name!r} tags nothing'}",
            hint="leave it out; plain text, CSV and JSON lines can be read from standard input",
        )
    trained = (record.get("files") or {}).get("train")
    same_format = layout.format if trained and Path(trained).suffix == path.suffix else None
    # What is read to recognize the format of a pipe could not be read again.
    recognizes = format is None and str(path) != "-" and path.is_file()

    # One word per line.
    if format == "conll" or (tags and recognizes and _has_word_per_line(task, path, same_format, layout)):
        if format is None and suffix not in COLUMN_SUFFIXES:
            note(f"{path.name}: read with one word per line; for one sentence per line: --format text")
        usual = layout.columns if layout.format == "conll" and suffix != ".conllu" else {}
        given = {**{role: names[0] for role, names in usual.items()}, **columns}
        words = int(numbered_columns(path, given)["words"][0])
        return _noted(read_conll(path, word_column=words, tag_column=None, characters=layout.characters), path, note)

    # Questions in the nested formats of SQuAD and MRQA.
    if task.labels.kind == "spans" and recognizes and not columns and suffix in (".json", ".jsonl", ""):
        beginning = "".join(line[:10_000] for _, line in islice(numbered_lines(path), 20))
        if '"qas"' in beginning or '"paragraphs"' in beginning:
            read = FORMATS["mrqa" if suffix == ".jsonl" else "squad"]
            return _noted(read(path, labeled=False), path, note)

    # A table. The columns that are not given are those of the training file; or they are recognized, if that was no table.
    own_formats = ("conll", *FORMATS)
    table_format = format or (None if same_format in own_formats else same_format)
    table = open_table(path, table_format, header=layout.header, verbatim=layout.verbatim)
    if tags and table.format == "text" and recognizes:
        note(f"{path.name}: read as plain text with one sentence per line; for one word per line: --format conll")
    recorded = {} if layout.format in own_formats else layout.columns
    usual_names = {role: names for family in USUAL_COLUMNS.values() for role, names in family.items()}
    chosen: dict[str, str] = {}
    for role in roles:
        names = (columns[role],) if role in columns else recorded.get(role, ())
        column = next((name for name in names if name in table.columns), None)
        if table.format == "text" and len(roles) == 1 and role not in columns:
            column = "text"
        if column is None and names and not (layout.published and role not in columns):
            column = table.require(names[0], f"--{role}")
        if column is None and (names or role != "pair" or "pair" in columns):
            column = choose_column(table, role, usual_names.get(role, ()), chosen.values())
        if column is not None:
            chosen[role] = column
    rows, again = tee(table.rows)
    identities = (row.values.get("id") for row in again)
    examples = type(task).rows(replace(table, rows=rows), Layout(characters=layout.characters).with_columns(chosen))
    return (
        (example, value if isinstance(value, int) else written(value) or None)
        for example, value in zip(examples, identities, strict=True)
    )


def blocks(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The examples in lists of `size`."""
    while block := list(islice(examples, size)):
        yield block


def _noted(reading: Reading[Any], path: Path, note: Callable[[str], None]) -> Iterator[tuple[Any, Any]]:
    """The examples of a reading with the ids that the file gives them, after noting its problems."""
    for problem in reading.problems:
        note(f"{path.name}: {problem}")
    are_numbers = all(example.id == str(number) for number, example in enumerate(reading.examples))
    return ((example, None if are_numbers else example.id) for example in reading.examples)


def _has_word_per_line(task: Task[Any], path: Path, same_format: str | None, layout: Layout) -> bool:
    """Whether a file to tag has one word per line.

    That is so by its suffix, or because every line ends in a tag (or is a character, if words are characters). If a training
    file with the same suffix had one word per line, it is enough that all lines have one column, or that there are several
    with equally many. Blank lines are no criterion: plain text may have them too.
    """
    if suffix_of(path) in COLUMN_SUFFIXES:
        return True
    if suffix_of(path) in (".csv", ".parquet", ".jsonl", ".ndjson"):
        return False
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return False
    lines = [line.strip() for _, line in islice(numbered_lines(path), _LOOKED_AT)]
    filled = [line for line in lines if line and not line.startswith(("-DOCSTART-", "# "))]
    if layout.characters and filled and all(_CHARACTER.fullmatch(line) for line in filled):
        return True
    rows = [line.split("\t") if "\t" in line else line.split() for line in filled]
    widths = {len(row) for row in rows}
    if same_format == "conll" and len(widths) == 1 and (widths == {1} or len(rows) > 1):
        return True

    def is_tag(word: str) -> bool:
        spans = task.labels.scheme != "none"
        return word in task.labels.names or (spans and bool(_SPAN_TAG.fullmatch(word)))

    return widths in ({2}, {3}, {4}, {5}) and all(is_tag(row[-1]) for row in rows)
