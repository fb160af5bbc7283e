"""What the objectives share that choose positions and hide what stands there."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from discern.corruption import maskings
from discern.corruption.masking import Chosen, MaskingContext, hide
from discern.corruption.randomness import Randomness
from discern.corruption.with_replacement import Sample, average_samples
from discern.objectives.base import Vocabulary
from discern.objectives.config import MaskingConfig, PositionsConfig
from discern.types import CorruptedBatch, TokenBatch


def choose_positions(batch: TokenBatch, config: PositionsConfig, vocabulary: Vocabulary, randomness: Randomness) -> Chosen:
    """What the configured masking chooses.

    Raises:
        ConfigError: the masking needs something that the batch or the vocabulary doesn't know.
    """
    context = MaskingContext(
        mask_probability=config.probability_at(randomness.step),
        randomness=randomness,
        token_counts=vocabulary.token_counts,
        rarity_exponent=config.rarity_exponent,
        span_stop_probability=config.span_stop_probability,
        span_max_words=config.span_max_words,
    )
    return maskings.load(config.masking)(batch, context)


def mask_batch(batch: TokenBatch, config: MaskingConfig, vocabulary: Vocabulary, randomness: Randomness) -> CorruptedBatch:
    """The batch with positions chosen and hidden, and all denominators counted.

    Raises:
        ConfigError: the masking needs something that the batch or the vocabulary doesn't know.
    """
    chosen = choose_positions(batch, config, vocabulary, randomness)
    positions, draws = chosen.positions, chosen.draws
    shares = (config.mask_token_probability, config.random_token_probability)
    masked_ids = hide(batch.input_ids, positions, shares, (vocabulary.special.mask, vocabulary.size), randomness, draws)
    return CorruptedBatch(
        tokens=batch,
        masked_ids=masked_ids,
        masked_positions=positions,
        num_masked=int(positions.sum()),
        num_tokens=int(batch.attention_mask.sum()),
        draws=draws,
        num_draws=None if draws is None else int(draws.sum()),
    )


def sample_replacements(
    batch: CorruptedBatch, logits: Float[Tensor, "M V"], randomness: Randomness, sample: Sample
) -> Int[Tensor, "M"]:
    """One id for each chosen position, drawn by `sample` from its row of logits.

    A position that was drawn several times gets the floored mean of as many samples, as in the released code.
    """
    positions, draws = batch.masked_positions, batch.target_draws

    def uniforms(purpose: str) -> Float[Tensor, "M"]:
        return randomness.uniforms(purpose, positions.shape[1])[positions]

    first = sample(logits, uniforms("replacements"))
    if draws is None:
        return first
    return average_samples(first, draws, lambda at, ordinal: sample(logits[at], uniforms(f"replacements {ordinal}")[at]))
