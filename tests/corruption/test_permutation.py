"""Who sees whom, against a table written out cell by cell; and which tokens are predicted: how many, where, whole words."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from discern.corruption.masking import span_lengths
from discern.corruption.permutation import (
    blocked_pairs,
    factorization_order,
    legacy_span_targets,
    single_targets,
    span_targets,
)
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch


def randomness(rows: int, step: int = 0) -> Randomness:
    return Randomness(0, step, torch.arange(rows))


def oracle(order: list[int], targets: list[bool], functional: list[bool], reuse_length: int) -> list[list[bool]]:
    """The table of Yang et al.'s released code, one pair of positions after the other."""
    length = len(order)
    blocked = [[False] * length for _ in range(length)]
    for row in range(length):
        for column in range(length):
            if row < reuse_length <= column:
                blocked[row][column] = True
            elif column < reuse_length <= row or not (targets[column] or functional[column]):
                blocked[row][column] = False
            elif targets[row]:
                blocked[row][column] = not order[column] < order[row]
            elif functional[row]:
                blocked[row][column] = not order[column] <= order[row]
            else:
                blocked[row][column] = True
    return blocked


def random_case(length: int, reuse_length: int, window: int | None, step: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    functional = torch.zeros(4, length, dtype=torch.bool)
    functional[:, -2:] = True
    functional[:, length * 3 // 4] = True
    targets = (torch.rand(4, length, generator=rng) < 0.3) & ~functional
    return factorization_order(length, reuse_length, window, randomness(4, step)), targets, functional


@pytest.mark.parametrize(
    ("length", "reuse_length", "window"), [(16, 8, None), (16, 8, 4), (16, 8, 8), (13, 0, None), (1, 0, None)]
)
def test_the_masks_are_those_of_the_table(length: int, reuse_length: int, window: int | None) -> None:
    for step in range(20):
        order, targets, functional = random_case(length, reuse_length, window, step)
        found = blocked_pairs(order, targets, functional, reuse_length)
        for row in range(4):
            expected = oracle(order[row].tolist(), targets[row].tolist(), functional[row].tolist(), reuse_length)
            assert found[row].tolist() == expected


def test_each_window_has_the_same_permutation_in_its_own_range() -> None:
    order = factorization_order(24, 12, 4, randomness(50))
    for part in (order[:, :12], order[:, 12:]):
        windows = part.view(50, 3, 4) - torch.arange(3)[:, None] * 4
        assert torch.equal(windows.sort(2).values, torch.arange(4).expand(50, 3, 4))
        assert (windows == windows[:, :1]).all()
    assert not torch.equal(order[:, :12], order[:, 12:])


def test_every_permutation_is_as_likely() -> None:
    orders = factorization_order(3, 0, None, randomness(6000))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert (counts.double() / 1000 - 1).abs().max() < 0.12  # four standard deviations


Choose = Callable[[TokenBatch, int, Randomness], Tensor]


def rows(count: int, length: int, *, seed: int = 0, one_piece: float = 0.7, backwards: bool = False) -> TokenBatch:
    """Rows in two parts, A as long as B or a token longer; a token begins a word with probability `one_piece`."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (count, length), generator=rng)
    middle = length // 2 + (length // 2 - 2) // 2
    for position, token in ((middle, SPECIAL.sep), (length - 2, SPECIAL.sep), (length - 1, SPECIAL.cls)):
        ids[:, position] = token
    batch = make_batch(ids.tolist())
    starts = (torch.rand(count, length, generator=rng) < one_piece) | batch.special_tokens_mask
    is_reversed = torch.full((count,), backwards)
    return replace(batch, word_starts=starts, reuse_length=length // 2, is_reversed=is_reversed)


@pytest.mark.parametrize("choose", [span_targets, single_targets])
@pytest.mark.parametrize(("length", "first", "second"), [(10, 1, 0), (12, 1, 1), (32, 3, 2), (128, 11, 10), (512, 43, 42)])
def test_the_quota_is_exact_in_each_part(choose: Choose, length: int, first: int, second: int) -> None:
    batch = rows(50, length)
    chosen = choose(batch, 6, randomness(50))
    part = length // 2
    assert chosen[:, :part].sum(1).unique().tolist() == [first]
    assert chosen[:, part:].sum(1).unique().tolist() == [second]
    assert not (chosen & batch.special_tokens_mask).any()


@pytest.mark.parametrize("choose", [span_targets, single_targets])
def test_a_part_makes_up_for_the_other(choose: Choose) -> None:
    full, short = [9] * 6, [9, *[SPECIAL.sep] * 5]
    chosen = choose(replace(make_batch([full + short, short + full]), reuse_length=6), 3, randomness(2))
    assert (chosen[:, :6].sum(1).tolist(), chosen[:, 6:].sum(1).tolist()) == ([3, 1], [1, 3])


@pytest.mark.parametrize("choose", [span_targets, single_targets])
@pytest.mark.parametrize("one_piece", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_position_is_as_likely(choose: Choose, one_piece: float, backwards: bool) -> None:
    count = torch.zeros(64)
    for step in range(4):
        batch = rows(4000, 64, seed=step, one_piece=one_piece, backwards=backwards)
        count += choose(batch, 6, randomness(4000, step)).sum(0)
    rate = count / 16_000
    free = ~batch.special_tokens_mask[0]
    first, second = rate[:32], rate[32:][free[32:]]
    # 5 of 32 and 5 of 29, which is what one in six of 64 makes.
    assert (first / (5 / 32) - 1).abs().max() < 0.1
    assert (second / (5 / 29) - 1).abs().max() < 0.1
    assert rate[free].mean().item() == pytest.approx(1 / 6, rel=0.02)


@pytest.mark.parametrize("backwards", [False, True])
def test_words_stay_whole_but_for_one_in_each_part(backwards: bool) -> None:
    batch = rows(300, 128, one_piece=0.5, backwards=backwards)
    chosen, starts = span_targets(batch, 6, randomness(300)), batch.word_starts
    assert starts is not None
    if backwards:  # into the order in which they are read
        chosen, starts = chosen.flip(1), starts.flip(1)
    special = batch.special_tokens_mask.flip(1) if backwards else batch.special_tokens_mask
    ends = starts | special | torch.arange(128).eq(64) | torch.cat([torch.ones(300, 1).bool(), special[:, :-1]], 1)
    number = ends.cumsum(1) - 1
    sizes, taken = (torch.zeros(300, 128).long().scatter_add_(1, number, each.long()) for each in (~special, chosen))
    cut = (taken > 0) & (taken < sizes)
    half = number[:, 64:65]
    assert int((cut & (torch.arange(128) < half)).sum(1).max()) <= 1
    assert int((cut & (torch.arange(128) >= half)).sum(1).max()) <= 1
    spans = int((chosen[:, 1:] & ~chosen[:, :-1]).sum() + chosen[:, 0].sum())
    assert 2.5 < 300 * 21 / spans < 5  # 2.19 words of two pieces on average, less where a quota ends


def test_one_part_and_padding() -> None:
    batch = make_batch([[SPECIAL.cls, *range(5, 35), SPECIAL.sep], [SPECIAL.cls, 9, SPECIAL.sep], [SPECIAL.cls, SPECIAL.sep], []])
    for choose in (span_targets, single_targets):
        chosen = choose(batch, 6, randomness(4))
        assert chosen.sum(1).tolist() == [5, 1, 0, 0]
        assert not (chosen & batch.special_tokens_mask).any()


def test_a_part_that_is_one_word_is_cut() -> None:
    batch = replace(rows(20, 32), word_starts=torch.zeros(20, 32, dtype=torch.bool))
    assert span_targets(batch, 6, randomness(20)).sum(1).unique().tolist() == [5]


@pytest.mark.parametrize("choose", [span_targets, single_targets, legacy_span_targets])
def test_targets_depend_on_seed_step_and_row_alone(choose: Choose) -> None:
    batch = rows(9, 64)
    whole = choose(batch, 6, randomness(9))
    assert torch.equal(choose(batch.rows(3, 7), 6, randomness(9).rows(3, 7)), whole[3:7])
    assert not torch.equal(choose(batch, 6, randomness(9, step=1)), whole)


def test_a_legacy_walk_by_hand() -> None:
    """The released loop, with the draws of the vectorized one put in."""
    batch = rows(40, 64, one_piece=0.6)
    chosen = legacy_span_targets(batch, 6, randomness(40))[:, :32]
    assert batch.word_starts is not None
    uniforms = randomness(40).uniforms("span lengths of the first part", 64)
    lengths = span_lengths(uniforms, [1 / words for words in range(1, 6)]).tolist()
    shifts = randomness(40).uniforms("span places of the first part", 64).tolist()
    for row in range(40):
        starts = batch.word_starts[row, :32].tolist()
        expected, cursor, left = [False] * 32, 0, 5
        for drawn, shift in zip(lengths[row], shifts[row], strict=True):
            pieces = min(drawn, left)
            before = int(shift * pieces * 6)
            start = next((place for place in range(cursor + before, 32) if starts[place]), 32)
            if not left or start + pieces >= 32:
                break
            expected[start : start + pieces] = [True] * pieces
            cursor, left = start + pieces + pieces * 6 - before, left - pieces
        assert all(found or not wanted for found, wanted in zip(chosen[row].tolist(), expected, strict=True))
        assert chosen[row].sum().item() == 5
