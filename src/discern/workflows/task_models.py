"""The network of a task in a folder of any kind: a fine-tuning, its export, or somebody else's Hugging Face model.

A fine-tuning is loaded as it was trained. A Hugging Face folder is put together from the encoder and the head that its
config.json names; what an export of ours was fine-tuned on stands there too, so it reads files as the fine-tuning does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discern import __version__
from discern.data.tokenizer import fingerprint
from discern.errors import CheckpointError, ConfigError, DataError
from discern.interop.config_json import read_huggingface_config, read_mark
from discern.interop.families import ENCODER_TYPES, family_in
from discern.interop.huggingface import check_shape, opened
from discern.interop.names import CONFIG_NAME, HEAD_NAME
from discern.interop.stored import Stored, stored_weights
from discern.interop.tokenizer import read_max_length
from discern.model.encoder import Encoder
from discern.tasks import families
from discern.tasks.base import TaskConfig
from discern.tasks.frames import FrameName
from discern.tasks.supervised import SupervisedObjective
from discern.tasks.tags import detect_scheme
from discern.workflows.finetuned import FORMAT, FineTuned, load_finetuned, task_of
from discern.workflows.models import check_rows, tokenizer_in
from discern.workflows.runs import is_finetuned

TASK_HEAD = "task_head"
"""Key of the mark of an export whose head stands in a file beside the encoder; its value is the name of the file."""
_RECORD = "record"
_ENDINGS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tagging",
    "ForQuestionAnswering": "span",
    "ForQuestionAnsweringSimple": "span",
}
# Of a model that says nothing of itself but what its head is. Every question has an answer: transformers' default too.
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
_SUMMARIES = {"electra": "dense", "bert": "summary", "xlnet": "summary"}


def holds_task(folder: Path) -> bool:
    """Whether a folder holds the network of a task: a fine-tuning, or a Hugging Face model with the head of one."""
    if is_finetuned(folder):
        return True
    if not (folder / CONFIG_NAME).is_file():
        return False
    try:
        config = read_huggingface_config(folder, ENCODER_TYPES)
    except CheckpointError:  # whoever reads it for something else says what is wrong
        return False
    return _kind(config) is not None or TASK_HEAD in read_mark(config)


def load_task_model(folder: Path, seed: int | None = None) -> FineTuned:
    """The network of a task.

    Args:
        folder: what `discern finetune` or `discern export` wrote, or a Hugging Face ELECTRA, BERT or XLNet for sequence
            classification, token classification or question answering.
        seed: of a fine-tuning, whose weights; None: those of the best.

    Raises:
        ConfigError: that seed was not trained, or the folder is no fine-tuning and has no seeds.
        DataError: the folder holds no network of a task, or no tokenizer that fits.
        CheckpointError: its weights are missing or damaged.
    """
    if is_finetuned(folder) or not (folder / CONFIG_NAME).is_file():
        return load_finetuned(folder, seed)
    if seed is not None:
        raise ConfigError(f"{folder} is a Hugging Face model, which has the weights of one seed", hint="leave out --seed")
    config = read_huggingface_config(folder, ENCODER_TYPES)
    mark, kind = read_mark(config), _kind(config)
    if kind is None and TASK_HEAD not in mark:
        named = ", ".join(config.get("architectures") or ()) or "nothing"
        raise DataError(
            f"{folder} has no task head (config.json names {named})",
            hint=f"fine-tune it first: discern finetune {folder} --train FILE --out OUT",
        )
    encoder, tokenizer = family_in(folder).encoder_from(folder), tokenizer_in(folder)
    check_rows(tokenizer, encoder.embeddings.vocab_size, folder)
    try:
        record = _record(folder, config, mark, encoder)
        tasks = {name: task_of(name, each) for name, each in record["tasks"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: its task settings cannot be read ({problem!r:.120})",
            hint="export or download the model again",
        ) from problem
    objective = SupervisedObjective(encoder, tasks, frame=record["frame"])
    _fill(objective.heads[next(iter(tasks))], folder, config)
    return FineTuned(folder, objective.eval(), tokenizer, mark.get("seed", 0), record)


def task_mark(loaded: FineTuned, task: str) -> dict[str, Any]:
    """What config.json of an export says for `load_task_model`: the task, without paths."""
    record = loaded.record
    of_task = {key: value for key, value in record["tasks"][task].items() if key != "files"}
    return {
        "version": __version__,
        "task": task,
        "seed": loaded.seed,
        "tokenizer_fingerprint": fingerprint(loaded.tokenizer),
        _RECORD: {"format": FORMAT, "frame": loaded.frame, "tasks": {task: of_task}},
    }


def _kind(config: Mapping[str, Any]) -> str | None:
    """What the head of a Hugging Face model is for; None: it has none, or another."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    return next((kind for ending, kind in _ENDINGS.items() if isinstance(name, str) and name.endswith(ending)), None)


def _record(folder: Path, config: Mapping[str, Any], mark: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """The task as finetuned.json would have it: what the export says, or else what the head tells."""
    said = mark.get(_RECORD)
    kind = _kind(config)
    if isinstance(said, dict):
        if said.get("format") != FORMAT:
            raise DataError(f"{folder}: the export has format {said.get('format')}; this version of discern reads {FORMAT}")
        record = {**said, "tasks": {name: _as_stored(each, config, kind) for name, each in said["tasks"].items()}}
    else:
        assert kind is not None  # a model of somebody else's has no head beside
        record = {"frame": _frame(config), "tasks": {_NAME: _told_by_head(folder, config, kind, encoder)}}
    return {"model": str(folder), "files": {}, **record}


def _as_stored(task: dict[str, Any], config: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """The record of a task whose head has been written in transformers' form: the unit of a score is in the weights, and
    ELECTRA's classifier has two layers."""
    if kind != "classification":
        return task
    head = _head_of(config)
    return {**task, "labels": {**task["labels"], "scale": 1.0, "shift": 0.0}, "config": {**task["config"], "head": head}}


def _head_of(config: Mapping[str, Any]) -> str:
    family = config["model_type"]
    return "linear" if family == "xlnet" and not config.get("summary_use_proj", True) else _SUMMARIES[family]


def _frame(config: Mapping[str, Any]) -> FrameName:
    return "cls-last" if config["model_type"] == "xlnet" else "cls-first"


def _told_by_head(folder: Path, config: Mapping[str, Any], kind: str, encoder: Encoder) -> dict[str, Any]:
    """The record of a task of which nothing is known but the head."""
    names = _label_names(folder, config)
    labels: dict[str, Any] = {"names": list(names), "kind": {"tagging": "tags", "span": "spans"}.get(kind, "single")}
    settings: dict[str, Any] = {"sequence_length": read_max_length(folder, encoder.config.max_positions)}
    if kind == "classification":
        problem = config.get("problem_type") or ("regression" if len(names) == 1 else "single_label_classification")
        if problem not in _PROBLEMS:
            raise CheckpointError(f"{folder / CONFIG_NAME}: unknown problem_type {problem!r}", hint="export the model again")
        labels["kind"] = _PROBLEMS[problem]
        settings["head"] = _head_of(config)
    elif kind == "tagging":
        labels["scheme"] = "iob2" if (scheme := detect_scheme([names])) == "iob1" else scheme
    else:
        settings["head"] = "span"
    if labels["kind"] in ("number", "spans"):
        labels["names"] = []
    family: Any = families.load(_FAMILIES[kind])
    built: TaskConfig = family.Config(**settings)
    known = {"family": _FAMILIES[kind], "metrics": list(_METRICS[kind]), "labels": labels}
    return {**known, "config": built.model_dump(mode="json"), "source": {}}


def _label_names(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The label of each output, in order; LABEL_0 and so on where config.json has no names, as in transformers."""
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
    """Give a head the weights in a folder.

    Raises:
        CheckpointError: they are missing, damaged, or of another shape.
    """
    parameters = dict(head.named_parameters())
    kind = _kind(config)
    if kind is None:
        with opened(folder, HEAD_NAME) as weights:
            present = set(weights.keys())
            tensors = {name: weights.get_tensor(name) for name in parameters if name in present}
        _copy(parameters, tensors, folder / HEAD_NAME)
        return
    layers = _CLASSIFIERS[config["model_type"]] if kind == "classification" else _LAYERS[kind]
    with stored_weights(folder) as stored:
        found = {ours: _read(stored, layers, ours) for ours in parameters}
        _copy(parameters, {ours: tensor for ours, tensor in found.items() if tensor is not None}, stored.path)


def _read(stored: Stored, layers: Mapping[str, str], ours: str) -> Tensor | None:
    layer, _, which = ours.rpartition(".")
    theirs = f"{layers[layer]}.{which}"
    return stored.read(theirs) if theirs in stored.tensors else None


def _copy(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], path: Path) -> None:
    for name, parameter in parameters.items():
        if name not in tensors:
            raise CheckpointError(f"{path} has no '{name}' of the head", hint="export or download the model again")
        check_shape(name, tensors[name].shape, parameter, path)
        parameter.copy_(tensors[name])
