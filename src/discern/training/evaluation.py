"""Held-out metrics of an objective's networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from discern.corruption.randomness import Randomness, key_of
from discern.data.batching.stream import Integers
from discern.models.unpadding import attention_path, with_spans
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.tasks.base import Outputs
from discern.tasks.features import Features, TaskRowsInOrder
from discern.tasks.supervised import SupervisedObjective
from discern.training.distributed import Ranks
from discern.training.precision import autocast
from discern.types import CorruptedBatch, StepOutput, TokenBatch

# The same corruption for every run and every step, so that metrics differ only because the networks do.
EVALUATION_SEED = key_of("evaluation")


@runtime_checkable
class HeldoutRows(Protocol):
    """Rows to evaluate on, by their numbers."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the split."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows with these numbers."""


@torch.no_grad()
def evaluate(
    objective: Objective,
    stream: HeldoutRows,
    ranks: Ranks,
    *,
    sequences: int = 0,
    batch_size: int = 32,
    precision: str = "float32",
    progress: Progress | None = None,
    observer: Callable[[StepOutput, CorruptedBatch], None] | None = None,
) -> dict[str, float]:
    """The objective's metrics over held-out rows, dropout off.

    The rows are divided among the ranks; the metrics are those of all ranks, and do not depend on the batch size.

    Args:
        stream: held-out rows in their own order.
        sequences: number of rows, evenly spread over the split; 0: all.
        observer: called with the output and the rows of each batch of this rank.
    """
    count = min(sequences, stream.num_rows) if sequences else stream.num_rows
    chosen = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))[ranks.rank :: ranks.world_size]
    evaluator = objective.evaluator()
    was_training = objective.training
    objective.eval()
    path = attention_path(objective, ranks.device, precision)
    for start in range(0, len(chosen), batch_size):
        rows = chosen[start : start + batch_size]
        batch = stream.batch(rows, rows)
        if path is not None and path.name == "varlen":
            batch = with_spans(batch)
        randomness = Randomness(EVALUATION_SEED, 0, batch.example_index)
        corrupted = objective.corrupt(batch, randomness).to(ranks.device)
        with autocast(precision, ranks.device):
            output = objective(corrupted, randomness.to(ranks.device))
        evaluator.update(output, corrupted)
        if observer is not None:
            observer(output, corrupted)
        if progress is not None:
            progress.advance(len(rows))
    objective.train(was_training)
    first, *others = ranks.gather(evaluator)
    for other in others:
        first.merge(other)
    metrics: dict[str, float] = first.compute()
    return metrics


_ROWS, _SHOWN_TOKENS = 3, 64


class ExampleRows:
    """Keeps the first rows of an evaluation. Every evaluation has the same rows, so they can be compared.

    Attributes:
        rows: for each row, its `original` and its `corrupted` ids, and the `probability` that each was replaced; empty if the
            objective has no discriminator.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, list[Any]]] = []

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        """Keep rows of this batch, if it is the first."""
        seen = output.observations
        if self.rows or not seen.keys() >= {"discriminator_logits", "corrupted_ids"}:
            return
        for row, real in enumerate(batch.tokens.attention_mask[:_ROWS]):
            positions = real.nonzero().squeeze(1)[:_SHOWN_TOKENS]
            probabilities = seen["discriminator_logits"][row, positions].float().sigmoid().tolist()
            self.rows.append(
                {
                    "original": batch.tokens.input_ids[row, positions].tolist(),
                    "corrupted": seen["corrupted_ids"][row, positions].tolist(),
                    "probability": [round(value, 3) for value in probabilities],
                }
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
        with autocast(precision, device):
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
