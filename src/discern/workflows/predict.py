"""A fine-tuned network applied to a file of any size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discern.artifacts.files import whole_file
from discern.artifacts.guard import check_output
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError, DataError, did_you_mean
from discern.progress import Progress, warning_to
from discern.tasks.base import Prediction, Task
from discern.training.parallel import choose_device
from discern.training.precision import resolve_precision, shape_of
from discern.training.prediction import outputs_of
from discern.workflows.finetuned import FineTuned
from discern.workflows.prediction_columns import readable_again, write_appended
from discern.workflows.prediction_input import InputFormat, blocks, input_examples
from discern.workflows.task_models import load_task_model

# Rows are sorted by length among this many: enough that batches hardly need padding, few enough to be held at once.
_BLOCK = 2048


@dataclass(frozen=True)
class PredictRequest:
    """What to predict with what.

    Attributes:
        model: what `discern finetune` wrote, an export of that, or a Hugging Face model for such a task.
        input: a table, a text, a file in the task's own format; `-` is standard input.
        out: file for JSON lines, there whole or not at all; None: they are shown.
        task: which, where there are several.
        seed: of a fine-tuning, whose weights; None: those of the best.
        columns: by what they hold; those not given are called as in the training file.
        format: of the input, where content and name do not tell.
        logits: give them too.
        append: write the rows of the input, a table, to `out` in their own format, with the predictions as further columns.
    """

    model: Path
    input: Path
    out: Path | None = None
    task: str | None = None
    seed: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    format: InputFormat | None = None
    logits: bool = False
    device: str = "auto"
    precision: str = "float32"
    append: bool = False


@dataclass(frozen=True)
class Predicted:
    """How much was predicted, in which time from the first row read to the last one written."""

    rows: int
    seconds: float


def predict(request: PredictRequest, show: Callable[[list[Prediction]], None], progress: Progress) -> Predicted:
    """What the network says of every row of the input, in its order.

    Args:
        show: takes some predictions at a time, where there is no `out`.

    Raises:
        ConfigError: no such task, column or device.
        DataError: the folder holds no network of a task, the input cannot be read, or a row has no text; nothing is left of
            `out`.
        CheckpointError: the weights are missing or damaged.
    """
    check_output("--out", request.out, "predictions.jsonl", request.model, request.input)
    table = readable_again(request.input, request.out, request.format, logits=request.logits) if request.append else None
    model = load_task_model(request.model, request.seed)
    task = chosen_task(model, request.task)
    model.objective.to(choose_device(request.device))
    started = time.perf_counter()
    of_task = model.record["tasks"][task.name]
    # What is appended to is read as a table, never in a task's own format: a row is a row.
    format = table.format if table is not None else request.format
    examples = input_examples(task, of_task, request.input, request.columns, format, progress.note)
    unknown = UnknownTokens(model.tokenizer)
    every = predictions_of(model, task, examples, request.precision, progress, unknown)
    predictions = _counted(every if request.logits else _without_logits(every), request.input)
    progress.start("predicting", None, "rows")
    rows = 0
    try:
        if request.out is None:
            for said in predictions:
                show(said)
                rows += len(said)
        elif table is not None:
            with whole_file(request.out) as file:
                rows = write_appended(table, predictions, task.labels.kind, file, progress.note)
        else:
            with whole_file(request.out) as file:
                for said in predictions:
                    file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in said)
                    rows += len(said)
    finally:
        progress.finish()
    unknown.report(progress.note, warning_to(progress))
    return Predicted(rows, time.perf_counter() - started)


def chosen_task(model: FineTuned, name: str | None) -> Task[Any]:
    """The task of that name, or the only one.

    Raises:
        ConfigError: there is no such task, or several and none was named.
    """
    tasks = model.objective.tasks
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name is None:
        raise ConfigError(
            f"{model.folder} was fine-tuned on {', '.join(tasks)}", hint=f"say on which of them: --task {next(iter(tasks))}"
        )
    if name not in tasks:
        raise ConfigError(f"{model.folder} was not fine-tuned on '{name}'", hint=did_you_mean(name, tasks))
    return tasks[name]


def predictions_of(
    model: FineTuned,
    task: Task[Any],
    examples: Iterator[Any],
    precision: str,
    progress: Progress,
    unknown: UnknownTokens,
) -> Iterator[list[Prediction]]:
    """What is said of the examples, some thousands at a time, on the device that the model is on; `unknown` counts their
    tokens."""
    device = next(model.objective.parameters()).device
    computed = resolve_precision(precision, device, shape_of(model.objective.encoder.config, _BLOCK)).name
    warned = False
    for number, block in enumerate(blocks(examples, _BLOCK)):
        features = task.encode(block, model.text, labelled=False)
        unknown.add_ids(features.input_ids.values)
        if features.notes and not warned:
            first = number * _BLOCK
            progress.note(f"rows {first:,} to {first + len(block) - 1:,}: {'; '.join(features.notes)}")
            warned = True
        outputs, _ = outputs_of(model.objective, task.name, features, precision=computed)
        said = task.predict(block, features, outputs)
        progress.advance(len(block))
        yield said


def _without_logits(predictions: Iterable[list[Prediction]]) -> Iterator[list[Prediction]]:
    for said in predictions:
        yield [{key: value for key, value in each.items() if key != "logits"} for each in said]


def _counted(predictions: Iterable[list[Prediction]], source: Path) -> Iterator[list[Prediction]]:
    """The same, if there is anything."""
    empty = True
    for said in predictions:
        empty = False
        yield said
    if empty:
        raise DataError(f"{source} holds no row", hint="expected a row, or a line, for each prediction")
