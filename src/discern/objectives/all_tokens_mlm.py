"""Restoring the whole text after replacement: a word for every token, with a gate that copies."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from discern.corruption.randomness import Randomness, key_of
from discern.model.encoder import build_encoder
from discern.model.heads import CopyMLMHead, MaskedLMHead, gather_positions
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.objectives.base import BuildSettings, Objective, Phase
from discern.objectives.config import ObjectiveConfig
from discern.objectives.losses import copy_loss
from discern.objectives.masked import mask_batch
from discern.objectives.metrics import CopyEvaluator
from discern.objectives.passes import Pass, head_share
from discern.objectives.replacement import ReplacementConfig, context_of, replace_chosen, separate_embeddings
from discern.types import CorruptedBatch, StepOutput, TokenBatch


class AllTokensMLMConfig(ReplacementConfig):
    """Settings of restoring every token."""

    name: str = Field("all-tokens-mlm", description="Objective, by its name in the registry.")
    tying: Literal["embeddings", "token", "none"] = Field(
        "embeddings",
        description="What generator and encoder share. 'embeddings': words, positions, segments and their LayerNorm; "
        "'token': words only; 'none': nothing.",
    )


class AllTokensMLM(Objective):
    """Predict the original token everywhere, from text in which a generator's samples stand at the chosen positions.

    The prediction at t is D [x_corrupt_t] + (1 - D) softmax(words), D from a sigmoid layer: without the gate an encoder
    would spend itself on learning to copy. The vocabulary's head runs on every token, which at V = 30,522 is most of the
    arithmetic and memory; `train.micro_batch_size` bounds the latter.

    Reference: Clark et al. 2020, section 3.3, "All-Tokens MLM".
    """

    Config: ClassVar[type[ObjectiveConfig]] = AllTokensMLMConfig

    def __init__(self, config: AllTokensMLMConfig, settings: BuildSettings) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = settings.vocabulary
        self._model = settings.model
        model, checkpointing = settings.model, settings.gradient_checkpointing
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = separate_embeddings(settings.vocabulary.size, model, small, config.tying)
        self.encoder = build_encoder(read, model, gradient_checkpointing=checkpointing)
        self.head = CopyMLMHead(model, read.word)
        self.generator = build_encoder(read_by_generator, small, gradient_checkpointing=checkpointing)
        self.generator_head = MaskedLMHead(small, read_by_generator.word)

    def initialise(self, seed: int) -> None:
        initialise(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return mask_batch(batch, self.config, self.vocabulary, randomness)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        return {"generator": batch.num_targets, "mlm": batch.num_tokens}

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        tokens = batch.tokens
        replaced = replace_chosen(self.networks()["generator"], batch, self.config, randomness)
        real = tokens.attention_mask
        hidden = gather_positions(self.encoder(replaced.corrupted_ids, *context_of(tokens)), real)
        logits, copy_logits = self.head(hidden), self.head.copy_logits(hidden)
        restored = copy_loss(logits, copy_logits, replaced.corrupted_ids[real], tokens.input_ids[real])
        observations = {**replaced.observations, "mlm_logits": logits.detach(), "copy_logits": copy_logits.detach()}
        return StepOutput({"generator": replaced.term, "mlm": restored}, observations)

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head), "generator": Network(self.generator, self.generator_head)}

    def passes(self, phase: Phase) -> list[Pass]:
        """The generator's head at the chosen positions, the encoder's everywhere."""
        networks = self.networks()
        generator = networks["generator"]
        return [Pass(networks["encoder"], 1.0), Pass(generator, head_share(self, generator, phase))]

    def evaluator(self) -> CopyEvaluator:
        return CopyEvaluator(self.config.generator_weight)

    def initial_loss(self) -> float:
        """ln V of the generator; of the encoder -ln(1/2 + 1/2V), and -ln(1/2V) where the token was replaced."""
        size = self.vocabulary.size
        replaced = self.config.mask_probability * (1 - 1 / size)
        restored = replaced * math.log(2 * size) + (1 - replaced) * math.log(2 * size / (size + 1))
        return self.config.generator_weight * math.log(size) + restored
