"""Held-out metrics of masked and replaced token prediction, exact whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from discern.objectives.base import Evaluator
from discern.types import CorruptedBatch, StepOutput

Ratios = dict[str, tuple[Any, float]]
"""Metrics by name, each as a sum and what it is divided by."""

Binary = tuple[Tensor, Tensor, Tensor]
"""Logits and labels of a binary classification, and which of them the area under the ROC curve includes."""


class MetricsEvaluator(Evaluator):
    """Ratios of sums over all rows, metrics of the discriminator, and the weighted loss.

    `discriminator_accuracy`, `_precision` and `_recall` are those of the positive class at probability 1/2. `discriminator_auc`
    counts ties as one half and leaves [CLS] and [SEP] out: ranking them below a replaced word takes no skill, and the more of
    them there are, the higher an area over all tokens would be. 0/0 is 0.

    Args:
        observe: returns what a batch adds; a function that can be pickled.
        weights: of the losses whose sum is `loss`, by metric.
    """

    def __init__(
        self, observe: Callable[[StepOutput, CorruptedBatch], tuple[Ratios, Binary | None]], weights: Mapping[str, float]
    ) -> None:
        self._observe, self._weights = observe, weights
        self._sums: dict[str, tuple[float, float]] = {}
        self._binary: list[list[NDArray[Any]]] = []

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        ratios, binary = self._observe(output, batch)
        self._add({name: (float(torch.as_tensor(part).detach()), whole) for name, (part, whole) in ratios.items()})
        if binary is not None:
            logits, labels, ranked = binary
            self._binary.append([column.cpu().numpy() for column in (logits.float(), labels, ranked)])

    def merge(self, other: Evaluator) -> None:
        assert isinstance(other, MetricsEvaluator)
        self._add(other._sums)
        self._binary += other._binary

    def _add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        for name, (part, whole) in sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + part, before[1] + whole

    def compute(self) -> dict[str, float]:
        metrics = {name: ratio(*sums) for name, sums in self._sums.items()}
        if self._binary:
            logits, labels, ranked = (np.concatenate(column) for column in zip(*self._binary, strict=True))
            flagged = logits > 0
            hits = int((flagged & labels).sum())
            metrics |= {
                "discriminator_accuracy": ratio(int((flagged == labels).sum()), len(logits)),
                "discriminator_auc": area_under_curve(logits[ranked], labels[ranked]),
                "discriminator_precision": ratio(hits, int(flagged.sum())),
                "discriminator_recall": ratio(hits, int(labels.sum())),
            }
        return {"loss": sum(weight * metrics.get(name, 0.0) for name, weight in self._weights.items())} | metrics


def masked_metrics(name: str, output: StepOutput) -> Ratios:
    """Loss and accuracy of the original tokens at the positions of a term.

    A position that was drawn several times counts as often in the loss, and once in the accuracy.
    """
    term, logits, targets = output.terms[name], *(output.observations[f"{name}_{part}"] for part in ("logits", "targets"))
    correct = (logits.argmax(-1) == targets).sum()
    return {f"{name}_loss": (term.total, term.count), f"{name}_accuracy": (correct, len(targets))}


def generator_metrics(output: StepOutput, batch: CorruptedBatch) -> Ratios:
    """Loss and accuracy of a generator, and how often its sample is the original."""
    seen = output.observations
    equal = (seen["sampled_ids"] == seen["sampled_targets"]).sum()
    return masked_metrics("generator", output) | {"sampled_accuracy": (equal, batch.num_masked)}


def replaced_token_metrics(output: StepOutput, batch: CorruptedBatch) -> tuple[Ratios, Binary]:
    """Metrics of a generator and of a discriminator that classifies tokens as original or replaced.

    Differs: the released code counts padding, [CLS] and [SEP] into the AUC and averages the loss over sequences, not tokens.
    """
    seen, mask = output.observations, output.observations["loss_mask"]
    replaced = seen["is_replaced"][mask]
    ratios = {
        "discriminator_loss": (output.terms["discriminator"].total, len(replaced)),
        "replaced_fraction": (replaced.sum(), len(replaced)),
    }
    if "correction" in output.terms:
        ratios["correction_loss"] = output.terms["correction"].total, batch.num_tokens
    if "sentence" in output.terms:
        logits, tampered = seen["sentence_logits"], seen["is_tampered"]
        ratios["sentence_loss"] = output.terms["sentence"].total, len(logits)
        ratios["sentence_accuracy"] = ((logits > 0) == tampered).sum(), len(logits)
    binary = seen["discriminator_logits"][mask], replaced, batch.tokens.maskable[mask]
    return generator_metrics(output, batch) | ratios, binary


def noise_logits(seen: Mapping[str, Tensor]) -> Tensor:
    """The logits of *noise* of Electric, (B, L). A row in which all tokens are noise, or none, has infinite odds."""
    return seen["energy"].float() + seen["log_noise_probability"] + seen["log_noise_odds"]


def ratio(part: float, whole: float) -> float:
    """part / whole; 0/0 is 0."""
    return part / whole if whole else 0.0


def area_under_curve(scores: NDArray[np.float32], positive: NDArray[np.bool_]) -> float:
    """Probability that a positive scores above a negative, ties counting one half; 0 if either class is empty."""
    from scipy.stats import rankdata  # takes half a second to import

    positives = int(positive.sum())
    negatives = len(positive) - positives
    rank_sum = float(rankdata(scores)[positive].sum())
    return ratio(rank_sum - positives * (positives + 1) / 2, positives * negatives)


# Occurrences in a million tokens; a token belongs to the first class that it reaches.
_CLASSES = ((1000.0, "1,000 and more"), (100.0, "100 to 1,000"), (10.0, "10 to 100"), (1.0, "1 to 10"), (0.0, "below 1"))
_PARTS = ("first quarter", "second quarter", "third quarter", "last quarter")
_BINS = 10
Floats = NDArray[np.float64]


class Breakdown:
    """Collects the networks' predictions for each token, over many batches.

    A token is grouped by the original word in its place, not by the generator's sample.

    Args:
        token_counts: (V,) occurrences of each id in the training text.
    """

    def __init__(self, token_counts: NDArray[np.int64]) -> None:
        rate = token_counts / max(int(token_counts.sum()), 1) * 1e6
        self._class_of = np.digitize(rate, [bound for bound, _ in _CLASSES[:-1]])
        self._classified: list[Floats] = [np.zeros((0, 4))]  # columns: logit, truth, class, part
        self._predicted: list[Floats] = [np.zeros((0, 4))]  # columns: loss, correct, class, part

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        """Add one batch; predictions that the objective does not observe are left out."""
        # Frequency class (-1 for special tokens) and quarter of the row of each token, both (B, L)
        tokens, length = batch.tokens, batch.tokens.input_ids.shape[1]
        ids, real, special = (
            column.cpu().numpy() for column in (tokens.input_ids, tokens.attention_mask, tokens.special_tokens_mask)
        )
        lengths = np.maximum(real.sum(1, keepdims=True), 1)
        quarters = np.minimum(np.arange(length)[None, :], lengths - 1) * len(_PARTS) // lengths
        groups = np.where(special, -1, self._class_of[ids]), quarters
        seen, classified = output.observations, tuple[Tensor, ...]()  # logits, labels and mask of the discriminator's loss
        if "discriminator_logits" in seen:
            classified = seen["discriminator_logits"], seen["is_replaced"], seen["loss_mask"]
        elif "energy" in seen:
            classified = noise_logits(seen).clamp(-50, 50), seen["is_noise"], tokens.maskable
        if classified:
            logits, truth, mask = (column.float().cpu().numpy() for column in classified)
            self._classified.append(np.stack([column[mask > 0] for column in (logits, truth, *groups)], 1).astype(np.float64))
        predicted = _predictions(seen, batch)
        if predicted is not None:
            loss, correct, mask = (column.float().cpu().numpy() for column in predicted)
            self._predicted.append(np.stack([loss, correct, *(column[mask > 0] for column in groups)], 1).astype(np.float64))

    def metrics(self) -> dict[str, Any]:
        """`by_frequency`, `by_position` (one row per group) and, where there is a discriminator, `calibration`."""
        classified, predicted = np.concatenate(self._classified), np.concatenate(self._predicted)
        metrics: dict[str, Any] = {
            "by_frequency": _rows(classified, predicted, 2, [name for _, name in _CLASSES]),
            "by_position": _rows(classified, predicted, 3, _PARTS),
        }
        if len(classified):
            probability = 1 / (1 + np.exp(-classified[:, 0]))
            bins = calibration(probability, classified[:, 1] > 0)
            error = ratio(sum(row["tokens"] * abs(row["probability"] - row["replaced"]) for row in bins), len(classified))
            metrics["calibration"] = {"expected_calibration_error": error, "bins": bins}
        return metrics


def calibration(probability: Floats, replaced: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Tokens in ten bins of equal width by their probability of *replaced*; empty bins are left out.

    Each has the number of `tokens`, their mean `probability`, and the fraction of them that was `replaced`.

    Reference: Guo et al. 2017, "On calibration of modern neural networks", section 2, for the class *replaced*.
    """
    bins = np.minimum((probability * _BINS).astype(np.int64), _BINS - 1)
    return [
        {"tokens": len(member), "probability": float(probability[member].mean()), "replaced": float(replaced[member].mean())}
        for member in ((bins == number).nonzero()[0] for number in range(_BINS))
        if len(member)
    ]


def _predictions(seen: Mapping[str, Tensor], batch: CorruptedBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """Loss (N,) and correctness (N,) of the predicted words, and their positions (B, L); the generator's, if there is one."""
    for name in ("generator", "mlm", "permutation_lm"):
        if (logits := seen.get(f"{name}_logits")) is None:
            continue
        targets = seen[f"{name}_targets"]
        for mask in (batch.masked_positions, batch.tokens.maskable):
            if int(mask.sum()) == len(targets) == len(logits):
                loss = F.cross_entropy(logits.float(), targets, reduction="none")
                return loss, logits.argmax(-1) == targets, mask
    return None


def _rows(classified: Floats, predicted: Floats, column: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of each group, except those that it has no tokens for; groups without a token are left out."""
    rows = []
    for number, name in enumerate(names):
        row: dict[str, Any] = {"group": name}
        mine = classified[classified[:, column] == number]
        if len(mine):
            logits, truth, is_word = mine[:, 0], mine[:, 1] > 0, mine[:, 2] >= 0
            row |= {
                "tokens": len(mine),
                "replaced_fraction": float(truth.mean()),
                "discriminator_loss": float(np.logaddexp(0, np.where(truth, -logits, logits)).mean()),
            }
            words = truth[is_word]
            if words.any() and not words.all():
                row["discriminator_auc"] = area_under_curve(logits[is_word].astype(np.float32), words)
            if truth.any():
                row["discriminator_recall"] = float((logits[truth] > 0).mean())
        mine = predicted[predicted[:, column] == number]
        if len(mine):
            row |= {
                "predicted_tokens": len(mine),
                "prediction_loss": float(mine[:, 0].mean()),
                "prediction_accuracy": float(mine[:, 1].mean()),
            }
        if len(row) > 1:
            rows.append(row)
    return rows
