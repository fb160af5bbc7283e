"""Held-out figures of masked and replaced token prediction, exact whatever the batch size."""

from __future__ import annotations

from typing import Self, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.masking import maskable_positions
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
        self._positions = 0
        self._count = 0

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        term = output.terms[self._prefix]
        logits, targets = (output.observations[f"{self._prefix}_{name}"] for name in ("logits", "targets"))
        self._loss += float(term.total.detach())
        self._correct += int((logits.argmax(-1) == targets).sum())
        self._positions += targets.shape[0]  # fewer than the term counts where positions are drawn with replacement
        self._count += term.count

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._loss += other._loss
        self._correct += other._correct
        self._positions += other._positions
        self._count += other._count

    def compute(self) -> dict[str, float]:
        loss, accuracy = ratio(self._loss, self._count), ratio(self._correct, self._positions)
        return {"loss": loss, f"{self._prefix}_loss": loss, f"{self._prefix}_accuracy": accuracy}


def judged_tokens(output: StepOutput, batch: CorruptedBatch) -> Tensor:
    """(B, L) True at the tokens that the discriminator is asked about: all but padding, unless the objective observes others."""
    return output.observations.get("judged", batch.tokens.attention_mask)


class GeneratorEvaluator(Evaluator):
    """Figures of a generator: its loss and accuracy, and how often its sample was the original.

    It reads `sampled_targets` where the loss is over other positions than those sampled for, else `generator_targets`.
    """

    def __init__(self) -> None:
        self._tokens = MaskedTokenEvaluator("generator")
        self._sampled_correct = 0
        self._masked = 0

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._tokens.update(output, batch)
        seen = output.observations
        original = seen.get("sampled_targets", seen["generator_targets"])
        self._sampled_correct += int((seen["sampled_ids"] == original).sum())
        self._masked += batch.num_masked

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._tokens.merge(other._tokens)
        self._sampled_correct += other._sampled_correct
        self._masked += other._masked

    def compute(self) -> dict[str, float]:
        return self._tokens.compute() | {"sampled_accuracy": ratio(self._sampled_correct, self._masked)}


class Judgements:
    """Logits of a yes-or-no question and the answers, over many batches."""

    def __init__(self) -> None:
        self._logits: list[NDArray[np.float32]] = []
        self._truth: list[NDArray[np.bool_]] = []
        self._open: list[NDArray[np.bool_]] = []

    def add(self, logits: Tensor, truth: Tensor, is_open: Tensor) -> None:
        """Take in as many answers as logits.

        Args:
            is_open: True where the answer may be *yes*; never at [CLS] and [SEP].
        """
        self._logits.append(logits.float().cpu().numpy())
        self._truth.append(truth.cpu().numpy())
        self._open.append(is_open.cpu().numpy())

    def extend(self, other: Judgements) -> None:
        """Take in what another gathered."""
        self._logits += other._logits
        self._truth += other._truth
        self._open += other._open

    def figures(self, prefix: str) -> dict[str, float]:
        """Accuracy, area under the ROC curve, precision and recall of *yes* at probability 1/2, by name.

        The area counts ties as one half, and the open questions only: to rank [CLS] below a replaced word is no skill, and
        the more such tokens rows have, the higher an area over all of them would be. 0/0 is 0.
        """
        logits = np.concatenate(self._logits) if self._logits else np.zeros(0, np.float32)
        truth, is_open = (np.concatenate(each) if each else np.zeros(0, np.bool_) for each in (self._truth, self._open))
        flagged = logits > 0
        hits = int((flagged & truth).sum())
        return {
            f"{prefix}_accuracy": ratio(int((flagged == truth).sum()), len(logits)),
            f"{prefix}_auc": area_under_curve(logits[is_open], truth[is_open]),
            f"{prefix}_precision": ratio(hits, int(flagged.sum())),
            f"{prefix}_recall": ratio(hits, int(truth.sum())),
        }


class ReplacedTokenEvaluator(Evaluator):
    """Figures of a generator and a discriminator.

    Precision and recall are of the class *replaced* at probability 1/2, over all real tokens; the area under the ROC curve
    counts ties as one half and leaves [CLS], [SEP] and padding out. 0/0 is 0.

    Differs: the released code counts padding, [CLS] and [SEP] into the AUC and averages the loss over sequences, not tokens.
    """

    def __init__(self, generator_weight: float, discriminator_weight: float) -> None:
        self._generator = GeneratorEvaluator()
        self._weights = generator_weight, discriminator_weight
        self._loss = 0.0
        self._replaced = 0
        self._count = 0
        self._judgements = Judgements()

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        seen, judged = output.observations, judged_tokens(output, batch)
        replaced = seen["is_replaced"][judged]
        self._generator.update(output, batch)
        self._loss += float(output.terms["discriminator"].total.detach())
        self._replaced += int(replaced.sum())
        self._count += replaced.shape[0]
        self._judgements.add(seen["discriminator_logits"][judged], replaced, maskable_positions(batch.tokens)[judged])

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._generator.merge(other._generator)
        self._loss += other._loss
        self._replaced += other._replaced
        self._count += other._count
        self._judgements.extend(other._judgements)

    def compute(self) -> dict[str, float]:
        generator = self._generator.compute()
        discriminator_loss = ratio(self._loss, self._count)
        return {
            **generator,
            "loss": self._weights[0] * generator["generator_loss"] + self._weights[1] * discriminator_loss,
            "discriminator_loss": discriminator_loss,
            **self._judgements.figures("discriminator"),
            "replaced_fraction": ratio(self._replaced, self._count),
        }


class NoiseContrastiveEvaluator(Evaluator):
    """Figures of Electric, over the tokens that may be noise.

    The discriminator's are of the class *noise*, by its odds with log q and the share of noise. `energy` is the mean energy
    of the tokens that are no noise: were exp(-energy) normalised, their cross-entropy, to be held against the generator's.
    """

    def __init__(self, generator_weight: float, discriminator_weight: float) -> None:
        self._generator = GeneratorEvaluator()
        self._weights = generator_weight, discriminator_weight
        self._loss = self._energy = 0.0
        self._count = self._noise = self._replaced = 0
        self._judgements = Judgements()

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        seen, judged = output.observations, maskable_positions(batch.tokens)
        self._generator.update(output, batch)
        self._loss += float(output.terms["discriminator"].total.detach())
        self._count += output.terms["discriminator"].count
        self._noise += batch.num_masked
        self._replaced += int((seen["corrupted_ids"] != batch.tokens.input_ids).sum())
        energy = seen["energy"].float()
        self._energy += float(energy[judged & ~seen["is_noise"]].sum())
        logits = energy + seen["log_noise_probability"] + seen["log_noise_odds"]
        self._judgements.add(logits[judged], seen["is_noise"][judged], judged[judged])

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._generator.merge(other._generator)
        self._loss += other._loss
        self._energy += other._energy
        self._count += other._count
        self._noise += other._noise
        self._replaced += other._replaced
        self._judgements.extend(other._judgements)

    def compute(self) -> dict[str, float]:
        generator = self._generator.compute()
        discriminator_loss = ratio(self._loss, self._count)
        return {
            **generator,
            "loss": self._weights[0] * generator["generator_loss"] + self._weights[1] * discriminator_loss,
            "discriminator_loss": discriminator_loss,
            **self._judgements.figures("discriminator"),
            "energy": ratio(self._energy, self._count - self._noise),
            "noise_fraction": ratio(self._noise, self._count),
            "replaced_fraction": ratio(self._replaced, self._count),
        }


class RestorationEvaluator(Evaluator):
    """Figures of a generator, and of an encoder that restores the chosen tokens after it.

    `replaced_fraction` is of the chosen ones.
    """

    def __init__(self, generator_weight: float) -> None:
        self._weight = generator_weight
        self._generator = GeneratorEvaluator()
        self._restored = MaskedTokenEvaluator("mlm")

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._generator.update(output, batch)
        self._restored.update(output, batch)

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._generator.merge(other._generator)
        self._restored.merge(other._restored)

    def compute(self) -> dict[str, float]:
        figures = self._generator.compute() | self._restored.compute()
        total = self._weight * figures["generator_loss"] + figures["mlm_loss"]
        return figures | {"loss": total, "replaced_fraction": 1 - figures["sampled_accuracy"]}


class CopyEvaluator(Evaluator):
    """Figures of a generator, and of an encoder that restores every token after it by copying or writing.

    `mlm_loss` and `mlm_accuracy` are over all real tokens, `masked_accuracy` over the chosen positions alone;
    `copy_probability` is the mean of the gate. `replaced_fraction` is of all real tokens.
    """

    def __init__(self, generator_weight: float) -> None:
        self._weight = generator_weight
        self._generator = GeneratorEvaluator()
        self._loss = self._copied = 0.0
        self._count = self._correct = self._masked = self._masked_correct = self._replaced = 0

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._generator.update(output, batch)
        seen, real = output.observations, batch.tokens.attention_mask
        logits, copy_logits = seen["mlm_logits"].float(), seen["copy_logits"].float()
        read, targets = seen["corrupted_ids"][real], batch.tokens.input_ids[real]
        # In units of (1 - D) / the softmax's sum, copying adds exp(copy logit) times that sum to what is read.
        copied = copy_logits + logits.logsumexp(1)
        kept = logits.gather(1, read[:, None]).squeeze(1).logaddexp(copied)
        best, written = logits.max(1)
        predicted = read.where(kept >= best, written)
        chosen = batch.masked_positions[real]
        correct = predicted == targets
        self._loss += float(output.terms["mlm"].total.detach())
        self._copied += float(F.sigmoid(copy_logits).sum())
        self._count += output.terms["mlm"].count
        self._correct += int(correct.sum())
        self._masked += batch.num_masked
        self._masked_correct += int((correct & chosen).sum())
        self._replaced += int((read != targets).sum())

    def merge(self, other: Evaluator) -> None:
        other = cast(Self, other)
        self._generator.merge(other._generator)
        self._loss += other._loss
        self._copied += other._copied
        self._count += other._count
        self._correct += other._correct
        self._masked += other._masked
        self._masked_correct += other._masked_correct
        self._replaced += other._replaced

    def compute(self) -> dict[str, float]:
        generator = self._generator.compute()
        loss = ratio(self._loss, self._count)
        return {
            **generator,
            "loss": self._weight * generator["generator_loss"] + loss,
            "mlm_loss": loss,
            "mlm_accuracy": ratio(self._correct, self._count),
            "masked_accuracy": ratio(self._masked_correct, self._masked),
            "copy_probability": ratio(self._copied, self._count),
            "replaced_fraction": ratio(self._replaced, self._count),
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
