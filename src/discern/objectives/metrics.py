"""Held-out metrics of masked and replaced token prediction, exact whatever the batch size."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from discern.corruption.masking import maskable_positions
from discern.objectives.base import Evaluator
from discern.types import CorruptedBatch, StepOutput


class SumEvaluator(Evaluator):
    """An evaluator that consists of sums by name and of further collectors.

    Args:
        parts: evaluators and `BinaryMetrics` to merge along with the sums.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self._sums: dict[str, float] = defaultdict(int)

    def add(self, **amounts: float) -> None:
        """Add to the sums."""
        for name, amount in amounts.items():
            self._sums[name] += amount

    def ratio(self, part: str, whole: str) -> float:
        """The ratio of two sums; 0/0 is 0."""
        return ratio(self._sums[part], self._sums[whole])

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self.add(**other._sums)
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine.merge(theirs)


class MaskedTokenEvaluator(SumEvaluator):
    """Loss and accuracy of the original token at the masked positions.

    Args:
        prefix: prefix of the observations that it reads (`<prefix>_logits`) and of its metrics (`<prefix>_loss`).
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        term = output.terms[self._prefix]
        logits, targets = (output.observations[f"{self._prefix}_{name}"] for name in ("logits", "targets"))
        self.add(
            loss=float(term.total.detach()),
            count=term.count,
            correct=int((logits.argmax(-1) == targets).sum()),
            positions=targets.shape[0],  # fewer than the term counts if positions are drawn with replacement
        )

    def compute(self) -> dict[str, float]:
        loss, accuracy = self.ratio("loss", "count"), self.ratio("correct", "positions")
        return {"loss": loss, f"{self._prefix}_loss": loss, f"{self._prefix}_accuracy": accuracy}


class GeneratorEvaluator(SumEvaluator):
    """Metrics of a generator: its loss and accuracy, and how often its sample is the original.

    It reads `sampled_targets` if the positions of the loss are not those of the samples, else `generator_targets`.
    """

    def __init__(self) -> None:
        self._tokens = MaskedTokenEvaluator("generator")
        super().__init__(self._tokens)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._tokens.update(output, batch)
        seen = output.observations
        original = seen.get("sampled_targets", seen["generator_targets"])
        self.add(correct=int((seen["sampled_ids"] == original).sum()), masked=batch.num_masked)

    def compute(self) -> dict[str, float]:
        return self._tokens.compute() | {"sampled_accuracy": self.ratio("correct", "masked")}


class BinaryMetrics:
    """Logits and labels of a binary classification, over many batches."""

    def __init__(self) -> None:
        self._logits: list[NDArray[np.float32]] = []
        self._labels: list[NDArray[np.bool_]] = []
        self._ranked: list[NDArray[np.bool_]] = []

    def add(self, logits: Tensor, labels: Tensor, ranked: Tensor) -> None:
        """Add as many labels as logits.

        Args:
            ranked: which of them the area under the curve includes: all but [CLS] and [SEP], which are never replaced.
        """
        self._logits.append(logits.float().cpu().numpy())
        self._labels.append(labels.cpu().numpy())
        self._ranked.append(ranked.cpu().numpy())

    def merge(self, other: BinaryMetrics) -> None:
        """Add what another collector has collected."""
        self._logits += other._logits
        self._labels += other._labels
        self._ranked += other._ranked

    def compute(self, prefix: str) -> dict[str, float]:
        """Accuracy, area under the ROC curve, and precision and recall of the positive class at probability 1/2, by name.

        The area counts ties as one half and leaves [CLS] and [SEP] out: ranking them below a replaced word takes no skill, and
        the more of them there are, the higher an area over all tokens would be. 0/0 is 0.
        """
        logits = np.concatenate(self._logits) if self._logits else np.zeros(0, np.float32)
        labels, ranked = (np.concatenate(each) if each else np.zeros(0, np.bool_) for each in (self._labels, self._ranked))
        flagged = logits > 0
        hits = int((flagged & labels).sum())
        return {
            f"{prefix}_accuracy": ratio(int((flagged == labels).sum()), len(logits)),
            f"{prefix}_auc": area_under_curve(logits[ranked], labels[ranked]),
            f"{prefix}_precision": ratio(hits, int(flagged.sum())),
            f"{prefix}_recall": ratio(hits, int(labels.sum())),
        }


class DiscriminatorEvaluator(SumEvaluator):
    """Base of the metrics of a generator with a discriminator.

    A subclass adds the logits to `self.binary`, and the number of tokens in the loss to the sum `count`.
    """

    def __init__(self, generator_weight: float, discriminator_weight: float) -> None:
        self.generator = GeneratorEvaluator()
        self.binary = BinaryMetrics()
        self._weights = generator_weight, discriminator_weight
        super().__init__(self.generator, self.binary)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self.generator.update(output, batch)
        self.add(loss=float(output.terms["discriminator"].total.detach()))

    def compute(self) -> dict[str, float]:
        generator, discriminator_loss = self.generator.compute(), self.ratio("loss", "count")
        return {
            **generator,
            "loss": self._weights[0] * generator["generator_loss"] + self._weights[1] * discriminator_loss,
            "discriminator_loss": discriminator_loss,
            **self.binary.compute("discriminator"),
        }


class ReplacedTokenEvaluator(DiscriminatorEvaluator):
    """Metrics of a generator and of a discriminator that classifies tokens as original or replaced.

    Precision and recall are of the class *replaced* at probability 1/2, over all real tokens; the area under the ROC curve
    counts ties as one half and leaves [CLS], [SEP] and padding out. 0/0 is 0.

    Differs: the released code counts padding, [CLS] and [SEP] into the AUC and averages the loss over sequences, not tokens.
    """

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        super().update(output, batch)
        seen, mask = output.observations, classified_tokens(output, batch)
        replaced = seen["is_replaced"][mask]
        self.add(replaced=int(replaced.sum()), count=replaced.shape[0])
        self.binary.add(seen["discriminator_logits"][mask], replaced, maskable_positions(batch.tokens)[mask])

    def compute(self) -> dict[str, float]:
        return super().compute() | {"replaced_fraction": self.ratio("replaced", "count")}


def classified_tokens(output: StepOutput, batch: CorruptedBatch) -> Tensor:
    """(B, L) True at the tokens of the discriminator's loss: all but padding, unless the objective observes a `loss_mask`."""
    return output.observations.get("loss_mask", batch.tokens.attention_mask)


def ratio(part: float, whole: float) -> float:
    """part / whole; 0/0 is 0."""
    return part / whole if whole else 0.0


def area_under_curve(scores: NDArray[np.float32], positive: NDArray[np.bool_]) -> float:
    """Probability that a positive scores above a negative, ties counting one half; 0 if either class is empty."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return 0.0
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    # The mean rank of a group of equal scores, ranks from 1: its last rank minus half of what precedes it in the group.
    ranks = np.cumsum(sizes) - (sizes - 1) / 2
    rank_sum = float(ranks[group][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)
