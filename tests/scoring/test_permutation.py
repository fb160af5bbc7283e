"""The likelihood from left to right against prefixes alone, against transformers, and as a distribution."""

from __future__ import annotations

import math

import pytest
import torch

from discern.data.tokenizer import vocab_size
from discern.model.two_stream import Factorization
from discern.model.xlnet import XLNetEncoder
from discern.scoring import scorers
from discern.scoring.base import Piece, ScoringModel
from tests.parity.small_xlnet import build_network, counterpart, sizes
from tests.scoring.small_scorers import SPECIAL, TEXTS, TOKENIZER, ids_of, make_objective, make_scorer


def piece_of(ids: list[int]) -> Piece:
    return Piece(tuple(ids), (True,) * len(ids), tuple(range(len(ids))))


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_is_told_from_those_before_it(text: str) -> None:
    """By hand: one prefix at a time, in which the last position alone is predicted."""
    built = make_objective("permutation-lm", encoder="xlnet")
    network, ids = built.networks()["encoder"], ids_of(text)
    assert isinstance(network.encoder, XLNetEncoder)
    expected = []
    for count in range(1, len(ids) + 1):
        visible = torch.ones(1, count, count, dtype=torch.bool).tril(-1)
        order = Factorization(visible, torch.tensor([[count - 1]]))
        state = network.encoder.two_streams(torch.tensor([ids[:count]]), order).query[0, 0]
        expected.append(float(network.head(state).log_softmax(0)[ids[count - 1]]))
    (score,) = make_scorer(built, "permutation-lm").score([text])
    assert score.token_scores == pytest.approx(expected, abs=1e-4)


def test_it_is_what_transformers_gives() -> None:
    """But for the first token: there transformers lets a query that may see nothing look at everything, its own token too."""
    network = build_network(sizes())
    ids = torch.randint(10, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    length = ids.shape[1]
    with torch.no_grad():
        hidden = torch.ones(1, length, length).triu()
        logits = counterpart(network)(ids, perm_mask=hidden, target_mapping=torch.eye(length)[None]).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(length), ids[0]]
    method = scorers.load("permutation-lm").of(ScoringModel({"encoder": network}, SPECIAL, is_permuted=True))
    assert method.token_scores([piece_of(ids[0].tolist())])[0][1:] == pytest.approx(expected.tolist()[1:], abs=1e-5)


def test_over_all_texts_of_a_length_it_sums_to_one() -> None:
    """Two tokens: the vocabulary squared is too many to be asked at once, so all seconds of some firsts, and all firsts."""
    built = make_objective("permutation-lm", encoder="xlnet")
    method = scorers.load("permutation-lm").of(ScoringModel(built.networks(), SPECIAL, is_permuted=True))
    entries = range(vocab_size(TOKENIZER))
    firsts = method.token_scores([piece_of([first]) for first in entries])
    assert math.fsum(math.exp(value) for (value,) in firsts) == pytest.approx(1, abs=1e-4)
    for first in (7, 30):
        pairs = method.token_scores([piece_of([first, second]) for second in entries])
        assert {round(pair[0], 4) for pair in pairs} == {round(firsts[first][0], 4)}
        assert math.fsum(math.exp(pair[1]) for pair in pairs) == pytest.approx(1, abs=1e-4)


def test_an_xlnet_is_used_as_it_was_trained() -> None:
    """As a masked language model its query stream has learned nothing."""
    permuted, masked = (make_objective(name, encoder="xlnet") for name in ("permutation-lm", "mlm"))
    for built, is_permuted, fitting in ((permuted, True, {"permutation-lm"}), (masked, False, {"pll", "pll-word-l2r"})):
        model = ScoringModel(built.networks(), SPECIAL, is_permuted=is_permuted)
        assert {name for name in scorers.names() if scorers.load(name).lacks(model) is None} == fitting
    (score,) = make_scorer(masked, "pll").score(["the meal"])
    ids = ids_of("the meal")
    # Framed as its rows are: [CLS] comes last, in a segment of its own.
    row = torch.tensor([[SPECIAL.mask, *ids[1:], SPECIAL.sep, SPECIAL.cls]])
    states = masked.networks()["encoder"].encoder(row, None, torch.tensor([[*[0] * (len(ids) + 1), 2]]))
    first = masked.networks()["encoder"].head(states)[0, 0].log_softmax(0)[ids[0]]
    assert score.token_scores[0] == pytest.approx(float(first), abs=1e-4)


def test_in_windows_each_token_is_told_from_as_much_as_fits_before_it() -> None:
    built = make_objective("permutation-lm", encoder="xlnet")
    text = "the chef cooked the meal and the guests ate purple elephants, " * 3
    (score,) = make_scorer(built, "permutation-lm", max_length=22).score([text])
    scorer, ids = make_scorer(built, "permutation-lm"), ids_of(text)
    assert score.windows > 1
    # The first window holds the first tokens with all that is before them.
    (whole,) = scorer.method.token_scores([piece_of(ids[:20])])
    assert score.token_scores[:20] == pytest.approx(whole, abs=1e-4)
