"""A fine-tuned model, and its construction from the encoder and the head of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from discern import __version__
from discern.artifacts.model_folder import TEXT_LICENSE
from discern.data.tokenizer import fingerprint, special_tokens
from discern.errors import CheckpointError, ConfigError, DataError, did_you_mean
from discern.interop.config_json import detector_label, read_mark
from discern.interop.families import family_of_type
from discern.interop.names import CONFIG_NAME, HEAD_NAME
from discern.interop.tokenizer import read_max_length
from discern.interop.weight_files import WeightFiles, check_shape, open_weight_files, opened
from discern.models.base import Encoder
from discern.tasks import families
from discern.tasks import tasks as registry
from discern.tasks.base import Labels, Task, TaskConfig, TextEncoder
from discern.tasks.frames import FrameName
from discern.tasks.supervised import SupervisedObjective, supervised
from discern.tasks.tags import detect_scheme

FORMAT = 1
"""Version of the records of fine-tuned models."""
TASK_HEAD = "task_head"
"""Key in the record of an export whose head is in a separate file; its value is the name of the file, "" if it has no weights."""
_RECORD = "record"
_ENDINGS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    "ForQuestionAnsweringSimple": "span",
}
# For a model of which only the head is known. Every question has an answer, as is the default in transformers.
_FAMILIES = {"classification": "classification", "tagging": "tagging", "span": "squad1"}
_METRICS = {"classification": ("accuracy",), "tagging": ("f1", "precision", "recall", "accuracy"), "span": ("exact_match", "f1")}
_PROBLEMS = {
    "single_label_classification": "single",
    "multi_label_classification": "multi",
    "regression": "number",
}
_NAME = "own"
_MOST_LABELS = 100_000
# The layers of a classifier by family, ours -> theirs: the one before the activation and the last one.
_CLASSIFIERS = {
    "electra": {"summary": "classifier.dense", "output": "classifier.out_proj"},
    "bert": {"summary": "bert.pooler.dense", "output": "classifier"},
    "xlnet": {"summary": "sequence_summary.summary", "output": "logits_proj"},
}
_LAYERS = {"tagging": {"output": "classifier"}, "span": {"output": "qa_outputs"}}
# Of families with the same layers in every head.
_PREDICTION_LAYERS = {"inner.dense": "head.dense", "inner.norm": "head.norm", "output": "classifier"}
_SUMMARIES = {"electra": "dense", "bert": "summary"}
# XLNet's is as its config.json says, by the activation.
_XLNET_SUMMARIES = {"tanh": "summary", "gelu": "dense"}


@dataclass(frozen=True, eq=False)
class TaskModel:
    """A fine-tuned model, in evaluation mode, float32, on the CPU.

    Attributes:
        folder: folder that the model was read from.
        objective: encoder and heads.
        seed: seed of the weights.
        record: content of finetuned.json; for a model without this file, an equivalent record of what is known.
    """

    folder: Path
    objective: SupervisedObjective
    tokenizer: Tokenizer
    seed: int
    record: dict[str, Any]

    @property
    def frame(self) -> FrameName:
        """Input framing of its texts."""
        frame: FrameName = self.record["frame"]
        return frame

    @property
    def text(self) -> TextEncoder:
        """Turns text into the ids that the model was trained on."""
        return TextEncoder(self.tokenizer, special_tokens(self.tokenizer))

    def task(self, name: str | None = None) -> Task[Any]:
        """The task with this name; without a name, the only task.

        Raises:
            ConfigError: there is no such task, or there are several and no name is given.
        """
        tasks = self.objective.tasks
        if name is None and len(tasks) == 1:
            return next(iter(tasks.values()))
        if name is None:
            raise ConfigError(
                f"{self.folder} was fine-tuned on several tasks: {', '.join(tasks)}",
                hint=f"specify the task: --task {next(iter(tasks))}",
            )
        if name not in tasks:
            raise ConfigError(f"{self.folder} was not fine-tuned on '{name}'", hint=did_you_mean(name, tasks))
        return tasks[name]


def task_of(name: str, record: dict[str, Any]) -> Task[Any]:
    """Build the task that a record describes.

    Raises:
        ConfigError: its family is not installed.
    """
    family = _family(name, record["family"])
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record["labels"].items()}
    labels = Labels(**known)
    config = family.Config.model_validate(record["config"])
    task: Task[Any] = family(name, config, tuple(record["metrics"]), labels)
    return task


def _family(name: str, family: str) -> type[Task[Any]]:
    """The class of a family: that of the registered task if the task is of this family, or else one of our own."""
    if name in registry.names():
        registered: type[Task[Any]] = registry.load(name).family
        if getattr(registered, "family", None) == family:
            return registered
    if family not in families.names():
        raise ConfigError(
            f"task '{name}' is of the family '{family}', which is not installed here",
            hint="install the package that registers the task",
        )
    ours: type[Task[Any]] = families.load(family)
    return ours


def task_model_of(folder: Path, config: Mapping[str, Any], encoder: Encoder, tokenizer: Tokenizer) -> TaskModel:
    """The model of a Hugging Face folder: its encoder with the task head that config.json names.

    An export of a fine-tuned model records its task in config.json, so it reads files in the same way as that model.

    Args:
        config: content of config.json.
        encoder: the encoder in the folder.

    Raises:
        CheckpointError: the head is missing or damaged, or its settings cannot be read.
    """
    mark = read_mark(config)
    try:
        record = _record(folder, config, mark, encoder)
        tasks = {name: task_of(name, each) for name, each in record["tasks"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: its task settings cannot be read ({problem!r:.120})",
            hint="export or download the model again",
        ) from problem
    objective = supervised(encoder, tasks, frame=record["frame"])
    _fill(objective.heads[next(iter(tasks))], folder, config)
    return TaskModel(folder, objective.eval(), tokenizer, mark.get("seed", 0), record)


def task_mark(loaded: TaskModel, task: str) -> dict[str, Any]:
    """What config.json of an export stores for `task_model_of`: the task, without paths."""
    record = loaded.record
    of_task = {key: value for key, value in record["tasks"][task].items() if key != "files"}
    return {
        "version": __version__,
        "task": task,
        "seed": loaded.seed,
        "tokenizer_fingerprint": fingerprint(loaded.tokenizer),
        _RECORD: {"format": FORMAT, "frame": loaded.frame, "tasks": {task: of_task}},
    } | {name: record[name] for name in ("language", TEXT_LICENSE) if name in record}


def head_kind(config: Mapping[str, Any]) -> str | None:
    """Kind of the task head of a Hugging Face model; None if it has none, or one of another kind."""
    if detector_label(config) is not None:
        return None
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    return next((kind for ending, kind in _ENDINGS.items() if isinstance(name, str) and name.endswith(ending)), None)


def _record(folder: Path, config: Mapping[str, Any], mark: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """A record in the form of finetuned.json: the one stored in an export, or else one derived from the head."""
    said = mark.get(_RECORD)
    kind = head_kind(config)
    if isinstance(said, dict):
        if said.get("format") != FORMAT:
            raise DataError(f"{folder}: the export has format {said.get('format')}; this version of discern reads {FORMAT}")
        record = {**said, "tasks": {name: _as_stored(each, config, kind) for name, each in said["tasks"].items()}}
    else:
        assert kind is not None  # only an export of discern stores its head in a separate file
        record = {"frame": _frame(config), "tasks": {_NAME: _told_by_head(folder, config, kind, encoder)}}
    return {"model": str(folder), "files": {}, **record}


def _as_stored(task: dict[str, Any], config: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """The record of a task whose head is stored in the form of transformers: the weights include the unit of a score, and
    ELECTRA's classifier has two layers."""
    if kind != "classification":
        return task
    labels = {**task["labels"], "scale": 1.0, "shift": 0.0}
    return {**task, "labels": labels, "config": {**task["config"], **_classifier_settings(config)}}


def _classifier_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a classification that its head in config.json determines."""
    model_type = config["model_type"]
    if _has_prediction_heads(config):
        return {"head": "prediction", "pooling": config.get("classifier_pooling", "cls")}
    if model_type != "xlnet":
        return {"head": _SUMMARIES[model_type]}
    if not config.get("summary_use_proj", True):
        return {"head": "linear"}
    activation = config.get("summary_activation", "tanh")
    if activation not in _XLNET_SUMMARIES:
        raise CheckpointError(
            f"{CONFIG_NAME} has summary_activation '{activation}', expected {' or '.join(_XLNET_SUMMARIES)}",
            hint="fine-tune the model again with discern finetune",
        )
    return {"head": _XLNET_SUMMARIES[activation]}


def _layers(config: Mapping[str, Any], kind: str) -> Mapping[str, str]:
    """The layers of a head, ours -> theirs."""
    if _has_prediction_heads(config):
        return _PREDICTION_LAYERS
    return _CLASSIFIERS[config["model_type"]] if kind == "classification" else _LAYERS[kind]


def _frame(config: Mapping[str, Any]) -> FrameName:
    return family_of_type(config["model_type"]).frame


def _has_prediction_heads(config: Mapping[str, Any]) -> bool:
    return family_of_type(config["model_type"]).prediction_heads


def _told_by_head(folder: Path, config: Mapping[str, Any], kind: str, encoder: Encoder) -> dict[str, Any]:
    """The record of a task, derived from the head alone."""
    names = _label_names(folder, config)
    labels: dict[str, Any] = {"names": list(names), "kind": {"tagging": "tags", "span": "spans"}.get(kind, "single")}
    settings: dict[str, Any] = {"sequence_length": read_max_length(folder, encoder.config.max_positions)}
    if kind == "classification":
        problem = config.get("problem_type") or ("regression" if len(names) == 1 else "single_label_classification")
        if problem not in _PROBLEMS:
            raise CheckpointError(f"{folder / CONFIG_NAME}: unknown problem_type {problem!r}", hint="export the model again")
        labels["kind"] = _PROBLEMS[problem]
        settings |= _classifier_settings(config)
    elif kind == "tagging":
        settings["head"] = "prediction" if _has_prediction_heads(config) else "linear"
        labels["scheme"] = "iob2" if (scheme := detect_scheme([names])) == "iob1" else scheme
    else:
        settings["head"] = "prediction" if _has_prediction_heads(config) else "span"
    if labels["kind"] in ("number", "spans"):
        labels["names"] = []
    family: Any = families.load(_FAMILIES[kind])
    built: TaskConfig = family.Config(**settings)
    known = {"family": _FAMILIES[kind], "metrics": list(_METRICS[kind]), "labels": labels}
    return {**known, "config": built.model_dump(mode="json"), "source": {}}


def _label_names(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The label of each output, in order; LABEL_0 and so on if config.json has no names, as in transformers."""
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or not 0 < count <= _MOST_LABELS:
            raise CheckpointError(f"{folder / CONFIG_NAME}: num_labels is {count!r}", hint="export or download the model again")
        return tuple(f"LABEL_{number}" for number in range(count))
    try:
        return tuple(str(named[str(number)]) for number in range(len(named)))
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: id2label must have a label for each number from 0 on", hint="export the model again"
        ) from None


@torch.no_grad()
def _fill(head: nn.Module, folder: Path, config: Mapping[str, Any]) -> None:
    """Fill a head with the weights in a folder.

    Raises:
        CheckpointError: the weights are missing, damaged, or of another shape.
    """
    parameters = dict(head.named_parameters())
    if not parameters:
        return
    kind = head_kind(config)
    if kind is None:
        with opened(folder, HEAD_NAME) as weights:
            present = set(weights.keys())
            tensors = {name: weights.get_tensor(name) for name in parameters if name in present}
        _copy(parameters, tensors, folder / HEAD_NAME)
        return
    layers = _layers(config, kind)
    with open_weight_files(folder) as stored:
        found = {ours: _read(stored, layers, ours) for ours in parameters}
        _copy(parameters, {ours: tensor for ours, tensor in found.items() if tensor is not None}, stored.path)


def _read(stored: WeightFiles, layers: Mapping[str, str], ours: str) -> Tensor | None:
    layer, _, which = ours.rpartition(".")
    theirs = f"{layers[layer]}.{which}"
    return stored.read(theirs) if theirs in stored.tensors else None


def _copy(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], path: Path) -> None:
    for name, parameter in parameters.items():
        if name not in tensors:
            raise CheckpointError(f"{path} has no '{name}' of the head", hint="export or download the model again")
        check_shape(name, tensors[name].shape, parameter, path)
        parameter.copy_(tensors[name])
