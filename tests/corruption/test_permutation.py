"""Who sees whom, against a table written out cell by cell."""

import pytest
import torch
from torch import Tensor

from discern.corruption.permutation import blocked_pairs, factorization_order
from discern.corruption.randomness import Randomness


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


def test_a_row_by_hand() -> None:
    # 0 context, 1 and 2 targets, 3 functional; the order is 2, 3, 1, 0.
    order = torch.tensor([[3, 2, 0, 1]])
    targets = torch.tensor([[False, True, True, False]])
    functional = torch.tensor([[False, False, False, True]])
    sees = ~blocked_pairs(order, targets, functional, 0)[0]
    assert sees.tolist() == [
        [True, False, False, False],  # context sees context alone
        [True, False, True, True],  # the last target sees the first and the functional token, not itself
        [True, False, False, False],  # the first target sees context alone
        [True, False, True, True],  # the functional token sees the target before it, and itself
    ]


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


def test_the_order_depends_on_seed_step_and_row_alone() -> None:
    whole = factorization_order(16, 8, None, randomness(6))
    part = factorization_order(16, 8, None, randomness(6).rows(2, 5))
    assert torch.equal(whole[2:5], part)
    assert not torch.equal(whole, factorization_order(16, 8, None, randomness(6, step=1)))
