"""Rare tokens more often: rates by closed form."""

import pytest
import torch

from discern.corruption.masking import MaskingContext, quota, rarity, uniform
from discern.corruption.masking import maskable_positions as maskable
from discern.corruption.randomness import Randomness
from tests.support import SPECIAL, make_batch

COUNTS = torch.tensor([0, 0, 0, 0, 0, 900, 100, 25, 1, 0])


def rates(ids: list[int], mask_probability: float, exponent: float, draws: int = 20_000) -> torch.Tensor:
    """How often each token of a row is chosen."""
    batch = make_batch([[SPECIAL.cls, *ids, SPECIAL.sep]] * 1000)
    total = torch.zeros(len(ids))
    for step in range(draws // 1000):
        context = MaskingContext(mask_probability, Randomness(0, step, batch.slot), COUNTS, rarity_exponent=exponent)
        chosen = rarity(batch, context).positions
        assert torch.equal(chosen.sum(1), quota(maskable(batch), mask_probability))
        total += chosen[:, 1:-1].sum(0)
    return total / draws


def test_one_draw_goes_by_the_weights() -> None:
    # 900, 100, 25 and 1 to the power of -1/2: 1/30, 1/10, 1/5, 1. One of four is drawn.
    weights = torch.tensor([1 / 30, 1 / 10, 1 / 5, 1.0])
    assert rates([5, 6, 7, 8], 0.25, 0.5).tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=0.015)


def test_two_draws_without_replacement() -> None:
    # Weights 1, 1/10, 1/30 (ids 8, 6, 5): the last is left out if the other two are drawn, in either order.
    a, b, c = 1.0, 0.1, 1 / 30
    total = a + b + c
    left_out = [x / total * y / (total - x) + y / total * x / (total - y) for x, y in ((b, c), (a, c), (a, b))]
    assert rates([8, 6, 5], 0.7, 0.5).tolist() == pytest.approx([1 - share for share in left_out], abs=0.015)


def test_tokens_that_training_never_saw_count_as_seen_once() -> None:
    assert rates([8, 9], 0.5, 1.0).tolist() == pytest.approx([0.5, 0.5], abs=0.02)


def test_exponent_zero_is_even() -> None:
    assert rates([5, 6, 7, 8], 0.25, 0.0).tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_a_row_of_equal_tokens_is_even_and_exact() -> None:
    batch = make_batch([[SPECIAL.cls, *[5] * 40, SPECIAL.sep]] * 50)
    context = MaskingContext(0.15, Randomness(0, 0, batch.slot), COUNTS)
    assert (rarity(batch, context).positions.sum(1) == 6).all()
    assert torch.equal(rarity(batch, context).positions.sum(1), uniform(batch, context).positions.sum(1))
