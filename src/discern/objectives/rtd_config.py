"""Settings of replaced token detection, and which of them go together."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from discern.corruption.sampling import Sampling
from discern.errors import did_you_mean
from discern.objectives import algorithms, generators
from discern.objectives.replacement import ReplacementConfig
from discern.objectives.weights import Point, check_points
from discern.registry import Registry


class RTDConfig(ReplacementConfig):
    """Settings of replaced token detection. Defaults: ELECTRA-Small, table 6."""

    name: str = Field("rtd", description="Objective, by its name in the registry.")
    generator: str = Field(
        "mlm",
        description="What proposes replacements, by its name in the registry of generators. 'mlm': a small masked language "
        "model; 'two-tower': a left-to-right and a right-to-left model over the clean text; 'uniform': any word, evenly; "
        "'unigram': words as frequent as in the training split.",
    )
    generator_checkpoint: str | None = Field(
        None, description="A run or an export whose masked language model the generator begins as; 'none': random weights."
    )
    tying: Literal["embeddings", "token", "none", "all", "gradient-disentangled"] = Field(
        "embeddings",
        description="What generator and discriminator share. 'embeddings': words, positions, segments and their LayerNorm; "
        "'token': words only; 'none': nothing; 'all': the whole encoder, so that only the heads differ (needs equal sizes); "
        "'gradient-disentangled': the discriminator reads the generator's embeddings without sending gradient back, and adds "
        "a difference of its own (DeBERTaV3).",
    )
    discriminator_head: Literal["dense", "bilinear"] = Field(
        "dense",
        description="'dense': the paper's, two layers on the state. 'bilinear' adds the product of the state with the word at "
        "its place; learns sooner at small scale, wants tying 'gradient-disentangled'.",
    )
    algorithm: str = Field(
        "joint",
        description="How the two are trained, by its name in the registry of algorithms. 'joint': together, from step 0; "
        "'two-stage': the generator, then the discriminator; 'adversarial': the generator to fool the discriminator (REINFORCE).",
    )
    two_stage_steps: float = Field(
        0.5,
        gt=0,
        description="Of algorithm 'two-stage': updates of the generator; below 1, that fraction of train.max_steps. Paper: 0.5.",
    )
    copy_weights: bool = Field(
        True,
        description="Of algorithm 'two-stage': the discriminator begins as a copy of the generator. Needs equal sizes. "
        "Paper: true; without it the discriminator may never beat the majority class.",
    )
    discriminator_weight: float = Field(50.0, ge=0, description="Factor of the discriminator's loss. ELECTRA: 50.")
    generator_weight_schedule: tuple[Point, ...] = Field(
        (),
        description="Factors of generator_weight by step, [[step, factor], ...], straight lines between; empty: 1 throughout. "
        "[[0, 0.0], [1000, 1.0]] is a warm-up.",
    )
    discriminator_weight_schedule: tuple[Point, ...] = Field((), description="Factors of discriminator_weight by step, likewise.")
    freeze_generator_at: int | None = Field(
        None, ge=0, description="The generator's weights stay as they are from this step on; 0: from the start; 'none': never."
    )
    freeze_discriminator_at: int | None = Field(None, ge=0, description="The discriminator's weights likewise.")
    generator_warmup_steps: int = Field(
        0,
        ge=0,
        description="Updates at the start in which the generator alone moves, and nothing that the discriminator reads: for a "
        "fresh generator beside a discriminator that has learned already. The schedule then begins anew for both.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Samples come from the likeliest words with this mass together; 1: from all, as in the paper.",
    )
    disallow_original: bool = Field(
        False, description="Never sample the word that stood there, so that every chosen position is replaced. Paper: false."
    )
    sentence_contrastive_weight: float = Field(
        0.0,
        ge=0,
        description="Factor of a further loss: whether any token of the text was replaced, told from the state of its first "
        "token. ELECTRA, appendix G: slightly worse; 0: none.",
    )
    sentence_clean_probability: float = Field(
        0.2, gt=0, lt=1, description="With it: share of the texts that stay as they were. ELECTRA, appendix G: 0.2."
    )

    @property
    def sampling(self) -> Sampling:
        """How replacements are drawn."""
        return Sampling(self.temperature, self.top_p, self.disallow_original)

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
            found["temperature"] = "generator = 'mlm'"
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
    """The name; a ValueError where nothing is registered under it."""
    names = registry.names()
    if name not in names:
        raise ValueError(f"unknown {registry.kind} '{name}'; {did_you_mean(name, names)}")
    return name
