"""Replaced token detection, the objective of ELECTRA: settings, generator and objective."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from discern.corruption.masking import chosen_share
from discern.corruption.randomness import Randomness
from discern.corruption.sampling import Sampling
from discern.errors import ConfigError, did_you_mean
from discern.models import encoders
from discern.models.base import Encoder, Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.embeddings import Disentangled, DisentangledEmbeddings, TokenEmbeddings, WordTable
from discern.models.heads import BilinearTerm, LanguageHead, ReplacedTokenHead
from discern.objectives import algorithms, generators
from discern.objectives.base import BuildSettings, Evaluator, ForwardPass, Phase
from discern.objectives.config import GeneratorConfig, ObjectiveConfig
from discern.objectives.entropies import TokenEntropies
from discern.objectives.losses import WordLogits, replaced_token_loss, word_logits
from discern.objectives.masked import MaskingObjective, sample_replacements
from discern.objectives.metrics import ReplacedTokenEvaluator
from discern.registry import Registry
from discern.types import CorruptedBatch, LossTerm, Places, PlacesOf, StepOutput

Point = tuple[int, float]
"""A step, and the factor of the weight at it."""


class RTDConfig(GeneratorConfig):
    """Settings of replaced token detection. Defaults: ELECTRA-Small, table 6."""

    name: str = Field("rtd", description="Objective, by its name in the registry.")
    generator: str = Field(
        "mlm",
        description="Generator of the replacements, by its name in the registry of generators. 'mlm': a small masked language "
        "model; 'two-tower': a left-to-right and a right-to-left model over the clean text; 'uniform': all words with equal "
        "probability; 'unigram': words with their frequencies in the training split.",
    )
    generator_checkpoint: str | None = Field(
        None, description="Run or export whose masked language model the generator starts from; 'none': random weights."
    )
    tying: Literal["embeddings", "token", "none", "all", "gradient-disentangled"] = Field(
        "embeddings",
        description="What generator and discriminator share. 'embeddings': words, positions, segments and their LayerNorm (of "
        "'modernbert' the words, as it has nothing else); "
        "'token': words only; 'none': nothing; 'all': the whole encoder, so that only the heads differ (needs equal sizes); "
        "'gradient-disentangled': the discriminator reads the generator's embeddings without sending gradient back, and adds a "
        "learned difference of its own (DeBERTaV3).",
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense",
        description="'dense': the paper's, two layers on the state. 'bilinear' adds the product of the state with the word at "
        "its place; learns sooner at small scale; best with tying 'gradient-disentangled'.",
    )
    algorithm: str = Field(
        "joint",
        description="How the two networks are trained, by name in the registry of algorithms. 'joint': together, from step 0; "
        "'two-stage': the generator, then the discriminator; 'adversarial': the generator to fool the discriminator (REINFORCE).",
    )
    two_stage_steps: float = Field(
        0.5,
        gt=0,
        description="Algorithm 'two-stage' only: updates of the generator; below 1, a fraction of train.max_steps. Paper: 0.5.",
    )
    copy_weights: bool = Field(
        True,
        description="Algorithm 'two-stage' only: the discriminator starts as a copy of the generator. Needs equal sizes. "
        "Paper: true; without it the discriminator may never beat the majority class.",
    )
    discriminator_weight: float = Field(50.0, ge=0, description="Factor of the discriminator's loss. ELECTRA: 50.")
    generator_weight_schedule: tuple[Point, ...] = Field(
        (),
        description="Factors of generator_weight by step, [[step, factor], ...], linear between them; empty: 1 throughout. "
        "[[0, 0.0], [1000, 1.0]] is a warm-up.",
    )
    discriminator_weight_schedule: tuple[Point, ...] = Field(
        (), description="Factors of discriminator_weight by step, as generator_weight_schedule."
    )
    freeze_generator_at: int | None = Field(
        None, ge=0, description="Step from which the generator's weights are frozen; 0: from the start; 'none': never."
    )
    freeze_discriminator_at: int | None = Field(None, ge=0, description="Step from which the discriminator's weights are frozen.")
    generator_warmup_steps: int = Field(
        0,
        ge=0,
        description="Number of updates at the start that train the generator alone, without the weights that it shares: for a "
        "new generator beside a trained discriminator. The schedule then starts again for both.",
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

    @property
    def detects_every_token(self) -> bool:
        return True

    def sampling_at(self, step: int) -> Sampling:
        return Sampling(self.temperature_at(step), self.top_p, self.disallow_original)

    @property
    def generator_source(self) -> str | None:
        return self.generator_checkpoint

    @property
    def can_warm_up_generator(self) -> bool:
        frozen = self.freeze_generator_at is not None or self.freeze_discriminator_at is not None
        apart = algorithms.load(self.algorithm).apart
        return not (frozen or apart or self.generator_checkpoint is not None or self.tying == "all")

    def replaced_share(self, step: int, row_length: int) -> float | None:
        share = chosen_share(self.masking, self.probability_at(step), row_length)
        if share is None or not self.sentence_contrastive_weight:
            return share
        return share * (1 - self.sentence_clean_probability)  # texts that stay clean get their original tokens back

    def continued_at(self, step: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for name in ("generator_weight_schedule", "discriminator_weight_schedule"):
            if points := getattr(self, name):
                factor = factor_at(points, step)
                changed[name] = () if factor == 1 else ((0, factor),)
        for name in ("freeze_generator_at", "freeze_discriminator_at"):
            begins = getattr(self, name)
            if begins is not None:
                changed[name] = 0 if begins <= step else None
        changed |= super().continued_at(step)
        if self.generator_checkpoint is not None:
            changed["generator_checkpoint"] = None
        if algorithms.load(self.algorithm).apart:
            # The two networks no longer share weights and now learn together; embeddings shared without gradient stay shared.
            changed["algorithm"] = "joint"
            changed["tying"] = self.tying if self.tying == "gradient-disentangled" else "none"
        return changed

    def unread(self) -> dict[str, str]:
        found = super().unread()
        if self.algorithm != "two-stage":
            found |= dict.fromkeys(("two_stage_steps", "copy_weights"), "algorithm = 'two-stage'")
        if self.generator in ("two-tower", "uniform", "unigram"):  # read no [MASK]
            found |= dict.fromkeys(("mask_token_probability", "random_token_probability"), "generator = 'mlm'")
        if self.generator in ("uniform", "unigram"):  # have no weights
            found |= dict.fromkeys(("generator_size", "generator_depth", "generator_weight_schedule"), "generator = 'mlm'")
            if self.tying in ("token", "none"):  # with 'embeddings' the discriminator has its own as well
                found["tying"] = "generator = 'mlm'"
        if self.generator == "uniform":
            found |= dict.fromkeys(("temperature", "temperature_end", "temperature_steps"), "generator = 'mlm'")
        if not self.sentence_contrastive_weight:
            found["sentence_clean_probability"] = "sentence_contrastive_weight > 0"
        return found

    @field_validator("generator")
    @classmethod
    def _is_generator(cls, name: str) -> str:
        return _known(generators, name)

    @field_validator("algorithm")
    @classmethod
    def _is_algorithm(cls, name: str) -> str:
        return _known(algorithms, name)

    @model_validator(mode="after")
    def _options_go_together(self) -> RTDConfig:
        check_points("generator_weight_schedule", self.generator_weight_schedule)
        check_points("discriminator_weight_schedule", self.discriminator_weight_schedule)
        chosen: list[Any] = [generators.load(self.generator), algorithms.load(self.algorithm)]
        for part in chosen:
            part.check(self)
        if self.tying == "all" and (self.generator_size != 1 or self.generator_depth != 1):
            raise ValueError(
                "tying 'all' makes generator and discriminator one encoder, which has one size, but generator_size is "
                f"{self.generator_size:g} and generator_depth {self.generator_depth:g}; set generator_size = 1.0 and "
                "generator_depth = 1.0, or tying = 'embeddings'"
            )
        return self


def _known(registry: Registry[Any], name: str) -> str:
    """The name, if it is registered.

    Raises:
        ValueError: it is not.
    """
    names = registry.names()
    if name not in names:
        raise ValueError(f"unknown {registry.kind} '{name}'; {did_you_mean(name, names)}")
    return name


def factor_at(points: Sequence[Point], step: int) -> float:
    """The factor of a weight at a step: linear between the points, constant before the first and after the last.

    No points: 1 throughout. [[0, 0.0], [1000, 1.0]] is a warm-up of 1000 steps; [[999, 1.0], [1000, 0.0]] stops at step 1000.
    """
    if not points:
        return 1.0
    if step <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return points[-1][1]


def check_points(name: str, points: Sequence[Point]) -> None:
    """Check that the steps increase and no factor is negative.

    Raises:
        ValueError: they do not, or one is.
    """
    steps = [step for step, _ in points]
    if any(right <= left for left, right in pairwise(steps)) or any(step < 0 for step in steps):
        raise ValueError(f"{name} has the steps {steps}; each must be larger than the one before, the first at least 0")
    if any(factor < 0 for _, factor in points):
        raise ValueError(f"{name} has a negative factor; 0 switches the loss off")


def masked_lm(embeddings: WordTable, sizes: ModelConfig, settings: BuildSettings) -> tuple[Encoder, LanguageHead]:
    """Encoder and head of a masked language model with the given embeddings, as a generator is one."""
    encoder = build_encoder(embeddings, sizes, gradient_checkpointing=settings.gradient_checkpointing)
    return encoder, encoder.language_head()


def bilinear_term(kind: Literal["dense", "bilinear"], encoder: Encoder) -> BilinearTerm | None:
    """The term that this kind of head adds to the discriminator's logits; None if there is none."""
    return BilinearTerm(encoder.config, encoder.embeddings.embedding_size) if kind == "bilinear" else None


def shared_embeddings(vocab_size: int, model: ModelConfig, small: ModelConfig, tying: str) -> tuple[TokenEmbeddings, WordTable]:
    """The embeddings of the main network and those of the generator.

    Args:
        model: sizes of the main network.
        small: sizes of the generator.
        tying: 'embeddings', 'token', 'none' or 'gradient-disentangled'.

    Raises:
        ConfigError: encoders of this kind cannot share embeddings.
    """
    kind = _sharing(model)
    if tying == "gradient-disentangled":
        own = kind.embeddings_class(vocab_size, model.embedding_size, small)
        return kind.disentangled_class(own, model), own
    return separate_embeddings(vocab_size, model, small, tying)


def separate_embeddings(vocab_size: int, model: ModelConfig, small: ModelConfig, tying: str) -> tuple[WordTable, WordTable]:
    """As `shared_embeddings`, for a main network that needs a word table.

    Args:
        tying: 'embeddings', 'token' or 'none'; 'equal': nothing is shared, and both are as wide as the main network's.
    """
    _sharing(model)
    own = build_embeddings(vocab_size, small.hidden_size if tying == "none" else model.embedding_size, small)
    if tying == "embeddings":
        return own, own
    read = build_embeddings(vocab_size, model.embedding_size, model)
    if tying == "token":
        own.word = read.word
    return read, own


def _sharing(model: ModelConfig) -> Any:
    """The class of the encoder, which must be able to share embeddings with a generator."""
    kind: Any = encoders.load(model.encoder)
    if kind.disentangled_class is None:
        raise ConfigError(
            f"encoder '{model.encoder}' cannot share its embeddings with a generator, as this objective asks",
            hint="set model.encoder=bert or modernbert, or another objective",
        )
    return kind


@dataclass(frozen=True)
class GeneratorInputs:
    """What a generator is built from.

    Attributes:
        settings: vocabulary, and whether activations are recomputed.
        sizes: sizes of the generator.
        embeddings: the embeddings that it reads.
        encoder: the discriminator's encoder if the two networks are one; otherwise None.
    """

    settings: BuildSettings
    sizes: ModelConfig
    embeddings: WordTable
    encoder: Encoder | None


@dataclass(frozen=True)
class Prediction:
    """A generator's distributions over the vocabulary.

    Attributes:
        logits: at the N positions of the loss.
        targets: (N,) the original tokens there.
        places: the N positions, which may count more than once.
        masked_logits: at the M chosen positions, with gradient; the same as `logits` if the loss is taken there.
        chosen: the M positions.
        originals: (M,) the original tokens there.
        states: (M, D) the hidden states behind `masked_logits`; None for a generator without weights.
    """

    logits: WordLogits
    targets: Int[Tensor, "N"]
    places: Places
    masked_logits: WordLogits
    chosen: Places
    originals: Int[Tensor, "M"]
    states: Float[Tensor, "M D"] | None


class Generator(abc.ABC):
    """Proposes a token for each chosen position.

    Not a module itself: the objective registers its `modules`, under names that every checkpoint has.

    Attributes:
        everywhere: whether its head runs at every position, rather than at the chosen ones only.
    """

    everywhere: ClassVar[bool] = False

    def __init__(self, config: RTDConfig) -> None:
        self.config = config

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Check that the other settings are compatible with this generator.

        Raises:
            ValueError: they are not; the message says why and what to set.
        """

    @abc.abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """The modules that hold its weights and tables, by name."""

    @abc.abstractmethod
    def networks(self) -> dict[str, Network]:
        """Its encoder and head under the name 'generator'; empty if it has none."""

    @abc.abstractmethod
    def count(self, batch: CorruptedBatch) -> int:
        """Number of items that its loss sums over."""

    @abc.abstractmethod
    def predict(self, batch: CorruptedBatch) -> Prediction:
        """Run the generator once; its loss and its samples come from the same logits."""

    def loss(self, prediction: Prediction, weight: float) -> LossTerm:
        """Cross-entropy of the original tokens, summed."""
        return prediction.logits.loss(prediction.targets, prediction.places, weight)

    def reads(self) -> frozenset[PlacesOf]:
        """The places of a batch that `predict` needs as an index."""
        return frozenset({"chosen"})

    def sample(self, prediction: Prediction, batch: CorruptedBatch, randomness: Randomness) -> Int[Tensor, "M"]:
        """A token for each chosen position, drawn from `masked_logits`; no gradient."""
        sample = self.config.sampling_at(randomness.step).sample
        return sample_replacements(batch, prediction.masked_logits, randomness, sample, prediction.originals)

    @abc.abstractmethod
    def initial_loss(self) -> float:
        """Expected loss before any training, in nats."""

    def prepare(self) -> None:  # noqa: B027
        """Check before training that nothing is missing.

        Raises:
            ConfigError: something is missing.
        """


class NetworkGenerator(Generator):
    """A generator with weights: an encoder, and a head over the vocabulary.

    Attributes:
        network: the encoder with its head.
    """

    network: Network

    def modules(self) -> dict[str, nn.Module]:
        return {"generator": self.network.encoder, "generator_head": self.network.head}

    def networks(self) -> dict[str, Network]:
        return {"generator": self.network}

    @property
    def head(self) -> LanguageHead:
        """The head over the vocabulary."""
        assert isinstance(self.network.head, LanguageHead)
        return self.network.head

    def initial_loss(self) -> float:
        """ln V."""
        return math.log(self.head.word_embeddings.num_embeddings)


class MaskedLMGenerator(NetworkGenerator):
    """A masked language model: reads [MASK] at the chosen positions and predicts the original tokens there.

    Reference: Clark et al. 2020, section 2.
    """

    def __init__(self, config: RTDConfig, inputs: GeneratorInputs) -> None:
        super().__init__(config)
        if inputs.encoder is None:
            self.network = Network(*masked_lm(inputs.embeddings, inputs.sizes, inputs.settings))
        else:
            self.network = Network(inputs.encoder, inputs.encoder.language_head())

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        pass

    def count(self, batch: CorruptedBatch) -> int:
        return batch.num_targets

    def predict(self, batch: CorruptedBatch) -> Prediction:
        tokens, chosen = batch.tokens, batch.places("chosen")
        # The head is the most expensive product, so it runs on the chosen positions alone.
        states = chosen.gather(self.network.encoder(batch.masked_ids, *tokens.context))
        logits, originals = word_logits(self.head, states), chosen.gather(tokens.input_ids)
        return Prediction(logits, originals, chosen, logits, chosen, originals, states)


Copy = Callable[[], None]
"""Copies the generator's weights into the discriminator."""


@dataclass(frozen=True)
class GeneratorTerms:
    """The generator's part of a step's loss.

    Attributes:
        terms: sums by name; their names and counts are those of `Algorithm.counts`.
        metrics: means that are logged and not trained on.
    """

    terms: Mapping[str, LossTerm]
    metrics: Mapping[str, LossTerm] = field(default_factory=dict)


class Algorithm(abc.ABC):
    """Decides which network is trained at which step, and from what the generator learns.

    Attributes:
        apart: whether the networks are never trained together. They then share no trained weights; what `tying` names is
            copied when the discriminator starts.
        needs_rewards: whether the generator learns from the discriminator's loss.
    """

    apart: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False

    def __init__(self, config: RTDConfig, generator: Generator) -> None:
        self.config = config
        self.generator = generator

    @classmethod
    @abc.abstractmethod
    def check(cls, config: RTDConfig) -> None:
        """Check that the other settings are compatible with this algorithm.

        Raises:
            ValueError: they are not; the message says why and what to set.
        """

    @abc.abstractmethod
    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        """The phases of training.

        Raises:
            ConfigError: they do not fit into `max_steps`.
        """

    def modules(self) -> dict[str, nn.Module]:
        """The modules that it trains along with the generator, by name."""
        return {}

    def generator_networks(self) -> dict[str, Network]:
        """The generator's network, with the modules that are trained along with it."""
        companions = tuple(self.modules().values())
        return {name: replace(network, companions=companions) for name, network in self.generator.networks().items()}

    def counts(self, batch: CorruptedBatch) -> dict[str, int]:
        """Number of items that each of the generator's terms sums over."""
        return {"generator": self.generator.count(batch)}

    def generator_terms(
        self,
        loss: LossTerm,
        prediction: Prediction,
        sampled_ids: Int[Tensor, "M"],
        rewards: Float[Tensor, "M"] | None,
        step: int,
    ) -> GeneratorTerms:
        """The terms that the generator learns from; by default its maximum-likelihood loss.

        Args:
            loss: cross-entropy of the original tokens, with the weight of this step.
            sampled_ids: the sample at each chosen position.
            rewards: the discriminator's loss at each chosen position, detached; None unless the algorithm `needs_rewards`.
        """
        return GeneratorTerms({"generator": loss})

    def initial_loss(self) -> float:
        """Weighted sum of the generator's terms before anything is learned, in nats."""
        return self.config.generator_weight * self.generator.initial_loss()

    def carry_state(self) -> dict[str, Tensor]:
        """State to save with the checkpoint besides weights."""
        return {}

    def load_carry_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restore what `carry_state` returned."""


class Joint(Algorithm):
    """Trains both networks together from step 0, the generator by maximum likelihood; either may be frozen at some step.

    Reference: Clark et al. 2020, section 2.
    """

    @classmethod
    def check(cls, config: RTDConfig) -> None:
        check_freezing(config)

    def phases(self, max_steps: int, copy: Copy) -> list[Phase]:
        return phases_with_freezing(self.config, max_steps)


def check_freezing(config: RTDConfig) -> None:
    """Check that a frozen network shares nothing with one that is still trained.

    Raises:
        ValueError: it does, or nothing would be trained.
    """
    freezes = config.freeze_generator_at is not None or config.freeze_discriminator_at is not None
    if config.generator_warmup_steps and (freezes or config.generator in ("uniform", "unigram") or config.tying == "all"):
        reason = "a network is frozen later on" if freezes else f"generator '{config.generator}' with tying '{config.tying}'"
        raise ValueError(
            f"generator_warmup_steps is {config.generator_warmup_steps}, which is not compatible with the other settings: "
            f"{reason}; only a generator with weights that the discriminator does not use can be warmed up. "
            "Set generator_warmup_steps = 0"
        )
    if config.freeze_generator_at is not None and config.freeze_discriminator_at is not None:
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at} and freeze_discriminator_at {config.freeze_discriminator_at}: "
            "with both frozen nothing is trained; leave one of them out, and end the run by train.max_steps"
        )
    if config.freeze_generator_at is not None and config.tying not in ("none", "gradient-disentangled"):
        raise ValueError(
            f"freeze_generator_at is {config.freeze_generator_at}, but with tying '{config.tying}' the discriminator still "
            "trains weights that the generator reads; set tying = 'none' or 'gradient-disentangled'"
        )
    if config.freeze_discriminator_at is not None and config.tying != "none":
        raise ValueError(
            f"freeze_discriminator_at is {config.freeze_discriminator_at}, but with tying '{config.tying}' the generator still "
            "trains weights that the discriminator reads; set tying = 'none'"
        )


def phases_with_freezing(config: RTDConfig, max_steps: int) -> list[Phase]:
    """The phases of training both networks together: one, or two if a network is frozen or the generator warms up.

    When a network is frozen, the other one keeps its optimizer. After a warm-up of the generator, both networks start with a
    new optimizer and a new schedule.

    Raises:
        ConfigError: the warm-up leaves no step to train both.
    """
    warmup = config.generator_warmup_steps
    if warmup:
        if warmup >= max_steps:
            raise ConfigError(
                f"objective.generator_warmup_steps {warmup} leaves none of train.max_steps {max_steps} for the discriminator",
                hint="decrease it, or increase train.max_steps",
            )
        held = frozenset({"discriminator"})
        first = Phase("generator warm-up", warmup, frozenset({"generator"}), holds=held, own_schedule=True)
        return [first, Phase("train", max_steps - warmup, own_schedule=True, begins=warmup)]
    stops = {"discriminator": config.freeze_generator_at, "generator": config.freeze_discriminator_at}
    for left, step in stops.items():
        if step is not None and step < max_steps:
            alone = Phase(f"{left} alone", max_steps - step, frozenset({left}), fresh_optimizer=False, begins=step)
            return [Phase("train", step), alone] if step else [alone]
    return [Phase("train", max_steps)]


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
        from discern.objectives.rtd_variants import SentenceContrast

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
            from discern.objectives.rtd_variants import is_tampered, sentence_loss

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
        from discern.objectives.rtd_variants import SentenceContrastEvaluator

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
