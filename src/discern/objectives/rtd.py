"""Replaced token detection, the objective of ELECTRA: its settings, a generator, joint training and the objective.

The other generators and algorithms, and the sentence-level task, are in `rtd_variants.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from discern.config.schema import RunPoint
from discern.corruption.masking import Sampling, chosen_share
from discern.corruption.randomness import Randomness
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.models.base import Encoder, Network, build_encoder
from discern.models.config import ModelConfig
from discern.models.heads import CopyMLMHead, ReplacedTokenHead, TiedLMHead
from discern.models.layers import WordEmbeddings
from discern.objectives import algorithms, generators
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase
from discern.objectives.config import CAUSAL_FRACTION, GeneratorConfig, ObjectiveConfig, check_one_way, registered
from discern.objectives.losses import WordLogits, replaced_token_loss, word_logits
from discern.objectives.masked import (
    MaskingObjective,
    bilinear_term,
    restore_tokens,
    sample_replacements,
    shared_embeddings,
)
from discern.objectives.metrics import MetricsEvaluator, replaced_token_metrics
from discern.types import CorruptedBatch, LossTerm, Places, PlacesOf, StepOutput


class RTDConfig(GeneratorConfig):
    """Settings of replaced token detection. Defaults: ELECTRA-Small, table 6."""

    detects_every_token: ClassVar[bool] = True
    name: str = Field("rtd", description="Objective, by its name in the registry.")
    generator: Annotated[str, AfterValidator(partial(registered, generators))] = Field(
        "mlm",
        description="Generator of the replacements, by its name in the registry of generators. 'mlm': a small masked language "
        "model; 'hybrid': one that is also trained left to right, and so used in `causal_fraction` of the rows; 'two-tower': a "
        "left-to-right and a right-to-left model over the clean text; 'uniform': all words with equal "
        "probability; 'unigram': words with their frequencies in the training split.",
    )
    generator_checkpoint: str | None = Field(
        None, description="Run or export whose masked language model the generator starts from; 'none': random weights."
    )
    causal_fraction: float = CAUSAL_FRACTION
    tying: Literal["embeddings", "token", "none", "all", "gradient-disentangled"] = Field(
        "embeddings",
        description="What generator and discriminator share. 'embeddings': words, positions, segments and their LayerNorm, as "
        "far as the encoder has them; 'token': words only; 'none': nothing; 'all': the whole encoder, so that only the heads "
        "differ (needs equal sizes); "
        "'gradient-disentangled': the discriminator reads the generator's embeddings without sending gradient back, and adds a "
        "learned difference of its own (DeBERTaV3).",
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense",
        description="'dense': the paper's, two layers on the state. 'bilinear' adds the product of the state with the word at "
        "its place; learns sooner at small scale; best with tying 'gradient-disentangled'.",
    )
    algorithm: Annotated[str, AfterValidator(partial(registered, algorithms))] = Field(
        "joint",
        description="How the two networks are trained, by name in the registry of algorithms. 'joint': together, from step 0; "
        "'two-stage': the generator, then the discriminator; 'adversarial': the generator to fool the discriminator (REINFORCE).",
    )
    two_stage_steps: RunPoint = Field(
        0.5,  # type: ignore[assignment]
        gt=0,
        description="Algorithm 'two-stage' only: updates of the generator, or the fraction of the run below 1. Paper: 0.5.",
    )
    copy_weights: bool = Field(
        True,
        description="Algorithm 'two-stage' only: the discriminator starts as a copy of the generator. Needs equal sizes. "
        "Paper: true; without it the discriminator may never beat the majority class.",
    )
    discriminator_weight: float = Field(50.0, ge=0, description="Factor of the discriminator's loss. ELECTRA: 50.")
    correction_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of an additional loss, for predicting the original token at every position from the discriminator's "
        "states, with the copy mechanism of 'all-tokens-mlm'. COCO-LM: 1; 0: none.",
    )
    freeze_generator_at: RunPoint | None = Field(
        None,
        ge=0,
        description="Step, or fraction of the run, from which the generator's weights are frozen; 0: from the start.",
    )
    generator_warmup_steps: RunPoint = Field(
        0,
        ge=0,
        description="Number of updates (or the fraction of the run) at the start that train the generator alone, without the "
        "weights that it shares: for a new generator beside a trained discriminator. The schedule then starts again for both.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely words with this total probability; 1: from all words, as in the paper.",
    )
    disallow_original: bool = Field(
        False, description="Never sample the original word, so that every chosen position is replaced. Paper: false."
    )
    sentence_contrastive_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of an additional loss, for predicting from the first token whether any token of the text was "
        "replaced. ELECTRA, appendix G: slightly worse; 0: none.",
    )
    sentence_clean_probability: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Fraction of the texts that are left unchanged for the sentence-contrastive loss. ELECTRA, appendix G: 0.2.",
    )

    def sampling_at(self, step: int) -> Sampling:
        return Sampling(self.value_at("temperature", step), self.top_p, self.disallow_original)

    @property
    def causal_rows(self) -> float:
        return self.causal_fraction if self.generator == "hybrid" else 0.0

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        if self.causal_rows:
            check_one_way(model, "generator 'hybrid'")
        if self.correction_weight and getattr(model, "mask_decoder", False):
            raise ValueError(
                "objective.correction_weight needs a discriminator without a decoder of its own; set model.mask_decoder=false, "
                "or objective.correction_weight=0"
            )

    @property
    def generator_source(self) -> str | None:
        return self.generator_checkpoint

    @property
    def can_warm_up_generator(self) -> bool:
        has_other_plan = self.freeze_generator_at is not None or self.generator_checkpoint is not None or self.tying == "all"
        return not has_other_plan and not algorithms.load(self.algorithm).trains_separately

    def replaced_share(self, step: int, row_length: int) -> float | None:
        share = chosen_share(self.masking, self.value_at("mask_probability", step), row_length)
        if share is None or not self.sentence_contrastive_weight:
            return share
        return share * (1 - self.sentence_clean_probability)  # texts that stay clean get their original tokens back

    def continued_at(self, step: int) -> dict[str, Any]:
        changed = super().continued_at(step)
        if self.freeze_generator_at is not None:
            changed["freeze_generator_at"] = 0 if self.freeze_generator_at <= step else None
        if self.generator_checkpoint is not None:
            changed["generator_checkpoint"] = None
        if algorithms.load(self.algorithm).trains_separately:
            # The two networks no longer share weights and now learn together; embeddings shared without gradient stay shared.
            changed["algorithm"] = "joint"
            changed["tying"] = self.tying if self.tying == "gradient-disentangled" else "none"
        return changed

    def unread(self) -> dict[str, str]:
        unread = super().unread()
        if self.algorithm != "two-stage":
            unread |= dict.fromkeys(("two_stage_steps", "copy_weights"), "algorithm = 'two-stage'")
        if self.generator in ("two-tower", "uniform", "unigram"):  # read no [MASK]
            unread |= dict.fromkeys(("mask_token_probability", "random_token_probability"), "generator = 'mlm'")
        if self.generator in ("uniform", "unigram"):  # have no weights
            unread |= dict.fromkeys(("generator_size", "generator_depth"), "generator = 'mlm'")
            if self.tying in ("token", "none"):  # with 'embeddings' the discriminator has its own as well
                unread["tying"] = "generator = 'mlm'"
        if self.generator == "uniform":
            unread |= dict.fromkeys(("temperature", "temperature_end", "temperature_steps"), "generator = 'mlm'")
        if self.generator != "hybrid":
            unread["causal_fraction"] = "generator = 'hybrid'"
        if not self.sentence_contrastive_weight:
            unread["sentence_clean_probability"] = "sentence_contrastive_weight > 0"
        return unread

    @model_validator(mode="after")
    def _options_go_together(self) -> RTDConfig:
        freezes = self.freeze_generator_at is not None
        two_stage, adversarial = self.algorithm == "two-stage", self.algorithm == "adversarial"
        weightless, disentangled = self.generator in ("uniform", "unigram"), self.tying == "gradient-disentangled"
        two_tower, tied = self.generator == "two-tower", self.tying == "all"
        sizes = f"generator_size is {self.generator_size:g} and generator_depth {self.generator_depth:g}"
        unequal, equal = self.generator_size != 1 or self.generator_depth != 1, "generator_size = 1.0 and generator_depth = 1.0"
        needs_predictions = self.masking == "entropy" or self.generator_checkpoint is not None
        conflicts = {
            "generator 'two-tower' reads the text once in each direction, so it cannot be the discriminator as tying 'all' "
            "asks; set tying = 'embeddings', or generator = 'mlm'": two_tower and tied,
            "the two encoders of generator 'two-tower' cannot be copied into the discriminator, as algorithm 'two-stage' "
            "does; set copy_weights = false, or generator = 'mlm'": two_tower and two_stage and self.copy_weights,
            f"generator '{self.generator}' has no weights to share, train, fill or freeze, and no doubts to mask by; set "
            "tying = 'embeddings', algorithm = 'joint' and masking = 'uniform' and leave out generator_checkpoint and "
            "freeze_generator_at, or set generator = 'mlm'": (
                weightless and (tied or disentangled or freezes or self.algorithm != "joint" or needs_predictions)
            ),
            "generator 'uniform' gives all words equal probability, and top_p below 1 would exclude those with the highest "
            "ids; leave out top_p, or set generator = 'unigram'": self.generator == "uniform" and self.top_p < 1,
            "algorithm 'two-stage' trains the two networks one after the other, but with tying 'all' they are one encoder; "
            "set tying = 'embeddings' (the discriminator still starts as a copy)": two_stage and tied,
            f"algorithm 'two-stage' copies the generator into the discriminator, which needs the same sizes, but {sizes}; "
            f"set {equal}, or copy_weights = false": two_stage and self.copy_weights and unequal,
            "algorithm 'two-stage' trains the generator first and freezes it after two_stage_steps; leave out "
            "freeze_generator_at and generator_warmup_steps, or set algorithm = 'joint'": (
                two_stage and (freezes or self.generator_warmup_steps > 0)
            ),
            "algorithm 'adversarial' needs the probability of each sample, and masking 'with-replacement' averages the "
            "samples of a position that it draws twice; set masking = 'uniform'": (
                adversarial and self.masking == "with-replacement"
            ),
            "algorithm 'adversarial' rewards each sample by the discriminator's loss, and with sentence_contrastive_weight "
            "above 0 it does not see the samples of texts that stay clean; set sentence_contrastive_weight = 0, or "
            "algorithm = 'joint'": adversarial and self.sentence_contrastive_weight > 0,
            "generator_warmup_steps needs a generator with weights of its own and networks that are never frozen; set "
            "generator_warmup_steps = 0, or generator = 'mlm', tying = 'embeddings' and no freezing": (
                self.generator_warmup_steps > 0 and (freezes or weightless or tied)
            ),
            f"freeze_generator_at is set, but with tying '{self.tying}' the discriminator still trains weights that the "
            "generator reads; set tying = 'none' or 'gradient-disentangled'": (
                freezes and self.tying not in ("none", "gradient-disentangled")
            ),
            f"tying 'all' makes generator and discriminator one encoder, but {sizes}; set {equal}, or tying = 'embeddings'": (
                tied and unequal
            ),
        }
        for message, conflict in conflicts.items():
            if conflict:
                raise ValueError(message)
        return self


class Prediction(NamedTuple):
    """A generator's distributions over the vocabulary.

    Attributes:
        logits: at the N positions of the loss.
        places: the N positions, which may count more than once.
        chosen_logits: at the M chosen positions, with gradient; the same as `logits` if the loss is taken there.
        states: (M, D) the hidden states behind `chosen_logits`; None for a generator without weights.
    """

    logits: WordLogits
    places: Places
    chosen_logits: WordLogits
    states: Float[Tensor, "M D"] | None


class Replacement(NamedTuple):
    """A batch after a generator has replaced the chosen tokens.

    Attributes:
        prediction: the distributions that the generator learns from and that the samples come from.
        term: cross-entropy of the original tokens.
        corrupted_ids: (B, L) samples at the chosen positions, the original ids elsewhere.
        observations: values for evaluation: `generator_targets`, (N,), the original tokens at the positions of the loss;
            `sampled_targets`, (M,), those at the chosen positions; `sampled_ids`, (M,), the samples there.
    """

    prediction: Prediction
    term: LossTerm
    corrupted_ids: Int[Tensor, "B L"]
    observations: dict[str, Tensor]

    @property
    def learned(self) -> tuple[WordLogits, Int[Tensor, "N"], Places]:
        """The logits, targets and positions of the loss."""
        return self.prediction.logits, self.observations["generator_targets"], self.prediction.places


class GeneratorInputs(NamedTuple):
    """What a generator is built from.

    Attributes:
        settings: vocabulary, and whether activations are recomputed.
        sizes: sizes of the generator.
        embeddings: the embeddings that it reads.
        shared: the discriminator's encoder if the two networks are one; otherwise None.
    """

    settings: BuildSettings
    sizes: ModelConfig
    embeddings: WordEmbeddings
    shared: Encoder | None = None


class Generator:
    """Proposes a token for each chosen position: a masked language model, which reads [MASK] there. Base of all generators.

    Not a module itself: the objective registers its `modules`, under names that every checkpoint has.

    Attributes:
        learns_at: the positions of its loss.
        modules: the modules that hold its weights and tables, by name.
        networks: its encoder and head under the name 'generator'; empty if it has none.

    Reference: Clark et al. 2020, section 2.
    """

    learns_at: ClassVar[PlacesOf] = "chosen"

    def __init__(self, config: ObjectiveConfig, inputs: GeneratorInputs) -> None:
        self.config, self.vocabulary = config, inputs.settings.vocabulary
        self.encoder, self.head = self.build(inputs)
        self.networks = {"generator": Network(self.encoder, self.head)}
        self.modules: dict[str, nn.Module] = {"generator": self.encoder, "generator_head": self.head}

    def build(self, inputs: GeneratorInputs) -> tuple[Encoder, TiedLMHead]:
        """New encoder and head."""
        settings, sizes, embeddings, shared = inputs
        encoder = shared or build_encoder(embeddings, sizes, gradient_checkpointing=settings.gradient_checkpointing)
        return encoder, encoder.language_head()

    def count(self, batch: CorruptedBatch) -> int:
        """Number of items that its loss sums over."""
        return batch.num_targets if self.learns_at == "chosen" else int(batch.mask(self.learns_at).sum())

    def predict(self, batch: CorruptedBatch) -> Prediction:
        """Run the generator once; its loss and its samples come from the same logits, dropout on."""
        chosen = batch.places("chosen")
        # The head is the most expensive product, so it runs on the chosen positions alone.
        states = chosen.gather(self.encoder(batch.masked_ids, *batch.tokens.context))
        logits = word_logits(self.head, states)
        return Prediction(logits, chosen, logits, states)

    def replace_chosen(self, batch: CorruptedBatch, randomness: Randomness, weight: float) -> Replacement:
        """Predict the chosen tokens and replace them with samples from the same logits.

        Args:
            weight: factor of the loss.
        """
        ids, chosen, prediction = batch.tokens.input_ids, batch.places("chosen"), self.predict(batch)
        targets, originals = prediction.places.gather(ids), chosen.gather(ids)
        term = prediction.logits.loss(targets, prediction.places, weight)
        sample = self.config.sampling_at(randomness.step).sample
        sampled_ids = sample_replacements(batch, prediction.chosen_logits, randomness, sample, originals)
        corrupted_ids = chosen.scatter(ids, sampled_ids)
        observations = {
            **prediction.logits.observed("generator"),
            "generator_targets": targets,
            "sampled_ids": sampled_ids,
            "sampled_targets": originals,
            "corrupted_ids": corrupted_ids,
        }
        return Replacement(prediction, term, corrupted_ids, observations)


class Algorithm:
    """Decides which network is trained at which step, and from what the generator learns. Base of all algorithms.

    This one, 'joint', trains both networks together from step 0, the generator by maximum likelihood; it may be frozen at some
    step.

    Attributes:
        trains_separately: whether the networks are never trained together. They then share no trained weights; what `tying`
            names is copied when the discriminator starts.
        needs_rewards: whether the generator learns from the discriminator's loss.
        modules: the modules that it trains along with the generator, by name.

    Reference: Clark et al. 2020, section 2.
    """

    trains_separately: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        self.config, self.generator = config, generator
        self.modules: dict[str, nn.Module] = {}

    def phases(self, max_steps: int, copy: Callable[[], None]) -> list[Phase]:
        """The phases of training: one, or two if the generator is frozen or warms up.

        When it is frozen, the discriminator keeps its optimizer. After a warm-up of the generator, both networks start with a new
        optimizer and a new schedule.

        Args:
            copy: copies the generator's weights into the discriminator.
        """
        warmup, frozen_at = self.config.generator_warmup_steps, self.config.freeze_generator_at
        if 0 < warmup < max_steps:
            held = frozenset({"discriminator"})
            first = Phase("generator warm-up", warmup, frozenset({"generator"}), holds=held, own_schedule=True)
            return [first, Phase("train", max_steps - warmup, own_schedule=True, begins=warmup)]
        if frozen_at is None or frozen_at >= max_steps:
            return [Phase("train", max_steps)]
        trained = frozenset({"discriminator"})
        alone = Phase("discriminator alone", max_steps - frozen_at, trained, fresh_optimizer=False, begins=frozen_at)
        return [Phase("train", frozen_at), alone] if frozen_at else [alone]

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """Number of items that each of the generator's terms sums over."""
        return {"generator": self.generator.count(batch)}

    def generator_terms(
        self, replaced: Replacement, chosen: Places, rewards: Float[Tensor, "M"] | None, step: int
    ) -> tuple[dict[str, LossTerm], dict[str, LossTerm]]:
        """The terms that the generator learns from, and means that are logged and not trained on, both by name.

        Args:
            chosen: the chosen positions.
            rewards: the discriminator's loss at each chosen position, detached; None unless the algorithm `needs_rewards`.
        """
        return {"generator": replaced.term}, {}


class ReplacedTokenDetection(MaskingObjective[RTDConfig]):
    """A generator replaces masked tokens with samples; a discriminator classifies every token as original or replaced.

    The generator, and the algorithm that trains the two networks, come from the registries `generators` and `algorithms`.

    Reference: Clark et al. 2020, section 2.
    """

    Config = RTDConfig

    def __init__(self, config: RTDConfig, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model, algorithm = settings.model, algorithms.load(config.algorithm)
        small = model.shrunk(config.generator_size, config.generator_depth)
        # Networks that never train together share nothing, but have embeddings of one width: one can become a copy of the other.
        separate = algorithm.trains_separately and config.tying != "gradient-disentangled"
        read, read_by_generator = shared_embeddings(settings, small, "equal" if separate else config.tying)
        self.discriminator = build_encoder(read, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.discriminator_head = ReplacedTokenHead(model)
        self.discriminator_bilinear = bilinear_term(config.discriminator_head, self.discriminator)
        self.correction_head = None
        if config.correction_weight > 0:
            self.correction_head = CopyMLMHead(model, self.discriminator.language_head())
        shared = self.discriminator if config.tying == "all" else None
        self._generator: Generator = generators.load(config.generator)(
            config, GeneratorInputs(settings, small, read_by_generator, shared)
        )
        self._algorithm: Algorithm = algorithm(config, self._generator)
        for name, module in (self._generator.modules | self._algorithm.modules).items():
            self.add_module(name, module)
        self.sentence_contrast = None
        if config.sentence_contrastive_weight > 0:
            from discern.objectives.rtd_variants import SentenceContrast

            self.sentence_contrast = SentenceContrast(
                model, config.sentence_clean_probability, config.sentence_contrastive_weight
            )

    def initialize(self, seed: int) -> None:
        """Fill every parameter, as a function of the seed alone.

        Raises:
            ConfigError: the generator needs word counts, which are unknown.
        """
        if self.config.generator == "unigram" and self.vocabulary.token_counts is None:
            raise ConfigError(
                "generator 'unigram' needs to know how often each word occurs in the training split, but there is no data set",
                hint="give a run or a data set, or set objective.generator = 'mlm'",
            )
        super().initialize(seed)

    def classified(self, batch: CorruptedBatch) -> tuple[Bool[Tensor, "B L"], int]:
        """The tokens of the discriminator's loss, and their number: all real tokens."""
        return batch.tokens.attention_mask, batch.num_tokens

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        counts = self._algorithm.counts(batch)
        if self._runs_discriminator():
            counts["discriminator"] = self.classified(batch)[1]
            if self.correction_head is not None:
                counts["correction"] = batch.num_tokens
            if self.sentence_contrast is not None:
                counts["sentence"] = int(batch.mask("texts").sum())
        return counts

    def reads(self) -> frozenset[PlacesOf]:
        places: set[PlacesOf] = {"chosen", self._generator.learns_at}
        if self.correction_head is not None:
            places.add("real")
        if self.sentence_contrast is not None:
            places.add("texts")
        return frozenset(places)

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        """Both losses of a batch whose chosen positions `corrupt` has masked."""
        tokens, chosen, step, contrast = batch.tokens, batch.places("chosen"), randomness.step, self.sentence_contrast

        # The generator predicts the masked tokens; samples from the same logits replace them, without gradient.
        replaced = self._generator.replace_chosen(batch, randomness, self._weight("generator"))
        corrupted_ids = replaced.corrupted_ids
        observations = replaced.observations | self.observed_entropies(*replaced.learned)
        if not self._runs_discriminator():
            terms, metrics = self._algorithm.generator_terms(replaced, chosen, None, step)
            return StepOutput(terms, observations, metrics)
        if contrast is not None:
            corrupted_ids = contrast.restore(corrupted_ids, tokens, randomness)

        # The discriminator classifies every real token as original or replaced.
        is_replaced = corrupted_ids != tokens.input_ids  # a sample that equals the original counts as original
        discriminator = self.networks()["discriminator"]
        hidden = discriminator.encoder(corrupted_ids, *tokens.context)
        logits, (loss_mask, count) = discriminator.logits_of(hidden, corrupted_ids, tokens.position_ids), self.classified(batch)
        observations |= {
            "corrupted_ids": corrupted_ids,
            "is_replaced": is_replaced,
            "discriminator_logits": logits.detach(),
            "loss_mask": loss_mask,
        }

        # The generator learns by maximum likelihood, or from the discriminator's loss at the positions that it fills.
        rewards = None
        if self._algorithm.needs_rewards:
            judged, labels = chosen.gather(logits.detach()).float(), chosen.gather(is_replaced).float()
            rewards = F.binary_cross_entropy_with_logits(judged, labels, reduction="none")
        terms, metrics = self._algorithm.generator_terms(replaced, chosen, rewards, step)
        terms["discriminator"] = replaced_token_loss(logits, is_replaced, loss_mask, count, self._weight("discriminator"))
        if self.correction_head is not None:
            weight = self.config.correction_weight
            terms["correction"], _ = restore_tokens(self.correction_head, hidden, batch, corrupted_ids, weight)
        if contrast is not None:
            terms["sentence"], seen = contrast.loss(hidden, is_replaced, tokens, batch.places("texts"))
            observations |= seen
        return StepOutput(terms, observations, metrics)

    def _weight(self, network: str) -> float:
        """Weight of a network's loss; 0 while the network is frozen, as its loss is then only reported."""
        weight: float = getattr(self.config, f"{network}_weight")
        return weight if not self.training or self._trains(network) else 0.0

    def _trains(self, name: str) -> bool:
        """Whether a network is being trained, judged by its head, which is never shared; true if there is no such network."""
        network = self.networks().get(name)
        return network is None or next(network.head.parameters()).requires_grad

    def _runs_discriminator(self) -> bool:
        """Whether the discriminator runs: not while the generator is trained alone, unless its loss is the reward."""
        return not self.training or self._trains("discriminator") or self._algorithm.needs_rewards

    def networks(self) -> dict[str, Network]:
        only_trained = tuple(part for part in (self.correction_head, self.sentence_contrast) if part is not None)
        discriminator = Network(self.discriminator, self.discriminator_head, self.discriminator_bilinear, only_trained)
        companions = tuple(self._algorithm.modules.values())
        generator = {name: replace(network, companions=companions) for name, network in self._generator.networks.items()}
        return {"discriminator": discriminator} | generator

    def forward_passes(self, phase: Phase) -> list[ForwardPass]:
        """As by default, but without the discriminator, which is the first, in a phase that has no use for it."""
        passes = super().forward_passes(phase)
        runs = phase.trains is None or "discriminator" in phase.trains or self._algorithm.needs_rewards
        return passes if runs else passes[1:]

    def head_share(self, network: Network, phase: Phase) -> float:
        return 1.0 if self._generator.learns_at == "words" else super().head_share(network, phase)

    def phases(self, max_steps: int) -> list[Phase]:
        return self._algorithm.phases(max_steps, self._copy_generator)

    @torch.no_grad()
    def _copy_generator(self) -> None:
        """Let the discriminator begin as a copy of the generator, or with a copy of what `tying` names."""
        tied = {"none": None, "token": "embeddings.word."}.get(self.config.tying, "embeddings.")
        prefix = "" if self.config.copy_weights else tied
        values = dict(self.networks()["generator"].encoder.named_parameters())
        for name, parameter in self.discriminator.named_parameters():
            # Shared tables that are read without gradient have names of their own, as they are the generator's already.
            if prefix is not None and name.startswith(prefix) and name in values:
                parameter.copy_(values[name])

    def evaluator(self) -> Evaluator:
        weights = {
            "generator_loss": self.config.generator_weight,
            "discriminator_loss": self.config.discriminator_weight,
            "correction_loss": self.config.correction_weight,
            "sentence_loss": self.config.sentence_contrastive_weight,
        }
        return MetricsEvaluator(replaced_token_metrics, weights)

    def loss_weights(self) -> tuple[float, float] | None:
        config = self.config
        is_sum = config.algorithm == "joint" and not (config.sentence_contrastive_weight or config.correction_weight)
        return (config.generator_weight, config.discriminator_weight) if is_sum else None
