"""Energies and odds: the network's own numbers, negated, of the words alone."""

from __future__ import annotations

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
