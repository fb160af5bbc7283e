"""What objectives with a generator and a second network share: settings, construction and the replacement of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from jaxtyping import Bool, Int
from pydantic import Field, model_validator
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import sample_tokens
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.base import Encoder, Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig
from discern.models.embeddings import TokenEmbeddings, WordTable
from discern.models.heads import BilinearTerm, CopyMLMHead, LanguageHead
from discern.objectives.base import BuildSettings
from discern.objectives.config import MaskingConfig, check_ramp, ramp
from discern.objectives.losses import word_logits
from discern.objectives.masked import MaskingObjective, sample_replacements
from discern.types import CorruptedBatch, LossTerm


class GeneratorConfig(MaskingConfig):
    """Settings of a masked language model as generator. Defaults: ELECTRA-Small, table 6."""

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
    temperature_steps: int | None = Field(None, ge=1, description="Number of steps until temperature_end is reached.")

    def temperature_at(self, step: int) -> float:
        """Temperature of the samples at this step, counted from 0."""
        if self.temperature_end is None or self.temperature_steps is None:
            return self.temperature
        return ramp(self.temperature, self.temperature_end, self.temperature_steps, step)

    def continued_at(self, step: int) -> dict[str, Any]:
        if self.temperature_end is None:
            return super().continued_at(step)
        constant = {"temperature_end": None, "temperature_steps": None}
        return super().continued_at(step) | {"temperature": self.temperature_at(step)} | constant

    @model_validator(mode="after")
    def _temperatures_go_together(self) -> GeneratorConfig:
        check_ramp(self, "temperature")
        return self


class RestorationConfig(GeneratorConfig):
    """Settings of the objectives that restore the original tokens after a generator."""

    tying: Literal["embeddings", "token", "none"] = Field(
        "embeddings",
        description="What generator and encoder share. 'embeddings': words, positions, segments and their LayerNorm (of "
        "'modernbert' the words, as it has nothing else); "
        "'token': words only; 'none': nothing.",
    )

    @property
    def encoder_reads_samples(self) -> bool:
        return True


GeneratorConfigT = TypeVar("GeneratorConfigT", bound=GeneratorConfig)
RestorationConfigT = TypeVar("RestorationConfigT", bound=RestorationConfig)


@dataclass(frozen=True)
class Replacement:
    """A batch after a generator has replaced the chosen tokens.

    Attributes:
        term: the generator's loss.
        corrupted_ids: (B, L) samples at the chosen positions, the original ids elsewhere.
        is_replaced: (B, L) whether the id changed; a sample equal to the original counts as original.
        observations: values for evaluation.
    """

    term: LossTerm
    corrupted_ids: Int[Tensor, "B L"]
    is_replaced: Bool[Tensor, "B L"]
    observations: dict[str, Tensor]


class ReplacementObjective(MaskingObjective[GeneratorConfigT]):
    """An objective whose main network reads a masked language model's samples at the chosen positions.

    Modules are filled from the seed in the order in which they are assigned: subclasses assign their own network first, then
    `generator` and `generator_head`.
    """

    generator: Encoder
    generator_head: LanguageHead

    def replace_chosen(self, batch: CorruptedBatch, randomness: Randomness) -> Replacement:
        """Run the generator once over the masked text: its loss and its samples come from the same logits, dropout on.

        Reference: Clark et al. 2020, section 2.
        """
        tokens, chosen = batch.tokens, batch.places("chosen")
        hidden = self.generator(batch.masked_ids, *tokens.context)
        logits = word_logits(self.generator_head, chosen.gather(hidden))
        targets = chosen.gather(tokens.input_ids)
        sample = partial(sample_tokens, temperature=self.config.temperature_at(randomness.step))
        sampled = sample_replacements(batch, logits, randomness, sample)
        corrupted_ids = chosen.scatter(tokens.input_ids, sampled)
        is_replaced = corrupted_ids != tokens.input_ids
        observations = {
            **logits.observed("generator"),
            **self.observed_entropies(logits, targets, chosen),
            "generator_targets": targets,
            "sampled_ids": sampled,
            "corrupted_ids": corrupted_ids,
            "is_replaced": is_replaced,
        }
        term = logits.loss(targets, chosen, self.config.generator_weight)
        return Replacement(term, corrupted_ids, is_replaced, observations)


class RestorationObjective(ReplacementObjective[RestorationConfigT]):
    """An objective whose encoder restores the original tokens from text with a generator's samples."""

    head: LanguageHead | CopyMLMHead

    def __init__(self, config: RestorationConfigT, settings: BuildSettings) -> None:
        super().__init__(config, settings)
        model = settings.model
        small = model.shrunk(config.generator_size, config.generator_depth)
        read, read_by_generator = separate_embeddings(settings.vocabulary.size, model, small, config.tying)
        self.encoder = build_encoder(read, model, gradient_checkpointing=settings.gradient_checkpointing)
        self.head = self.restoring_head()
        self.generator, self.generator_head = masked_lm(read_by_generator, small, settings)

    def restoring_head(self) -> LanguageHead | CopyMLMHead:
        """A new head for the encoder."""
        return self.encoder.language_head()

    def networks(self) -> dict[str, Network]:
        return {"encoder": Network(self.encoder, self.head), "generator": Network(self.generator, self.generator_head)}


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
