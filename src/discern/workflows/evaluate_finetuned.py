"""A fine-tuned network judged on a labelled file. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress, warning_to
from discern.records import read_object
from discern.tasks.base import Definition, Task
from discern.tasks.baselines.base import measure_baselines
from discern.tasks.examples import Reading
from discern.training.parallel import choose_device
from discern.training.precision import resolve_precision, shape_of
from discern.training.prediction import outputs_of
from discern.workflows.baselines import Baselines, compared
from discern.workflows.finetuned import RESULTS_FILE, FineTuned
from discern.workflows.own_files import OwnSource
from discern.workflows.predict import chosen_task
from discern.workflows.prediction_input import known_definition
from discern.workflows.task_files import ReadingOptions, has_labels, trained_on
from discern.workflows.task_models import load_task_model

# Training examples up to which baselines take a few seconds.
_CHEAP = 5000


@dataclass(frozen=True)
class JudgeRequest:
    """What to judge on what.

    Attributes:
        model: what `discern finetune` wrote, or an export of it.
        data: a file as the training file is; of a named task also a folder of its files.
        task: which, where there are several.
        seed: of a fine-tuning, whose weights; None: those of the best.
        baselines: measure simple predictors beside, where the training file is there and small.
    """

    model: Path
    data: Path | None
    task: str | None = None
    seed: int | None = None
    device: str = "auto"
    precision: str = "float32"
    baselines: bool = True


def judge(request: JudgeRequest, progress: Progress) -> dict[str, Any]:
    """The task's metrics on the file, the headline as `score`, the loss in nats, and what they are of.

    Raises:
        ConfigError: no such task, no file given, or a column is missing.
        DataError: the file cannot be read, has no labels, or has one that training did not know.
        CheckpointError: the weights are missing or damaged.
    """
    if request.data is None:
        raise ConfigError(f"{request.model} is fine-tuned: on which labelled file is it to be judged?", hint="add --data FILE")
    model = load_task_model(request.model, request.seed)
    task = chosen_task(model, request.task)
    model.objective.to(choose_device(request.device))
    found: dict[str, Any] = {}
    for prefix, split, path, reading in _readings(task, model.record["tasks"][task.name], request.data):
        for line in (*reading.notes, *map(str, reading.problems)):
            progress.note(f"{path.name}: {line}")
        metrics, loss = _figures(model, task, reading, request, progress)
        if found:
            found["metrics"] |= {f"{prefix}{name}": value for name, value in metrics.items()}
            continue
        headline = next(iter(metrics))
        found = {"task": task.name, "metric": headline, "score": metrics[headline], "metrics": metrics, "loss": loss}
        found |= {"examples": len(reading.examples), "split": split, "file": str(path), "seed": model.seed}
        baselines = _baselines(model, task, reading, progress) if request.baselines else {}
        found |= compared(baselines, headline, metrics[headline])
    return found


def _baselines(model: FineTuned, task: Task[Any], reading: Reading[Any], progress: Progress) -> Baselines:
    """Simple predictors trained on what the model was; none where that is not there as it was, or takes long."""
    try:
        record = model.record["tasks"][task.name]
        path = Path(record["files"]["train"])
        results = read_object(model.folder / RESULTS_FILE, hint="")
        entry, settings = results.get("tasks", {}).get(task.name, results), results["settings"]
        if not path.is_file() or entry["train_examples"] > _CHEAP:
            return {}
        definition = known_definition(task)
        source = definition.source if definition is not None else OwnSource.of_record(task.labels.kind, record["source"])
        options = ReadingOptions(settings["finetune.heldout_fraction"], settings.get("finetune.train_rows"), results["debug"])
        train = source.configured(task.config).read(path, "train")
        examples = trained_on(train, task, entry["split"], options, record["digests"]["train"])
    except (OSError, ValueError, KeyError, DiscernError):
        return {}  # the score stands without them
    if examples is None:
        progress.note(f"no baselines: {path} has changed since the model was trained on it")
        return {}
    scores = measure_baselines(task, examples, reading.examples, progress.note)
    return {score.name: score.record() for score in scores}


def _figures(
    model: FineTuned, task: Task[Any], reading: Reading[Any], request: JudgeRequest, progress: Progress
) -> tuple[dict[str, float], float]:
    """The metrics by name, the headline first, and the mean loss."""
    if not reading.examples or not has_labels(reading):
        raise DataError(
            f"{reading.source} has no labels to judge by", hint=f"discern predict {request.model} {reading.source} only predicts"
        )
    task.check(reading)
    features = task.encode(reading.examples, model.text, labelled=True)
    for line in features.notes:
        progress.note(line)
    unknown = UnknownTokens(model.tokenizer)
    unknown.add_ids(features.input_ids.values)
    unknown.report(progress.note, warning_to(progress))
    device = next(model.objective.parameters()).device
    progress.start("evaluating", len(features), "rows")
    try:
        precision = resolve_precision(
            request.precision, device, shape_of(model.objective.encoder.config, len(features) * task.config.sequence_length)
        ).name
        outputs, loss = outputs_of(model.objective, task.name, features, precision=precision, progress=progress)
    finally:
        progress.finish()
    return dict(task.score(reading.examples, task.predict(reading.examples, features, outputs)).values), loss


def _readings(task: Task[Any], record: Mapping[str, Any], data: Path) -> list[tuple[str, str, Path, Reading[Any]]]:
    """What is judged: prefix of the metrics' names, split, file, examples; the first gives the headline."""
    definition = known_definition(task)
    if definition is not None and data.is_dir():
        return _splits(definition, data)
    if data.is_dir():
        raise ConfigError(f"{data} is a folder", hint="give a labelled file, with the columns of the training file: --data FILE")
    if definition is not None:
        return [("", data.name, data, definition.source.read(data, "dev"))]
    if not record.get("source"):
        raise ConfigError(
            f"the model does not say which columns of {data} hold the text and the label",
            hint="fine-tunings and their exports can be evaluated; `discern predict` takes any model",
        )
    columns = record["source"]["columns"]
    source = OwnSource.of_record(task.labels.kind, record["source"])
    try:
        return [("", data.name, data, source.read(data, "dev"))]
    except ConfigError as problem:
        if record["source"]["format"] == "conll":  # its columns have numbers, and the hint knows them
            raise
        named = ", ".join(f"{role} = {name}" for role, name in columns.items() if name and role not in ("kind", "separator"))
        raise ConfigError(problem.message, hint=f"call the columns as in the training file: {named}") from None


def _splits(definition: Definition[Any], folder: Path) -> list[tuple[str, str, Path, Reading[Any]]]:
    """The labelled dev or test file of a folder, and the further ones that the task reports."""
    paths = definition.source.splits(folder)
    found = [(split, definition.source.read(paths[split], split)) for split in ("dev", "test") if split in paths]
    first = next(((split, reading) for split, reading in found if has_labels(reading)), None)
    if first is None:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
        raise DataError(f"{folder} holds no labelled dev or test file of {definition.name}; it holds {held}", hint="check --data")
    others = [split for split in definition.report_splits if split in paths and split != first[0]]
    further = [(split, definition.source.read(paths[split], split)) for split in others]
    readings = [first, *((split, reading) for split, reading in further if has_labels(reading))]
    return [
        ("" if not place else f"{split.removeprefix('dev_')}_", split, paths[split], reading)
        for place, (split, reading) in enumerate(readings)
    ]
