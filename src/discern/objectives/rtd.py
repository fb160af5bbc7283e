"""Replaced token detection: the objective of ELECTRA."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from discern.corruption.randomness import Randomness, key_of
from discern.corruption.sampling import replace_positions, sample_tokens
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings, TokenEmbeddings
from discern.model.encoder import build_encoder
from discern.model.heads import BilinearTerm, MaskedLMHead, ReplacedTokenHead, gather_positions
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.objectives.base import BuildSettings, Objective
from discern.objectives.config import MaskingConfig, ObjectiveConfig
from discern.objectives.losses import masked_token_loss, replaced_token_loss
from discern.objectives.masked import mask_batch
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.types import CorruptedBatch, StepOutput, TokenBatch


class RTDConfig(MaskingConfig):
    """Settings of replaced token detection. Defaults: ELECTRA-Small, table 6."""

    name: str = Field("rtd", description="Objective, by its name in the registry.")
    generator: Literal["mlm"] = Field("mlm", description="What proposes replacements. 'mlm': a small masked language model.")
    generator_size: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Width of the generator, a fraction of the discriminator's. ELECTRA, table 6: 1/4 small and large, 1/3 base.",
    )
    generator_depth: float = Field(1.0, gt=0, le=1, description="Depth likewise. ELECTRA keeps the depth.")
    tying: Literal["embeddings", "token", "none", "gradient-disentangled"] = Field(
        "embeddings",
        description="What generator and discriminator share. 'embeddings': words, positions, segments and their LayerNorm; "
        "'token': words only; 'none': nothing; 'gradient-disentangled': the discriminator reads the generator's embeddings "
        "without sending gradient back, and adds a difference of its own (DeBERTaV3).",
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense",
        description="'dense': the paper's, two layers on the state. 'bilinear' adds the product of the state with the word at "
        "its place; learns sooner at small scale, wants tying 'gradient-disentangled'.",
    )
    algorithm: Literal["joint"] = Field("joint", description="How the two are trained. 'joint': together, from step 0.")
    generator_weight: float = Field(1.0, ge=0, description="Factor of the generator's loss.")
    discriminator_weight: float = Field(50.0, ge=0, description="Factor of the discriminator's loss. ELECTRA: 50.")
    temperature: float = Field(1.0, gt=0, description="Divides the generator's logits before sampling, not in its loss.")


class ReplacedTokenDetection(Objective):
    """A generator fills masked positions with samples; a discriminator tells which tokens were replaced.

    The generator runs once a step: its loss and its samples come from the same logits, dropout on.

    Reference: Clark et al. 2020, section 2.
    """

    Config: ClassVar[type[ObjectiveConfig]] = RTDConfig

    def __init__(self, config: RTDConfig, settings: BuildSettings) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = settings.model
        size, model, checkpointing = settings.vocabulary.size, settings.model, settings.gradient_checkpointing
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = _embeddings(size, model, small, config.tying)
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
        return {"generator": batch.num_masked, "discriminator": batch.num_tokens}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens, positions = batch.tokens, batch.masked_positions
        context = (tokens.visible_mask, tokens.token_type_ids, tokens.position_ids, tokens.document_ids)

        hidden = self.generator(batch.masked_ids, *context)
        generator_logits = self.generator_head(gather_positions(hidden, positions))
        targets = tokens.input_ids[positions]

        uniforms = randomness.uniforms("replacements", positions.shape[1])[positions]
        sampled = sample_tokens(generator_logits.detach(), uniforms, self.config.temperature)
        corrupted_ids = replace_positions(tokens.input_ids, positions, sampled)
        is_replaced = corrupted_ids != tokens.input_ids

        discriminator_logits = self.networks()["discriminator"].token_logits(corrupted_ids, *context)
        weights = self.config.generator_weight, self.config.discriminator_weight
        terms = {
            "generator": masked_token_loss(generator_logits, targets, weights[0]),
            "discriminator": replaced_token_loss(
                discriminator_logits, is_replaced, tokens.attention_mask, batch.num_tokens, weights[1]
            ),
        }
        observations = {
            "generator_logits": generator_logits.detach(),
            "generator_targets": targets,
            "sampled_ids": sampled,
            "corrupted_ids": corrupted_ids,
            "is_replaced": is_replaced,
            "discriminator_logits": discriminator_logits.detach(),
        }
        return StepOutput(terms, observations)

    def networks(self) -> dict[str, Network]:
        return {
            "discriminator": Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear),
            "generator": Network(self.generator, self.generator_head),
        }

    def evaluator(self) -> ReplacedTokenEvaluator:
        return ReplacedTokenEvaluator(self.config.generator_weight, self.config.discriminator_weight)

    def initial_loss(self) -> float:
        """ln V + 50 ln 2: about 45 for 30,522 words."""
        config = self.config
        return config.generator_weight * math.log(self.vocabulary.size) + config.discriminator_weight * math.log(2)


def _embeddings(size: int, model: ModelConfig, small: ModelConfig, tying: str) -> tuple[TokenEmbeddings, Embeddings]:
    """What the discriminator reads, and what the generator reads."""
    width = small.hidden_size if tying == "none" else model.embedding_size
    own = Embeddings(size, width, small)
    if tying == "embeddings":
        return own, own
    if tying == "gradient-disentangled":
        return DisentangledEmbeddings(own, model), own
    read = Embeddings(size, model.embedding_size, model)
    if tying == "token":
        own.word = read.word
    return read, own
