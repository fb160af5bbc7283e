"""A fine-tuned network as a folder that transformers loads, with the same probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from discern.artifacts.files import write_file
from discern.data.tokenizer import lowercases, special_tokens
from discern.errors import ConfigError, did_you_mean
from discern.interop.config_json import MARK
from discern.interop.families import finetuned_to_huggingface
from discern.interop.finetuned import HeadWeights, Kind, OwnHead, Problem, Summary
from discern.interop.folder import CARD_NAME, check_target, publish
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import HEAD_NAME
from discern.interop.task_card import TaskFacts, task_card
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, to_huggingface_tokenizer
from discern.objectives.base import Vocabulary
from discern.progress import Progress
from discern.records import understood
from discern.tasks.answer_heads import SpanHead
from discern.tasks.base import Task
from discern.tasks.classification import ClassificationHead
from discern.tasks.frames import FrameName
from discern.tasks.tagging import TaggingHead
from discern.workflows.export import check_finite
from discern.workflows.finetuned import (
    RESULTS_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    FineTuned,
    load_finetuned,
    read_results,
    read_scores,
    seed_folder,
)
from discern.workflows.predict import chosen_task
from discern.workflows.prediction_input import known_definition
from discern.workflows.runs import TEXT_LICENSE
from discern.workflows.task_models import TASK_HEAD, task_mark

# What the card shows of the settings: what decides the weights.
_RECIPE = ("finetune.", "task.", "tasks.", "optimizer.")
_TRAINING = {"train.max_steps", "train.sequences_per_step", "train.precision"}
_KINDS: dict[str, Kind] = {"tags": "tagging", "spans": "span"}
_PROBLEMS: dict[str, Problem] = {"multi": "multi", "number": "regression"}
_BIO = {"S": "B", "E": "I"}


@dataclass(frozen=True)
class TaskExportRequest:
    """What to export, and where to.

    Attributes:
        model: what `discern finetune` wrote.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        task: which, where there are several.
        seed: whose weights; None: those of the best.
        precision: type that the weights are stored in: 'float32', 'bfloat16' or 'float16'.
    """

    model: Path
    out: Path
    task: str | None = None
    seed: int | None = None
    precision: str = "float32"


@dataclass(frozen=True)
class ExportedTask:
    """What was written.

    Attributes:
        architecture: class of transformers that loads it.
        whole: whether that class holds the head too; otherwise it stands in a file beside, which discern reads.
        num_bytes: size of the whole folder.
    """

    folder: Path
    task: str
    seed: int
    architecture: str
    whole: bool
    parameters: int
    num_bytes: int


def export_task(request: TaskExportRequest, progress: Progress) -> ExportedTask:
    """Write the encoder and the head of a task, with tokenizer and model card.

    Raises:
        ConfigError: no such task or precision, or transformers has no such head or encoder.
        DataError: the folder holds no fine-tuning, or `out` holds something else or cannot be written.
        CheckpointError: the weights are missing or damaged.
        NumericsError: a weight is not finite, or too large for the precision.
    """
    check_target(request.out, request.model)
    if request.precision not in PRECISIONS:
        raise ConfigError(f"unknown precision '{request.precision}'", hint=did_you_mean(request.precision, PRECISIONS))
    progress.start("exporting", 3, "parts")
    loaded = load_finetuned(request.model, request.seed)
    task = chosen_task(loaded, request.task)
    head = head_weights(task, loaded.objective.heads[task.name], loaded.frame)
    vocabulary = Vocabulary(loaded.record["vocab_size"], special_tokens(loaded.tokenizer))
    model = finetuned_to_huggingface(loaded.objective.encoder, head, vocabulary, request.precision)
    check_finite(model, request.model)
    # No key `objective`: that is how discern tells the settings of a pre-training.
    model.config[MARK] = task_mark(loaded, task.name) | ({TASK_HEAD: HEAD_NAME} if model.head else {})
    progress.advance(1)
    tokenizer = to_huggingface_tokenizer(request.model / TOKENIZER_FILE, task.config.sequence_length, head.frame)
    hint = "remove it for a card without scores, or run the same `discern finetune` command, which writes it again"
    with understood(request.model / RESULTS_FILE, hint=hint):
        card = task_card(_facts(loaded, task, model, head, request.out.resolve().name))
    progress.advance(1)

    def write(folder: Path) -> None:
        model.write(folder)
        write_file(folder / TOKENIZER_NAME, tokenizer.tokenizer)
        write_file(folder / TOKENIZER_CONFIG_NAME, tokenizer.config)
        write_file(folder / CARD_NAME, card.encode())

    publish(request.out, write)
    progress.advance(1)
    progress.finish()
    size = sum(path.stat().st_size for path in request.out.rglob("*") if path.is_file())
    loads_as = model.config["architectures"][0]
    return ExportedTask(request.out, task.name, loaded.seed, loads_as, not model.head, model.num_parameters, size)


def head_weights(task: Task[Any], head: nn.Module, frame: FrameName = "cls-first") -> HeadWeights | OwnHead:
    """What a head computes, in the form of transformers where it has one.

    Args:
        frame: of the texts.
    """
    output, labels = getattr(head, "output", None), task.labels
    kind: Kind = _KINDS.get(labels.kind, "classification")
    names = bio_labels(labels.names) if labels.scheme != "none" else labels.names if kind != "span" else ()
    problem: Problem = _PROBLEMS.get(labels.kind, "single")
    # A subclass may compute something else. The end of an answer by ELECTRA's joint head depends on its start: transformers
    # has no such head.
    if type(head) not in (ClassificationHead, TaggingHead, SpanHead) or not isinstance(output, nn.Linear):
        return OwnHead(kind, head.state_dict(), names, problem, frame)
    summary = None
    if isinstance(head, ClassificationHead) and head.summary is not None and head.activation is not None:
        summary = Summary(head.summary.weight, head.summary.bias, head.activation)
    return HeadWeights(kind, output.weight, output.bias, names, problem, labels.scale, labels.shift, summary, frame)


def bio_labels(names: Sequence[str]) -> tuple[str, ...]:
    """The tags of BIOES as those of BIO, which is what the pipelines of transformers read: S begins a span, E continues it."""
    return tuple(_BIO.get(prefix, prefix) + rest for prefix, rest in ((name[:1], name[1:]) for name in names))


def _facts(loaded: FineTuned, task: Task[Any], model: HuggingFaceModel, head: HeadWeights | OwnHead, title: str) -> TaskFacts:
    """What is known of the model; no path, no name of a machine."""
    record, of_task = loaded.record, loaded.record["tasks"][task.name]
    seed = seed_folder(loaded.folder, loaded.seed)
    results = read_results(loaded.folder) if (loaded.folder / RESULTS_FILE).is_file() else {}
    scores = read_scores(seed) if (seed / SCORES_FILE).is_file() else {}
    own = results.get("tasks", {}).get(task.name, results if results.get("task") == task.name else {})
    settings = {
        key: value
        for key, value in results.get("settings", {}).items()
        if (key.startswith(_RECIPE) and (not key.startswith("tasks.") or key.startswith(f"tasks.{task.name}.")))
        or key in _TRAINING
    }
    kind = f"{type(loaded.tokenizer.model).__name__}, {'lower-cased' if lowercases(loaded.tokenizer) else 'cased'}"
    definition = known_definition(task)
    pairs = len(definition.source.text_names()) > 1 if definition else bool((of_task["source"].get("columns") or {}).get("pair"))
    return TaskFacts(
        title=title,
        task=task.name if definition else "a labelled file of one's own",
        base=re.sub(r"\S*/", "", record["model"]),
        seed=loaded.seed,
        model=model,
        head=head,
        max_length=task.config.sequence_length,
        tokenizer=kind,
        pairs=pairs or head.kind == "span",
        results=own,
        seeds=results.get("seeds", [loaded.seed]),
        of_seed=(scores.get("tasks", {}).get(task.name) or {}).get(own.get("metric")),
        settings=settings,
        versions=({"discern": record["discern"]} if "discern" in record else {}) | record.get("versions", {}),
        language=record.get("language"),
        text_license=record.get(TEXT_LICENSE),
    )
