"""XLNet's permutation language modeling: the tokens to predict, the factorization order, and the attention masks.

A row has three classes of tokens. *Targets* are predicted, in a random order; *functional* tokens ([SEP], [CLS]) have a place
in that order but are not predicted; all other tokens are *context*, visible to all.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from discern.corruption.masking import smallest, span_lengths
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch

_CONTEXT = -1
_SPAN_WEIGHTS = [1 / words for words in range(1, 6)]


def factorization_order(
    length: int, reuse_length: int, permutation_size: int | None, randomness: Randomness
) -> Int[Tensor, "B L"]:
    """Rank of each position in the factorization order of its part of the row.

    A part is cut into windows. One permutation is drawn for each part and row, and applied to all its windows, which keep
    their order from left to right.

    Args:
        length: L.
        reuse_length: start of the second part; 0: the row is one part.
        permutation_size: positions per window; None: a part is one window.

    Reference: zihangdai/xlnet, data_utils.py, `_local_perm`.
    """
    sizes = [reuse_length, length - reuse_length] if reuse_length else [length]
    parts = []
    for number, size in enumerate(sizes):
        window = min(permutation_size or size, size)
        drawn = randomness.integers(f"factorization order {number}", window).argsort(1).argsort(1)
        place = torch.arange(size, device=drawn.device)
        parts.append(place // window * window + drawn[:, place % window])
    return torch.cat(parts, 1)


def blocked_pairs(
    order: Int[Tensor, "B L"], targets: Bool[Tensor, "B L"], functional: Bool[Tensor, "B L"], reuse_length: int
) -> Bool[Tensor, "B L L"]:
    """True where the token of the row may not see the token of the column, when each predicts itself.

    | row \\ column | context | target | functional |
    |---|---|---|---|
    | context | sees | never | never |
    | target | sees | only those earlier in the order | only those earlier in the order |
    | functional | sees | those not later in the order | those not later in the order, itself too |

    The first part does not see the second, which sees all of the first. So the states of the first part, which a memory keeps
    for the next row, contain nothing of the text with which that row continues.

    Args:
        order: the result of `factorization_order`.
        functional: special tokens; they are not targets.

    Reference: zihangdai/xlnet, data_utils.py, `_local_perm` and `_create_data`.
    """
    rank = torch.where(targets | functional, order, _CONTEXT)
    # A token that is not a target sees itself: its own rank counts as one later.
    own = torch.where(targets, rank, rank + 1)
    blocked = (own[:, :, None] <= rank[:, None, :]) & (rank[:, None, :] != _CONTEXT)
    second = torch.arange(order.shape[1], device=order.device) >= reuse_length
    return torch.where(second[:, None] == second[None, :], blocked, second[None, :])


def single_targets(batch: TokenBatch, ratio: int, randomness: Randomness) -> Bool[Tensor, "B L"]:
    """Choose single tokens uniformly, the quota of each part: the ablation without spans."""
    order = randomness.integers("single targets", batch.maskable.shape[1])
    chosen = torch.zeros_like(batch.maskable)
    for _, part, quota in _parts(batch, batch.maskable, ratio):
        chosen = chosen | smallest(order, part, quota)
    return chosen


def span_targets(batch: TokenBatch, ratio: int, randomness: Randomness, *, legacy: bool = False) -> Bool[Tensor, "B L"]:
    """Choose spans of one to five whole words, with exactly the quota of tokens of each part.

    The tokens of a part form a ring, which is traversed once, starting at a random word. In each stretch, a span of n words
    is chosen, with P(n) proportional to 1/n, at a random place; the stretch is `ratio` times as long as its span. The last span
    is cut to the quota, and if too few tokens were chosen, single words are added. No position is favored, because the traversal
    starts anywhere, and the ends of a part are treated like any other place (the pieces of words that are cut there count as one
    word).

    Differs: the released code intends the same, but it chooses n pieces instead of n words, and starts at the beginning of the
    part with a seventh of the tokens instead of a sixth, so that a sixth of the quota is filled with single pieces.

    Args:
        legacy: choose as the released code does: n pieces from the beginning of a word on, traversing each part from its start.
            A span that would reach the end of its part is dropped and ends the traversal; the quota is filled with single
            positions. Special tokens of the second part can be chosen, and are then removed without a replacement.

    Reference: Yang et al. 2019, appendix A.5 (span-based prediction); for `legacy`, zihangdai/xlnet, data_utils.py,
    `_sample_mask` and `_create_data`.
    """
    result = torch.zeros_like(batch.maskable)
    for name, part, quota in _parts(batch, batch.attention_mask if legacy else batch.maskable, ratio):
        # The window: the eligible tokens of each row, in reading order, and where a word begins among them.
        eligible = _in_reading_order(part, batch)
        word_starts = torch.ones_like(part) if batch.word_starts is None else _in_reading_order(batch.word_starts, batch)
        sizes = part.sum(1, keepdim=True)
        positions = (~eligible).to(torch.uint8).argsort(dim=1, stable=True)
        begins = (word_starts & eligible).gather(1, positions)
        width, place = part.shape[1], torch.arange(part.shape[1], device=part.device)
        inside = place < sizes
        if not legacy:
            # A token also begins a word behind one that is not eligible, and so does the first token if no word begins at all.
            begins[:, 1:] |= (eligible & ~F.pad(eligible, (1, -1))).gather(1, positions)[:, 1:]
            begins[:, :1] |= ~begins.any(1, keepdim=True)
            # Rotated so that the traversal starts at a random word: `at` is the index in the window of each place.
            drawn = (randomness.uniforms(f"turn of the {name} part", 1) * sizes).long()
            turn = _next_start(begins, sizes).gather(1, drawn.clamp(max=width - 1))
            at = torch.where(inside, (place + turn) % sizes.clamp(min=1), place)
            positions, begins = positions.gather(1, at), begins.gather(1, at)
        starts, number = _next_start(begins, sizes), begins.cumsum(1)
        lengths = span_lengths(randomness.uniforms(f"span lengths of the {name} part", width), _SPAN_WEIGHTS)
        shifts = randomness.uniforms(f"span places of the {name} part", width)
        # If spans were always cut at their end, the beginnings of words would be favored.
        from_left = randomness.uniforms(f"side of the {name} part", 1) < 0.5

        chosen, cursor, left = torch.zeros_like(begins), torch.zeros_like(sizes), quota[:, None]
        for length, shift in zip(torch.split(lengths, 1, 1), torch.split(shifts, 1, 1), strict=True):
            if legacy:
                pieces = torch.minimum(length, left)
                before = (shift * pieces * ratio).long()
                start = starts.gather(1, (cursor + before).clamp(max=width))
                stop = start + pieces
                active = (left > 0) & (stop < sizes)
                cursor = stop + pieces * ratio - before
            else:
                here = starts.gather(1, cursor.clamp(max=width))
                likely = _end_of(length, here, number, sizes) - here
                start = starts.gather(1, (cursor + (shift * ((ratio - 1) * likely + 1)).long()).clamp(max=width))
                stop = _end_of(length, start, number, sizes)
                active = (left > 0) & (start < sizes)
                surplus = (stop - start - left).clamp(min=0)
                start, stop = torch.where(from_left, start + surplus, start), torch.where(from_left, stop, stop - surplus)
                # A stretch is `ratio` times as long as its span, and longer only if the span ends later.
                cursor = torch.maximum(stop, cursor + ratio * (stop - start))
            if not active.any():
                break
            chosen = chosen | (active & (place >= start) & (place < stop))
            left = left - (stop - start) * active
            cursor = torch.where(active, cursor, sizes)

        if legacy:
            missing = randomness.integers(f"missing tokens of the {name} part", width)
        else:
            # Missing tokens are taken from words in random order; the last word is cut in the same way.
            shuffled = randomness.integers(f"missing words of the {name} part", width) >> 1
            order = shuffled.argsort(1).argsort(1).gather(1, (number - 1).clamp(min=0))
            missing = order * width + torch.where(from_left, width - 1 - place, place)
        chosen = chosen | smallest(missing, inside & ~chosen, left.squeeze(1))
        result = result | _in_reading_order(torch.zeros_like(chosen).scatter(1, positions, chosen), batch)
    return result & batch.maskable


legacy_span_targets = partial(span_targets, legacy=True)


def _parts(
    batch: TokenBatch, eligible: Bool[Tensor, "B L"], ratio: int
) -> list[tuple[str, Bool[Tensor, "B L"], Int[Tensor, "B"]]]:
    """The parts of the rows by name: their eligible tokens, and the number to predict. One is empty without a `reuse_length`.

    The total is the number of real tokens of the row divided by `ratio`, rounded down, but at least one. Half of it, rounded
    down, is in the second part. If a part has too few eligible tokens, the other one makes up for it. For a full row of 512
    tokens and ratio 6, the quotas are 43 and 42.
    """
    is_first = torch.arange(eligible.shape[1], device=eligible.device) < (batch.reuse_length or eligible.shape[1])
    first, second = eligible & is_first, eligible & ~is_first
    total = torch.minimum((batch.attention_mask.sum(1) // ratio).clamp(min=1), eligible.sum(1))
    in_second = torch.minimum(torch.maximum(total // 2, total - first.sum(1)), second.sum(1))
    return [("first", first, total - in_second), ("second", second, in_second)]


def _in_reading_order(values: Bool[Tensor, "B L"], batch: TokenBatch) -> Bool[Tensor, "B L"]:
    """The rows of reversed text turned round, which is its own inverse."""
    return values if batch.is_reversed is None else torch.where(batch.is_reversed[:, None], values.flip(1), values)


def _next_start(begins: Bool[Tensor, "B W"], sizes: Int[Tensor, "B 1"]) -> Int[Tensor, "B W+1"]:
    """For each place, the first place at or after it where a word begins; the size of the window if there is none."""
    place = torch.where(begins, torch.arange(begins.shape[1], device=begins.device), sizes)
    return torch.cat([place, sizes], 1).flip(1).cummin(1).values.flip(1)


def _end_of(words: Tensor, start: Tensor, number: Tensor, sizes: Tensor) -> Tensor:
    """The end of the next `words` words from `start`, at most the size of the window."""
    last = number.gather(1, start.clamp(max=number.shape[1] - 1)) + words
    return torch.minimum(torch.searchsorted(number, last), sizes)
