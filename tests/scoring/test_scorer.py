"""What every scorer does with texts: batches, windows, texts without a token, texts of the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from discern.errors import ConfigError, NumericsError
from discern.objectives.base import Objective
from discern.scoring import PREFERRED, scorers
from discern.scoring.base import Method, ScoringModel
from discern.scoring.rows import batches
from tests.scoring.small_scorers import SPECIAL, TEXTS, ids_of, make_objective, make_scorer

EVERY = [
    ("electric", "electric"),
    ("electric", "two-tower"),
    ("rtd", "rtd"),
    ("rtd", "pll"),
    ("rtd", "pll-word-l2r"),
    ("rtd", "inversion"),
    ("mlm", "pll"),
    ("permutation-lm", "permutation-lm"),
]
LONG = "the chef cooked the meal and the guests ate purple elephants, " * 3


def objective_of(name: str) -> Objective:
    return make_objective(name, encoder="xlnet" if name == "permutation-lm" else "bert")


def test_every_registered_scorer_is_tried_here() -> None:
    assert {name for _, name in EVERY} == set(scorers.names())
    assert set(PREFERRED) <= set(scorers.names())


@pytest.mark.parametrize(("objective", "name"), EVERY)
def test_scores_do_not_depend_on_their_company(objective: str, name: str) -> None:
    scorer = make_scorer(objective_of(objective), name, max_length=20, chosen_share=0.15)
    texts = [*TEXTS, LONG, ""]
    together, reversed_ = scorer.score(texts), scorer.score(texts[::-1])[::-1]
    assert [score.text for score in together] == texts
    assert [score.tokens for score in together] == [score.tokens for score in reversed_]
    for text, score, other in zip(texts, together, reversed_, strict=True):
        (alone,) = scorer.score([text])
        assert score.token_scores == pytest.approx(alone.token_scores, abs=1e-5)
        assert score.token_scores == pytest.approx(other.token_scores, abs=1e-5)
        assert score.total == math.fsum(score.token_scores)


@pytest.mark.parametrize(("objective", "name"), EVERY)
def test_texts_of_the_same_tokens_have_the_very_same_score(objective: str, name: str) -> None:
    scorer = make_scorer(objective_of(objective), name, chosen_share=0.15)
    first, *_, last = scorer.score(["The chef ate.", *TEXTS, LONG, "the CHEF  ate."])
    assert first.total == last.total
    assert first.offsets != last.offsets


def test_a_text_without_a_token_scores_nothing() -> None:
    scorer = make_scorer(make_objective("electric"), "electric")
    assert scorer.score([]) == []
    for score in scorer.score(["", "  "]):
        assert (score.total, score.tokens, score.token_scores, score.windows) == (0.0, [], [], 0)


def test_each_token_of_a_long_text_counts_where_it_has_most_context() -> None:
    objective, room = make_objective("electric"), 10
    scorer = make_scorer(objective, "electric", max_length=room + 2)
    ids = ids_of(LONG)[: room + 1]
    text = scorer.tokenizer.decode(ids)
    assert ids_of(text) == ids
    (score,) = scorer.score([text])
    assert score.windows == 2
    network = objective.networks()["discriminator"]

    def read(part: list[int]) -> list[float]:
        return list((-network.token_logits(torch.tensor([[SPECIAL.cls, *part, SPECIAL.sep]])))[0, 1:-1].tolist())

    left, right = read(ids[:room]), read(ids[1:])
    # To the right of token 5 the first window has 4 tokens, to its left the second has 4: the first is taken.
    assert score.token_scores == pytest.approx(left[:6] + right[5:], abs=1e-5)
    assert scorer.score([scorer.tokenizer.decode(ids[:room])])[0].windows == 1


def test_a_score_that_is_not_finite_is_an_error() -> None:
    objective = make_objective("electric")
    objective.networks()["discriminator"].head.output.bias.fill_(math.nan)
    with pytest.raises(NumericsError, match=r"text 1 has a score that is not finite.*\n.*discern doctor"):
        make_scorer(objective, "electric").score(["a meal"])


def test_what_a_model_lacks_is_said() -> None:
    networks = make_objective("mlm").networks()
    missing = {name: scorers.load(name).lacks(ScoringModel(networks, SPECIAL)) for name in scorers.names()}
    assert {name for name, lack in missing.items() if lack is None} == {"pll", "pll-word-l2r"}
    assert missing["electric"] == "an energy model, as objective 'electric' trains"


def test_an_unknown_scorer_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'electric'"):
        scorers.load("electrc")
    assert all(issubclass(scorers.load(name), Method) for name in scorers.names())


@pytest.mark.parametrize("lengths", [[], [3], [500] * 20, list(range(3, 600, 7)), [3] * 1000, [9000, 3]])
def test_batches_hold_each_row_once_and_stay_small(lengths: list[int]) -> None:
    found = list(batches(lengths))
    assert sorted(number for batch in found for number in batch) == list(range(len(lengths)))
    for batch in found:
        widest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or (len(batch) * widest <= 4096 and len(batch) <= 256)
