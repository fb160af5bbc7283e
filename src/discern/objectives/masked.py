"""What the objectives share that choose positions and hide what stands there."""

from __future__ import annotations

from discern.corruption import maskings
from discern.corruption.masking import hide
from discern.corruption.randomness import Randomness
from discern.objectives.base import Vocabulary
from discern.objectives.config import MaskingConfig
from discern.types import CorruptedBatch, TokenBatch


def mask_batch(batch: TokenBatch, config: MaskingConfig, vocabulary: Vocabulary, randomness: Randomness) -> CorruptedBatch:
    """The batch with positions chosen and hidden, and both denominators counted."""
    positions = maskings.load(config.masking)(batch, config.mask_probability, randomness)
    shares = (config.mask_token_probability, config.random_token_probability)
    masked_ids = hide(batch.input_ids, positions, shares, (vocabulary.special.mask, vocabulary.size), randomness)
    return CorruptedBatch(
        tokens=batch,
        masked_ids=masked_ids,
        masked_positions=positions,
        num_masked=int(positions.sum()),
        num_tokens=int(batch.attention_mask.sum()),
    )
