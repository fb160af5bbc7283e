"""Replaced token detection judged at the chosen positions only: "ELECTRA 15 %"."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from discern.corruption.randomness import Randomness, key_of
from discern.model.encoder import build_encoder
from discern.model.heads import BilinearTerm, MaskedLMHead, ReplacedTokenHead
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.objectives.base import BuildSettings, Objective
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import replaced_token_loss
from discern.objectives.masked import mask_batch
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.objectives.replacement import ReplacementConfig, context_of, replace_chosen, shared_embeddings
from discern.types import CorruptedBatch, StepOutput, TokenBatch


class MaskedOnlyRTDConfig(ReplacementConfig):
    """Settings of replaced token detection at the chosen positions; those of `rtd` mean the same there."""

    name: str = Field("rtd-masked-only", description="Objective, by its name in the registry.")
    tying: Literal["embeddings", "token", "none", "gradient-disentangled"] = Field(
        "embeddings", description="What generator and discriminator share, as in objective 'rtd'."
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense", description="What judges the discriminator's states, as in objective 'rtd'."
    )
    discriminator_weight: float = Field(
        50.0, ge=0, description="Factor of the discriminator's loss, a mean over the chosen positions. ELECTRA: 50."
    )


class MaskedOnlyReplacedTokenDetection(Objective):
    """Replaced token detection whose discriminator learns from the chosen positions alone.

    An ablation: how much of ELECTRA's gain comes from a loss over all tokens instead of 15 % of them.

    Reference: Clark et al. 2020, section 3.3, "ELECTRA 15%".
    """

    Config: ClassVar[type[ObjectiveConfig]] = MaskedOnlyRTDConfig

    def __init__(self, config: MaskedOnlyRTDConfig, settings: BuildSettings) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = settings.model
        model, checkpointing = settings.model, settings.gradient_checkpointing
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = shared_embeddings(settings.vocabulary.size, model, small, config.tying)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=checkpointing)
        self.discriminator_head = ReplacedTokenHead(model)
        bilinear = config.discriminator_head == "bilinear"
        self.discriminator_bilinear = BilinearTerm(model, read.embedding_size) if bilinear else None
        self.generator = build_encoder(read_by_generator, small, gradient_checkpointing=checkpointing)
        self.generator_head = MaskedLMHead(small, read_by_generator.word)

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return mask_batch(batch, self.config, self.vocabulary, randomness)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "discriminator": batch.num_masked}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        networks = self.networks()
        replaced = replace_chosen(networks["generator"], batch, self.config, randomness)
        logits = networks["discriminator"].token_logits(replaced.corrupted_ids, *context_of(batch.tokens))
        judgement = replaced_token_loss(
            logits, replaced.is_replaced, batch.masked_positions, batch.num_masked, self.config.discriminator_weight
        )
        observations = {
            **replaced.observations,
            "discriminator_logits": logits.detach(),
            "judged": batch.masked_positions,
        }
        return StepOutput({"generator": replaced.term, "discriminator": judgement}, observations)

    def networks(self) -> dict[str, Network]:
        return {
            "discriminator": Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear),
            "generator": Network(self.generator, self.generator_head),
        }

    def evaluator(self) -> ReplacedTokenEvaluator:
        return ReplacedTokenEvaluator(self.config.generator_weight, self.config.discriminator_weight)

    def initial_loss(self) -> float:
        """ln V + 50 ln 2."""
        config = self.config
        return config.generator_weight * math.log(self.vocabulary.size) + config.discriminator_weight * math.log(2)
