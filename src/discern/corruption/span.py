"""Spans of neighbouring words, of random length."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from discern.corruption.masking import Chosen, MaskingContext, quota
from discern.corruption.words import take_in_order, words_of
from discern.types import TokenBatch


def span(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Spans of whole words, as `take_in_order` fills the row's `quota` of tokens; of tokens where words aren't known.

    The words of a row, closed to a ring, are cut from a random place on into spans of random length, and the spans are
    taken in random order. So every place is as likely as any other, which it would not be if spans ended at the ends
    of the row; long words are a little less likely, as they are passed over where they don't fit. A span goes on behind a
    special token in its way.

    Differs: SpanBERT draws the beginnings of its spans anew, which favours words away from the beginning of the row.
    Reference: Joshi et al. 2020, section 3.1.
    """
    words, randomness = words_of(batch), context.randomness
    shape = words.number.shape
    lengths = span_lengths(randomness.uniforms("span lengths", shape[1]), context.span_stop_probability, context.span_max_words)
    number = torch.arange(shape[1], device=lengths.device).expand(shape)
    turn = randomness.integers("span turn", 1)
    # Numbers beyond the row's last word mean nothing, whatever they are here.
    place = (number - turn) % words.count.clamp(min=1)[:, None]
    span_of_word = torch.searchsorted(lengths.cumsum(1), place, right=True)
    rank = randomness.integers("masked spans", shape[1]).argsort(1).argsort(1)
    keys = rank.gather(1, span_of_word) * shape[1] + place
    return Chosen(take_in_order(words, keys, quota(words.maskable, context.mask_probability)))


def span_lengths(uniforms: Float[Tensor, "B L"], stop_probability: float, longest: int) -> Int[Tensor, "B L"]:
    """Lengths in words, P(n) proportional to `(1 - stop_probability)^(n-1)` for n from 1 to `longest`.

    For 0.2 and 10 the mean is 3.8.
    """
    going_on = 1 - stop_probability
    # The distribution function 1 - going_on^n, cut off at the longest, inverted.
    total = 1 - going_on**longest
    lengths = ((1 - uniforms.double() * total).log() / math.log(going_on)).floor().long() + 1
    return lengths.clamp(1, longest)
