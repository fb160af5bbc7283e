"""Masking of whole words, singly or in spans, up to an exact number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.corruption.masking import Chosen, MaskingContext, maskable_positions, quota
from discern.errors import ConfigError
from discern.types import TokenBatch


@dataclass(frozen=True)
class Words:
    """The words of a batch, numbered from 0 in each row.

    A word is a run of maskable tokens: special tokens and the ends of the row end it, so that one which packing has
    cut counts as what is left of it.

    Attributes:
        maskable: (B, L) tokens that belong to a word.
        number: (B, L) word of each such token; 0 elsewhere.
        lengths: (B, L) tokens of each word, by its number; 0 beyond the last.
    """

    maskable: Bool[Tensor, "B L"]
    number: Int[Tensor, "B L"]
    lengths: Int[Tensor, "B L"]

    @property
    def count(self) -> Int[Tensor, "B"]:
        """Words of each row."""
        return (self.lengths > 0).sum(1)


def words_of(batch: TokenBatch) -> Words:
    """The words of the batch; every token is one where the batch doesn't say where words begin."""
    maskable = maskable_positions(batch)
    begins = maskable
    if batch.word_starts is not None:
        follows = torch.zeros_like(maskable)
        follows[:, 1:] = maskable[:, :-1]
        starts = batch.word_starts
        if batch.is_reversed is not None:
            # Where the text runs backwards, the beginning of a word is the last of its tokens, and the next word follows it.
            ended = torch.zeros_like(starts)
            ended[:, 1:] = starts[:, :-1]
            starts = torch.where(batch.is_reversed[:, None], ended, starts)
        begins = maskable & (starts | ~follows)
    number = (begins.cumsum(1) - 1).clamp(min=0) * maskable
    lengths = torch.zeros_like(number).scatter_add_(1, number, maskable.long())
    return Words(maskable, number, lengths)


def whole_word(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Whole words in an even random order, as `take_in_order` fills the row's `quota` of tokens.

    Raises:
        ConfigError: the batch doesn't say where words begin.

    Reference: google-research/bert, create_pretraining_data.py, `do_whole_word_mask`; Cui et al. 2019 for Chinese.
    """
    if batch.word_starts is None:
        raise ConfigError(
            "masking 'whole-word' needs to know where words begin, and these rows don't say it",
            hint="train on a data set of `discern prepare`, which stores it, or set objective.masking=uniform",
        )
    words = words_of(batch)
    keys = context.randomness.integers("masked words", words.number.shape[1])
    return Chosen(take_in_order(words, keys, quota(words.maskable, context.mask_probability)))


def span(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Spans of whole words, as `take_in_order` fills the row's `quota` of tokens; of tokens where words aren't known.

    The words of a row, closed to a ring, are cut from a random place on into spans of random length, and the spans are
    taken in random order. So every place is as likely as any other, which it would not be if spans ended at the ends
    of the row; long words are a little less likely, as they are passed over where they don't fit. A span goes on behind a
    special token in its way.

    Differs: SpanBERT draws the beginnings of its spans anew, which favors words away from the beginning of the row.
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


def take_in_order(words: Words, keys: Int[Tensor, "B L"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """The tokens of words taken in the order of their keys until there are `count` of each row.

    A word that would exceed the number is passed over. So it is never exceeded, and missed only where every word left
    is longer than what is missing. But where even the shortest word of a row is longer than `count`, the first of that
    length is taken, so that a row with words always gives one.

    Args:
        keys: of each word, by its number.
        count: tokens to choose, none where a row has no word.
    """
    exists = words.lengths > 0
    order = keys.masked_fill(~exists, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    lengths = words.lengths.gather(1, order)
    taken = _fill(lengths, count)
    taken = taken | _shortest(lengths) & (~taken.any(1) & (count > 0))[:, None]
    by_number = torch.zeros_like(taken).scatter_(1, order, taken)
    return by_number.gather(1, words.number) & words.maskable


def _fill(lengths: Int[Tensor, "B W"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B W"]:
    """Which items are taken, from left to right, each unless it exceeds what is left of `count`; items of length 0 never.

    One pass takes what fits up to the first item that does not. After it that item, and any as long, fits never more:
    there are at most as many passes as different lengths, and one item after the other is not needed.
    """
    taken = torch.zeros_like(lengths, dtype=torch.bool)
    left = count
    while True:
        fits = ~taken & (lengths > 0) & (lengths <= left[:, None])
        now = fits & ((lengths * fits).cumsum(1) <= left[:, None])
        if not now.any():
            return taken
        taken = taken | now
        left = left - (lengths * now).sum(1)


def _shortest(lengths: Int[Tensor, "B W"]) -> Bool[Tensor, "B W"]:
    """True at the first of the shortest items of each row, items of length 0 left out; nowhere in a row without any."""
    width = lengths.shape[1]
    places = torch.arange(width, device=lengths.device)
    score = torch.where(lengths > 0, lengths * width + places, torch.iinfo(torch.int64).max)
    return (lengths > 0) & (score == score.min(1, keepdim=True).values)
