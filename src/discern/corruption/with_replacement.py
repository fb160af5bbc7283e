"""Positions drawn with replacement, and what follows from it: the released code, for runs that must repeat it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.corruption.masking import Chosen, MaskingContext, maskable_positions
from discern.types import TokenBatch

Sample = Callable[[Float[Tensor, "N V"], Float[Tensor, "N"]], Int[Tensor, "N"]]
"""Gives one id a row of logits, from a uniform number in [0, 1) each."""


def with_replacement(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Exactly `draw_quota` draws a sequence, each of any maskable position, so that some are drawn twice or more.

    Of 128 tokens 19 are drawn, of which 17.7 differ: 13.8 % where 15 % are meant. `draws` says how often each was drawn.

    Reference: google-research/electra, pretrain/pretrain_helpers.py, `mask`.
    """
    maskable = maskable_positions(batch)
    available = maskable.sum(1)
    count = draw_quota(batch.attention_mask, available, context.mask_probability)
    most = _most_draws(maskable.shape[1], context.mask_probability)
    numbers = context.randomness.integers("masked positions", most) % available.clamp(min=1)[:, None]
    places = (~maskable).to(torch.uint8).argsort(dim=1, stable=True)  # the maskable positions first, in order
    positions = places.gather(1, numbers)
    counted = torch.arange(most, device=count.device) < count[:, None]
    draws = torch.zeros_like(maskable, dtype=torch.int64).scatter_add_(1, positions, counted.long())
    return Chosen(draws > 0, draws)


def draw_quota(attention_mask: Bool[Tensor, "B L"], available: Int[Tensor, "B"], mask_probability: float) -> Int[Tensor, "B"]:
    """Draws of each sequence: `round(mask_probability * real tokens)`, [CLS] and [SEP] counted in.

    At most `int((mask_probability + 0.005) * L)`, at least 1, and none where nothing is maskable (there the released
    code divides by zero). Halves round to even, in float32, as there.
    """
    wanted = torch.round(attention_mask.sum(1).float() * mask_probability).long()
    wanted = wanted.clamp(1, _most_draws(attention_mask.shape[1], mask_probability))
    return wanted * (available > 0)


def average_samples(
    first: Int[Tensor, "M"], draws: Int[Tensor, "M"], again: Callable[[Int[Tensor, "N"], int], Int[Tensor, "N"]]
) -> Int[Tensor, "M"]:
    """What is put at positions that were drawn several times: the mean of as many sampled ids, rounded down.

    Where the samples differ, that is the id of an unrelated token. The authors know of it and left it
    (google-research/electra, issue 41).

    Args:
        first: a sample of each position.
        draws: how often each was drawn, at least once.
        again: gives the sample number 1, 2, ... of the positions with these indices.
    """
    total = first
    for ordinal in range(1, int(draws.max()) if len(draws) else 0):
        chosen = (draws > ordinal).nonzero().squeeze(1)
        total = total.index_add(0, chosen, again(chosen, ordinal))
    return total // draws


def _most_draws(length: int, mask_probability: float) -> int:
    return max(1, int((mask_probability + 0.005) * length))
