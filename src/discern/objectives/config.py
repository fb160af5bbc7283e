"""Settings that objectives share. Each objective's own settings are in its file and extend these."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, model_validator

from discern.config.schema import OTHER_NAME, RunPoint, Section
from discern.corruption import maskings
from discern.corruption.masking import Sampling
from discern.data.config import DataConfig
from discern.errors import did_you_mean
from discern.models import encoders
from discern.models.config import ModelConfig
from discern.registry import Registry


def registered(registry: Registry[Any], name: str) -> str:
    """The name, if it is registered.

    Raises:
        ValueError: it is not; the message suggests the nearest name.
    """
    if name not in registry.names():
        raise ValueError(f"unknown {registry.kind} '{name}'; {did_you_mean(name, registry.names())}")
    return name


CAUSAL_FRACTION: Any = Field(
    0.125,
    gt=0,
    lt=1,
    description="Fraction of the rows that train causal language modeling: each token is predicted from those before it. "
    "GPT-BERT: from 1/16 to 1/4.",
)


def check_one_way(model: ModelConfig, reader: str) -> None:
    """Check that an encoder can attend left to right.

    Raises:
        ValueError: it cannot; the message says what to set.
    """
    able = [name for name in encoders.names() if encoders.load(name).one_way]
    if model.encoder not in able:
        raise ValueError(
            f"{reader} reads some rows left to right, which encoder '{model.encoder}' cannot; set model.encoder to "
            f"{' or '.join(able)}"
        )


class ObjectiveConfig(Section):
    """What every objective has: its name in the registry, and what callers may ask without knowing which objective it is.

    Attributes:
        ramps: settings that may change linearly to the value of `<name>_end` over the first `<name>_steps` steps.
        permutes: whether the encoder learns to predict in random orders, by its query stream, rather than at masked positions.
        encoder_reads_samples: whether the network 'encoder' was trained on a generator's samples and never read a [MASK].
        detects_every_token: whether a discriminator is trained to classify every token as original or replaced.
    """

    ramps: ClassVar[tuple[str, ...]] = ()
    permutes: ClassVar[bool] = False
    encoder_reads_samples: ClassVar[bool] = False
    detects_every_token: ClassVar[bool] = False
    name: str = Field(description="Objective, by its name in the registry.")

    @property
    def reads_in_order(self) -> bool:
        """Whether each slot of the batch continues its text from step to step, rather than reading rows in random order."""
        return False

    def sampling_at(self, step: int) -> Sampling:
        """How replacements are drawn from a generator's logits at a step."""
        return Sampling()

    @property
    def generator_source(self) -> str | None:
        """The run or export that the generator starts from; None: random weights, or no generator."""
        return None

    @property
    def can_warm_up_generator(self) -> bool:
        """Whether a generator without training can first be trained alone, beside a trained discriminator."""
        return False

    @property
    def word_masking(self) -> str | None:
        """The masking's name if it chooses whole words, so that the data set must record them; None otherwise."""
        return None

    def replaced_share(self, step: int, row_length: int) -> float | None:
        """Expected fraction of the tokens for which the discriminator read a sample at a step.

        None if there is no such discriminator, or if the fraction depends on the token.
        """
        return None

    def value_at(self, name: str, step: int) -> float:
        """The value of one of the `ramps` at a step, counted from 0."""
        start, end, steps = (getattr(self, f"{name}{suffix}") for suffix in ("", "_end", "_steps"))
        return float(start if end is None else start + (end - start) * min(1.0, step / steps))

    def continued_at(self, step: int) -> dict[str, Any]:
        """The settings that change for a new run from weights saved at `step`: those that name steps of the old run.

        Args:
            step: the step of the weights; a run that was stopped is not at its end.
        """
        changed: dict[str, Any] = {}
        for name in self.ramps:
            if getattr(self, f"{name}_end") is not None:
                changed |= {name: self.value_at(name, step), f"{name}_end": None, f"{name}_steps": None}
        return changed

    @model_validator(mode="after")
    def _end_and_steps_go_together(self) -> ObjectiveConfig:
        for name in self.ramps:
            if (getattr(self, f"{name}_end") is None) != (getattr(self, f"{name}_steps") is None):
                raise ValueError(f"{name}_end and {name}_steps go together: set both or neither")
        return self

    def check(self, data: DataConfig, model: ModelConfig) -> None:
        """Check that rows and encoder suit the objective.

        Raises:
            ValueError: they do not; the message says what to set.
        """


class PositionsConfig(ObjectiveConfig):
    """Settings of the objectives that choose positions."""

    ramps: ClassVar[tuple[str, ...]] = ("mask_probability",)
    masking: Annotated[str, AfterValidator(partial(registered, maskings))] = Field(
        "uniform",
        description="How positions are chosen: 'uniform', 'with-replacement' (the released code), 'whole-word', 'span' "
        "(SpanBERT), 'rarity' (rare tokens more often), 'entropy' (tokens more often whose recent predictions were uncertain).",
    )
    mask_probability: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Fraction of maskable tokens chosen per sequence. ELECTRA, table 6: 0.15 small and base, 0.25 large.",
        json_schema_extra={OTHER_NAME: "prediction_ratio"},
    )
    mask_probability_end: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="If given, mask_probability changes to this value, linearly over the first mask_probability_steps steps. "
        "Held-out metrics always use mask_probability, so that they can be compared.",
    )
    mask_probability_steps: RunPoint | None = Field(
        None, gt=0, description="Number of steps until mask_probability_end is reached, or the fraction of the run below 1."
    )
    rarity_exponent: float = Field(
        0.5, ge=0, le=2, description="'rarity' only: a token is drawn with weight count^-exponent. 0: evenly; word2vec: 0.5."
    )
    entropy_exponent: float = Field(
        1.0,
        ge=0,
        le=4,
        description="'entropy' only: a token is drawn with weight entropy^exponent, where entropy is a running mean of the "
        "entropy of the generator's (of 'mlm': the encoder's) predictions of this token. 0: evenly.",
    )
    span_stop_probability: float = Field(
        0.2, gt=0, lt=1, description="'span' only: probability that a span ends after each of its words. SpanBERT: 0.2."
    )
    span_max_words: int = Field(10, ge=1, description="'span' only: maximum number of words of a span. SpanBERT: 10.")

    @property
    def word_masking(self) -> str | None:
        return self.masking if self.masking == "whole-word" else None

    def unread(self) -> dict[str, str]:
        readers = {
            "rarity_exponent": "rarity",
            "entropy_exponent": "entropy",
            "span_stop_probability": "span",
            "span_max_words": "span",
        }
        return super().unread() | {name: f"masking = '{masking}'" for name, masking in readers.items() if self.masking != masking}


class MaskingConfig(PositionsConfig):
    """Settings of the objectives that choose positions and mask their tokens."""

    mask_token_probability: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the chosen positions that become [MASK]. Paper: 1; released ELECTRA: 0.85; BERT: 0.8.",
    )
    random_token_probability: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the chosen positions that become a random token. BERT: 0.1. The rest stays as it was.",
    )

    @property
    def causal_rows(self) -> float:
        """Fraction of the rows in which each token is predicted from those before it."""
        return 0.0

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> MaskingConfig:
        total = self.mask_token_probability + self.random_token_probability
        if total > 1 + 1e-9:
            raise ValueError(f"mask_token_probability + random_token_probability is {total:g}, more than 1")
        return self


class TaughtConfig(MaskingConfig):
    """Settings of the objectives that predict masked words and may also learn how a larger model predicts them."""

    teacher: str | None = Field(
        None,
        description="Run or export with the same tokenizer, whose masked language model is learned from besides the text.",
    )
    teacher_weight: float = Field(
        0.5, ge=0, le=1, description="Share of the teacher's predictions in the loss of the masked words; the text has the rest."
    )
    teacher_temperature: float = Field(
        2.0, gt=0, description="Divisor of the logits of teacher and student. Hinton et al. 2015; DistilBERT: 2."
    )

    def unread(self) -> dict[str, str]:
        unread = {} if self.teacher else dict.fromkeys(("teacher_weight", "teacher_temperature"), "teacher = a model")
        return super().unread() | unread

    def continued_at(self, step: int) -> dict[str, Any]:
        return super().continued_at(step) | ({"teacher": None} if self.teacher else {})


class GeneratorConfig(MaskingConfig):
    """Settings of a masked language model as generator. Defaults: ELECTRA-Small, table 6."""

    ramps: ClassVar[tuple[str, ...]] = ("mask_probability", "temperature")
    generator_size: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Width of the generator, a fraction of the encoder's. ELECTRA, table 6: 1/4 small and large, 1/3 base.",
    )
    generator_depth: float = Field(
        1.0, gt=0, le=1, description="Depth of the generator, a fraction of the encoder's. ELECTRA keeps the depth."
    )
    generator_weight: float = Field(1.0, ge=0, description="Factor of the generator's loss.")
    temperature: float = Field(1.0, gt=0, description="Divisor of the generator's logits for sampling; its loss does not use it.")
    temperature_end: float | None = Field(
        None,
        gt=0,
        description="If given, the temperature changes to this value, linearly over the first temperature_steps steps. "
        "Fast-ELECTRA lowers the temperature of a frozen generator. Held-out metrics always use temperature.",
    )
    temperature_steps: RunPoint | None = Field(
        None, gt=0, description="Number of steps until temperature_end is reached, or the fraction of the run below 1."
    )

    def sampling_at(self, step: int) -> Sampling:
        return Sampling(self.value_at("temperature", step))
