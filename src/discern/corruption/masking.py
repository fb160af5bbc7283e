"""Which positions of a sequence are chosen for corruption, and what the generator sees there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.types import TokenBatch


@dataclass(frozen=True)
class MaskingContext:
    """What a masking goes by, besides the batch.

    Attributes:
        mask_probability: share of the maskable tokens to choose at this step.
        randomness: the numbers of this step and these rows.
        token_counts: (V,) how often each id occurs in the training split; None where that isn't known.
        rarity_exponent: of the masking by rarity.
        span_stop_probability: of the masking of spans: chance that a span ends after each of its words.
        span_max_words: of the masking of spans: words a span has at most.
    """

    mask_probability: float
    randomness: Randomness
    token_counts: Int[Tensor, "V"] | None = None
    rarity_exponent: float = 0.5
    span_stop_probability: float = 0.2
    span_max_words: int = 10


@dataclass(frozen=True)
class Chosen:
    """What a masking chose.

    Attributes:
        positions: (B, L) True where a position was chosen.
        draws: (B, L) how often each position was drawn; None where no position can be drawn twice.
    """

    positions: Bool[Tensor, "B L"]
    draws: Int[Tensor, "B L"] | None = None


def maskable_positions(batch: TokenBatch) -> Bool[Tensor, "B L"]:
    """True where corruption may happen: real tokens that are not special. [UNK] may."""
    return batch.attention_mask & ~batch.special_tokens_mask


def quota(maskable: Bool[Tensor, "B L"], mask_probability: float) -> Int[Tensor, "B"]:
    """How many positions each sequence gives: `round(mask_probability * maskable)`, at least one, none where none is.

    Halves round to even. Differs: the released code counts [CLS] and [SEP] in and caps the number by the row's length.
    """
    available = maskable.sum(1)
    # float64: 0.15 x 190 must be the 28.5 that a person computes, not the 28.500002 of float32.
    wanted = torch.round(available.double() * mask_probability).long().clamp(min=1)
    return torch.minimum(wanted, available)


def uniform(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Positions drawn evenly and without replacement, exactly `quota` a sequence.

    Differs: the released code draws with replacement, so that 13.8 % of the tokens are chosen where 15 % are meant.
    Reference: Clark et al. 2020, section 2.
    """
    maskable = maskable_positions(batch)
    keys = context.randomness.integers("masked positions", maskable.shape[1])
    keys = keys.masked_fill(~maskable, torch.iinfo(torch.int64).max)
    return Chosen(smallest(keys, quota(maskable, context.mask_probability)))


def smallest(keys: Shaped[Tensor, "B L"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """True at the `count` smallest keys of each row."""
    rank = keys.argsort(1).argsort(1)
    return rank < count[:, None]


def hide(
    input_ids: Int[Tensor, "B L"],
    positions: Bool[Tensor, "B L"],
    shares: tuple[float, float],
    vocabulary: tuple[int, int],
    randomness: Randomness,
    draws: Int[Tensor, "B L"] | None = None,
) -> Int[Tensor, "B L"]:
    """The ids with something else at the chosen positions.

    Args:
        positions: the chosen ones.
        shares: which share of them becomes [MASK], which a random token; the rest stays.
        vocabulary: id of [MASK], and V. A random token is any of the V, as in BERT.
        draws: how often each position was drawn, where that may be more than once. Each draw decides for itself; a position
            becomes [MASK] if any of its draws says so, and else a random token if any says that.

    Reference for the draws: google-research/electra, pretrain/pretrain_helpers.py, `mask`.
    """
    mask_share, random_share = shares
    mask_id, vocab_size = vocabulary
    masked_ids = input_ids.masked_fill(positions, mask_id)
    if mask_share >= 1:
        return masked_ids
    draw = randomness.uniforms("masked input", input_ids.shape[1])
    random_ids = randomness.integers("random tokens", input_ids.shape[1]) % vocab_size
    if draws is None:
        kept = torch.where(draw < mask_share + random_share, random_ids, input_ids)
        return torch.where(positions & (draw >= mask_share), kept, masked_ids)
    # The chance that none of the draws says [MASK], and that none says [MASK] or random.
    unmasked, unchanged = ((1 - share) ** draws.double() for share in (mask_share, min(1.0, mask_share + random_share)))
    kept = torch.where(draw < 1 - unchanged, random_ids, input_ids)
    return torch.where(positions & (draw >= 1 - unmasked), kept, masked_ids)
