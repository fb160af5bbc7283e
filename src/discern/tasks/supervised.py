"""Supervised training as an objective: one encoder and a head per task, trained by the loop of pre-training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from discern.corruption.randomness import Randomness, key_of
from discern.errors import ConfigError, NumericsError
from discern.models.base import Encoder, Network
from discern.models.config import HeadLayers
from discern.models.heads import PredictionLayers
from discern.models.initialization import truncated_normal
from discern.objectives.base import Evaluator, Objective
from discern.progress import Progress
from discern.tasks.base import Outputs, Task, TaskHead
from discern.tasks.features import Features, TaskBatch, TaskRows, TaskRowsInOrder
from discern.tasks.frames import FRAMES, FrameName
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their features."""

    examples: tuple[Any, ...]
    features: Features


def supervised(encoder: Encoder, tasks: Mapping[str, Task[Any]], **settings: Any) -> SupervisedObjective:
    """The objective that trains the tasks: that of their family if it has one of its own.

    Args:
        settings: the other arguments of `SupervisedObjective`.

    Raises:
        ConfigError: a task whose family has an objective of its own is not the only one.
    """
    own = {name: task.objective for name, task in tasks.items() if task.objective is not None}
    if own and len(tasks) > 1:
        raise ConfigError(
            f"task '{next(iter(own))}' has a loss over whole batches, so it can only be trained alone, but there are "
            f"{len(tasks)} tasks",
            hint="fine-tune on it in a separate run",
        )
    module, _, name = next(iter(own.values()), f"{__name__}:SupervisedObjective").partition(":")
    kind: type[SupervisedObjective] = getattr(import_module(module), name)
    return kind(encoder, tasks, **settings)


class SupervisedObjective(Objective):
    """The loss of each task on its rows of a batch.

    Args:
        encoder: encoder with its weights, which are trained with the heads.
        tasks: tasks by name.
        dropout: dropout before the heads.
        reduction: 'mean': the mean over the items of each task (rows, or words for tags), weighted by the task's share of the
            rows of the step, so that all rows count the same; 'sum': the sum over the batch, as in the released code. With
            gradients clipped to norm 1 the two train differently.
        sequences_per_step: rows per training step, which a sum is taken over.
        heldout: labeled splits for evaluation, of some tasks or none.
        frame: input framing.
    """

    def __init__(
        self,
        encoder: Encoder,
        tasks: Mapping[str, Task[Any]],
        *,
        dropout: float = 0.1,
        reduction: Literal["mean", "sum"] = "mean",
        sequences_per_step: int = 32,
        heldout: Mapping[str, Split] | None = None,
        frame: FrameName = "cls-first",
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tasks = dict(tasks)
        # A generator may read embeddings of another width than that of its own settings.
        sizes = encoder.config.model_copy(update={"embedding_size": encoder.embeddings.embedding_size})
        self.heads = nn.ModuleDict({name: task.head(sizes, dropout) for name, task in tasks.items()})
        self.heldout = dict(heldout or {})
        self._frame = FRAMES[frame]
        self._sums = reduction == "sum"
        self._sequences = sequences_per_step

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize the heads: Glorot uniform with zero biases, or as the encoder prescribes. The encoder is unchanged."""
        generator = torch.Generator().manual_seed(key_of(seed, "heads"))
        stds = _stds(self.heads, self.encoder.config.head_layers())
        for part in self.heads.modules():
            if isinstance(part, nn.Linear):
                if id(part) in stds:
                    truncated_normal(part.weight, generator, stds[id(part)])
                else:
                    nn.init.xavier_uniform_(part.weight, generator=generator)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """The batch unchanged, as supervised training corrupts nothing. Its items are counted while it is on the host."""
        nowhere = torch.zeros_like(batch.attention_mask)
        groups = cast(TaskBatch, batch).groups
        counted = tuple(replace(group, count=self.tasks[group.task].items(group)) for group in groups)
        batch = replace(cast(TaskBatch, batch), groups=counted)
        return CorruptedBatch(batch, batch.input_ids, nowhere, 0, int(batch.attention_mask.sum()))

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        groups = cast(TaskBatch, batch.tokens).groups
        if self._sums:
            return {group.task: batch.tokens.size for group in groups}
        return {group.task: self._items(group) for group in groups}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = cast(TaskBatch, batch.tokens)
        hidden = self._frame.states(self.encoder, tokens)
        terms: dict[str, LossTerm] = {}
        observations: dict[str, Tensor] = {}
        for group in tokens.groups:
            whole = len(group.rows) == tokens.size
            rows = tokens if whole else _chosen(tokens, group)
            head = cast(TaskHead, self.heads[group.task])
            states = head.inputs(hidden if whole else hidden[group.rows], self.encoder, rows.input_ids)
            loss, outputs = head(states, rows, group)
            if loss is None:
                loss = hidden.new_zeros(())
            # The count is the number of items; a sum is the mean over the sequences of a step times their number. Without its
            # share, a task with one row in a step would weigh as much as a task with all the others.
            count = tokens.size if self._sums else self._items(group)
            terms[group.task] = LossTerm(loss, count, float(self._sequences) if self._sums else group.share)
            observations |= {f"{group.task}/{name}": value for name, value in outputs.items()}
        return StepOutput(terms, observations)

    def _items(self, group: TaskRows) -> int:
        return self.tasks[group.task].items(group) if group.count is None else group.count

    def networks(self) -> dict[str, Network]:
        return {name: Network(self.encoder, self.heads[name]) for name in self.tasks}

    def evaluator(self) -> SupervisedEvaluator:
        return SupervisedEvaluator(self.tasks, self.heldout)

    def initial_loss(self) -> float:
        """ln C for a task with C classes; for several tasks the mean, as if they had equally many rows."""
        classes = [len(task.labels.names) for task in self.tasks.values() if task.labels.kind in ("single", "tags")]
        return sum(map(math.log, classes)) / len(self.tasks)


class SupervisedEvaluator(Evaluator):
    """Collects the outputs for all rows of a split, and computes the metrics over the whole of it.

    The metrics of several tasks are prefixed by their names ("rte_accuracy"); `mean_headline` is then the mean of their
    headline metrics, and `mean_loss` the mean of their losses.
    """

    def __init__(self, tasks: Mapping[str, Task[Any]], splits: Mapping[str, Split]) -> None:
        self._tasks = tasks
        self._splits = splits
        self.outputs: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in tasks}
        self._losses = dict.fromkeys(tasks, 0.0)
        self._items = dict.fromkeys(tasks, 0)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        tokens = cast(TaskBatch, batch.tokens)
        for group in tokens.groups:
            if len(group.rows):
                prefix = f"{group.task}/"
                outputs = {
                    name.removeprefix(prefix): value for name, value in output.observations.items() if name.startswith(prefix)
                }
                rows = self._tasks[group.task].rows_of(_chosen(tokens, group), outputs)
                self.outputs[group.task] |= dict(zip(group.features.tolist(), rows, strict=True))
                self._losses[group.task] += float(output.terms[group.task].total.detach())
                self._items[group.task] += self._tasks[group.task].items(group) if group.targets else 0

    def merge(self, other: Evaluator) -> None:
        other = cast(SupervisedEvaluator, other)
        for name in self._tasks:
            self.outputs[name] |= other.outputs[name]
            self._losses[name] += other._losses[name]
            self._items[name] += other._items[name]

    def ordered(self, task: str) -> Outputs:
        """Outputs for the rows of a task, in their order."""
        return [outputs for _, outputs in sorted(self.outputs[task].items())]

    def loss(self, task: str) -> float:
        """Mean loss over the items of a task, in nats; 0 without targets."""
        return self._losses[task] / max(self._items[task], 1)

    def compute(self) -> dict[str, float]:
        """The metrics by name.

        Raises:
            NumericsError: the outputs of the network are not finite.
        """
        metrics: dict[str, float] = {}
        headlines = []
        for name, split in self._splits.items():
            task, prefix = self._tasks[name], f"{name}_" if len(self._splits) > 1 else ""
            refuse_non_finite(name, self.ordered(name), self.loss(name))
            predictions = task.predict(split.examples, split.features, self.ordered(name))
            scores = task.score(split.examples, predictions).values
            headlines.append(scores[task.metrics[0]])
            metrics[f"{prefix}loss"] = self.loss(name)
            metrics |= {f"{prefix}{metric}": value for metric, value in scores.items()}
        if len(headlines) < 2:
            return metrics
        losses = [self.loss(name) for name in self._splits]
        return metrics | {"mean_headline": sum(headlines) / len(headlines), "mean_loss": sum(losses) / len(losses)}


def are_finite(outputs: Outputs) -> bool:
    """Whether all outputs are finite numbers."""
    return all(np.isfinite(array).all() for row in outputs for array in row.values())


def refuse_non_finite(
    task: str, outputs: Outputs, loss: float, hint: str = "try a lower optimizer.learning_rate or a longer warm-up"
) -> None:
    """Refuse the outputs of a network whose weights have overflowed.

    Raises:
        NumericsError: an output or the loss is not finite.
    """
    if not math.isfinite(loss) or not are_finite(outputs):
        raise NumericsError(f"{task}: the outputs of the network are not finite (loss {loss:.4g})", hint=hint)


def _stds(heads: nn.Module, layers: HeadLayers) -> dict[int, float]:
    """Standard deviations of the initial weights of prediction heads, by the identity of the layer; none if Glorot uniform."""
    found: dict[int, float] = {}
    for head in heads.modules():
        inner, output = getattr(head, "inner", None), getattr(head, "output", None)
        if isinstance(inner, PredictionLayers):
            stds = {id(inner.dense): layers.dense_std, id(output): layers.output_std}
            found |= {layer: std for layer, std in stds.items() if std is not None}
    return found


def _chosen(tokens: TaskBatch, group: TaskRows) -> TokenBatch:
    """The rows of one task, without targets."""
    index = group.rows
    return TokenBatch(
        input_ids=tokens.input_ids[index],
        attention_mask=tokens.attention_mask[index],
        special_tokens_mask=tokens.special_tokens_mask[index],
        token_type_ids=tokens.token_type_ids[index],
        position_ids=tokens.position_ids[index],
        document_ids=None,
        word_starts=None,
        example_index=tokens.example_index[index],
        slot=tokens.slot[index],
        full=tokens.full,
    )


# Tokens per batch: large enough for the matrix products, small enough for the caches.
_TOKENS = 4096


@torch.inference_mode()
def outputs_of(
    objective: SupervisedObjective,
    task: str,
    features: Features,
    *,
    precision: str = "float32",
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> tuple[Outputs, float]:
    """The outputs of a task's head for each row, and the mean loss in nats if the rows have targets (0 otherwise).

    Up to rounding, the results do not depend on how rows are batched.
    """
    device = device or next(objective.parameters()).device
    rows, evaluator = TaskRowsInOrder({task: features}), objective.evaluator()
    was_training = objective.training
    objective.eval()
    for chosen in _batches(features.input_ids.lengths):
        batch = objective.corrupt(rows.batch(chosen, chosen), Randomness(0, 0, torch.from_numpy(chosen))).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            output = objective(batch, Randomness(0, 0, batch.tokens.example_index))
        evaluator.update(output, batch)
        if progress is not None:
            progress.advance(len(chosen))
    objective.train(was_training)
    return evaluator.ordered(task), evaluator.loss(task)


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of the rows in order of length, in batches of about `_TOKENS` tokens including padding."""
    ordered = np.sort(lengths, kind="stable")
    start = 0
    while start < len(ordered):
        # The last row of a batch is its longest.
        stop = start + 1
        while stop < len(ordered) and (stop + 1 - start) * ordered[stop] <= _TOKENS:
            stop += 1
        yield np.arange(start, stop)
        start = stop
