"""Evaluate a fine-tuned network on a labeled file. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from discern.data.tokenizer.unknown import UnknownTokens
from discern.errors import ConfigError, DataError, DiscernError
from discern.finetuning.results import Baselines, compared
from discern.finetuning.task_files import ReadingOptions, has_labels, trained_on
from discern.finetuning.user_files import recorded_source
from discern.model_files.finetuned import RESULTS_FILE
from discern.model_files.folder import ModelFolder, TaskModel, open_model
from discern.progress import Progress, warning_to
from discern.storage.checksums import read_object
from discern.tasks.base import Definition, Task
from discern.tasks.baselines.base import measure_baselines
from discern.tasks.examples import Reading
from discern.tasks.prediction_input import known_definition
from discern.tasks.supervised import outputs_of, refuse_non_finite
from discern.training.distributed import choose_device
from discern.training.precision import resolve_precision

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
        The task's metrics as `metrics`, the headline metric as `score`, the mean loss in nats, and what was evaluated.

    Raises:
        ConfigError: the task does not exist, no file is given, or a column is missing.
        DataError: the file cannot be read, has no labels, or has a label that the training file lacks.
        CheckpointError: the weights are missing or damaged.
    """
    if data is None:
        raise ConfigError(f"{model} is a fine-tuned model, which is evaluated on a labeled file", hint="add --data FILE")
    loaded = open_model(model, warn=progress.note).task_model(seed)
    chosen = loaded.task(task)
    loaded.objective.to(choose_device(device))
    found: dict[str, Any] = {}
    for prefix, split, path, reading in _readings(chosen, loaded.record["tasks"][chosen.name], data):
        for line in (*reading.notes, *map(str, reading.problems)):
            progress.note(f"{path.name}: {line}")
        metrics, loss = _measure(loaded, chosen, reading, precision, progress)
        if found:
            found["metrics"] |= {f"{prefix}{name}": value for name, value in metrics.items()}
            continue
        headline = next(iter(metrics))
        found = {"task": chosen.name, "metric": headline, "score": metrics[headline], "metrics": metrics, "loss": loss}
        found |= {"examples": len(reading.examples), "split": split, "file": str(path), "seed": loaded.seed}
        simple = _baselines(loaded, chosen, reading, progress) if baselines else {}
        found |= compared(simple, headline, metrics)
    return found


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
    loaded = model.task_model(seed)
    chosen = loaded.task(task)
    if chosen.labels.kind == "vectors":
        return None
    record = loaded.record["tasks"][chosen.name]
    known = (record.get("files") or {}).get("dev")
    path = data if data is not None else Path(known) if known is not None and Path(known).is_file() else None
    if path is None:
        return None
    _, split, _, reading = _readings(chosen, record, path)[0]
    _check_labels(chosen, reading, model.folder)
    return split, list(reading.examples)


def _baselines(model: TaskModel, task: Task[Any], reading: Reading[Any], progress: Progress) -> Baselines:
    """Metrics of simple predictors trained on the model's training file; none if it has changed, is missing, or is large."""
    try:
        record = model.record["tasks"][task.name]
        path = Path(record["files"]["train"])
        results = read_object(model.folder / RESULTS_FILE, hint="")
        entry, settings = results.get("tasks", {}).get(task.name, results), results["settings"]
        if not path.is_file() or entry["train_examples"] > _FEW_EXAMPLES:
            return {}
        definition = known_definition(task)
        source = definition.source if definition is not None else recorded_source(task.labels.kind, record["source"])
        options = ReadingOptions(settings["finetune.heldout_fraction"], settings.get("finetune.train_rows"), results["debug"])
        train = source.configured(task.config).read(path, "train")
        examples = trained_on(train, task, entry["split"], options, record["digests"]["train"])
    except (OSError, ValueError, KeyError, DiscernError):
        return {}  # baselines are optional: the score is valid without them
    if examples is None:
        progress.note(f"no baselines: {path} has changed since the model was trained on it")
        return {}
    scores = measure_baselines(task, examples, reading.examples, progress.note)
    return {score.name: score.record() for score in scores}


def _check_labels(task: Task[Any], reading: Reading[Any], model: Path) -> None:
    if not reading.examples or not has_labels(reading):
        raise DataError(
            f"{reading.source} has no labels to evaluate on",
            hint=f"to predict labels: discern predict {model} {reading.source}",
        )
    task.check(reading)


def _measure(
    model: TaskModel, task: Task[Any], reading: Reading[Any], precision: str, progress: Progress
) -> tuple[dict[str, float], float]:
    """The metrics by name, the headline first, and the mean loss."""
    _check_labels(task, reading, model.folder)
    features = task.encode(reading.examples, model.text, labeled=True)
    for line in features.notes:
        progress.note(line)
    unknown = UnknownTokens(model.tokenizer)
    unknown.add_ids(features.input_ids.values)
    unknown.report(progress.note, warning_to(progress))
    device = next(model.objective.parameters()).device
    progress.start("evaluating", len(features), "rows")
    try:
        tokens = len(features) * task.config.sequence_length
        resolved = resolve_precision(precision, device, model.objective.encoder.config, tokens).name
        outputs, loss = outputs_of(model.objective, task.name, features, precision=resolved, progress=progress)
    finally:
        progress.finish()
    refuse_non_finite(task.name, outputs, loss, hint="fine-tune again with a lower optimizer.learning_rate")
    scores = task.score(reading.examples, task.predict(reading.examples, features, outputs))
    for line in scores.undefined(Path(reading.source).name):
        progress.note(line)
    return dict(scores.values), loss


def _readings(task: Task[Any], record: Mapping[str, Any], data: Path) -> list[tuple[str, str, Path, Reading[Any]]]:
    """Prefix of the metrics, split, file and examples of each evaluated file; the first has the headline metric."""
    definition = known_definition(task)
    if definition is not None and data.is_dir():
        return _splits(definition, data)
    source = recorded_source(task.labels.kind, record["source"]).configured(task.config) if record.get("source") else None
    if data.is_dir() and not (source is not None and source.reads_folders):
        raise ConfigError(f"{data} is a folder", hint="give a labeled file with the columns of the training file: --data FILE")
    if definition is not None:
        return [("", data.name, data, definition.source.read(data, "dev"))]
    if source is None:
        raise ConfigError(
            f"the model does not record which columns of {data} contain the text and the label",
            hint="models fine-tuned by discern, and their exports, can be evaluated; `discern predict` takes any model",
        )
    columns = record["source"]["columns"]
    try:
        return [("", data.name, data, source.read(data, "dev"))]
    except ConfigError as problem:
        named = ", ".join(f"{role} = {name}" for role, name in columns.items() if name and role not in ("kind", "separator"))
        if record["source"]["format"] == "conll" or not named:  # its columns are numbered, or were recognized
            raise
        raise ConfigError(problem.message, hint=f"name the columns as in the training file: {named}") from None


def _splits(definition: Definition[Any], folder: Path) -> list[tuple[str, str, Path, Reading[Any]]]:
    """The labeled dev or test file of a folder, and the further splits that the task reports."""
    paths = definition.source.splits(folder)
    found = [(split, definition.source.read(paths[split], split)) for split in ("dev", "test") if split in paths]
    first = next(((split, reading) for split, reading in found if has_labels(reading)), None)
    if first is None:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise DataError(f"{folder} has no labeled dev or test file of {definition.name}; it contains {held}", hint="check --data")
    others = [split for split in definition.report_splits if split in paths and split != first[0]]
    further = [(split, definition.source.read(paths[split], split)) for split in others]
    readings = [first, *((split, reading) for split, reading in further if has_labels(reading))]
    return [
        ("" if not place else f"{split.removeprefix('dev_')}_", split, paths[split], reading)
        for place, (split, reading) in enumerate(readings)
    ]
