"""Masked language modeling without [MASK]: a generator's samples replace the chosen tokens."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from discern.corruption.randomness import Randomness
from discern.objectives.base import WordTargets
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import word_logits
from discern.objectives.metrics import GeneratorEvaluator, MaskedTokenEvaluator, SumEvaluator
from discern.objectives.two_networks import RestorationConfig, RestorationObjective
from discern.types import CorruptedBatch, StepOutput


class ReplaceMLMConfig(RestorationConfig):
    """Settings of masked language modeling on replaced tokens."""

    name: str = Field("replace-mlm", description="Objective, by its name in the registry.")


class ReplaceMLM(RestorationObjective[ReplaceMLMConfig]):
    """Predict the original token at each chosen position, where the encoder reads a generator's sample instead of [MASK].

    An ablation: how much of ELECTRA's gain comes from an encoder that never sees [MASK], which fine-tuning does not use
    either.

    Reference: Clark et al. 2020, section 3.3, "Replace MLM".
    """

    Config: ClassVar[type[ObjectiveConfig]] = ReplaceMLMConfig

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_targets}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        replaced, chosen = self.replace_chosen(batch, randomness), batch.places("chosen")
        hidden = self.encoder(replaced.corrupted_ids, *batch.tokens.context)
        logits, targets = word_logits(self.head, chosen.gather(hidden)), replaced.observations["generator_targets"]
        observations = {**replaced.observations, **logits.observed("mlm"), "mlm_targets": targets}
        return StepOutput({"generator": replaced.term, "mlm": logits.loss(targets, chosen)}, observations)

    def evaluator(self) -> RestorationEvaluator:
        return RestorationEvaluator(self.config.generator_weight)

    def word_targets(self) -> WordTargets | None:
        return self._masked_words(shown=1.0, correct=None)

    def initial_loss(self) -> float:
        """2 ln V: the generator's and the encoder's."""
        return (self.config.generator_weight + 1) * math.log(self.vocabulary.size)


class RestorationEvaluator(SumEvaluator):
    """Metrics of a generator, and of an encoder that restores the chosen tokens after it.

    `replaced_fraction` is the fraction of the chosen tokens.
    """

    def __init__(self, generator_weight: float) -> None:
        self._weight = generator_weight
        self._generator = GeneratorEvaluator()
        self._restored = MaskedTokenEvaluator("mlm")
        super().__init__(self._generator, self._restored)

    def update(self, output: StepOutput, batch: CorruptedBatch) -> None:
        self._generator.update(output, batch)
        self._restored.update(output, batch)

    def compute(self) -> dict[str, float]:
        metrics = self._generator.compute() | self._restored.compute()
        total = self._weight * metrics["generator_loss"] + metrics["mlm_loss"]
        return metrics | {"loss": total, "replaced_fraction": 1 - metrics["sampled_accuracy"]}
