"""The inversion formula, against a game of replacement that is played out in full."""

from __future__ import annotations

import math

import pytest
import torch

from discern.corruption.sampling import Sampling
from discern.scoring import scorers
from discern.scoring.base import ScoringModel
from discern.scoring.inversion import inverted
from tests.scoring.small_scorers import SPECIAL, TEXTS, make_objective, make_scorer


@pytest.mark.parametrize("share", [0.01, 0.15, 0.25, 0.9])
def test_the_best_discriminator_gives_the_probabilities_of_the_text(share: float) -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)  # of a word in the text
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)  # of a word by the generator
    original, replaced = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for true in range(4):
        original[true] += p[true] * (1 - share)  # not chosen
        for drawn in range(4):
            (original if drawn == true else replaced)[drawn] += p[true] * share * q[drawn]
    log_odds = (original / replaced).log()
    torch.testing.assert_close(inverted(log_odds, q.log(), share).exp(), p)


def test_extreme_odds_stay_finite_and_never_exceed_certainty() -> None:
    log_odds = torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0], dtype=torch.float64)
    found = inverted(log_odds, torch.full((5,), -30.0, dtype=torch.float64), 0.15)
    assert bool(found.isfinite().all())
    assert bool((found.diff() > 0).all())
    assert bool((found <= torch.nn.functional.logsigmoid(log_odds) + 1e-12).all())
    # Where the discriminator says no more than the odds of a fair choice at p = q, the two are equal: D = (1 - a + a q) / 1.
    q = 0.2
    fair = 1 - 0.15 + 0.15 * q
    log_fair = torch.tensor([math.log(fair) - math.log1p(-fair)], dtype=torch.float64)
    torch.testing.assert_close(inverted(log_fair, torch.tensor([q]).double().log(), 0.15).exp(), torch.tensor([q]).double())


@pytest.mark.parametrize("generator", ["mlm", "two-tower"])
def test_the_scorer_combines_odds_and_generator(generator: str) -> None:
    built = make_objective("rtd", generator=generator)
    odds = make_scorer(built, "rtd").score(TEXTS)
    likelihoods = make_scorer(built, "pll" if generator == "mlm" else "two-tower").score(TEXTS)
    for score, odd, likelihood in zip(
        make_scorer(built, "inversion", chosen_share=0.25).score(TEXTS), odds, likelihoods, strict=True
    ):
        for found, log_odds, log_q in zip(score.token_scores, odd.token_scores, likelihood.token_scores, strict=True):
            d, q = 1 / (1 + math.exp(-log_odds)), math.exp(log_q)
            assert math.exp(found) == pytest.approx(0.25 * d * q / (0.25 * q + 0.75 * (1 - d)), rel=1e-4)


def test_what_the_formula_does_not_hold_for_is_refused() -> None:
    networks, method = make_objective("rtd").networks(), scorers.load("inversion")
    assert method.lacks(ScoringModel(networks, SPECIAL, 0.15)) is None
    assert "trained on every token" in method.lacks(ScoringModel(networks, SPECIAL))
    for cut in (Sampling(top_p=0.9), Sampling(disallow_original=True)):
        assert "top_p and disallow_original" in method.lacks(ScoringModel(networks, SPECIAL, 0.15, sampling=cut))
    assert "chosen uniformly" in method.lacks(ScoringModel(networks, SPECIAL, None, chosen_evenly=False))
    judge = {"discriminator": networks["discriminator"]}
    assert "a generator with weights" in method.lacks(ScoringModel(judge, SPECIAL, 0.15))
