"""Supervised training as an objective: one encoder, a head for each task, through the same loop as pre-training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from discern.corruption.randomness import Randomness, key_of
from discern.errors import NumericsError
from discern.model.encoder import Encoder
from discern.model.network import Network
from discern.objectives.base import Evaluator, Objective
from discern.tasks.base import Outputs, Task
from discern.tasks.features import Features, TaskBatch, TaskRows
from discern.tasks.frames import FRAMES, FrameName
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch


@dataclass(frozen=True, eq=False)
class Split:
    """Examples with their rows."""

    examples: tuple[Any, ...]
    features: Features


class SupervisedObjective(Objective):
    """The loss of every task on its rows of a batch.

    Args:
        encoder: with its weights; it is trained with the heads.
        tasks: by name.
        dropout: before the heads.
        reduction: 'mean': the mean over the items of each task (rows, or words for tags), weighted by the task's share of the
            step's rows, so that no row counts more than another; 'sum': over the batch, as the released code does. With
            gradients clipped to norm 1 the two train differently.
        sequences_per_step: of the training, which a sum is taken over.
        heldout: labelled splits that evaluation judges by, of some tasks or none.
        frame: how the rows are laid before the encoder.
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
        self.heads = nn.ModuleDict({name: task.head(encoder.config.hidden_size, dropout) for name, task in tasks.items()})
        self.heldout = dict(heldout or {})
        self._frame = FRAMES[frame]
        self._sums = reduction == "sum"
        self._sequences = sequences_per_step

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the heads, Glorot uniform with biases 0; the encoder keeps its weights."""
        generator = torch.Generator().manual_seed(key_of(seed, "heads"))
        for part in self.heads.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight, generator=generator)
                nn.init.zeros_(part.bias)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        """The batch as it is: nothing is corrupted."""
        nowhere = torch.zeros_like(batch.attention_mask)
        return CorruptedBatch(batch, batch.input_ids, nowhere, 0, int(batch.attention_mask.sum()))

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        groups = cast(TaskBatch, batch.tokens).groups
        if self._sums:
            return {group.task: batch.tokens.size for group in groups}
        return {group.task: self.tasks[group.task].items(group) for group in groups}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = cast(TaskBatch, batch.tokens)
        hidden = self._frame.states(self.encoder, tokens)
        terms: dict[str, LossTerm] = {}
        observations: dict[str, Tensor] = {}
        for group in tokens.groups:
            whole = len(group.rows) == tokens.size
            rows = tokens if whole else _chosen(tokens, group)
            loss, said = self.heads[group.task](hidden if whole else hidden[group.rows], rows, group)
            if loss is None:
                loss = hidden.new_zeros(())
            # The count is of items; a sum is the mean over the sequences of a step times their number. Without its share, a
            # task with one row in a step would weigh as much there as one with all the others.
            count = tokens.size if self._sums else self.tasks[group.task].items(group)
            terms[group.task] = LossTerm(loss, count, float(self._sequences) if self._sums else group.share)
            observations |= {f"{group.task}/{name}": value for name, value in said.items()}
        return StepOutput(terms, observations)

    def networks(self) -> dict[str, Network]:
        return {name: Network(self.encoder, self.heads[name]) for name in self.tasks}

    def evaluator(self) -> SupervisedEvaluator:
        return SupervisedEvaluator(self.tasks, self.heldout)

    def initial_loss(self) -> float:
        """ln C of a task that tells C classes apart; of several tasks the mean, as if each had as many rows."""
        classes = [len(task.labels.names) for task in self.tasks.values() if task.labels.kind in ("single", "tags")]
        return sum(map(math.log, classes)) / len(self.tasks)


class SupervisedEvaluator(Evaluator):
    """Gathers what the heads say of every row of a split, and judges it as a whole.

    Gives the loss of each task and its metrics; with several tasks their names come first ("rte_accuracy"), and
    `mean_headline` is the mean of their first metrics, `mean_loss` that of their losses.
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
                said = {
                    name.removeprefix(prefix): value for name, value in output.observations.items() if name.startswith(prefix)
                }
                rows = self._tasks[group.task].rows_of(_chosen(tokens, group), said)
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
        """What was said of a task's rows, in their order."""
        return [said for _, said in sorted(self.outputs[task].items())]

    def loss(self, task: str) -> float:
        """Mean over the items of a task, in nats; 0 without targets."""
        return self._losses[task] / max(self._items[task], 1)

    def compute(self) -> dict[str, float]:
        """The figures by name.

        Raises:
            NumericsError: what the network says is not finite.
        """
        figures: dict[str, float] = {}
        headlines = []
        for name, split in self._splits.items():
            task, prefix = self._tasks[name], f"{name}_" if len(self._splits) > 1 else ""
            refuse_non_finite(name, self.ordered(name), self.loss(name))
            predictions = task.predict(split.examples, split.features, self.ordered(name))
            scores = task.score(split.examples, predictions).values
            headlines.append(scores[task.metrics[0]])
            figures[f"{prefix}loss"] = self.loss(name)
            figures |= {f"{prefix}{metric}": value for metric, value in scores.items()}
        if len(headlines) < 2:
            return figures
        losses = [self.loss(name) for name in self._splits]
        return figures | {"mean_headline": sum(headlines) / len(headlines), "mean_loss": sum(losses) / len(losses)}


def refuse_non_finite(task: str, outputs: Outputs, loss: float) -> None:
    """What a network says after its weights overflowed is no prediction.

    Raises:
        NumericsError: an output or the loss is not finite.
    """
    if not math.isfinite(loss) or not all(np.isfinite(array).all() for said in outputs for array in said.values()):
        raise NumericsError(
            f"{task}: what the network says is not finite, its loss {loss:.4g}",
            hint="try a lower optimizer.learning_rate or a longer warm-up",
        )


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
