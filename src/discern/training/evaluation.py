"""Held-out metrics of an objective's networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from discern.corruption.randomness import Randomness, key_of
from discern.data.batching.mixture import HeldoutMixture
from discern.data.batching.stream import RowStream
from discern.models.attention import span_obstacle
from discern.objectives.base import Objective
from discern.progress import Progress
from discern.training.distributed import Ranks
from discern.training.execution import autocast
from discern.training.metrics import BY_SOURCE, add_held_out
from discern.types import CorruptedBatch, StepOutput, with_spans

# The same corruption for every run and every step, so that metrics differ only because the networks do.
EVALUATION_SEED = key_of("evaluation")


@torch.no_grad()
def evaluate(
    objective: Objective,
    stream: RowStream,
    ranks: Ranks,
    *,
    sequences: int = 0,
    batch_size: int = 32,
    precision: str = "float32",
    progress: Progress | None = None,
    observer: Callable[[StepOutput, CorruptedBatch], None] | None = None,
) -> dict[str, Any]:
    """The objective's metrics over held-out rows, dropout off.

    The rows are divided among the ranks; the metrics are those of all ranks, and do not depend on the batch size. Those of a
    mixture are means of the metrics of its sources by their weights; those of each source are under `heldout_by_source`.

    Args:
        stream: held-out rows in their own order.
        sequences: number of rows, evenly spread over the split, or over that of each source; 0: all.
        observer: called with the output and the rows of each batch of this rank.
    """
    if isinstance(stream, HeldoutMixture):
        options: dict[str, Any] = {"sequences": sequences, "batch_size": batch_size, "precision": precision}
        options |= {"progress": progress, "observer": observer}
        by_source = {name: evaluate(objective, rows, ranks, **options) for name, rows in stream.sources.items()}
        named = {name: add_held_out({}, each) for name, each in by_source.items()}
        return {**stream.mean([*by_source.values()]), BY_SOURCE: named}
    count = min(sequences or stream.num_rows, stream.num_rows)
    chosen = np.unique(np.linspace(0, stream.num_rows - 1, count).astype(np.int64))[ranks.rank :: ranks.world_size]
    evaluator = objective.evaluator()
    was_training = objective.training
    objective.eval()
    spans = span_obstacle(objective, ranks.device, precision) is None
    for start in range(0, len(chosen), batch_size):
        rows = chosen[start : start + batch_size]
        batch = stream.batch(rows, rows)
        batch = with_spans(batch) if spans else batch
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
