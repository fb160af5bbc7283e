"""Spans: their lengths, their number of tokens, whole words."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from discern.corruption.masking import MaskingContext, quota, span, span_lengths, words_of
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch


def rows(count: int, length: int) -> TokenBatch:
    return make_batch([[SPECIAL.cls, *[9] * length, SPECIAL.sep]] * count)


def runs(chosen: torch.Tensor) -> list[int]:
    """Lengths of the runs of neighboring chosen positions."""
    edges = torch.diff(torch.nn.functional.pad(chosen.long(), (1, 1)), dim=1)
    return ((edges == -1).nonzero()[:, 1] - (edges == 1).nonzero()[:, 1]).tolist()


@pytest.mark.parametrize(("stop", "longest"), [(0.2, 10), (0.5, 3), (0.9, 1)])
def test_lengths_are_geometric_up_to_the_longest(stop: float, longest: int) -> None:
    count = 20_000
    uniforms = ((torch.arange(count) + 0.5) / count)[None]
    observed = torch.bincount(span_lengths(uniforms, stop, longest)[0], minlength=longest + 1)
    weights = torch.tensor([0.0] + [(1 - stop) ** (n - 1) for n in range(1, longest + 1)], dtype=torch.float64)
    # The uniform numbers are a grid, so that each length is met to within one.
    assert (observed - count * weights / weights.sum()).abs().max() <= 1.5


def test_the_mean_length_is_that_of_spanbert() -> None:
    uniforms = ((torch.arange(100_000) + 0.5) / 100_000)[None]
    assert float(span_lengths(uniforms, 0.2, 10).double().mean()) == pytest.approx(3.8, abs=0.01)
    assert span_lengths(torch.tensor([[0.0, 1 - 2**-24]]), 0.2, 10).tolist() == [[1, 10]]


def test_runs_are_as_long_as_spans() -> None:
    """A row so long, and a share so small, that few spans touch or are cut: run lengths follow the drawn ones nearly."""
    batch = rows(200, 1000)
    found = runs(span(batch, MaskingContext(0.05, Randomness(0, 0, batch.slot))).positions)
    weights = torch.tensor([0.8 ** (n - 1) for n in range(1, 11)], dtype=torch.float64)
    shares = weights / weights.sum()
    observed = torch.bincount(torch.tensor(found), minlength=11).double()[1:11] / len(found)
    # Spans that touch (one in twenty), the last span of each row (one in thirteen) and the ring's seam move each a little.
    assert (observed - shares).abs().max() < 0.03
    mean = sum(found) / len(found)
    assert 3.6 < mean < 4.1
    assert max(found) <= 30


def test_spans_of_one_word_are_even_draws() -> None:
    batch = rows(300, 6)
    context = MaskingContext(1 / 3, Randomness(0, 1, batch.slot), span_max_words=1)
    chosen = torch.cat(
        [span(batch, replace(context, randomness=Randomness(0, step, batch.slot))).positions for step in range(20)]
    )
    table = chosen[:, 1:-1].double().T @ chosen[:, 1:-1].double()
    assert stats.chisquare(table[torch.triu_indices(6, 6, 1).unbind()].numpy()).pvalue > 1e-4


def test_spans_are_of_whole_words() -> None:
    rng = torch.Generator().manual_seed(0)
    batch = rows(100, 80)
    batch = replace(batch, word_starts=torch.rand(batch.input_ids.shape, generator=rng) < 0.7)
    found = words_of(batch)
    chosen = span(batch, MaskingContext(0.25, Randomness(0, 0, batch.slot))).positions
    taken = torch.zeros_like(found.lengths).scatter_add_(1, found.number, chosen.long())
    assert ((taken == 0) | (taken == found.lengths)).all()
    missing = quota(found.maskable, 0.25) - chosen.sum(1)
    assert (missing >= 0).all()
    assert float((missing == 0).double().mean()) > 0.95
    words_in_runs = [len(set(found.number[at][chosen[at]].tolist())) for at in range(100)]
    assert sum(words_in_runs) / len(runs(chosen)) > 2.5  # words stand together: 14 of 56 drawn singly make runs of 1.3


def test_a_span_goes_on_behind_a_special_token() -> None:
    batch = make_batch([[SPECIAL.cls, *[9] * 5, SPECIAL.sep, *[9] * 5, SPECIAL.sep]] * 200)
    context = MaskingContext(0.3, Randomness(0, 0, batch.slot), span_stop_probability=0.01)
    positions = span(batch, context).positions[:, 1:-1]
    across = positions[:, 4] & positions[:, 6]
    assert across.any()
    assert not positions[:, 5].any()
    assert (positions.sum(1) == 3).all()
