"""Replaced token detection: the objective of ELECTRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.randomness import Randomness, key_of
from discern.corruption.sampling import replace_positions
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings, TokenEmbeddings
from discern.model.encoder import build_encoder
from discern.model.heads import BilinearTerm, ReplacedTokenHead
from discern.model.initialisation import initialise
from discern.model.network import Network
from discern.objectives import algorithms, generators
from discern.objectives.algorithm import Algorithm, copy_matching
from discern.objectives.base import BuildSettings, Evaluator, Objective, Phase
from discern.objectives.config import ObjectiveConfig
from discern.objectives.contrastive import (
    SentenceContrast,
    SentenceContrastEvaluator,
    is_tampered,
    sentence_loss,
    text_starts,
)
from discern.objectives.generator import Generator, Materials, Proposal
from discern.objectives.losses import replaced_token_loss
from discern.objectives.masked import mask_batch
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.objectives.passes import Pass, head_share
from discern.objectives.replacement import context_of, shared_embeddings
from discern.objectives.rtd_config import RTDConfig
from discern.objectives.weights import factor_at
from discern.types import CorruptedBatch, LossTerm, StepOutput, TokenBatch

__all__ = ["RTDConfig", "ReplacedTokenDetection"]


class ReplacedTokenDetection(Objective):
    """A generator fills masked positions with samples; a discriminator tells which tokens were replaced.

    The generator runs once a step: its loss and its samples come from the same logits, dropout on. What it is, and how the
    two are trained, are objects of the registries `generators` and `algorithms`.

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
        algorithm: type[Algorithm] = algorithms.load(config.algorithm)
        read, read_by_generator = _embeddings(size, model, small, config.tying, apart=algorithm.apart)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=checkpointing)
        self.discriminator_head = ReplacedTokenHead(model)
        bilinear = config.discriminator_head == "bilinear"
        self.discriminator_bilinear = BilinearTerm(model, read.embedding_size) if bilinear else None
        shared = self.discriminator if config.tying == "all" else None
        materials = Materials(settings, small, read_by_generator, shared)
        self._generator: Generator = generators.load(config.generator)(config, materials)
        self._algorithm = algorithm(config, self._generator)
        for name, module in (self._generator.modules() | self._algorithm.modules()).items():
            self.add_module(name, module)
        contrasts = config.sentence_contrastive_weight > 0
        self.sentence_contrast = SentenceContrast(model, config.sentence_clean_probability) if contrasts else None

    def initialise(self, seed: int) -> None:
        """Fill every parameter, as a function of the seed alone.

        Raises:
            ConfigError: the generator lacks something, as word counts.
        """
        self._generator.prepare()
        initialise(self, torch.Generator().manual_seed(key_of(seed, "weights")), self._model)

    def corrupt(self, batch: TokenBatch, randomness: Randomness) -> CorruptedBatch:
        return mask_batch(batch, self.config, self.vocabulary, randomness)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        counts = self._algorithm.counts(batch)
        if self._judges():
            counts["discriminator"] = batch.num_tokens
            if self.sentence_contrast is not None:
                counts["sentence"] = int(text_starts(batch.tokens).sum())
        return counts

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        proposal = self._generator.propose(batch, randomness)
        weight = self._weight("generator", randomness.step)
        observations = {
            "generator_logits": proposal.logits.detach(),
            "generator_targets": proposal.targets,
            "sampled_ids": proposal.sampled_ids,
            "sampled_targets": proposal.originals,
        }
        judged, seen = self._judge(batch, proposal, randomness) if self._judges() else ({}, {})
        rewards = None
        if self._algorithm.needs_rewards:
            rewards = judgement_at(seen["discriminator_logits"], seen["is_replaced"], batch.masked_positions)
        learned = self._algorithm.generator_loss(proposal, weight, rewards)
        return StepOutput({**learned.terms, **judged}, observations | seen, learned.figures)

    def _judge(
        self, batch: CorruptedBatch, proposal: Proposal, randomness: Randomness
    ) -> tuple[dict[str, LossTerm], dict[str, Tensor]]:
        """The discriminator's terms and observations."""
        tokens, config = batch.tokens, self.config
        corrupted_ids = replace_positions(tokens.input_ids, batch.masked_positions, proposal.sampled_ids)
        if self.sentence_contrast is not None:
            corrupted_ids = self.sentence_contrast.restore(corrupted_ids, tokens, randomness)
        is_replaced = corrupted_ids != tokens.input_ids
        network = self.networks()["discriminator"]
        hidden = network.encoder(corrupted_ids, *context_of(tokens))
        logits = network.logits_of(hidden, corrupted_ids)
        weight = self._weight("discriminator", randomness.step)
        terms = {
            "discriminator": replaced_token_loss(logits, is_replaced, tokens.attention_mask, batch.num_tokens, weight),
        }
        seen = {"corrupted_ids": corrupted_ids, "is_replaced": is_replaced, "discriminator_logits": logits.detach()}
        if self.sentence_contrast is not None:
            sentence_logits, tampered = self.sentence_contrast(hidden, tokens), is_tampered(is_replaced, tokens)
            terms["sentence"] = sentence_loss(sentence_logits, tampered, config.sentence_contrastive_weight)
            seen |= {"sentence_logits": sentence_logits.detach(), "is_tampered": tampered}
        return terms, seen

    def _weight(self, network: str, step: int) -> float:
        """Of a network's loss at a step; 0 where the network is frozen, which its loss then only describes."""
        config = self.config
        weight, schedule = {
            "generator": (config.generator_weight, config.generator_weight_schedule),
            "discriminator": (config.discriminator_weight, config.discriminator_weight_schedule),
        }[network]
        if not self.training:
            return weight
        return weight * factor_at(schedule, step) if self._moves(network) else 0.0

    def _moves(self, name: str) -> bool:
        """Whether a network is being trained, which its head tells, as it is never shared; true where there is none."""
        network = self.networks().get(name)
        return network is None or next(network.head.parameters()).requires_grad

    def _judges(self) -> bool:
        """Whether the discriminator runs: not while only the generator learns, unless its judgement is the reward."""
        return not self.training or self._moves("discriminator") or self._algorithm.needs_rewards

    def networks(self) -> dict[str, Network]:
        sentence = () if self.sentence_contrast is None else (self.sentence_contrast,)
        judge = Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear, sentence)
        return {"discriminator": judge} | self._algorithm.generator_networks()

    def passes(self, phase: Phase) -> list[Pass]:
        """The generator's head where its loss is taken; no discriminator in a phase that has no use for it."""
        networks, trains = self.networks(), phase.trains
        found = []
        if trains is None or "discriminator" in trains or self._algorithm.needs_rewards:
            moves = trains is None or "discriminator" in trains
            found.append(Pass(networks["discriminator"], 1.0, moves))
        if "generator" in networks:
            generator = networks["generator"]
            share = 1.0 if self._generator.everywhere else head_share(self, generator, phase)
            found.append(Pass(generator, share, trains is None or "generator" in trains))
        return found

    def phases(self, max_steps: int) -> list[Phase]:
        return self._algorithm.phases(max_steps, self._take_over)

    def _take_over(self) -> None:
        """Let the discriminator begin where the generator stands: as a copy of it, or with what `tying` names only."""
        source, target = self.networks()["generator"].encoder, self.networks()["discriminator"].encoder
        if isinstance(target.embeddings, DisentangledEmbeddings):
            copy_matching(target.embeddings.shared.norm, target.embeddings.norm)
        elif self.config.copy_weights or self.config.tying == "embeddings":
            copy_matching(source.embeddings, target.embeddings)
        elif self.config.tying == "token":
            with torch.no_grad():
                target.embeddings.weights.copy_(source.embeddings.weights)
        if self.config.copy_weights:
            copy_matching(source, target, leaving_out="embeddings.")

    def carry_state(self) -> dict[str, Tensor]:
        return self._algorithm.carry_state()

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        self._algorithm.load_carry_state(state)

    def evaluator(self) -> Evaluator:
        tokens = ReplacedTokenEvaluator(self.config.generator_weight, self.config.discriminator_weight)
        weight = self.config.sentence_contrastive_weight
        return tokens if self.sentence_contrast is None else SentenceContrastEvaluator(tokens, weight)

    def initial_loss(self) -> float:
        """ln V + 50 ln 2: about 45 for 30,522 words."""
        judged = self.config.discriminator_weight + self.config.sentence_contrastive_weight
        return self._algorithm.initial_loss() + judged * math.log(2)


def judgement_at(logits: Tensor, is_replaced: Tensor, positions: Tensor) -> Float[Tensor, "M"]:
    """The discriminator's loss at the chosen positions, in nats, detached: what an adversarial generator is rewarded with."""
    chosen, truth = logits.detach()[positions].float(), is_replaced[positions].float()
    return F.binary_cross_entropy_with_logits(chosen, truth, reduction="none")


def _embeddings(
    size: int, model: ModelConfig, small: ModelConfig, tying: str, *, apart: bool
) -> tuple[TokenEmbeddings, Embeddings]:
    """What the discriminator reads, and what the generator reads."""
    if apart and tying != "gradient-disentangled":
        # Of one width whatever is tied, so that one can become a copy of the other.
        return Embeddings(size, model.embedding_size, model), Embeddings(size, model.embedding_size, small)
    return shared_embeddings(size, model, small, "embeddings" if tying == "all" else tying)
