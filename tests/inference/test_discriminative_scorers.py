"""Scorers by a discriminator or an energy model, against formulas by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from discern.corruption.masking import Sampling
from discern.inference import scorers
from discern.inference.discriminative_scorers import inverted
from discern.inference.scoring import ScoringModel
from tests.inference.small_scorers import SPECIAL, TEXTS, ids_of, make_objective, make_scorer


@pytest.mark.parametrize(("objective", "name"), [("electric", "electric"), ("rtd", "rtd")])
@pytest.mark.parametrize("text", TEXTS)
def test_scores_are_the_numbers_of_the_head_negated(objective: str, name: str, text: str) -> None:
    built = make_objective(objective)
    (score,) = make_scorer(built, name).score([text])
    network = built.networks()["discriminator"]
    numbers = network.head(network.encoder(torch.tensor([[SPECIAL.cls, *ids_of(text), SPECIAL.sep]])))[0]
    assert score.token_scores == pytest.approx((-numbers[1:-1]).tolist(), abs=1e-5)
    assert score.total == pytest.approx(-float(numbers[1:-1].sum()), abs=1e-4)


def test_special_tokens_and_padding_have_no_energy() -> None:
    built = make_objective("electric")
    output = built.networks()["discriminator"].head.output
    output.weight.zero_()
    output.bias.fill_(2.5)  # the energy of whatever is read
    for score in make_scorer(built, "electric").score(TEXTS):
        assert score.total == -2.5 * len(score.tokens)


def test_a_bilinear_term_is_part_of_the_energy() -> None:
    built = make_objective("electric", discriminator_head="bilinear")
    network = built.networks()["discriminator"]
    (score,) = make_scorer(built, "electric").score(["purple elephants"])
    row = torch.tensor([[SPECIAL.cls, *ids_of("purple elephants"), SPECIAL.sep]])
    assert score.token_scores == pytest.approx((-network.token_logits(row))[0, 1:-1].tolist(), abs=1e-5)
    assert network.bilinear is not None
    network.bilinear.context.weight.zero_()
    (without,) = make_scorer(built, "electric").score(["purple elephants"])
    assert without.total != pytest.approx(score.total, abs=1e-3)


@pytest.mark.parametrize("share", [Fraction(1, 100), Fraction(15, 100), Fraction(9, 10), Fraction(1)])
def test_the_best_odds_by_playing_the_game_out(share: Fraction) -> None:
    """The formula of the documentation; a share of 1 is 'rtd-masked-only', which judges the chosen tokens alone."""
    p = [Fraction(n, 20) for n in (10, 6, 3, 1)]  # of a word in the text
    q = [Fraction(n, 10) for n in (1, 2, 3, 4)]  # of a word by the generator
    original, replaced = [Fraction()] * 4, [Fraction()] * 4
    for true in range(4):
        original[true] += p[true] * (1 - share)
        for drawn in range(4):
            (original if drawn == true else replaced)[drawn] += p[true] * share * q[drawn]
    for word in range(4):
        # The exponential of log p - log q - log(1 - p) + log((1 - a + a q) / a).
        formula = p[word] / q[word] / (1 - p[word]) * (1 - share + share * q[word]) / share
        assert original[word] / replaced[word] == formula
        if share == 1:
            assert formula == p[word] / (1 - p[word])
        else:  # it is not p / q up to a constant, and not constant where q is p
            assert formula != p[word] / q[word] * (1 - share) / share


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
    assert "uniformly chosen" in method.lacks(ScoringModel(networks, SPECIAL, None, chosen_evenly=False))
    judge = {"discriminator": networks["discriminator"]}
    assert "a generator with weights" in method.lacks(ScoringModel(judge, SPECIAL, 0.15))
