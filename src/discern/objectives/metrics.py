"""Held-out figures of masked and replaced token prediction, exact whatever the batch size."""

from __future__ import annotations

from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from discern.objectives.base import Evaluator
from discern.types import CorruptedBatch, StepOutput


class MaskedTokenEvaluator(Evaluator):
    """Loss and accuracy of the original token at the masked positions.

    Args:
        prefix: of the observations it reads (`<prefix>_logits`) and the figures it gives (`<prefix>_loss`).
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._loss = 0.0
        self._correct = 0
        self._count = 0

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        term = output.terms[self._prefix]
        logits, targets = (output.observations[f"{self._prefix}_{name}"] for name in ("logits", "targets"))
        self._loss += float(term.total)
        self._correct += int((logits.argmax(-1) == targets).sum())
        self._count += term.count

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._loss += other._loss
        self._correct += other._correct
        self._count += other._count

    def compute(self) -> dict[str, float]:
        loss, accuracy = ratio(self._loss, self._count), ratio(self._correct, self._count)
        return {"loss": loss, f"{self._prefix}_loss": loss, f"{self._prefix}_accuracy": accuracy}


class ReplacedTokenEvaluator(Evaluator):
    """Figures of a generator and a discriminator.

    Precision and recall are of the class *replaced* at probability 1/2; the area under the ROC curve counts ties as one
    half and leaves padding out. 0/0 is 0.

    Differs: the released code counts padding into the AUC and averages the loss over sequences, not tokens.
    """

    def __init__(self, generator_weight: float, discriminator_weight: float) -> None:
        self._generator = MaskedTokenEvaluator("generator")
        self._weights = generator_weight, discriminator_weight
        self._sampled_correct = 0
        self._masked = 0
        self._loss = 0.0
        self._logits: list[NDArray[np.float32]] = []
        self._replaced: list[NDArray[np.bool_]] = []

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        seen = output.observations
        self._generator.update(output, batch)
        self._sampled_correct += int((seen["sampled_ids"] == seen["generator_targets"]).sum())
        self._masked += batch.num_masked
        self._loss += float(output.terms["discriminator"].total)
        real = batch.tokens.attention_mask
        self._logits.append(seen["discriminator_logits"].float()[real].cpu().numpy())
        self._replaced.append(seen["is_replaced"][real].cpu().numpy())

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._generator.merge(other._generator)
        self._sampled_correct += other._sampled_correct
        self._masked += other._masked
        self._loss += other._loss
        self._logits += other._logits
        self._replaced += other._replaced

    def compute(self) -> dict[str, float]:
        logits = np.concatenate(self._logits) if self._logits else np.zeros(0, np.float32)
        replaced = np.concatenate(self._replaced) if self._replaced else np.zeros(0, np.bool_)
        flagged = logits > 0
        hits = int((flagged & replaced).sum())
        generator = self._generator.compute()
        discriminator_loss = ratio(self._loss, len(logits))
        return {
            "loss": self._weights[0] * generator["loss"] + self._weights[1] * discriminator_loss,
            "generator_loss": generator["generator_loss"],
            "generator_accuracy": generator["generator_accuracy"],
            "sampled_accuracy": ratio(self._sampled_correct, self._masked),
            "discriminator_loss": discriminator_loss,
            "discriminator_accuracy": ratio(int((flagged == replaced).sum()), len(logits)),
            "discriminator_auc": area_under_curve(logits, replaced),
            "discriminator_precision": ratio(hits, int(flagged.sum())),
            "discriminator_recall": ratio(hits, int(replaced.sum())),
            "replaced_fraction": ratio(int(replaced.sum()), len(logits)),
        }


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where there is nothing to divide by."""
    return part / whole if whole else 0.0


def area_under_curve(scores: NDArray[np.float32], positive: NDArray[np.bool_]) -> float:
    """Chance that a positive scores above a negative, ties counting one half; 0 where either class is empty."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return 0.0
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    # The mean rank of a group of equal scores, ranks from 1: its last rank minus half of what precedes it in the group.
    ranks = np.cumsum(sizes) - (sizes - 1) / 2
    rank_sum = float(ranks[group][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
