"""Chooses the tokens that permutation language modeling predicts: spans of whole words, a fixed share of each part of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.types import TokenBatch

LONGEST_SPAN = 5


@dataclass(frozen=True)
class Window:
    """The eligible tokens of one part of each row, in reading order.

    Attributes:
        positions: (B, W) position of each token in its row; arbitrary beyond `sizes`.
        sizes: (B,) number of tokens.
        begins: (B, W) True where a word begins.
    """

    positions: Int[Tensor, "B W"]
    sizes: Int[Tensor, "B"]
    begins: Bool[Tensor, "B W"]


def span_targets(batch: TokenBatch, ratio: int, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """Choose spans of one to five whole words, with exactly `quotas` tokens in each part.

    The tokens of a part form a ring, which is traversed once, starting at a random word. In each stretch, a span of n words
    is chosen, with P(n) proportional to 1/n, at a random place; the stretch is `ratio` times as long as its span. The last span
    is cut to the quota, and if too few tokens were chosen, single words are added. No position is favored, because the traversal
    starts anywhere, and the ends of a part are treated like any other place (the pieces of words that are cut there count as one
    word).

    Differs: the released code intends the same, but it chooses n pieces instead of n words, and starts at the beginning of the
    part with a seventh of the tokens instead of a sixth, so that a sixth of the quota is filled with single pieces. See
    `legacy_span_targets`.
    Reference: Yang et al. 2019, appendix A.5 (span-based prediction).
    """
    chosen = torch.zeros_like(batch.attention_mask)
    eligible = batch.attention_mask & ~batch.special_tokens_mask
    for part, quota in _parts(batch, eligible, ratio):
        window = reading_window(batch, eligible & part)
        chosen = chosen | _scatter(window, _walk(window, quota, ratio, _part_draws(randomness, part)), chosen)
    return chosen


def single_targets(batch: TokenBatch, ratio: int, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """Choose single tokens uniformly, `quotas` in each part: the ablation without spans."""
    eligible = batch.attention_mask & ~batch.special_tokens_mask
    order = randomness.integers("single targets", eligible.shape[1])
    chosen = torch.zeros_like(eligible)
    for part, quota in _parts(batch, eligible, ratio):
        chosen = chosen | _smallest(order, eligible & part, quota)
    return chosen


def legacy_span_targets(batch: TokenBatch, ratio: int, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """Choose spans as the released code does: n pieces from the beginning of a word on, traversing each part from its start.

    A span that would reach the end of its part is dropped and ends the traversal; the quota is filled with single positions.
    Special tokens of the second part can be chosen, and are then removed without a replacement.

    Reference: zihangdai/xlnet, data_utils.py, `_sample_mask` and `_create_data`.
    """
    chosen = torch.zeros_like(batch.attention_mask)
    for part, quota in _parts(batch, batch.attention_mask, ratio):
        window = reading_window(batch, batch.attention_mask & part, cut=False)
        picked = _legacy_walk(window, quota, ratio, _part_draws(randomness, part))
        chosen = chosen | _scatter(window, picked, chosen)
    return chosen & ~batch.special_tokens_mask


def quotas(eligible: Int[Tensor, "B 2"], real: Int[Tensor, "B"], ratio: int) -> Int[Tensor, "B 2"]:
    """Number of tokens to predict in the first and in the second part.

    The total is the number of real tokens of the row divided by `ratio`, rounded down, but at least one. Half of it, rounded
    down, is in the second part. If a part has too few eligible tokens, the other one makes up for it. For a full row of 512
    tokens and ratio 6, the quotas are 43 and 42.
    """
    wanted = torch.minimum((real // ratio).clamp(min=1), eligible.sum(1))
    second = torch.minimum(torch.maximum(wanted // 2, wanted - eligible[:, 0]), eligible[:, 1])
    return torch.stack([wanted - second, second], 1)


def reading_window(batch: TokenBatch, eligible: Bool[Tensor, "B L"], *, cut: bool = True) -> Window:
    """The eligible tokens in reading order, which is from right to left in rows with reversed text.

    Args:
        cut: whether a token also begins a word if the token before it is not eligible, and the first token does if no word begins
            in the window.
    """
    length = eligible.shape[1]
    place = torch.arange(length, device=eligible.device).expand(eligible.shape)
    starts = torch.ones_like(eligible) if batch.word_starts is None else batch.word_starts
    before = torch.zeros_like(eligible)
    before[:, 1:] = eligible[:, :-1]
    if batch.is_reversed is not None:
        after = torch.zeros_like(eligible)
        after[:, :-1] = eligible[:, 1:]
        backwards = batch.is_reversed[:, None]
        before = torch.where(backwards, after, before)
        place = torch.where(backwards, length - 1 - place, place)
    positions = place.masked_fill(~eligible, length).argsort(1)
    sizes = eligible.sum(1)
    inside, first = place_in(positions) < sizes[:, None], place_in(positions) == 0
    begins = starts.gather(1, positions) & inside
    if cut:
        begins = begins | (~before.gather(1, positions) & inside & ~first)
        begins = begins | (first & inside & ~begins.any(1, keepdim=True))
    return Window(positions, sizes, begins)


def span_lengths(uniforms: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Lengths from 1 to 5 with weights 1/n (mean 2.19), by inverting the cumulative distribution function."""
    weights = 1 / torch.arange(1, LONGEST_SPAN + 1, dtype=torch.float64, device=uniforms.device)
    distribution = (weights.cumsum(0) / weights.sum())[:-1]
    return torch.searchsorted(distribution, uniforms.double().contiguous(), right=True) + 1


def place_in(like: Tensor) -> Int[Tensor, "1 W"]:
    """0, 1, 2, ... along the rows."""
    return torch.arange(like.shape[1], device=like.device)[None, :]


@dataclass(frozen=True)
class _Draws:
    """The random numbers of one part of the rows."""

    randomness: Randomness
    part: str

    def uniforms(self, purpose: str, length: int) -> Float[Tensor, "B n"]:
        return self.randomness.uniforms(f"{purpose} of the {self.part} part", length)

    def integers(self, purpose: str, length: int) -> Int[Tensor, "B n"]:
        return self.randomness.integers(f"{purpose} of the {self.part} part", length)


def _part_draws(randomness: Randomness, part: Bool[Tensor, "L"]) -> _Draws:
    return _Draws(randomness, "first" if part[0] else "second")


def _parts(batch: TokenBatch, eligible: Bool[Tensor, "B L"], ratio: int) -> list[tuple[Bool[Tensor, "L"], Int[Tensor, "B"]]]:
    """The parts of the rows as masks over the positions, each with its quota. There is a single part without a `reuse_length`."""
    length = eligible.shape[1]
    first = torch.arange(length, device=eligible.device) < (batch.reuse_length or length)
    counts = torch.stack([(eligible & first).sum(1), (eligible & ~first).sum(1)], 1)
    shares = quotas(counts, batch.attention_mask.sum(1), ratio)
    parts = [(first, shares[:, 0]), (~first, shares[:, 1])]
    return parts if batch.reuse_length else parts[:1]


def _walk(window: Window, quota: Int[Tensor, "B"], ratio: int, draws: _Draws) -> Bool[Tensor, "B W"]:
    """The traversal of `span_targets` for all rows at once; returns which tokens of the window are chosen."""
    width = window.begins.shape[1]
    sizes = window.sizes[:, None]
    # Rotated so that the traversal starts at a random word: `at` is the index in the window of each place of the traversal.
    drawn = (draws.uniforms("turn", 1) * sizes).long()
    behind = _next_start(window.begins, sizes).gather(1, drawn.clamp(max=width - 1))
    turn = torch.where(behind < sizes, behind, torch.zeros_like(behind))
    at = torch.where(
        place_in(window.begins) < sizes, (place_in(window.begins) + turn) % sizes.clamp(min=1), place_in(window.begins)
    )
    begins = window.begins.gather(1, at)
    starts, number = _next_start(begins, sizes), begins.cumsum(1)
    lengths, shifts = span_lengths(draws.uniforms("span lengths", width)), draws.uniforms("span places", width)
    # If spans were always cut at their end, the beginnings of words would be favored.
    from_left = draws.uniforms("side", 1) < 0.5
    chosen = torch.zeros_like(begins)
    cursor, left = torch.zeros_like(sizes), quota[:, None].clone()
    for step in range(width):
        here = _at(starts, cursor, sizes)
        words = lengths[:, step : step + 1]
        likely = _after_words(number, here, words, sizes) - here
        start = _at(starts, cursor + (shifts[:, step : step + 1] * ((ratio - 1) * likely + 1)).long(), sizes)
        stop = _after_words(number, start, words, sizes)
        active = (start < sizes) & (left > 0)
        surplus = (stop - start - left).clamp(min=0)
        start, stop = torch.where(from_left, start + surplus, start), torch.where(from_left, stop, stop - surplus)
        if not active.any():
            break
        place = place_in(begins)
        chosen = chosen | (active & (place >= start) & (place < stop))
        left = torch.where(active, left - (stop - start), left)
        # A stretch is `ratio` times as long as its span, and longer only if the span ends later.
        cursor = torch.where(active, torch.maximum(stop, cursor + ratio * (stop - start)), sizes)
    # Missing tokens are taken from words in random order; the last word is cut in the same way.
    place = torch.where(from_left, width - 1 - place_in(begins), place_in(begins))
    order = (draws.integers("missing words", width) >> 1).argsort(1).argsort(1).gather(1, (number - 1).clamp(min=0))
    missing = _smallest(order * width + place, (place_in(begins) < sizes) & ~chosen, left.squeeze(1))
    chosen = chosen | missing
    return torch.zeros_like(chosen).scatter(1, at, chosen)


def _legacy_walk(window: Window, quota: Int[Tensor, "B"], ratio: int, draws: _Draws) -> Bool[Tensor, "B W"]:
    """The traversal of the released code."""
    width, sizes = window.begins.shape[1], window.sizes[:, None]
    starts = _next_start(window.begins, sizes)
    lengths, shifts = span_lengths(draws.uniforms("span lengths", width)), draws.uniforms("span places", width)
    chosen = torch.zeros_like(window.begins)
    cursor, left = torch.zeros_like(sizes), quota[:, None].clone()
    for step in range(width):
        pieces = torch.minimum(lengths[:, step : step + 1], left)
        before = (shifts[:, step : step + 1] * pieces * ratio).long()
        start = _at(starts, cursor + before, sizes)
        stop = start + pieces
        active = (left > 0) & (stop < sizes)
        if not active.any():
            break
        chosen = chosen | (active & (place_in(chosen) >= start) & (place_in(chosen) < stop))
        left = torch.where(active, left - pieces, left)
        cursor = torch.where(active, stop + pieces * ratio - before, sizes)
    free = (place_in(chosen) < sizes) & ~chosen
    return chosen | _smallest(draws.integers("missing tokens", width), free, left.squeeze(1))


def _next_start(begins: Bool[Tensor, "B W"], sizes: Int[Tensor, "B 1"]) -> Int[Tensor, "B W"]:
    """For each place, the first place at or after it where a word begins; the size of the window if there is none."""
    place = torch.where(begins, place_in(begins), sizes)
    return place.flip(1).cummin(1).values.flip(1)


def _at(starts: Int[Tensor, "B W"], place: Int[Tensor, "B 1"], sizes: Int[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
    """`starts` at a place; the size of the window for places beyond it."""
    return torch.where(place < sizes, starts.gather(1, place.clamp(max=starts.shape[1] - 1)), sizes)


def _after_words(
    number: Int[Tensor, "B W"], start: Int[Tensor, "B 1"], words: Int[Tensor, "B 1"], sizes: Int[Tensor, "B 1"]
) -> Int[Tensor, "B 1"]:
    """The end of the next `words` words from `start`, at most the size of the window.

    Args:
        number: running number of the word of each token in the window.
    """
    last = number.gather(1, start.clamp(max=number.shape[1] - 1)) + words
    found = torch.searchsorted(number, last)
    return torch.minimum(torch.where(start < sizes, found, sizes), sizes)


def _smallest(keys: Int[Tensor, "B W"], among: Bool[Tensor, "B W"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B W"]:
    """True at the `count` smallest keys of each row among the places in `among`, of which there must be enough."""
    rank = keys.masked_fill(~among, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True).argsort(1)
    return (rank < count[:, None]) & among


def _scatter(window: Window, chosen: Bool[Tensor, "B W"], like: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """The chosen tokens of a window at their positions in the row."""
    return torch.zeros_like(like).scatter(1, window.positions, chosen)
