"""Settings of replaced token detection, and checks of their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from discern.corruption.masking import chosen_share
from discern.corruption.sampling import Sampling
from discern.errors import did_you_mean
from discern.objectives import algorithms, generators
from discern.objectives.two_networks import GeneratorConfig
from discern.registry import Registry

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
