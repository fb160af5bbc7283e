"""Restoration of the whole text after replacement: a word for every token, with a gate that copies."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.models.base import Network
from discern.models.heads import CopyMLMHead
from discern.objectives.base import Phase
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import copy_loss, word_logits
from discern.objectives.metrics import GeneratorEvaluator, SumEvaluator
from discern.objectives.two_networks import RestorationConfig, RestorationObjective
from discern.types import CorruptedBatch, PlacesOf, StepOutput


class AllTokensMLMConfig(RestorationConfig):
    """Settings of restoring every token."""

    name: str = Field("all-tokens-mlm", description="Objective, by its name in the registry.")


class AllTokensMLM(RestorationObjective[AllTokensMLMConfig]):
    """Predict the original token everywhere, from text in which a generator's samples replace the chosen tokens.

    The prediction at t is D [x_corrupt_t] + (1 - D) softmax(words), with D from a sigmoid layer: without this gate the encoder
    would spend its capacity on learning to copy. The head over the vocabulary runs on every token, which at V = 30,522 is most
    of the arithmetic and memory; `train.micro_batch_size` limits the memory.

    Reference: Clark et al. 2020, section 3.3, "All-Tokens MLM".
    """

    Config: ClassVar[type[ObjectiveConfig]] = AllTokensMLMConfig
    head: CopyMLMHead

    def restoring_head(self) -> CopyMLMHead:
        return CopyMLMHead(self.encoder.config, self.encoder.language_head())

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_tokens}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens, real = batch.tokens, batch.places("real")
        replaced = self.replace_chosen(batch, randomness)
        hidden = real.gather(self.encoder(replaced.corrupted_ids, *tokens.context))
        logits, copy_logits = word_logits(self.head, hidden), self.head.copy_logits(hidden)
        targets = real.gather(tokens.input_ids)
        restored = copy_loss(logits.losses(targets), copy_logits, real.gather(replaced.corrupted_ids), targets)
        observations = {**replaced.observations, **logits.observed("mlm"), "copy_logits": copy_logits.detach()}
        return StepOutput({"generator": replaced.term, "mlm": restored}, observations)

    def reads(self) -> frozenset[PlacesOf]:
        return frozenset({"chosen", "real"})

    def head_share(self, network: Network, phase: Phase) -> float:
        """1 for the encoder, whose head runs on every token; the masked fraction for the generator."""
        return 1.0 if network.head is self.head else super().head_share(network, phase)

    def evaluator(self) -> CopyEvaluator:
        return CopyEvaluator(self.config.generator_weight)

    def initial_loss(self) -> float:
        """ln V for the generator; for the encoder -ln(1/2 + 1/2V), and -ln(1/2V) where the token was replaced."""
        size = self.vocabulary.size
        replaced = self.config.mask_probability * (1 - 1 / size)
        restored = replaced * math.log(2 * size) + (1 - replaced) * math.log(2 * size / (size + 1))
        return self.config.generator_weight * math.log(size) + restored


class CopyEvaluator(SumEvaluator):
    """Metrics of a generator, and of an encoder that restores every token after it by copying or writing.

    `mlm_loss` and `mlm_accuracy` are over all real tokens, `masked_accuracy` over the chosen positions alone;
    `copy_probability` is the mean of the gate. `replaced_fraction` is the fraction of all real tokens.
    """

    def __init__(self, generator_weight: float) -> None:
        self._weight = generator_weight
        self._generator = GeneratorEvaluator()
        super().__init__(self._generator)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._generator.update(output, batch)
        seen, real = output.observations, batch.tokens.attention_mask
        logits, copy_logits = seen["mlm_logits"].float(), seen["copy_logits"].float()
        read, targets = seen["corrupted_ids"][real], batch.tokens.input_ids[real]
        # In units of (1 - D) / (sum of the softmax), copying adds exp(copy logit) times that sum to the token that is read.
        copied = copy_logits + logits.logsumexp(1)
        kept = logits.gather(1, read[:, None]).squeeze(1).logaddexp(copied)
        best, written = logits.max(1)
        predicted = read.where(kept >= best, written)
        chosen = batch.masked_positions[real]
        correct = predicted == targets
        self.add(
            loss=float(output.terms["mlm"].total.detach()),
            copied=float(F.sigmoid(copy_logits).sum()),
            count=output.terms["mlm"].count,
            correct=int(correct.sum()),
            masked=batch.num_masked,
            masked_correct=int((correct & chosen).sum()),
            replaced=int((read != targets).sum()),
        )

    def compute(self) -> dict[str, float]:
        generator = self._generator.compute()
        loss = self.ratio("loss", "count")
        return {
            **generator,
            "loss": self._weight * generator["generator_loss"] + loss,
            "mlm_loss": loss,
            "mlm_accuracy": self.ratio("correct", "count"),
            "masked_accuracy": self.ratio("masked_correct", "masked"),
            "copy_probability": self.ratio("copied", "count"),
            "replaced_fraction": self.ratio("replaced", "count"),
        }
