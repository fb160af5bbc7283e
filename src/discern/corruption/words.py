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

    A word is a run of maskable tokens. It ends at the latest at a special token or at the end of the row. If packing has cut
    a word, the remaining part counts as a word.

    Attributes:
        maskable: (B, L) tokens that belong to a word.
        number: (B, L) number of the word of each such token; 0 elsewhere.
        lengths: (B, L) number of tokens of each word, by the word's number; 0 beyond the last word.
    """

    maskable: Bool[Tensor, "B L"]
    number: Int[Tensor, "B L"]
    lengths: Int[Tensor, "B L"]

    @property
    def count(self) -> Int[Tensor, "B"]:
        """Number of words in each row."""
        return (self.lengths > 0).sum(1)


def words_of(batch: TokenBatch) -> Words:
    """The words of the batch. If the batch does not record where words begin, every token is a word."""
    maskable = maskable_positions(batch)
    begins = maskable
    if batch.word_starts is not None:
        follows = torch.zeros_like(maskable)
        follows[:, 1:] = maskable[:, :-1]
        starts = batch.word_starts
        if batch.is_reversed is not None:
            # In reversed text, a word begins with the last of its tokens in the row, and the next token begins another word.
            ended = torch.zeros_like(starts)
            ended[:, 1:] = starts[:, :-1]
            starts = torch.where(batch.is_reversed[:, None], ended, starts)
        begins = maskable & (starts | ~follows)
    number = (begins.cumsum(1) - 1).clamp(min=0) * maskable
    lengths = torch.zeros_like(number).scatter_add_(1, number, maskable.long())
    return Words(maskable, number, lengths)


def whole_word(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Choose whole words in uniformly random order, until the `quota` of tokens of the row is filled; see `take_in_order`.

    Raises:
        ConfigError: the batch does not record where words begin.

    Reference: google-research/bert, create_pretraining_data.py, `do_whole_word_mask`; Cui et al. 2019 for Chinese.
    """
    if batch.word_starts is None:
        raise ConfigError(
            "masking 'whole-word' needs to know where words begin, which these rows do not record",
            hint="train on a data set of `discern prepare`, which stores it, or set objective.masking=uniform",
        )
    words = words_of(batch)
    keys = context.randomness.integers("masked words", words.number.shape[1])
    return Chosen(take_in_order(words, keys, quota(words.maskable, context.mask_probability)))


def span(batch: TokenBatch, context: MaskingContext) -> Chosen:
    """Choose spans of whole words, until the `quota` of tokens of the row is filled; see `take_in_order`.

    If words are unknown, the spans consist of tokens. The words of a row form a ring, which is cut into spans of random length,
    starting at a random place. The spans are taken in random order. All places are therefore equally likely, which they would
    not be if spans ended at the ends of the row. Long words are slightly less likely, because they are skipped if they do not
    fit. A span continues after a special token.

    Differs: SpanBERT draws the beginning of each span independently, which favors words away from the beginning of the row.
    Reference: Joshi et al. 2020, section 3.1.
    """
    words, randomness = words_of(batch), context.randomness
    shape = words.number.shape
    lengths = span_lengths(randomness.uniforms("span lengths", shape[1]), context.span_stop_probability, context.span_max_words)
    number = torch.arange(shape[1], device=lengths.device).expand(shape)
    turn = randomness.integers("span turn", 1)
    # Entries beyond the last word of a row are meaningless and not used.
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
    # Inverts the distribution function 1 - going_on^n, truncated at the longest span.
    total = 1 - going_on**longest
    lengths = ((1 - uniforms.double() * total).log() / math.log(going_on)).floor().long() + 1
    return lengths.clamp(1, longest)


def take_in_order(words: Words, keys: Int[Tensor, "B L"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """The tokens of words that are taken in the order of their keys, until each row has `count` tokens.

    A word that would exceed the count is skipped. A row therefore has fewer tokens only if each remaining word is longer than
    the number of missing tokens. There is one exception: if even the shortest word of a row is longer than `count`, the first
    word of that length is taken, so that every row with words has at least one.

    Args:
        keys: key of each word, by the word's number.
        count: number of tokens to choose; 0 for a row without words.
    """
    exists = words.lengths > 0
    order = keys.masked_fill(~exists, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True)
    lengths = words.lengths.gather(1, order)
    taken = _fill(lengths, count)
    taken = taken | _shortest(lengths) & (~taken.any(1) & (count > 0))[:, None]
    by_number = torch.zeros_like(taken).scatter_(1, order, taken)
    return by_number.gather(1, words.number) & words.maskable


def _fill(lengths: Int[Tensor, "B W"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B W"]:
    """Which items are taken, from left to right, skipping those that exceed the rest of `count` and those of length 0.

    One pass takes all items up to the first one that does not fit. Neither that item nor any other of its length fits later,
    so there are at most as many passes as different lengths, instead of one per item.
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
    """True at the first of the shortest items of each row, without items of length 0; False throughout a row without items."""
    width = lengths.shape[1]
    places = torch.arange(width, device=lengths.device)
    score = torch.where(lengths > 0, lengths * width + places, torch.iinfo(torch.int64).max)
    return (lengths > 0) & (score == score.min(1, keepdim=True).values)
