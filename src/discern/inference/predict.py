"""Apply a fine-tuned model to a file of any size, or to Python values."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from discern.data.tables import clean_text
from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError, DataError, NumericsError
from discern.inference.prediction_columns import readable_again, write_appended
from discern.inference.prediction_input import InputFormat, blocks, input_examples
from discern.model_files.folder import TaskModel, open_model
from discern.progress import Progress, warning_to
from discern.storage.files import whole_file
from discern.storage.output import check_output
from discern.tasks.base import ClassificationExample, Layout, Prediction, QuestionExample, TaggingExample, Task
from discern.tasks.supervised import are_finite, outputs_of
from discern.training.distributed import choose_device
from discern.training.precision import resolve_precision

# Rows are sorted by length in blocks of this size: large enough for little padding, small enough to be held in memory.
_BLOCK = 2048


@dataclass(frozen=True)
class Predicted:
    """Number of rows, and the time from the first row read to the last row written."""

    rows: int
    seconds: float


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
) -> Predicted:
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
        logits: also return the logits.
        append: write the rows of the input table to `out` in their own format, with the predictions as additional columns.

    Raises:
        ConfigError: there is no such task, column or device.
        DataError: the folder has no fine-tuned model, the input cannot be read, or a row has no text; nothing is left of `out`.
        CheckpointError: the weights are missing or damaged.
    """
    check_output("--out", out, "predictions.jsonl", model, input)
    table = readable_again(input, out, format, logits=logits) if append else None
    tuned = open_model(model, warn=progress.note).task_model(seed)
    chosen = tuned.task(task)
    tuned.objective.to(choose_device(device))
    started = time.perf_counter()
    # A table with appended columns is always read as a table, never in the task's own format, so that each record is one row.
    read_as = table.format if table is not None else format
    read = input_examples(chosen, tuned.record["tasks"][chosen.name], input, columns or {}, read_as, progress.note)
    ids: deque[Any] = deque()

    def examples() -> Iterator[Any]:
        for example, identity in read:
            ids.append(identity)
            yield example

    unknown = UnknownTokens(tuned.tokenizer)
    found = predictions_of(tuned, chosen, examples(), precision, progress, unknown)
    predictions = _numbered(found, ids, logits=logits)
    progress.start("predicting", None, "rows")
    rows = 0
    try:
        with nullcontext() if out is None else whole_file(out) as file:
            if table is not None and file is not None:
                rows = write_appended(table, predictions, chosen.labels.kind, file, progress.note)
            else:
                for block in predictions:
                    rows += len(block)
                    if file is None:
                        show(block)
                    else:
                        file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in block)
            if not rows:
                raise DataError(f"{input} has no rows", hint="expected one row, or one line, per prediction")
    finally:
        progress.finish()
    unknown.report(progress.note, warning_to(progress))
    return Predicted(rows, time.perf_counter() - started)


def predictions_of(
    model: TaskModel,
    task: Task[Any],
    examples: Iterator[Any],
    precision: str,
    progress: Progress,
    unknown: UnknownTokens,
) -> Iterator[list[Prediction]]:
    """Predictions for the examples, in blocks of some thousands, on the device of the model.

    Args:
        unknown: counts the unknown tokens of the examples.
    """
    device = next(model.objective.parameters()).device
    computed = resolve_precision(precision, device, model.objective.encoder.config, _BLOCK).name
    warned = False
    for number, block in enumerate(blocks(examples, _BLOCK)):
        features = task.encode(block, model.text, labeled=False)
        unknown.add_ids(features.input_ids.values)
        if features.notes and not warned:
            first = number * _BLOCK
            progress.note(f"rows {first:,} to {first + len(block) - 1:,}: {'; '.join(features.notes)}")
            warned = True
        outputs, _ = outputs_of(model.objective, task.name, features, precision=computed)
        if not are_finite(outputs):
            raise NumericsError(
                f"{model.folder}: the outputs of the network are not finite",
                hint="the file is damaged, or training diverged: use an earlier checkpoint, or train the model again",
            )
        yield task.predict(block, features, outputs)
        progress.advance(len(block))


def _numbered(predictions: Iterable[list[Prediction]], ids: deque[Any], *, logits: bool) -> Iterator[list[Prediction]]:
    """The predictions with the number of their row, from 0, and the row's own id, if it is not None."""
    left_out = {"id"} if logits else {"id", "logits"}
    rows = count()
    for block in predictions:
        heads = ({"row": next(rows)} | ({} if (identity := ids.popleft()) is None else {"id": identity}) for _ in block)
        yield [
            head | {key: value for key, value in each.items() if key not in left_out}
            for head, each in zip(heads, block, strict=True)
        ]


_EXPECTED = {
    "pair": "a pair of texts: (first, second)",
    "text": "a text",
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
    if task.labels.kind == "vectors":
        raise ConfigError(
            f"'{task.name}' predicts no labels: the model was trained for text embeddings", hint="use encode(texts)"
        )
    return examples_from_values(_wants(task, record), texts)


def examples_from_values(wants: str, texts: Iterable[Any]) -> list[Any]:
    """Examples from Python values; raises the errors of `examples_of`.

    Args:
        wants: 'text', 'pair', 'either' (a text or a pair), 'tags', 'characters' (of which each is a word) or 'spans'.
    """
    refuse_other_than_list(texts)
    make = {"tags": _tagging, "characters": _characters, "spans": _question}.get(wants, _classification)
    return [make(str(number), value, _Refusal(number, wants)) for number, value in enumerate(texts)]


def refuse_other_than_list(texts: Any) -> None:
    """Refuse what can be iterated over but is no list of texts.

    Raises:
        ConfigError: `texts` is a single text, a mapping, or a data frame.
    """
    if isinstance(texts, str):  # a sequence of characters, by its type
        raise ConfigError("expected a list of texts, found a single text", hint="put it into a list: [text]")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # a sequence of names, by its type
        kind = type(texts).__name__
        raise ConfigError(f"expected a list of texts, found a {kind}", hint="give one of its columns, such as data['text']")


def list_of_texts(texts: Iterable[Any]) -> list[str]:
    """The texts as a list; a ConfigError for what is no list, and for items that are no texts, such as the gaps of a column."""
    refuse_other_than_list(texts)
    found = list(texts)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise _Refusal(number, "text")(text)
    return found


def _wants(task: Task[Any], record: Mapping[str, Any]) -> str:
    """Kind of input of a task; 'either' if unknown."""
    if Layout.of_record(record.get("layout")).characters:
        return "characters"
    if task.labels.kind in ("tags", "spans"):
        return task.labels.kind
    if not record.get("layout"):
        return "either"
    return "pair" if task.labels.pairs else "text"


class _Refusal:
    """Makes the error about one item."""

    def __init__(self, number: int, wants: str) -> None:
        self.number = number
        self.wants = wants

    def __call__(self, value: Any) -> ConfigError:
        expected = _EXPECTED.get(self.wants, "a text, or a pair of texts")
        return ConfigError(f"item {self.number} is {value!r:.60}, expected {expected}", hint="every item must be of that form")


def _text(value: Any, refusal: Callable[[Any], ConfigError]) -> str:
    if not isinstance(value, str):
        raise refusal(value)
    return clean_text(value)


def _two(value: Any) -> tuple[Any, Any] | None:
    """The two items of a pair, which may also be a row of an array; None if the value is not a pair."""
    if isinstance(value, str | Mapping | Set) or not hasattr(value, "__len__") or len(value) != 2:
        return None
    return value[0], value[1]


def _classification(identity: str, value: Any, refusal: _Refusal) -> ClassificationExample:
    halves = _two(value)
    if (refusal.wants == "pair" and halves is None) or (refusal.wants == "text" and halves is not None):
        raise refusal(value)
    first, second = halves if halves is not None else (value, None)
    other = None if second is None else _text(second, refusal).strip()
    return ClassificationExample(identity, _text(first, refusal).strip(), other)


def _tagging(identity: str, value: Any, refusal: _Refusal) -> TaggingExample:
    if isinstance(value, str):
        return TaggingExample(identity, tuple(clean_text(value).split()))
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise refusal(value)
    return TaggingExample(identity, tuple(_text(word, refusal) for word in value))


def _characters(identity: str, value: Any, refusal: _Refusal) -> TaggingExample:
    """Like `_tagging`, with every character of a text as a word."""
    made = _tagging(identity, value, refusal)
    return TaggingExample(identity, tuple("".join(made.words))) if isinstance(value, str) else made


def _question(identity: str, value: Any, refusal: _Refusal) -> QuestionExample:
    halves = (value.get("question"), value.get("context")) if isinstance(value, Mapping) else _two(value)
    if halves is None:
        raise refusal(value)
    # The context is not stripped: answers are located by characters of the context.
    return QuestionExample(identity, _text(halves[0], refusal).strip(), _text(halves[1], refusal))
