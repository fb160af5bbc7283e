"""Dropout: how much is dropped, that the mean stays, and what it depends on."""

from __future__ import annotations

import pytest
import torch

from discern.models.layers import Dropout, keep_mask

MANY = 4_000_000


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9, 0.001])
def test_probability_and_mean(probability: float) -> None:
    mask = keep_mask(torch.Size([MANY]), probability, torch.float32)
    dropped = float((mask == 0).float().mean())
    # Three standard deviations of a fraction of 4 million draws are at most 0.00075 at 1/2, and 0.00045 at 0.1.
    assert dropped == pytest.approx(probability, abs=0.0005 if probability != 0.5 else 0.001)
    kept = mask[mask > 0]
    assert torch.equal(kept, kept[:1].expand_as(kept))
    assert float(kept[0]) == pytest.approx(1 / (1 - probability), rel=2e-3)
    assert float(mask.double().mean()) == pytest.approx(1, abs=0.0005 / (1 - probability) * 3)


def test_the_smallest_probability_is_exact() -> None:
    """1/65536: of 8.4 million elements 128 are expected, with a deviation of 11; an off-by-one would drop none or 256."""
    dropped = int((keep_mask(torch.Size([2**23]), 1 / 65536, torch.float32) == 0).sum())
    assert abs(dropped - 128) < 60


def test_the_expectation_of_the_mask_is_exactly_one() -> None:
    """What is kept is scaled by the chance as it is, a multiple of 1/65536, not as it was asked for."""
    for probability in (0.1, 0.3, 1e-4):
        chance = 1 - round(probability * 65536) / 65536
        mask = keep_mask(torch.Size([1000]), probability, torch.float64)
        assert float(mask.max()) * chance == pytest.approx(1, abs=1e-12)


def test_elements_are_dropped_independently() -> None:
    """Four elements share a 64-bit draw, and neighbors share rows; neither may correlate."""
    centered = keep_mask(torch.Size([MANY]), 0.5, torch.float32) - 1
    for distance in (1, 2, 3, 4, 768):
        correlation = float((centered[:-distance] * centered[distance:]).mean())
        assert abs(correlation) < 0.002, distance


def test_the_seed_decides() -> None:
    layer = Dropout(0.3).train()
    torch.manual_seed(1)
    first = layer(torch.ones(1000))
    torch.manual_seed(1)
    again = layer(torch.ones(1000))
    assert torch.equal(first, again)
    assert not torch.equal(first, layer(torch.ones(1000)))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 5), (3, 1, 7), (0,)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    output = Dropout(0.5).train()(torch.ones(shape))
    assert output.shape == shape
    assert set(output.flatten().tolist()) <= {0.0, 2.0}


def test_the_gradient_passes_where_the_value_did() -> None:
    values = torch.ones(1000, requires_grad=True)
    output = Dropout(0.3).train()(values)
    output.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, output.detach())


def test_bfloat16_stays_bfloat16() -> None:
    assert Dropout(0.1).train()(torch.ones(10, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("layer", [Dropout(0.5).eval(), Dropout(0.0).train()])
def test_nothing_is_dropped_in_evaluation_or_at_zero(layer: Dropout) -> None:
    state = torch.get_rng_state()
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert layer(values) is values
    assert torch.equal(torch.get_rng_state(), state), "it drew random numbers for nothing"
