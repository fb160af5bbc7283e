"""Predictions of a fine-tuned network: the forward pass alone, in batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from discern.corruption.randomness import Randomness
from discern.progress import Progress
from discern.tasks.base import Outputs
from discern.tasks.features import Features, TaskRowsInOrder
from discern.tasks.supervised import SupervisedObjective
from discern.training.precision import autocast

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
