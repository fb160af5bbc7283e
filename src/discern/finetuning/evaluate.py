"""Evaluate a fine-tuned network on a labeled file. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern.data.tokenizer.tokens import UnknownTokens
from discern.errors import ConfigError, DataError, DiscernError
from discern.finetuning.plan import find_splits, has_labels
from discern.finetuning.results import compare
from discern.model_files.folder import ModelFolder, TaskModel, open_model
from discern.progress import Progress, warning_to
from discern.tasks import known_definition
from discern.tasks.base import Definition, Layout, Reading, Task
from discern.tasks.baselines import BaselineScore, measure_baselines
from discern.tasks.supervised import outputs_of, refuse_non_finite
from discern.training.distributed import choose_device
from discern.training.execution import resolve_precision

# Up to this number of training examples, baselines take a few seconds.
_FEW_EXAMPLES = 5000


def evaluate_finetuned(
    model: Path,
    data: Path | None,
    *,
    progress: Progress,
    task: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    baselines: bool = True,
) -> dict[str, Any]:
    """Evaluate a fine-tuned model on a labeled file, without writing anything.

    Args:
        model: a folder that `discern finetune` wrote, or an export of it.
        data: a file in the format of the training file, or for a named task also a folder of its files.
        task: name of the task, if there are several.
        seed: seed whose weights are used; None: the best seed.
        baselines: also evaluate simple predictors, if the training file exists and is small.

    Returns:
        The task's metrics as `metrics`, the headline metric as `score` with its `interval`, the mean loss in nats, and what was
        evaluated.

    Raises:
        ConfigError: the task does not exist, no file is given, or a column is missing.
        DataError: the file cannot be read, has no labels, or has a label that the training file lacks.
        CheckpointError: the weights are missing or damaged.
    """
    if data is None:
        raise ConfigError(f"{model} is a fine-tuned model, which is evaluated on a labeled file", hint="add --data FILE")
    tuned = open_model(model, warn=progress.note).task_model(seed)
    chosen = tuned.task(task)
    chosen_device = choose_device(device)
    objective = tuned.objective.to(chosen_device)
    results: dict[str, Any] = {}
    for prefix, split, path, reading in _readings(chosen, tuned.record["tasks"][chosen.name], data):
        for line in (*reading.notes, *map(str, reading.problems)):
            progress.note(f"{path.name}: {line}")
        features = chosen.encode(reading.examples, tuned.text, labeled=True)
        for line in features.notes:
            progress.note(line)
        unknown = UnknownTokens(tuned.tokenizer)
        unknown.add_ids(features.input_ids.values)
        unknown.report(progress.note, warning_to(progress))
        tokens = len(features) * chosen.config.sequence_length
        resolved = resolve_precision(precision, chosen_device, objective.encoder.config, tokens).name
        progress.start("evaluating", len(features), "rows")
        try:
            outputs, loss = outputs_of(objective, chosen.name, features, precision=resolved, progress=progress)
        finally:
            progress.finish()
        refuse_non_finite(chosen.name, outputs, loss, hint="fine-tune again with a lower optimizer.learning_rate")
        predictions = chosen.predict(reading.examples, features, outputs)
        scores = chosen.score(reading.examples, predictions)
        for line in scores.undefined(path.name):
            progress.note(line)
        if results:
            results["metrics"] |= {f"{prefix}{name}": value for name, value in scores.values.items()}
            continue
        headline = next(iter(scores.values))
        results = {"task": chosen.name, "metric": headline, "score": scores.values[headline], "metrics": dict(scores.values)}
        results |= {"loss": loss, "examples": len(reading.examples), "split": split, "file": str(path), "seed": tuned.seed}
        simple = _baselines(tuned, chosen, reading, progress) if baselines else []
        # Text embeddings have other metrics if the kind of the file differs from that of the file in training.
        scored = type(chosen)(chosen.name, chosen.config, tuple(scores.values), chosen.labels)
        results |= compare(scored, reading.examples, predictions, simple)
    return results


def labeled_examples(
    model: ModelFolder, data: Path | None, *, task: str | None = None, seed: int | None = None
) -> tuple[str, list[Any]] | None:
    """The name of a labeled file of a task, and its examples.

    None if the task is to give vectors, or if no file is given and the one of the training is gone.

    Args:
        model: a fine-tuned model.
        data: as in `evaluate_finetuned`; None: the file that the fine-tuning was evaluated on.

    Raises:
        ConfigError: the task does not exist, or a column is missing.
        DataError: the file cannot be read, has no labels, or has a label that the training file lacks.
    """
    tuned = model.task_model(seed)
    chosen = tuned.task(task)
    record = tuned.record["tasks"][chosen.name]
    dev = (record.get("files") or {}).get("dev")
    path = data or (Path(dev) if dev is not None and Path(dev).is_file() else None)
    if path is None or chosen.labels.kind == "vectors":
        return None
    _, split, _, reading = _readings(chosen, record, path)[0]
    return split, list(reading.examples)


def _baselines(model: TaskModel, task: Task[Any], reading: Reading[Any], progress: Progress) -> list[BaselineScore]:
    """Simple predictors trained on the model's training file; none if it is missing or large."""
    try:
        record = model.record["tasks"][task.name]
        train = _definition(task, record).read(Path(record["files"]["train"]), "train", task.config)
    except (KeyError, DiscernError):
        return []  # baselines are optional: the score is valid without them
    few = len(train.examples) <= _FEW_EXAMPLES
    return list(measure_baselines(task, train.examples, reading.examples, progress.note)) if few else []


def _readings(task: Task[Any], record: Mapping[str, Any], data: Path) -> list[tuple[str, str, Path, Reading[Any]]]:
    """Prefix of the metrics, split, file and examples of each evaluated file; the first has the headline metric."""
    if not record.get("layout"):
        raise ConfigError(
            f"the model does not record which columns of {data} contain the text and the label",
            hint="models fine-tuned by discern, and their exports, can be evaluated; `discern predict` takes any model",
        )
    definition = _definition(task, record)
    if data.is_dir() and definition.files:
        readings = _splits(definition, data, task)
    elif data.is_dir() and task.labels.kind != "vectors":
        raise ConfigError(f"{data} is a folder", hint="give a labeled file with the columns of the training file: --data FILE")
    else:
        # Of a retrieval set, what has no judgment is left out; other tasks ignore the setting.
        config = task.config.model_copy(update={"unjudged": "leave-out"})
        readings = [("", data.name, data, definition.read(data, "dev", config))]
    for _, _, _, reading in readings:
        if not reading.examples or not has_labels(reading):
            raise DataError(
                f"{reading.source} has no labels to evaluate on", hint="to predict labels: discern predict MODEL FILE"
            )
        task.check(reading)
    return readings


def _definition(task: Task[Any], record: Mapping[str, Any]) -> Definition[Any]:
    """The registered definition, or that of the user's own files."""
    own = Definition(task.name, type(task), task.metrics, layout=Layout.of_record(record["layout"]))
    return known_definition(task.name) or own


def _splits(definition: Definition[Any], folder: Path, task: Task[Any]) -> list[tuple[str, str, Path, Reading[Any]]]:
    """The labeled dev or test file of a folder, and the further splits that the task reports."""
    paths = find_splits(definition, folder)
    names = [split for split in dict.fromkeys(("dev", "test", *definition.report_splits)) if split in paths]
    readings = {split: definition.read(paths[split], split, task.config) for split in names}
    labeled = [split for split, reading in readings.items() if has_labels(reading)]
    if not labeled or labeled[0] not in ("dev", "test"):
        entries = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise DataError(
            f"{folder} has no labeled dev or test file of {definition.name}; it contains {entries}", hint="check --data"
        )
    first, *others = labeled
    chosen = [first, *(split for split in others if split in definition.report_splits)]
    return [
        ("" if split == first else f"{split.removeprefix('dev_')}_", split, paths[split], readings[split]) for split in chosen
    ]
