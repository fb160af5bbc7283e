"""Replaced token detection: the objective of ELECTRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.models.base import Network, build_encoder
from discern.models.config import ModelConfig
from discern.models.embeddings import Disentangled, DisentangledEmbeddings, TokenEmbeddings, WordTable
from discern.models.heads import ReplacedTokenHead
from discern.objectives import algorithms, generators
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase
from discern.objectives.config import ObjectiveConfig
from discern.objectives.entropies import TokenEntropies
from discern.objectives.losses import replaced_token_loss
from discern.objectives.masked import MaskingObjective
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.objectives.rtd.algorithms import Algorithm
from discern.objectives.rtd.config import RTDConfig, factor_at
from discern.objectives.rtd.generators import Generator, GeneratorInputs
from discern.objectives.rtd.sentence_contrast import (
    SentenceContrast,
    SentenceContrastEvaluator,
    is_tampered,
    sentence_loss,
)
from discern.objectives.two_networks import bilinear_term, separate_embeddings, shared_embeddings
from discern.types import CorruptedBatch, Places, PlacesOf, StepOutput


class ReplacedTokenDetection(MaskingObjective[RTDConfig]):
    """A generator replaces masked tokens with samples; a discriminator classifies every token as original or replaced.

    The generator, and the algorithm that trains the two networks, come from the registries `generators` and `algorithms`.

    Reference: Clark et al. 2020, section 2.
    """

    Config: ClassVar[type[ObjectiveConfig]] = RTDConfig
    detects_every_token: ClassVar[bool] = True

    def __init__(self, config: RTDConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        size, model, checkpointing = settings.vocabulary.size, settings.model, settings.gradient_checkpointing
        small = model.shrunk(config.generator_size, config.generator_depth)
        algorithm: type[Algorithm] = algorithms.load(config.algorithm)
        read, read_by_generator = _embeddings(size, model, small, config.tying, apart=algorithm.apart)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=checkpointing)
        self.discriminator_head = ReplacedTokenHead(model)
        self.discriminator_bilinear = bilinear_term(config.discriminator_head, self.discriminator)
        shared = self.discriminator if config.tying == "all" else None
        inputs = GeneratorInputs(settings, small, read_by_generator, shared)
        self._generator: Generator = generators.load(config.generator)(config, inputs)
        self._algorithm = algorithm(config, self._generator)
        for name, module in (self._generator.modules() | self._algorithm.modules()).items():
            self.add_module(name, module)
        contrasts = config.sentence_contrastive_weight > 0
        self.sentence_contrast = SentenceContrast(model, config.sentence_clean_probability) if contrasts else None

    def initialize(self, seed: int) -> None:
        """Fill every parameter, as a function of the seed alone.

        Raises:
            ConfigError: the generator lacks something, such as word counts.
        """
        self._generator.prepare()
        super().initialize(seed)

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        counts = self._algorithm.counts(batch)
        if self._runs_discriminator():
            counts["discriminator"] = batch.num_tokens
            if self.sentence_contrast is not None:
                counts["sentence"] = int(batch.mask("texts").sum())
        return counts

    def reads(self) -> frozenset[PlacesOf]:
        texts: frozenset[PlacesOf] = frozenset() if self.sentence_contrast is None else frozenset({"texts"})
        return self._generator.reads() | texts

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        """Both losses of a batch whose chosen positions `corrupt` has masked."""
        tokens, step = batch.tokens, randomness.step

        # The generator predicts the masked tokens.
        prediction = self._generator.predict(batch)
        generator_loss = self._generator.loss(prediction, self._weight("generator", step))

        # Samples from the same logits replace them; no gradient flows through the choice.
        sampled_ids = self._generator.sample(prediction, batch, randomness)
        chosen = batch.places("chosen")
        corrupted_ids = chosen.scatter(tokens.input_ids, sampled_ids)
        observations = {
            **prediction.logits.observed("generator"),
            **self.observed_entropies(prediction.logits, prediction.targets, prediction.places),
            "generator_targets": prediction.targets,
            "sampled_ids": sampled_ids,
            "sampled_targets": prediction.originals,
        }
        if not self._runs_discriminator():
            learned = self._algorithm.generator_terms(generator_loss, prediction, sampled_ids, None, step)
            return StepOutput(learned.terms, observations, learned.metrics)
        if self.sentence_contrast is not None:
            corrupted_ids = self.sentence_contrast.restore(corrupted_ids, tokens, randomness)

        # The discriminator classifies every real token as original or replaced.
        is_replaced = corrupted_ids != tokens.input_ids  # a sample that equals the original counts as original
        discriminator = self.networks()["discriminator"]
        hidden = discriminator.encoder(corrupted_ids, *tokens.context)
        logits = discriminator.logits_of(hidden, corrupted_ids)
        weight = self._weight("discriminator", step)
        terms = {"discriminator": replaced_token_loss(logits, is_replaced, tokens.attention_mask, batch.num_tokens, weight)}
        observations |= {"corrupted_ids": corrupted_ids, "is_replaced": is_replaced, "discriminator_logits": logits.detach()}
        if self.sentence_contrast is not None:
            texts = batch.places("texts")
            sentence_logits, tampered = self.sentence_contrast(hidden, texts), is_tampered(is_replaced, tokens, texts)
            terms["sentence"] = sentence_loss(sentence_logits, tampered, self.config.sentence_contrastive_weight)
            observations |= {"sentence_logits": sentence_logits.detach(), "is_tampered": tampered}

        rewards = None
        if self._algorithm.needs_rewards:
            rewards = loss_at(logits, is_replaced, chosen)
        learned = self._algorithm.generator_terms(generator_loss, prediction, sampled_ids, rewards, step)
        return StepOutput({**learned.terms, **terms}, observations, learned.metrics)

    def _weight(self, network: str, step: int) -> float:
        """Weight of a network's loss at a step; 0 while the network is frozen, as its loss is then only reported."""
        config = self.config
        weight, schedule = {
            "generator": (config.generator_weight, config.generator_weight_schedule),
            "discriminator": (config.discriminator_weight, config.discriminator_weight_schedule),
        }[network]
        if not self.training:
            return weight
        return weight * factor_at(schedule, step) if self._trains(network) else 0.0

    def _trains(self, name: str) -> bool:
        """Whether a network is being trained, judged by its head, which is never shared; true if there is no such network."""
        network = self.networks().get(name)
        return network is None or next(network.head.parameters()).requires_grad

    def _runs_discriminator(self) -> bool:
        """Whether the discriminator runs: not while the generator is trained alone, unless its loss is the reward."""
        return not self.training or self._trains("discriminator") or self._algorithm.needs_rewards

    def networks(self) -> dict[str, Network]:
        sentence = () if self.sentence_contrast is None else (self.sentence_contrast,)
        discriminator = Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear, sentence)
        return {"discriminator": discriminator} | self._algorithm.generator_networks()

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        """As by default, but without the discriminator in a phase that has no use for it."""
        found = super().forward_passes(phase)
        if phase.trains is None or "discriminator" in phase.trains or self._algorithm.needs_rewards:
            return found
        return [each for each in found if each.network.head is not self.discriminator_head]

    def head_share(self, network: Network, phase: Phase) -> float:
        return 1.0 if self._generator.everywhere else super().head_share(network, phase)

    def phases(self, max_steps: int) -> list[Phase]:
        return self._algorithm.phases(max_steps, self._copy_generator)

    def _copy_generator(self) -> None:
        """Let the discriminator begin as a copy of the generator, or with a copy of what `tying` names."""
        source, target = self.networks()["generator"].encoder, self.networks()["discriminator"].encoder
        if isinstance(target.embeddings, DisentangledEmbeddings):
            copy_matching(target.embeddings.shared.norm, target.embeddings.norm)
        elif isinstance(target.embeddings, Disentangled):
            pass  # the words are those of the generator already, and the difference is zero
        elif self.config.copy_weights or self.config.tying == "embeddings":
            copy_matching(source.embeddings, target.embeddings)
        elif self.config.tying == "token":
            with torch.no_grad():
                target.embeddings.weights.copy_(source.embeddings.weights)
        if self.config.copy_weights:
            copy_matching(source, target, leaving_out="embeddings.")

    def carry_state(self) -> dict[str, Tensor]:
        return self._algorithm.carry_state() | super().carry_state()

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:
        self._algorithm.load_carry_state(state)
        if self._entropies is not None:
            self._entropies.load({name: values for name, values in state.items() if name.startswith(TokenEntropies.PREFIX)})

    def evaluator(self) -> Evaluator:
        tokens = ReplacedTokenEvaluator(self.config.generator_weight, self.config.discriminator_weight)
        weight = self.config.sentence_contrastive_weight
        return tokens if self.sentence_contrast is None else SentenceContrastEvaluator(tokens, weight)

    def loss_weights(self) -> tuple[float, float] | None:
        config = self.config
        scheduled = config.generator_weight_schedule or config.discriminator_weight_schedule
        is_sum = config.algorithm == "joint" and not config.sentence_contrastive_weight
        return (config.generator_weight, config.discriminator_weight) if is_sum and not scheduled else None

    def initial_loss(self) -> float:
        """ln V + 50 ln 2: about 45 for 30,522 words."""
        binary = self.config.discriminator_weight + self.config.sentence_contrastive_weight
        return self._algorithm.initial_loss() + binary * math.log(2)


def loss_at(logits: Float[Tensor, "B L"], is_replaced: Bool[Tensor, "B L"], chosen: Places) -> Float[Tensor, "M"]:
    """The discriminator's loss at the chosen positions, in nats, detached: the reward of an adversarial generator."""
    judged, labels = chosen.gather(logits.detach()).float(), chosen.gather(is_replaced).float()
    return F.binary_cross_entropy_with_logits(judged, labels, reduction="none")


@torch.no_grad()
def copy_matching(source: torch.nn.Module, target: torch.nn.Module, leaving_out: str | None = None) -> None:
    """Copy each parameter of `source` to the one of the same name in `target`.

    Args:
        leaving_out: prefix of the names that are not copied.
    """
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if leaving_out is None or not name.startswith(leaving_out):
            parameter.copy_(values[name])


def _embeddings(
    size: int, model: ModelConfig, small: ModelConfig, tying: str, *, apart: bool
) -> tuple[TokenEmbeddings, WordTable]:
    """The embeddings of the discriminator and those of the generator."""
    if apart and tying != "gradient-disentangled":
        # Of one width whatever is tied, so that one can become a copy of the other.
        return separate_embeddings(size, model, small, "equal")
    return shared_embeddings(size, model, small, "embeddings" if tying == "all" else tying)
