"""Masked language modeling: the objective of BERT, without next-sentence prediction."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from discern.corruption.randomness import Randomness
from discern.models.base import Network, build_embeddings, build_encoder
from discern.objectives.base import BuildSettings, WordTargets
from discern.objectives.config import MaskingConfig, ObjectiveConfig
from discern.objectives.losses import word_logits
from discern.objectives.masked import MaskingObjective
from discern.objectives.metrics import MaskedTokenEvaluator
from discern.types import CorruptedBatch, StepOutput


class MLMConfig(MaskingConfig):
    """Settings of masked language modeling: 80% [MASK], 10% random, 10% unchanged, as in BERT."""

    name: str = Field("mlm", description="Objective, by its name in the registry.")
    mask_token_probability: float = Field(
        0.8, ge=0, le=1, description="Share of the chosen positions that become [MASK]. BERT: 0.8."
    )
    random_token_probability: float = Field(
        0.1, ge=0, le=1, description="Share of the chosen positions that become a random token. BERT: 0.1. The rest stays."
    )


class MaskedLanguageModel(MaskingObjective[MLMConfig]):
    """Predict the original token at each chosen position.

    Reference: Devlin et al. 2019, section 3.1; new positions are drawn at every step, as in RoBERTa.
    """

    Config: ClassVar[type[ObjectiveConfig]] = MLMConfig

    def __init__(self, config: MLMConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        embeddings = build_embeddings(settings.vocabulary.size, model.embedding_size, model)
        self.encoder = build_encoder(embeddings, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.head = self.encoder.language_head()

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"mlm": batch.num_targets}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens, chosen = batch.tokens, batch.places("chosen")
        direction = {"is_reversed": tokens.is_reversed} if self.encoder.reads_backwards else {}
        hidden = self.encoder(batch.masked_ids, *tokens.context, **direction)
        logits, targets = word_logits(self.head, chosen.gather(hidden)), chosen.gather(tokens.input_ids)
        seen = logits.observed("mlm") | {"mlm_targets": targets} | self.observed_entropies(logits, targets, chosen)
        return StepOutput({"mlm": logits.loss(targets, chosen)}, seen)

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head)}

    def evaluator(self) -> MaskedTokenEvaluator:
        return MaskedTokenEvaluator("mlm")

    def word_targets(self) -> WordTargets | None:
        shown = 1 - self.config.mask_token_probability
        correct = (shown - self.config.random_token_probability) / shown if shown > 0 else 0.0
        return self._masked_words(shown=shown, correct=correct)

    def initial_loss(self) -> float:
        """ln V."""
        return math.log(self.vocabulary.size)
