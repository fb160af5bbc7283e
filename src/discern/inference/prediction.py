"""Apply a fine-tuned model to a file of any size, or to Python values."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import TextIOWrapper
from itertools import islice, tee
from pathlib import Path
from typing import Any, Literal

from discern.data.tables import TABLE_SUFFIXES, Table, TableFormat, clean_text, numbered_lines, open_table, suffix_of
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError, DataError
from discern.inference.windows import not_finite
from discern.model_files.folder import TaskModel, open_model
from discern.progress import Progress, warning_to
from discern.storage.files import check_output, whole_file
from discern.tasks import known_definition
from discern.tasks.base import ClassificationExample, Layout, Prediction, QuestionExample, Reading, TaggingExample, Task
from discern.tasks.readers.conll import read_conll
from discern.tasks.readers.questions import FORMATS
from discern.tasks.rows import COLUMN_SUFFIXES, USUAL_COLUMNS, choose_column, numbered_columns, written
from discern.tasks.supervised import are_finite, outputs_of
from discern.training.distributed import choose_device
from discern.training.execution import resolve_precision

# Rows are sorted by length in blocks of this size: large enough for little padding, small enough to be held in memory.
_BLOCK = 2048


def predict(
    model: Path,
    input: Path,
    show: Callable[[list[Prediction]], None],
    progress: Progress,
    *,
    out: Path | None = None,
    task: str | None = None,
    seed: int | None = None,
    columns: Mapping[str, str] | None = None,
    format: InputFormat | None = None,
    logits: bool = False,
    device: str = "auto",
    precision: str = "float32",
    append: bool = False,
) -> dict[str, Any]:
    """Predict for every row of a file, in order. A prediction has the number of its `row`, from 0, and the row's own `id`.

    Args:
        model: a fine-tuned model, an export of it, or a Hugging Face model for such a task.
        input: a table, a text file, or a file in the task's own format; `-` is standard input.
        show: called with blocks of predictions if there is no `out`.
        out: JSON lines file to write, complete or not at all.
        task: task to predict, if the model has several.
        seed: seed whose weights are used; None: the best seed.
        columns: column names by role; roles not given have the column names of the training file.
        format: format of the input; None: recognized by content and name.
        logits: also return the logits, unless `append`.
        append: write the rows of the input table to `out` in their own format, with the predictions as additional columns.

    Returns:
        The number of `rows`, the `seconds` from the first row read to the last row written, and `rows_per_second`.

    Raises:
        ConfigError: there is no such task, column or device, or the input of `append` is no table, or no `out` is given.
        DataError: the folder has no fine-tuned model, the input cannot be read, or a row has no text; nothing is left of `out`.
        CheckpointError: the weights are missing or damaged.
    """
    check_output("--out", out, "predictions.jsonl", model, input)
    if append and out is None:
        raise ConfigError("--append writes a table to a file", hint="add --out FILE")
    tuned = open_model(model, warn=progress.note).task_model(seed)
    chosen = tuned.task(task)
    tuned.objective.to(choose_device(device))
    started = time.perf_counter()
    record = tuned.record["tasks"][chosen.name]
    examples, table = open_input(chosen, record, input, columns or {}, format, progress.note)
    kind, names, output_format, rows = chosen.labels.kind, tuple[str, ...](), "jsonl", 0
    if append:
        if table is None or table.format == "text":
            raise ConfigError(
                f"{input} is not a table, so no columns can be appended to it",
                hint="--append takes CSV, TSV, JSON lines, a JSON array or Parquet; without it the predictions are JSON lines",
            )
        output_format = table.format
        if out is not None and TABLE_SUFFIXES.get(out.suffix.lower()) != output_format:
            raise ConfigError(f"{out} would be a {output_format} file, like {input}", hint=f"name it {out.stem}.{output_format}")
        # The first names that the table does not have: "prediction", "prediction_2", ...
        wanted = ("prediction",) if kind == "number" else ("prediction", "probability")
        candidates = (tuple(f"{name}{suffix}" for name in wanted) for suffix in ("", *(f"_{number}" for number in range(2, 100))))
        names = next(names for names in candidates if not set(names) & set(table.columns))

    def records() -> Iterator[dict[str, Any]]:
        nonlocal rows
        for row, prediction in predictions_of(tuned, chosen, examples, precision, progress, warning_to(progress)):
            if names:
                yield {**row, **dict(zip(names, _values(prediction, kind), strict=True))}
            else:
                identity = row.get("id")
                identity = identity if isinstance(identity, int) else written(identity)
                shown = {key: value for key, value in prediction.items() if key != "id" and (logits or key != "logits")}
                yield {"row": rows} | ({} if identity in ("", None) else {"id": identity}) | shown
            rows += 1

    progress.start("predicting", None, "rows")
    try:
        with nullcontext() if out is None else whole_file(out) as file:
            if file is None:
                for line in records():
                    show([line])
            else:
                _write_table(records(), output_format, (*table.columns, *names) if table is not None else (), file)
            if not rows:
                raise DataError(f"{input} has no rows", hint="expected one row, or one line, per prediction")
    finally:
        progress.finish()
    seconds = time.perf_counter() - started
    return {"rows": rows, "seconds": seconds, "rows_per_second": rows / max(seconds, 1e-9)}


def predictions_of(
    model: TaskModel,
    task: Task[Any],
    examples: Iterable[tuple[Any, Mapping[str, Any]]],
    precision: str,
    progress: Progress,
    warn: Callable[[str], None],
) -> Iterator[tuple[Mapping[str, Any], Prediction]]:
    """The values of the row of each example with its prediction, in order, on the device of the model; memory is bounded.

    Args:
        examples: each example with the values of its row by column.
        warn: called about the first texts that are cut and, at the end, about a high fraction of unknown tokens.

    Raises:
        NumericsError: an output is not finite.
    """
    device = next(model.objective.parameters()).device
    computed = resolve_precision(precision, device, model.objective.encoder.config, _BLOCK).name
    unknown, warned, done, rest = UnknownTokens(model.tokenizer), False, 0, iter(examples)
    while block := list(islice(rest, _BLOCK)):
        inputs, rows = zip(*block, strict=True)
        features = task.encode(inputs, model.text, labeled=False)
        unknown.add_ids(features.input_ids.values)
        if features.notes and not warned:
            warn(f"rows {done:,} to {done + len(block) - 1:,}: {'; '.join(features.notes)}")
            warned = True
        outputs, _ = outputs_of(model.objective, task.name, features, precision=computed)
        if not are_finite(outputs):
            raise not_finite()
        yield from zip(rows, task.predict(inputs, features, outputs), strict=True)
        done += len(block)
        progress.advance(len(block))
    unknown.report(progress.note, warn)


# Input: the examples of a file or of standard input, one by one, read like the training file

InputFormat = TableFormat | Literal["conll"]

_SPAN_TAG = re.compile(r"O|[BIESLUM]-\S+")
# A character alone, or with its position in its word.
_CHARACTER = re.compile(r".\d*")


Examples = Iterator[tuple[Any, Mapping[str, Any]]]
"""Each example, without labels, with the values of its row by column, of which one may be its `id`."""


def open_input(
    task: Task[Any],
    record: Mapping[str, Any],
    path: Path,
    columns: Mapping[str, str],
    format: InputFormat | None,
    note: Callable[[str], None],
) -> tuple[Examples, Table | None]:
    """The examples of a file, and the table that they are the rows of; None for files in other formats.

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
        return _read(definition.reader(path, False), path, note)
    kind, layout, suffix = task.labels.kind, Layout.of_record(record.get("layout")), suffix_of(path)
    if kind == "vectors":
        raise _no_labels(task)
    usual_roles = ("text", "pair") if task.labels.pairs or not record.get("layout") else ("text",)
    roles = {"tags": ("words",), "spans": ("question", "context")}.get(kind, usual_roles)
    if wrong := [role for role in columns if role not in roles]:
        raise ConfigError(
            f"--{wrong[0]} is given, but '{task.name}' was fine-tuned on {' and '.join(roles)}",
            hint=" ".join(f"--{role} COLUMN" for role in roles),
        )
    trained = (record.get("files") or {}).get("train")
    same_format = layout.format if trained and Path(trained).suffix == path.suffix else None
    # What is read to recognize the format of a pipe could not be read again.
    recognizes = format is None and path.is_file()

    # One word per line.
    if kind == "tags" and (format == "conll" or (recognizes and _has_word_per_line(task, path, same_format, layout))):
        if format is None and suffix not in COLUMN_SUFFIXES:
            note(f"{path.name}: read with one word per line; for one sentence per line: --format text")
        trained_on = layout.columns if layout.format == "conll" and suffix != ".conllu" else {}
        given = {**{role: names[0] for role, names in trained_on.items()}, **columns}
        words = int(numbered_columns(path, given)["words"][0])
        return _read(read_conll(path, word_column=words, tag_column=None, characters=layout.characters), path, note)

    # Questions in the nested formats of SQuAD and MRQA.
    if kind == "spans" and recognizes and not columns and suffix in (".json", ".jsonl", ""):
        beginning = "".join(line[:10_000] for _, line in islice(numbered_lines(path), 20))
        if '"qas"' in beginning or '"paragraphs"' in beginning:
            return _read(FORMATS["mrqa" if suffix == ".jsonl" else "squad"](path, labeled=False), path, note)

    # A table. The columns that are not given are those of the training file; or they are recognized, if that was no table.
    own_formats = ("conll", *FORMATS)
    table_format = format or (None if same_format in own_formats else same_format)
    table = open_table(path, table_format, header=layout.header, verbatim=layout.verbatim)
    if kind == "tags" and table.format == "text" and recognizes:
        note(f"{path.name}: read as plain text with one sentence per line; for one word per line: --format conll")
    recorded = {} if layout.format in own_formats else layout.columns
    usual = {role: names for family in USUAL_COLUMNS.values() for role, names in family.items()}
    chosen: dict[str, str] = {}
    for role in roles:
        names = (columns[role],) if role in columns else recorded.get(role, ())
        column = next((name for name in names if name in table.columns), None)
        if table.format == "text" and len(roles) == 1 and role not in columns:
            column = "text"
        elif column is None and names and not (layout.published and role not in columns):
            column = table.require(names[0], f"--{role}")
        elif column is None and (names or role != "pair"):
            column = choose_column(table, role, usual.get(role, ()), chosen.values())
        if column is not None:
            chosen[role] = column
    rows, again = tee(table.rows)
    examples = type(task).rows(replace(table, rows=rows), Layout(characters=layout.characters).with_columns(chosen))
    return zip(examples, (row.values for row in again), strict=True), table


def _no_labels(task: Task[Any]) -> ConfigError:
    return ConfigError(
        f"'{task.name}' predicts no labels: the model was trained for text embeddings",
        hint="discern embed MODEL INPUT --out vectors.npy, or encode(texts) in Python",
    )


def _read(reading: Reading[Any], path: Path, note: Callable[[str], None]) -> tuple[Examples, None]:
    """The examples of a reading with the ids that the file gives them, after noting its problems."""
    for problem in reading.problems:
        note(f"{path.name}: {problem}")
    return (
        (example, {} if example.id == str(number) else {"id": example.id}) for number, example in enumerate(reading.examples)
    ), None


def _has_word_per_line(task: Task[Any], path: Path, same_format: str | None, layout: Layout) -> bool:
    """Whether a file to tag has one word per line.

    That is so by its suffix, or because every line ends in a tag (or is a character, if words are characters). If a training
    file with the same suffix had one word per line, it is enough that all lines have one column, or that there are several
    with equally many. Blank lines are no criterion: plain text may have them too.
    """
    if suffix_of(path) in (*COLUMN_SUFFIXES, ".parquet"):
        return suffix_of(path) != ".parquet"
    lines = [line.strip() for _, line in islice(numbered_lines(path), 1000) if line.strip()]
    if layout.characters and lines and all(_CHARACTER.fullmatch(line) for line in lines):
        return True
    rows = [line.split() for line in lines]
    if len({len(row) for row in rows}) != 1:
        return False
    are_tags = all(row[-1] in task.labels.names or _SPAN_TAG.fullmatch(row[-1]) for row in rows)
    return are_tags or (same_format == "conll" and (len(rows) > 1 or len(rows[0]) == 1))


# Predictions as additional columns of the input table


def _values(prediction: Prediction, kind: str) -> tuple[Any, ...]:
    """The values of the new columns: the prediction, and its probability if there are two."""
    shown = summarized(prediction, kind)
    value = shown[{"number": "score", "single": "label", "multi": "labels", "tags": "tags", "spans": "answer"}[kind]]
    if kind == "number":
        return (value,)
    if kind == "multi":
        return value, [shown["probabilities"][label] for label in value]
    return value, shown["probabilities" if kind == "tags" else "probability"]


def summarized(prediction: Prediction, kind: str) -> Prediction:
    """A prediction that begins with what is predicted and its probability, for one label and for answers.

    Args:
        kind: kind of the task's labels.
    """
    if kind == "single":
        return {"label": prediction["label"], "probability": prediction["probabilities"][prediction["label"]], **prediction}
    if kind == "spans":
        best = prediction["nbest"][0] if prediction["answer"] else {}
        place = {"start": best["start"], "end": best["start"] + len(best["text"])} if best else {"start": None, "end": None}
        return {"answer": prediction["answer"], **place, "probability": best.get("probability"), **prediction}
    return prediction


def _write_table(records: Iterable[dict[str, Any]], format: str, columns: Sequence[str], file: TextIOWrapper) -> None:
    """Write rows in a format of tables.

    Values are kept; quotation marks, spaces and blank lines around them are not.

    Args:
        columns: names of the columns of CSV and TSV.
    """
    if format in ("csv", "tsv"):
        writer = csv.DictWriter(file, columns, delimiter="," if format == "csv" else "\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in record.items()} for record in records)
    elif format == "jsonl":
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif format == "json":
        json.dump(list(records), file, ensure_ascii=False, indent=1)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(records)), file.buffer)


def _cell(value: Any) -> Any:
    """A list as text: its items are separated by spaces, or JSON if one contains a space."""
    if not isinstance(value, list):
        return value
    parts = [str(each) for each in value]
    return " ".join(parts) if all(len(part.split()) == 1 for part in parts) else json.dumps(value, ensure_ascii=False)


# Examples from Python values

_EXPECTED = {
    "pair": "a pair of texts: (first, second)",
    "text": "a text",
    "either": "a text, or a pair of texts",
    "tags": "a text, or a list of its words",
    "characters": "a text, or a list of its characters",
    "spans": "a pair (question, context)",
}


def examples_of(task: Task[Any], record: Mapping[str, Any], texts: Iterable[Any]) -> list[Any]:
    """Examples of a task from Python values. Their ids are numbers from 0.

    Args:
        record: entry of the task in finetuned.json.
        texts: for classification and regression, texts or pairs of texts, as in training; for tagging, texts (split
            at white space) or lists of words; for question answering, pairs (question, context) or mappings with these keys.

    Raises:
        ConfigError: `texts` is a single text or a table, or an item is not what the task reads.
    """
    kind, layout = task.labels.kind, record.get("layout")
    if kind == "vectors":
        raise _no_labels(task)
    if Layout.of_record(layout).characters:
        kind = "characters"
    elif kind not in ("tags", "spans"):
        kind = "either" if not layout else "pair" if task.labels.pairs else "text"
    return examples_from_values(kind, texts)


def examples_from_values(wants: str, texts: Iterable[Any]) -> list[Any]:
    """Examples from Python values; raises the errors of `examples_of`.

    Args:
        wants: 'text', 'pair', 'either' (a text or a pair), 'tags', 'characters' (of which each is a word) or 'spans'.
    """
    examples: list[Any] = []
    for number, value in enumerate(checked_list(texts)):
        if isinstance(value, Mapping):
            value = value.get("question"), value.get("context")
        # A pair may also be a row of an array, but a set has no order.
        parts = [value] if isinstance(value, str) or not hasattr(value, "__getitem__") else list(value)
        lengths = {"text": (1,), "pair": (2,), "either": (1, 2), "spans": (2,)}.get(wants, (len(parts),))
        if len(parts) not in lengths or not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"item {number} is {value!r:.60}, expected {_EXPECTED[wants]}", hint="every item must be of that form"
            )
        parts = [clean_text(part) for part in parts]
        if wants == "spans":
            # The context is not stripped: answers are located by characters of the context.
            examples.append(QuestionExample(str(number), parts[0].strip(), parts[1]))
        elif wants in ("tags", "characters"):
            if isinstance(value, str):
                parts = parts[0].split() if wants == "tags" else list("".join(parts[0].split()))
            examples.append(TaggingExample(str(number), tuple(parts)))
        else:
            examples.append(ClassificationExample(str(number), *(part.strip() for part in parts)))
    return examples


def checked_list(texts: Any) -> list[Any]:
    """A list of texts as it is; what can be iterated over but is no list of texts is refused.

    Raises:
        ConfigError: `texts` is a single text, a mapping, or a data frame.
    """
    if isinstance(texts, str):  # a sequence of characters, by its type
        raise ConfigError("expected a list of texts, found a single text", hint="put it into a list: [text]")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # a sequence of names, by its type
        kind = type(texts).__name__
        raise ConfigError(f"expected a list of texts, found a {kind}", hint="give one of its columns, such as data['text']")
    return list(texts)
