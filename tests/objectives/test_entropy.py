"""Masking by the entropy of the predictions, and temperatures that change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from discern.corruption.masking import MaskingContext, entropy
from discern.corruption.randomness import Randomness
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.objectives.losses import TokenEntropies, entropies_of, entropy_sums
from tests.support import make_batch, settings


def build(name: str, **options: Any) -> Objective:
    factory = objectives.load(name)
    objective: Objective = factory(factory.Config(**options), settings(hidden_dropout=0.0, attention_dropout=0.0))
    objective.initialize(0)
    return objective


def test_entropies_by_hand() -> None:
    # Token 2 is predicted twice, once evenly over four tokens and once with certainty; token 0 once, evenly over two of them.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [99.0, 0.0, 0.0, 0.0], [5.0, 5.0, -99.0, -99.0]])
    sums = entropy_sums(entropies_of(logits), torch.tensor([2, 2, 0]), 4)
    assert sums[0].tolist() == pytest.approx([math.log(2), 0.0, math.log(4), 0.0])
    assert sums[1].tolist() == [1, 0, 2, 0]
    table = TokenEntropies(4)
    assert table.at(0) is None
    table.update(0, sums)
    assert table.at(1) is None, "the masks of step 1 are drawn while step 0 is computed"
    kept = 0.99**2
    expected = [
        0.99 * math.log(4) + 0.01 * math.log(2),
        math.log(4),
        kept * math.log(4) + (1 - kept) * math.log(4) / 2,
        math.log(4),
    ]
    first = table.at(2)
    assert first is not None
    assert first.tolist() == pytest.approx(expected)
    table.update(1, sums)
    assert table.at(2) is first
    second = table.at(3)
    assert second is not None
    assert second[0].item() == pytest.approx(0.99 * expected[0] + 0.01 * math.log(2))


def test_the_values_of_two_steps_are_saved() -> None:
    table, again = TokenEntropies(4), TokenEntropies(4)
    for step in range(5):
        table.update(step, torch.rand(2, 4))
    assert list(table.state()) == ["token_entropies.5", "token_entropies.6"]
    again.load(table.state())
    for entropies in (table, again):
        entropies.update(5, torch.ones(2, 4))
    assert all(torch.equal(table.state()[key], again.state()[key]) for key in ("token_entropies.6", "token_entropies.7"))


def test_uncertain_tokens_are_chosen_in_proportion_to_their_entropy() -> None:
    # One of two tokens is chosen; with weights 3^a and 1 the first is, in 3^a / (3^a + 1) of the rows.
    batch = make_batch([[2, 5, 6, 3]] * 4000)
    entropies = torch.ones(50)
    entropies[5] = 3.0

    def share(exponent: float, known: torch.Tensor | None) -> float:
        numbers = Randomness(0, 0, batch.slot)
        chosen = entropy(batch, MaskingContext(0.5, numbers, token_entropies=known, entropy_exponent=exponent)).positions
        assert (chosen.sum(1) == 1).all()
        assert not (chosen & batch.special_tokens_mask).any()
        return float(chosen[:, 1].float().mean())

    assert share(1.0, entropies) == pytest.approx(0.75, abs=0.02)
    assert share(2.0, entropies) == pytest.approx(0.9, abs=0.02)
    assert share(1.0, None) == share(0.0, entropies) == pytest.approx(0.5, abs=0.02)
    assert share(1.0, torch.zeros(50)) == share(1.0, None), "no token has weight 0"


def test_the_masks_follow_the_entropies_of_two_steps_before() -> None:
    objective = build("rtd", masking="entropy", entropy_exponent=4.0)
    batch = make_batch([[2, *range(5, 25), 3]] * 200)
    sums = torch.zeros(2, 50, dtype=torch.float64)
    sums[1] = 1e6
    sums[0, 7] = 1e6
    objective.update_state(0, {"entropies": sums})
    chosen = {step: objective.corrupt(batch, Randomness(0, step, batch.slot)).masked_positions[:, 3] for step in (0, 1, 2)}
    assert chosen[2].all(), "only token 7 is uncertain"
    assert chosen[0].float().mean() < 0.3, "as held-out rows"
    assert chosen[1].float().mean() < 0.3


@pytest.mark.parametrize("name", ["rtd", "replace-mlm"])
def test_the_temperature_changes_with_the_step(name: str) -> None:
    config = objectives.load(name).Config(temperature=2.0, temperature_end=0.5, temperature_steps=10)
    assert [config.value_at("temperature", step) for step in (0, 5, 10, 50)] == [2.0, 1.25, 0.5, 0.5]
    assert config.continued_at(5)["temperature"] == 1.25
    batch = make_batch([[2, *range(5, 45), 3]] * 8)
    falling, cold, hot = (
        build(name, **options)
        for options in (
            {"temperature": 1e4, "temperature_end": 1e-4, "temperature_steps": 10},
            {"temperature": 1e-4},
            {"temperature": 1e4},
        )
    )

    def sampled(objective: Objective, step: int) -> torch.Tensor:
        numbers = Randomness(0, step, batch.slot)
        return objective(objective.corrupt(batch, numbers), numbers).observations["sampled_ids"]  # type: ignore[no-any-return]

    assert torch.equal(sampled(falling, 0), sampled(hot, 0))
    assert torch.equal(sampled(falling, 10), sampled(cold, 10))
    assert not torch.equal(sampled(falling, 10), sampled(hot, 10))
