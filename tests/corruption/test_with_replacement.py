"""Drawing as the released code draws: its number, its duplicates, its averages."""

import pytest
import torch
from scipy import stats

from discern.corruption.masking import MaskingContext, average_samples, draw_quota, with_replacement
from discern.corruption.randomness import Randomness
from discern.types import Places
from tests.support import SPECIAL, make_batch


def draws_of(lengths: list[int], width: int, mask_probability: float = 0.15, step: int = 0) -> torch.Tensor:
    """Draws of rows of so many real tokens, special ones included, in rows of this width."""
    ids = [[SPECIAL.cls, *[9] * (length - 2), SPECIAL.sep] for length in lengths]
    ids.append([SPECIAL.cls, *[9] * (width - 2), SPECIAL.sep])
    batch = make_batch(ids)
    drawn = with_replacement(batch, MaskingContext(mask_probability, Randomness(0, step, batch.slot))).draws
    assert drawn is not None
    return drawn[:-1]


@pytest.mark.parametrize(
    ("real", "width", "mask_probability", "expected"),
    [
        (128, 128, 0.15, 19),  # 19.2
        (512, 512, 0.15, 77),  # 76.8, at most int(0.155 x 512) = 79
        (512, 512, 0.25, 128),
        (30, 128, 0.15, 4),  # 4.5, half to even
        (190, 512, 0.15, 29),  # 28.5 in decimals, 28.500002 in the float32 of the released code
        (3, 128, 0.15, 1),  # 0.45, but one at least
        (32, 32, 0.15, 4),  # 4.8 would be 5, but int(0.155 x 32) = 4 at most
    ],
)
def test_the_number_counts_frames_in(real: int, width: int, mask_probability: float, expected: int) -> None:
    assert draws_of([real], width, mask_probability).sum(1).tolist() == [expected]


def test_nothing_is_drawn_where_nothing_can_be() -> None:
    assert draws_of([2, 0], 16).sum(1).tolist() == [0, 0]
    real = torch.tensor([[True, True, False]])
    assert draw_quota(real, torch.tensor([0]), 0.5).tolist() == [0]


@pytest.mark.parametrize(("width", "mask_probability", "distinct"), [(128, 0.15, 17.7), (512, 0.15, 71.5), (512, 0.25, 113.3)])
def test_so_many_positions_differ(width: int, mask_probability: float, distinct: float) -> None:
    """Of n positions drawn k times, n (1 - (1 - 1/n)^k) are expected to differ."""
    drawn = draws_of([width] * 2000, width, mask_probability)
    n, k = width - 2, int(drawn[0].sum())
    closed_form = n * (1 - (1 - 1 / n) ** k)
    assert closed_form == pytest.approx(distinct, abs=0.1)
    counts = (drawn > 0).sum(1).double()
    assert float(counts.mean()) == pytest.approx(closed_form, abs=5 * float(counts.std()) / 2000**0.5)


def test_draws_are_independent() -> None:
    """Two draws of four positions: each of the ten outcomes as often as two dice with four sides say."""
    # 6 real tokens: 0.35 x 6 = 2.1; the row is wider, so that the cap does not bind.
    drawn = torch.cat([draws_of([6] * 500, 12, 0.35, step)[:, 1:5] for step in range(10)])
    assert (drawn.sum(1) == 2).all()
    doubles = torch.stack([(drawn[:, at] == 2).sum() for at in range(4)])
    pairs = torch.stack([((drawn[:, a] == 1) & (drawn[:, b] == 1)).sum() for a in range(4) for b in range(a)])
    observed = torch.cat([doubles, pairs]).double()
    expected = torch.tensor([1.0] * 4 + [2.0] * 6).double() / 16 * observed.sum()
    assert observed.sum() == 5000
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-4


def test_samples_are_averaged_by_hand() -> None:
    first, draws = torch.tensor([10, 20, 30, 7]), torch.tensor([[1, 2, 0], [3, 2, 0]])
    later = {1: torch.tensor([0, 25, 31, 7]), 2: torch.tensor([0, 0, 34, 0])}
    asked = []

    def again(chosen: torch.Tensor, ordinal: int) -> torch.Tensor:
        asked.append((ordinal, chosen.tolist()))
        return later[ordinal][chosen]

    # 10; (20 + 25) / 2 = 22.5; (30 + 31 + 34) / 3 = 31.67; two equal samples stay.
    assert average_samples(first, Places.of(draws > 0, draws), again).tolist() == [10, 22, 31, 7]
    assert asked == [(1, [1, 2, 3]), (2, [2])]
    assert first.tolist() == [10, 20, 30, 7]


def test_no_sample_to_average() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    places = Places.of(none > 0, none)
    assert average_samples(none.flatten(), places, lambda chosen, ordinal: chosen).tolist() == []
