"""Which positions of a sequence are chosen for corruption, and what the generator sees there."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.types import TokenBatch


def maskable_positions(batch: TokenBatch) -> Bool[Tensor, "B L"]:
    """True where corruption may happen: real tokens that are not special. [UNK] may."""
    return batch.attention_mask & ~batch.special_tokens_mask


def quota(maskable: Bool[Tensor, "B L"], mask_probability: float) -> Int[Tensor, "B"]:
    """How many positions each sequence gives: `round(mask_probability * maskable)`, at least one, none where none is.

    Halves round to even. Differs: the released code counts [CLS] and [SEP] in and caps the number by the row's length.
    """
    available = maskable.sum(1)
    # float64: 0.15 x 30 must be the 4.5 that a person computes, not the 4.500000178 of float32.
    wanted = torch.round(available.double() * mask_probability).long().clamp(min=1)
    return torch.minimum(wanted, available)


def uniform(batch: TokenBatch, mask_probability: float, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """Positions drawn evenly and without replacement, exactly `quota` a sequence.

    Differs: the released code draws with replacement, so that 13.8 % of the tokens are chosen where 15 % are meant.
    Reference: Clark et al. 2020, section 2.
    """
    maskable = maskable_positions(batch)
    order = randomness.integers("masked positions", maskable.shape[1])
    order = order.masked_fill(~maskable, torch.iinfo(torch.int64).max)
    rank = order.argsort(1).argsort(1)
    return rank < quota(maskable, mask_probability)[:, None]


def hide(
    input_ids: Int[Tensor, "B L"],
    positions: Bool[Tensor, "B L"],
    shares: tuple[float, float],
    vocabulary: tuple[int, int],
    randomness: Randomness,
) -> Int[Tensor, "B L"]:
    """The ids with something else at the chosen positions.

    Args:
        positions: the chosen ones.
        shares: which share of them becomes [MASK], which a random token; the rest stays.
        vocabulary: id of [MASK], and V. A random token is any of the V, as in BERT.
    """
    mask_share, random_share = shares
    mask_id, vocab_size = vocabulary
    masked_ids = input_ids.masked_fill(positions, mask_id)
    if mask_share >= 1:
        return masked_ids
    draw = randomness.uniforms("masked input", input_ids.shape[1])
    random_ids = randomness.integers("random tokens", input_ids.shape[1]) % vocab_size
    kept = torch.where(draw < mask_share + random_share, random_ids, input_ids)
    return torch.where(positions & (draw >= mask_share), kept, masked_ids)
