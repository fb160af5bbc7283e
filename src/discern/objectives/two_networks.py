"""What objectives with a generator and a second network share: settings, construction and the replacement of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import sample_tokens
from discern.models.base import Encoder, Network, build_encoder
from discern.models.heads import CopyMLMHead, LanguageHead
from discern.objectives.base import BuildSettings
from discern.objectives.config import GeneratorConfig
from discern.objectives.losses import word_logits
from discern.objectives.masked import MaskingObjective, sample_replacements
from discern.objectives.rtd import masked_lm, separate_embeddings
from discern.types import CorruptedBatch, LossTerm


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
