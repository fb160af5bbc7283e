"""Held-out metrics by token frequency, by position and by the discriminator's confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.masking import maskable_positions
from discern.objectives.metrics import area_under_curve, classified_tokens, ratio
from discern.types import CorruptedBatch, StepOutput

# Occurrences in a million tokens; a token belongs to the first class that it reaches.
_CLASSES = ((1000.0, "1,000 and more"), (100.0, "100 to 1,000"), (10.0, "10 to 100"), (1.0, "1 to 10"), (0.0, "below 1"))
_PARTS = ("first quarter", "second quarter", "third quarter", "last quarter")
_BINS = 10
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """Tokens with about the same predicted probability of being replaced.

    Attributes:
        tokens: number of tokens.
        probability: their mean predicted probability.
        replaced: the fraction of them that was replaced.
    """

    tokens: int
    probability: float
    replaced: float


class Breakdown:
    """Collects the networks' predictions for each token, over many batches.

    A token is grouped by the original word in its place, not by the generator's sample.

    Args:
        token_counts: (V,) occurrences of each id in the training text.
    """

    def __init__(self, token_counts: NDArray[np.int64]) -> None:
        rate = token_counts / max(int(token_counts.sum()), 1) * 1e6
        # searchsorted needs ascending bounds; the classes descend.
        bounds = np.array([bound for bound, _ in _CLASSES[:-1]])
        self._class_of = (len(_CLASSES) - 1 - np.searchsorted(bounds[::-1], rate, side="right")).astype(np.int64)
        self._classified: list[Floats] = []  # columns: logit, truth, class, part
        self._predicted: list[Floats] = []  # columns: loss, correct, class, part

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        """Add one batch; predictions that the objective does not observe are left out."""
        groups = self._groups(batch)
        classified = _classifications(output, batch)
        if classified is not None:
            logits, truth, mask = classified
            columns = [logits[mask].float().cpu().numpy(), truth[mask].cpu().numpy()]
            self._classified.append(_table([*columns, *(group[mask.cpu().numpy()] for group in groups)]))
        predicted = _predictions(output.observations, batch)
        if predicted is not None:
            loss, correct, mask = predicted
            columns = [loss.cpu().numpy(), correct.cpu().numpy()]
            self._predicted.append(_table([*columns, *(group[mask.cpu().numpy()] for group in groups)]))

    def metrics(self) -> dict[str, Any]:
        """`by_frequency`, `by_position` (one row per group) and, where there is a discriminator, `calibration`."""
        classified, predicted = _stacked(self._classified), _stacked(self._predicted)
        found: dict[str, Any] = {
            "by_frequency": _rows(classified, predicted, 2, [name for _, name in _CLASSES]),
            "by_position": _rows(classified, predicted, 3, _PARTS),
        }
        if len(classified):
            probability = 1 / (1 + np.exp(-classified[:, 0]))
            bins = calibration(probability, classified[:, 1] > 0)
            error = ratio(sum(each.tokens * abs(each.probability - each.replaced) for each in bins), len(classified))
            found["calibration"] = {"expected_calibration_error": error, "bins": [asdict(each) for each in bins]}
        return found

    def _groups(self, batch: CorruptedBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Frequency class (-1 for special tokens) and quarter of the row of each token, both (B, L)."""
        ids, real = batch.tokens.input_ids.cpu().numpy(), batch.tokens.attention_mask.cpu().numpy()
        lengths = np.maximum(real.sum(1, keepdims=True), 1)
        places = np.minimum(np.arange(ids.shape[1])[None, :], lengths - 1)
        special = batch.tokens.special_tokens_mask.cpu().numpy()
        return np.where(special, -1, self._class_of[ids]), places * len(_PARTS) // lengths


def calibration(probability: Floats, replaced: NDArray[np.bool_]) -> list[Bin]:
    """Tokens in ten bins of equal width by their probability of *replaced*; empty bins are left out.

    Reference: Guo et al. 2017, "On calibration of modern neural networks", section 2, for the class *replaced*.
    """
    places = np.minimum((probability * _BINS).astype(np.int64), _BINS - 1)
    members = [places == place for place in range(_BINS)]
    return [
        Bin(int(member.sum()), float(probability[member].mean()), float(replaced[member].mean()))
        for member in members
        if member.any()
    ]


def _classifications(output: StepOutput, batch: CorruptedBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """The discriminator's logits, the labels and the mask of its loss, (B, L) each; None if there is no discriminator."""
    seen = output.observations
    if "discriminator_logits" in seen:
        return seen["discriminator_logits"], seen["is_replaced"], classified_tokens(output, batch)
    if "energy" in seen:
        logits = seen["energy"].float() + seen["log_noise_probability"] + seen["log_noise_odds"]
        # A row in which all tokens are noise, or none, has infinite odds.
        return logits.clamp(-50, 50), seen["is_noise"], maskable_positions(batch.tokens)
    return None


def _predictions(seen: Mapping[str, Tensor], batch: CorruptedBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """Loss (N,) and correctness (N,) of the predicted words, and their positions (B, L); the generator's, if there is one."""
    for name in ("generator", "mlm", "permutation_lm"):
        logits, targets = seen.get(f"{name}_logits"), seen.get(f"{name}_targets")
        if logits is None or targets is None:
            continue
        for mask in (batch.masked_positions, maskable_positions(batch.tokens)):
            if int(mask.sum()) == len(targets) == len(logits):
                loss = F.cross_entropy(logits.float(), targets, reduction="none")
                return loss, logits.argmax(-1) == targets, mask
    return None


def _rows(classified: Floats, predicted: Floats, column: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of each group, except those that it has no tokens for; groups without a token are left out."""
    found = []
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
            found.append(row)
    return found


def _table(columns: Sequence[NDArray[Any]]) -> Floats:
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _stacked(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.zeros((0, 4))
