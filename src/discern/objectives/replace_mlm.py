"""Masked language modelling without [MASK]: a generator's samples stand at the chosen positions."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from discern.corruption.randomness import Randomness, key_of
from discern.model.encoder import build_encoder
from discern.model.heads import MaskedLMHead, gather_positions
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.objectives.base import BuildSettings, Objective
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import masked_token_loss
from discern.objectives.masked import mask_batch
from discern.objectives.metrics import RestorationEvaluator
from discern.objectives.replacement import ReplacementConfig, context_of, replace_chosen, separate_embeddings
from discern.types import CorruptedBatch, StepOutput, TokenBatch


class ReplaceMLMConfig(ReplacementConfig):
    """Settings of masked language modelling on replaced tokens."""

    name: str = Field("replace-mlm", description="Objective, by its name in the registry.")
    tying: Literal["embeddings", "token", "none"] = Field(
        "embeddings",
        description="What generator and encoder share. 'embeddings': words, positions, segments and their LayerNorm; "
        "'token': words only; 'none': nothing.",
    )


class ReplaceMLM(Objective):
    """Predict the original token at each chosen position, where a generator's sample stands instead of [MASK].

    An ablation: how much of ELECTRA's gain comes from an encoder that never sees [MASK], which is not there in use either.

    Reference: Clark et al. 2020, section 3.3, "Replace MLM".
    """

    Config: ClassVar[type[ObjectiveConfig]] = ReplaceMLMConfig

    def __init__(self, config: ReplaceMLMConfig, settings: BuildSettings) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = settings.model
        model, checkpointing = settings.model, settings.gradient_checkpointing
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = separate_embeddings(settings.vocabulary.size, model, small, config.tying)
        self.encoder = build_encoder(read, model, gradient_checkpointing=checkpointing)
        self.head = MaskedLMHead(model, read.word)
        self.generator = build_encoder(read_by_generator, small, gradient_checkpointing=checkpointing)
        self.generator_head = MaskedLMHead(small, read_by_generator.word)

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return mask_batch(batch, self.config, self.vocabulary, randomness)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_targets}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        replaced = replace_chosen(self.networks()["generator"], batch, self.config, randomness)
        hidden = self.encoder(replaced.corrupted_ids, *context_of(batch.tokens))
        logits = self.head(gather_positions(hidden, batch.masked_positions))
        targets = replaced.observations["generator_targets"]
        restored = masked_token_loss(logits, targets, draws=batch.target_draws)
        observations = {**replaced.observations, "mlm_logits": logits.detach(), "mlm_targets": targets}
        return StepOutput({"generator": replaced.term, "mlm": restored}, observations)

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head), "generator": Network(self.generator, self.generator_head)}

    def evaluator(self) -> RestorationEvaluator:
        return RestorationEvaluator(self.config.generator_weight)

    def initial_loss(self) -> float:
        """2 ln V: the generator's and the encoder's."""
        return (self.config.generator_weight + 1) * math.log(self.vocabulary.size)
