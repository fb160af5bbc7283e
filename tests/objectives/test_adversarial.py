"""The policy gradient, against sums over all that could have been sampled."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from discern.corruption.randomness import Randomness
from discern.objectives import rtd as generator_module
from discern.objectives.rtd import ReplacedTokenDetection
from discern.types import TokenBatch
from tests.objectives.rtd_options import build_option
from tests.objectives.test_conformance import batch, run
from tests.support import SPECIAL, make_batch

VOCABULARY = 9


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_p": 0.6, "disallow_original": True}])
def test_the_whole_objective_climbs_the_expected_loss_of_its_discriminator(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One position is chosen in a text, so the samples can be enumerated: each word of the vocabulary, by its probability.
    objective = build_option(
        {"algorithm": "adversarial", "tying": "none", "mask_probability": 0.1, **options},
        vocab_size=VOCABULARY,
        initializer_range=0.5,
    )
    with torch.no_grad():
        for parameter in objective.generator_baseline.parameters():
            parameter.fill_(0.3)
    tokens = make_batch([[SPECIAL.cls, 5, 8, 6, 7, SPECIAL.sep]])
    parameters = [*objective.generator.parameters(), objective.generator_head.bias]
    expected_reward, probabilities = _expected_reward(objective, tokens)
    expected = torch.autograd.grad(expected_reward, parameters)

    mean = [torch.zeros_like(parameter) for parameter in parameters]
    for token in range(VOCABULARY):
        monkeypatch.setattr(generator_module, "sample_replacements", lambda *arguments, token=token: torch.tensor([token]))
        if probabilities[token] == 0:
            continue
        gradients = torch.autograd.grad(run(objective, tokens).terms["adversarial"].total, parameters)
        for total, gradient in zip(mean, gradients, strict=True):
            total += probabilities[token] * gradient
    assert any(value.abs().max() > 1e-3 for value in expected)
    for total, value in zip(mean, expected, strict=True):
        torch.testing.assert_close(-total, value, rtol=1e-3, atol=1e-6)


def _expected_reward(objective: ReplacedTokenDetection, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """The discriminator's loss at the chosen position, in the mean over samples, and the probability of each."""
    corrupted = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
    positions = corrupted.masked_positions
    assert int(positions.sum()) == 1
    networks, original = objective.networks(), tokens.input_ids[positions]
    logits = networks["generator"].token_logits(corrupted.masked_ids, *tokens.context)[positions]
    probabilities = torch.softmax(objective.config.sampling_at(0).logits(logits, original), -1)[0]
    rewards = []
    for token in range(VOCABULARY):
        replaced = tokens.input_ids.masked_scatter(positions, torch.tensor([token]))
        judged = networks["discriminator"].token_logits(replaced, *tokens.context)[positions]
        truth = torch.tensor([float(token != original)])
        rewards.append(F.binary_cross_entropy_with_logits(judged, truth).detach())
    return (probabilities * torch.stack(rewards)).sum(), probabilities.detach()


def test_the_baseline_is_fitted_to_the_probability_of_the_right_answer() -> None:
    objective, tokens = build_option({"algorithm": "adversarial"}), batch(16)
    with torch.no_grad():
        objective.generator_baseline.weight.zero_()
    corrupted = objective.corrupt(tokens, Randomness(0, 0, tokens.slot))
    output, positions = run(objective, tokens), corrupted.masked_positions
    judged, truth = output.observations["discriminator_logits"][positions], output.observations["is_replaced"][positions]
    right = torch.where(truth, judged.sigmoid(), 1 - judged.sigmoid())
    # At a logit of 0 the cross-entropy with any target is ln 2, and its slope 1/2 - target.
    term = output.terms["baseline"]
    assert (term.total / term.count).item() == pytest.approx(math.log(2), rel=1e-6)
    (slope,) = torch.autograd.grad(term.total, objective.generator_baseline.weight)
    states = objective.generator(corrupted.masked_ids, *tokens.context)[positions]
    torch.testing.assert_close(slope, ((0.5 - right)[:, None] * states).sum(0, keepdim=True), rtol=1e-4, atol=1e-5)


def test_the_baseline_moves_nothing_but_itself_and_the_rewards_do_not_reach_the_discriminator() -> None:
    objective = build_option({"algorithm": "adversarial", "tying": "none"})
    output = run(objective, batch())
    output.terms["baseline"].total.backward(retain_graph=True)
    assert {name for name, p in objective.named_parameters() if p.grad is not None} == {"generator_baseline.weight"}
    objective.zero_grad()
    output.terms["adversarial"].total.backward()
    touched = {name.split(".")[0] for name, p in objective.named_parameters() if p.grad is not None}
    assert touched == {"generator", "generator_head"}
