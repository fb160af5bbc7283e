"""Replaced token detection with a loss at the chosen positions only: "ELECTRA 15%"."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from discern.corruption.randomness import Randomness
from discern.models.base import Network, build_encoder
from discern.models.heads import ReplacedTokenHead
from discern.objectives.base import BuildSettings
from discern.objectives.config import GeneratorConfig, ObjectiveConfig
from discern.objectives.losses import replaced_token_loss
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.objectives.rtd import bilinear_term, masked_lm, shared_embeddings
from discern.objectives.two_networks import ReplacementObjective
from discern.types import CorruptedBatch, StepOutput


class MaskedOnlyRTDConfig(GeneratorConfig):
    """Settings of replaced token detection at the chosen positions; they mean the same as in objective 'rtd'."""

    name: str = Field("rtd-masked-only", description="Objective, by its name in the registry.")
    tying: Literal["embeddings", "token", "none", "gradient-disentangled"] = Field(
        "embeddings", description="What generator and discriminator share, as in objective 'rtd'."
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense", description="The discriminator's head, as in objective 'rtd'."
    )
    discriminator_weight: float = Field(
        50.0, ge=0, description="Factor of the discriminator's loss, a mean over the chosen positions. ELECTRA: 50."
    )


class MaskedOnlyReplacedTokenDetection(ReplacementObjective[MaskedOnlyRTDConfig]):
    """Replaced token detection whose discriminator learns from the chosen positions alone.

    An ablation: how much of ELECTRA's gain comes from a loss over all tokens instead of 15% of them.

    Reference: Clark et al. 2020, section 3.3, "ELECTRA 15%".
    """

    Config: ClassVar[type[ObjectiveConfig]] = MaskedOnlyRTDConfig

    def __init__(self, config: MaskedOnlyRTDConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = shared_embeddings(settings.vocabulary.size, model, small, config.tying)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.discriminator_head = ReplacedTokenHead(model)
        self.discriminator_bilinear = bilinear_term(config.discriminator_head, self.discriminator)
        self.generator, self.generator_head = masked_lm(read_by_generator, small, settings)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "discriminator": batch.num_masked}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        replaced = self.replace_chosen(batch, randomness)
        logits = self.networks()["discriminator"].token_logits(replaced.corrupted_ids, *batch.tokens.context)
        detection = replaced_token_loss(
            logits, replaced.is_replaced, batch.masked_positions, batch.num_masked, self.config.discriminator_weight
        )
        observations = {
            **replaced.observations,
            "discriminator_logits": logits.detach(),
            "loss_mask": batch.masked_positions,
        }
        return StepOutput({"generator": replaced.term, "discriminator": detection}, observations)

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
