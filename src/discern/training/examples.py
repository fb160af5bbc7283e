"""A few rows of each evaluation, with what the discriminator said about their tokens, for `discern watch`."""

from __future__ import annotations

from typing import Any

from discern.types import CorruptedBatch, StepOutput

_ROWS, _TOKENS = 3, 64


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
        real = batch.tokens.attention_mask
        logits = seen["discriminator_logits"]
        if logits.shape != real.shape:
            return
        for row in range(min(_ROWS, len(logits))):
            places = real[row].nonzero().squeeze(1)[:_TOKENS]
            self.rows.append(
                {
                    "original": batch.tokens.input_ids[row, places].tolist(),
                    "corrupted": seen["corrupted_ids"][row, places].tolist(),
                    "probability": [round(value, 3) for value in logits[row, places].float().sigmoid().tolist()],
                }
            )
