"""Energies and odds: the network's own numbers, negated, of the words alone."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.scoring.small_scorers import SPECIAL, TEXTS, ids_of, make_objective, make_scorer


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
