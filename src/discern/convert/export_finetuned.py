"""Write a fine-tuned model as a folder that transformers loads, with the same probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from discern.artifacts.export_folder import CARD_NAME, check_target, publish
from discern.artifacts.finetuned import (
    RESULTS_FILE,
    SCORES_FILE,
    TOKENIZER_FILE,
    read_results,
    read_scores,
    seed_folder,
)
from discern.artifacts.model_folder import TEXT_LICENSE
from discern.artifacts.opening import open_model
from discern.artifacts.task_model import TASK_HEAD, TaskModel, task_mark
from discern.convert.cards.finetuned import TaskFacts, task_card
from discern.convert.cards.model import tokenizer_kind
from discern.convert.export import check_finite, folder_size
from discern.convert.forms import in_form
from discern.convert.onnx_graph import check_graph, check_head
from discern.convert.parity import Parity
from discern.convert.serving import Serving
from discern.data.tokenizer import special_tokens
from discern.errors import ConfigError, did_you_mean
from discern.interop.config_json import MARK
from discern.interop.families import family_of, finetuned_to_huggingface
from discern.interop.finetuned import HeadWeights, Kind, OwnHead, Problem, Summary
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import HEAD_NAME
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, to_huggingface_tokenizer
from discern.models.heads import PredictionLayers
from discern.objectives.base import Vocabulary
from discern.progress import Progress
from discern.storage.checksums import understood, write_recorded
from discern.storage.files import write_file
from discern.tasks.answer_heads import SpanHead
from discern.tasks.base import Task
from discern.tasks.classification import ClassificationHead, Pooling
from discern.tasks.contrastive import ContrastiveConfig
from discern.tasks.frames import FrameName
from discern.tasks.prediction_input import known_definition
from discern.tasks.tagging import TaggingHead

# The settings that the card shows: those that determine the weights. Their length is in the scores, as it was.
_RECIPE = ("finetune.", "task.", "optimizer.")
_LENGTH = {"finetune.epochs", "finetune.min_steps"}
_TRAINING = {"train.max_steps", "train.sequences_per_step", "train.precision"}
_KINDS: dict[str, Kind] = {"tags": "tagging", "spans": "span", "vectors": "vectors"}
_PROBLEMS: dict[str, Problem] = {"multi": "multi", "number": "regression"}
_BIO = {"S": "B", "E": "I"}


@dataclass(frozen=True)
class ExportedTask:
    """What `export_task` wrote.

    Attributes:
        folder: the folder.
        task: name of the task.
        seed: seed of the weights.
        architecture: class of transformers that loads it.
        whole: whether that class includes the head; otherwise the head is in a file of its own, for discern.
        parameters: number of parameters.
        num_bytes: size of the whole folder.
        parity: report of the ONNX file; None: there is none.
        gives_vectors: whether it was trained for text embeddings, and is a model of sentence-transformers.
    """

    folder: Path
    task: str
    seed: int
    architecture: str
    whole: bool
    parameters: int
    num_bytes: int
    parity: Parity | None = None
    gives_vectors: bool = False


def export_task(
    source: Path,
    *,
    out: Path,
    task: str | None = None,
    seed: int | None = None,
    precision: str = "float32",
    serving: Serving = Serving(),
    progress: Progress,
) -> ExportedTask:
    """Write the encoder and the head of a task, with tokenizer and model card.

    Args:
        source: folder that `discern finetune` wrote.
        out: new or empty folder, or an earlier export, which is replaced as a whole.
        task: name of the task; None: the only one.
        seed: seed whose weights are exported; None: the best.
        precision: type that the weights are stored in: 'float32', 'bfloat16' or 'float16'.
        serving: further forms of the model, for those who serve it.

    Raises:
        ConfigError: there is no such task or precision, or transformers has no such head or encoder.
        DataError: the folder is not a fine-tuned model, or `out` holds something else or cannot be written.
        CheckpointError: the weights are missing or damaged.
        NumericsError: a weight is not finite, or too large for the precision; or eight bits lose more than is allowed.
    """
    check_target(out, source)
    serving.check()
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown precision '{precision}'", hint=did_you_mean(precision, PRECISIONS))
    progress.start("exporting", 3, "parts")
    loaded = open_model(source, warn=progress.note).task_model(seed)
    chosen = loaded.task(task)
    head = head_weights(chosen, loaded.objective.heads[chosen.name], loaded.frame)
    vocabulary = Vocabulary(loaded.record["vocab_size"], special_tokens(loaded.tokenizer))
    model = finetuned_to_huggingface(loaded.objective.encoder, head, vocabulary, precision)
    check_finite(model, source)
    if isinstance(chosen.config, ContrastiveConfig):
        serving = serving.of_vectors(chosen.config.pooling, chosen.config.sequence_length)
    if serving.onnx:
        check_graph(model.config["model_type"])
        if not serving.sentence_transformers:
            check_head(loaded.objective.heads[chosen.name])
    # No key `objective`: its presence marks a pre-trained model.
    own_head = {TASK_HEAD: HEAD_NAME} if model.head else {TASK_HEAD: ""} if head.kind == "vectors" else {}
    model.config[MARK] = task_mark(loaded, chosen.name) | own_head
    if serving.form is not None:
        model = in_form(model, serving.form)
    progress.advance(1)
    has_segments = family_of(loaded.objective.encoder).has_segments
    tokenizer = to_huggingface_tokenizer(
        source / TOKENIZER_FILE, chosen.config.sequence_length, head.frame, has_segments=has_segments
    )
    hint = "remove it for a card without scores, or run the same `discern finetune` command, which writes it again"
    with understood(source / RESULTS_FILE, hint=hint):
        card = task_card(_facts(loaded, chosen, model, head, out.resolve().name))
    progress.advance(1)

    def write(folder: Path) -> None:
        model.write(folder)
        write_recorded(folder, {TOKENIZER_NAME: tokenizer.tokenizer, TOKENIZER_CONFIG_NAME: tokenizer.config})
        write_file(folder / CARD_NAME, card.encode())
        parity.append(serving.add(folder, progress))

    parity: list[Parity | None] = []
    publish(out, write)
    progress.advance(1)
    progress.finish()
    loads_as = model.config["architectures"][0]
    whole, size, vectors = not model.head, folder_size(out), chosen.labels.kind == "vectors"
    return ExportedTask(out, chosen.name, loaded.seed, loads_as, whole, model.num_parameters, size, parity[-1], vectors)


def head_weights(task: Task[Any], head: nn.Module, frame: FrameName = "cls-first") -> HeadWeights | OwnHead:
    """Return the weights of a head, in the form of transformers if it has a class for the head.

    Args:
        frame: input framing.
    """
    output, labels = getattr(head, "output", None), task.labels
    kind: Kind = _KINDS.get(labels.kind, "classification")
    names = bio_labels(labels.names) if labels.scheme != "none" else labels.names if kind != "span" else ()
    problem: Problem = _PROBLEMS.get(labels.kind, "single")
    pooling: Pooling = head.pooling if isinstance(head, ClassificationHead) else "cls"
    # Exact types, as a subclass may compute something else. transformers has neither ELECTRA's joint head, in which the end of
    # an answer depends on its start, nor a head that compares two texts.
    known = type(head) in (ClassificationHead, TaggingHead, SpanHead)
    if not known or not isinstance(output, nn.Linear) or pooling == "pair":
        return OwnHead(kind, head.state_dict(), names, problem, frame)
    return HeadWeights(
        kind, output.weight, output.bias, names, problem, labels.scale, labels.shift, _summary(head), frame, pooling
    )


def _summary(head: nn.Module) -> Summary | None:
    """The layers before the last one of a head, if it has any."""
    inner = getattr(head, "inner", None)
    if isinstance(inner, PredictionLayers):
        return Summary(inner.dense.weight, inner.dense.bias, "gelu", inner.norm.weight, inner.norm.bias)
    if isinstance(head, ClassificationHead) and head.summary is not None and head.activation is not None:
        return Summary(head.summary.weight, head.summary.bias, head.activation)
    return None


def bio_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Convert BIOES tags to BIO, which the pipelines of transformers read: S becomes B, and E becomes I."""
    return tuple(_BIO.get(prefix, prefix) + rest for prefix, rest in ((name[:1], name[1:]) for name in names))


def _facts(loaded: TaskModel, task: Task[Any], model: HuggingFaceModel, head: HeadWeights | OwnHead, title: str) -> TaskFacts:
    """Collect the facts for the card. They contain no paths and no host names."""
    record, of_task = loaded.record, loaded.record["tasks"][task.name]
    seed = seed_folder(loaded.folder, loaded.seed)
    results = read_results(loaded.folder) if (loaded.folder / RESULTS_FILE).is_file() else {}
    scores = read_scores(seed) if (seed / SCORES_FILE).is_file() else {}
    own = results.get("tasks", {}).get(task.name, results if results.get("task") == task.name else {})
    own_keys = (*_RECIPE, f"tasks.{task.name}.")
    settings = {
        key: value
        for key, value in results.get("settings", {}).items()
        if (key.startswith(own_keys) and key not in _LENGTH) or key in _TRAINING
    }
    definition = known_definition(task)
    pairs = len(definition.source.text_names()) > 1 if definition else bool((of_task["source"].get("columns") or {}).get("pair"))
    return TaskFacts(
        title=title,
        task=task.name if definition else "a custom labeled file",
        base=re.sub(r"\S*/", "", record["model"]),
        seed=loaded.seed,
        model=model,
        head=head,
        max_length=task.config.sequence_length,
        tokenizer=tokenizer_kind(loaded.tokenizer),
        pairs=(pairs or head.kind == "span") and head.kind != "vectors",
        results=own,
        seeds=results.get("seeds", [loaded.seed]),
        of_seed=(scores.get("tasks", {}).get(task.name) or {}).get(own.get("metric")),
        training=scores,
        settings=settings,
        versions=({"discern": record["discern"]} if "discern" in record else {}) | record.get("versions", {}),
        language=record.get("language"),
        text_license=record.get(TEXT_LICENSE),
    )
