import pytest
import torch
from scipy import stats

from discern.corruption.masking import MaskingContext, hide, maskable_positions, quota
from discern.corruption.masking import uniform as masking
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch


def rows(lengths: list[int]) -> TokenBatch:
    return make_batch([[SPECIAL.cls, *range(10, 10 + length), SPECIAL.sep] for length in lengths])


def randomness(count: int, step: int = 0) -> Randomness:
    return Randomness(0, step, torch.arange(count))


def uniform(batch: TokenBatch, mask_probability: float, numbers: Randomness) -> torch.Tensor:
    return masking(batch, MaskingContext(mask_probability, numbers)).positions


def test_exactly_the_rounded_share_is_chosen() -> None:
    lengths = [1, 2, 3, 6, 7, 9, 10, 11, 30, 100]
    batch = rows(lengths)
    chosen = uniform(batch, 0.15, randomness(len(lengths)))
    # 0.15 x 10 = 1.5 and 0.15 x 30 = 4.5: halves round to even, as Python's round does.
    assert chosen.sum(1).tolist() == [max(1, round(0.15 * length)) for length in lengths]


def test_special_tokens_and_padding_are_never_chosen() -> None:
    batch = rows([3, 40, 17])
    for step in range(50):
        chosen = uniform(batch, 0.5, randomness(3, step))
        assert not (chosen & (batch.special_tokens_mask | ~batch.attention_mask)).any()


@pytest.mark.parametrize("ids", [[[SPECIAL.cls, SPECIAL.sep]], [[SPECIAL.pad] * 4], [[SPECIAL.cls, 9, SPECIAL.sep]]])
def test_rows_with_little_or_nothing_to_choose(ids: list[list[int]]) -> None:
    batch = make_batch(ids)
    if ids[0][0] == SPECIAL.pad:
        batch = make_batch([[SPECIAL.cls, 9, 9, SPECIAL.sep], []]).rows(1, 2)
    chosen = uniform(batch, 0.15, randomness(1))
    assert int(chosen.sum()) == min(1, int(maskable_positions(batch).sum()))


def test_positions_are_even() -> None:
    count, length = 64, 20
    batch = rows([length] * count)
    hits = sum(uniform(batch, 0.15, randomness(count, step)).sum(0) for step in range(200))
    assert hits[0] == hits[-1] == 0
    assert hits.sum() == 3 * count * 200
    assert stats.chisquare(hits[1:-1].numpy()).pvalue > 1e-4


def test_pairs_of_positions_are_even() -> None:
    # Drawn without replacement, every pair is equally likely; a biased ranking would show here first.
    batch = rows([6] * 256)
    table = torch.zeros(6, 6)
    for step in range(60):
        chosen = uniform(batch, 1 / 3, randomness(256, step))[:, 1:-1].float()
        table += chosen.T @ chosen
    pairs = table[torch.triu_indices(6, 6, 1).unbind()]
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-4


def test_quota_is_computed_as_a_person_would() -> None:
    maskable = torch.ones(1, 30, dtype=torch.bool)
    assert quota(maskable, 0.15).item() == 4  # 4.5 rounds to even
    assert quota(maskable, 0.25).item() == 8  # 7.5 -> 8
    assert quota(torch.ones(1, 190, dtype=torch.bool), 0.15).item() == 28  # 28.5; in float32 it is 28.500002, hence 29


def test_all_chosen_positions_become_mask() -> None:
    batch = rows([50])
    chosen = uniform(batch, 0.3, randomness(1))
    hidden = hide(batch.input_ids, chosen, (1.0, 0.0), (SPECIAL.mask, 100), randomness(1))
    assert (hidden[chosen] == SPECIAL.mask).all()
    assert torch.equal(hidden[~chosen], batch.input_ids[~chosen])


@pytest.mark.parametrize("shares", [(0.8, 0.1), (0.85, 0.0)])
def test_shares_of_mask_random_and_unchanged(shares: tuple[float, float]) -> None:
    batch = make_batch([[SPECIAL.cls, *[7] * 60, SPECIAL.sep]] * 500)
    chosen = uniform(batch, 0.5, randomness(500))
    hidden = hide(batch.input_ids, chosen, shares, (SPECIAL.mask, 1000), randomness(500))[chosen]
    total = len(hidden)
    masked, kept = (int((hidden == token).sum()) / total for token in (SPECIAL.mask, 7))
    assert masked == pytest.approx(shares[0], abs=0.015)
    assert kept == pytest.approx(1 - sum(shares), abs=0.015)
    random_ids = hidden[(hidden != SPECIAL.mask) & (hidden != 7)]
    if shares[1]:
        observed = torch.histc(random_ids.float(), 10, 0, 1000).numpy()
        assert stats.chisquare(observed).pvalue > 1e-4
    else:
        assert len(random_ids) == 0


@pytest.mark.parametrize("shares", [(0.85, 0.0), (0.8, 0.1)])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_position_is_hidden_if_any_of_its_draws_says_so(shares: tuple[float, float], times: int) -> None:
    batch = make_batch([[SPECIAL.cls, *[7] * 60, SPECIAL.sep]] * 500)
    chosen = ~batch.special_tokens_mask
    draws = chosen.long() * times
    hidden = hide(batch.input_ids, chosen, shares, (SPECIAL.mask, 10**6), randomness(500), draws)
    assert torch.equal(hidden[~chosen], batch.input_ids[~chosen])
    masked, kept = (float((hidden[chosen] == token).float().mean()) for token in (SPECIAL.mask, 7))
    assert masked == pytest.approx(1 - (1 - shares[0]) ** times, abs=0.01)
    assert kept == pytest.approx((1 - sum(shares)) ** times, abs=0.01)
