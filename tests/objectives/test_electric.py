"""Electric: the loss by hand, q at every position, and a joint distribution that can be enumerated."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.objectives.electric import Electric, ElectricConfig, log_probability, noise_odds
from discern.objectives.losses import noise_contrastive_loss
from discern.types import StepOutput, TokenBatch
from tests.objectives import electric_optimum as optimum
from tests.support import SPECIAL, make_batch, settings

FIRST, WORDS, PLACES = 5, 5, 3
EVERY = torch.tensor(list(product(range(WORDS), repeat=PLACES)))  # (125, 3)


def electric(**changes: object) -> Electric:
    model = settings(FIRST + WORDS, hidden_dropout=0.0, attention_dropout=0.0, **changes)
    objective = Electric(ElectricConfig(generator_size=1.0), model)
    objective.initialize(0)
    return objective


def sentences(words: Tensor) -> TokenBatch:
    return make_batch([[SPECIAL.cls, *row, SPECIAL.sep] for row in (words + FIRST).tolist()])


def run(objective: Electric, tokens: TokenBatch, step: int = 0) -> StepOutput:
    numbers = Randomness(0, step, tokens.slot)
    output: StepOutput = objective(objective.corrupt(tokens, numbers), numbers)
    return output


def test_the_loss_by_hand() -> None:
    """Four tokens, one of them noise: the odds are 1 to 3. What is not judged counts nowhere."""
    energy = torch.tensor([[0.5, 2.0, -1.0, 0.0, 99.0]])
    q = torch.tensor([[0.2, 0.1, 0.5, 0.25, 1.0]])
    judged = torch.tensor([[True, True, True, True, False]])
    noise = torch.tensor([[False, True, False, False, False]])
    term = noise_contrastive_loss(energy, q.log(), torch.tensor([[math.log(1 / 3)]]), noise, judged, count=4, weight=50.0)

    def noise_probability(at: int) -> float:
        from_noise, from_text = 1 * float(q[0, at]), 3 * math.exp(-float(energy[0, at]))
        return from_noise / (from_noise + from_text)

    expected = -math.log(noise_probability(1)) - sum(math.log(1 - noise_probability(at)) for at in (0, 2, 3))
    assert term.total.item() == pytest.approx(expected, rel=1e-6)
    assert (term.count, term.weight) == (4, 50.0)


@pytest.mark.parametrize(
    ("noise_tokens", "exact", "clean", "nats"),
    [
        (1, True, False, 0.0),  # the only one where the energies are the probabilities
        (1, True, True, 0.119),  # the released code's q
        (2, True, False, 0.292),
        (2, False, False, 0.414),
    ],
)
def test_energies_are_exact_for_an_exact_q_and_one_noise_token_only(
    noise_tokens: int, exact: bool, clean: bool, nats: float
) -> None:
    """The figures of docs/concepts/electric.md, by enumerating what can happen to the texts of a known distribution."""
    joint = optimum.chain(PLACES, WORDS)
    q = optimum.conditionals(joint) if exact else optimum.frequencies(joint)
    assert optimum.gap(joint, q, noise_tokens, clean=clean) == pytest.approx(nats, abs=6e-4)


def test_odds_are_those_of_each_row_and_rows_of_noise_alone_cost_nothing() -> None:
    is_noise = torch.tensor([[True, True, False, False, False], [False, True, False, False, False]])
    is_word = torch.tensor([[True, True, True, True, True], [True, True, False, False, False]])
    assert noise_odds(is_noise, is_word).flatten().tolist() == pytest.approx([math.log(2 / 3), 0.0])
    energy = torch.tensor([[1.0, 2.0], [1.0, 2.0]], requires_grad=True)
    noise = torch.tensor([[True, False], [False, False]])
    odds = noise_odds(noise, torch.tensor([[True, False], [False, False]]))
    assert odds[0].item() == math.inf
    term = noise_contrastive_loss(energy, torch.zeros(2, 2), odds, noise, torch.ones(2, 2, dtype=torch.bool), count=1)
    term.total.backward()
    assert term.total.item() == 0
    assert energy.grad is not None
    assert not energy.grad.any()


def test_a_lucky_sample_is_noise_all_the_same() -> None:
    """One word in the vocabulary of the data: q soon draws nothing else, and what it draws equals what stood there."""
    objective = electric()
    with torch.no_grad():
        objective.generator_head.bias[FIRST] = 50.0
    tokens = sentences(torch.zeros(4, PLACES, dtype=torch.long))
    output = run(objective, tokens)
    seen = output.observations
    assert torch.equal(seen["corrupted_ids"], tokens.input_ids)
    assert seen["is_noise"].sum(1).tolist() == [1, 1, 1, 1]
    evaluator = objective.evaluator()
    numbers = Randomness(0, 0, tokens.slot)
    evaluator.update(output, objective.corrupt(tokens, numbers))
    figures = evaluator.compute()
    assert figures["replaced_fraction"] == 0
    assert figures["sampled_accuracy"] == 1
    assert figures["noise_fraction"] == pytest.approx(1 / 3)


def test_figures_by_hand() -> None:
    objective, tokens = electric().eval(), sentences(EVERY[:40])
    numbers = Randomness(0, 0, tokens.slot)
    corrupted = objective.corrupt(tokens, numbers)
    with torch.no_grad():
        output = objective(corrupted, numbers)
    evaluator = objective.evaluator()
    evaluator.update(output, corrupted)
    figures, seen, words = evaluator.compute(), output.observations, tokens.maskable
    noise = corrupted.masked_positions
    logits = seen["energy"] + seen["log_noise_probability"] + math.log(1 / 2)
    right = ((logits > 0) == noise)[words]
    assert figures["discriminator_accuracy"] == pytest.approx(right.float().mean().item())
    assert figures["discriminator_auc"] == pytest.approx(roc_auc_score(noise[words], logits[words]))
    assert figures["energy"] == pytest.approx(seen["energy"][words & ~noise].mean().item())
    changed = (seen["corrupted_ids"] != tokens.input_ids).sum().item()
    assert figures["replaced_fraction"] == pytest.approx(changed / 120)
    assert figures["sampled_accuracy"] == pytest.approx(1 - changed / 40)
    terms = output.terms
    assert figures["loss"] == pytest.approx((terms["generator"].total + 50 * terms["discriminator"].total).item() / 120)


def noise_distribution(objective: Electric, words: Tensor) -> Tensor:
    """q over the whole vocabulary at each of the three places, (N, 3, V)."""
    tokens = sentences(words)
    with torch.no_grad():
        logits = objective.networks()["generator"].token_logits(tokens.input_ids, tokens.visible_mask)
    return logits[:, 1:-1].softmax(-1)


def test_q_is_exact_at_every_position() -> None:
    """It sums to one, does not depend on the token at its own place, and is what the loss and the samples are made with."""
    objective = electric(initializer_range=0.5).eval()
    q = noise_distribution(objective, EVERY)
    torch.testing.assert_close(q.sum(-1), torch.ones(125, PLACES))
    for place in range(PLACES):
        # (5, 5, 5, V) with the axis of the place's own word first: all along it must be the same.
        same = q[:, place].reshape(WORDS, WORDS, WORDS, -1).movedim(place, 0)
        assert torch.equal(same, same[:1].expand_as(same))
        others = same[0].reshape(WORDS * WORDS, -1)
        assert len(others.unique(dim=0)) == WORDS * WORDS
    seen = run(objective, sentences(EVERY)).observations
    noised = seen["corrupted_ids"][:, 1:-1]
    keep = ((noised >= FIRST) & (noised < FIRST + WORDS)).all(1)
    expected = noise_distribution(objective, noised[keep] - FIRST).gather(2, noised[keep][..., None]).squeeze(2)
    torch.testing.assert_close(seen["log_noise_probability"][keep, 1:-1], expected.log(), atol=1e-5, rtol=1e-5)
    assert not seen["log_noise_probability"][:, [0, -1]].any()


def test_both_passes_of_q_drop_the_same() -> None:
    objective = Electric(ElectricConfig(), settings(FIRST + WORDS, hidden_dropout=0.4, attention_dropout=0.4)).train()
    objective.initialize(1)
    tokens = sentences(EVERY)
    randomness = Randomness(0, 0, tokens.slot)
    batch = objective.corrupt(tokens, randomness)
    # Without noise the second pass reads what the first has read.
    clean = replace(batch, masked_positions=torch.zeros_like(batch.masked_positions))
    found = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        seen = objective(clean, randomness).observations
        expected = log_probability(seen["generator_logits"], seen["generator_targets"])
        assert torch.allclose(seen["log_noise_probability"][tokens.maskable], expected, atol=1e-6)
        found.append(expected)
    assert not torch.allclose(*found, atol=1e-3), "dropout is at work"
