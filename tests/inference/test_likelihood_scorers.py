"""Scorers by a softmax, against loops by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from discern.data.tokenizer import vocab_size
from discern.inference import scorers
from discern.inference.likelihood_scorers import PseudoLikelihood, TwoTowerLikelihood, generator_likelihood
from discern.inference.scoring import CorpusScore, Score, ScoredWindow, ScoringModel
from discern.models.base import Network
from discern.models.two_stream import Factorization
from discern.models.xlnet.encoder import XLNetEncoder
from tests.inference.small_scorers import SPECIAL, TEXTS, TOKENIZER, ids_of, make_objective, make_scorer
from tests.parity.small_xlnet import build_network, counterpart, sizes


def by_hand(network: Network, text: str, last: Callable[[list[str], int], int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token, masked together with what follows it up to `last(tokens, place)`."""
    ids, found = ids_of(text), []
    tokens = [TOKENIZER.id_to_token(token) for token in ids]
    for place, token in enumerate(ids):
        masked = [*ids]
        masked[place : last(tokens, place) + 1] = [SPECIAL.mask] * (last(tokens, place) + 1 - place)
        hidden = network.encoder(torch.tensor([[SPECIAL.cls, *masked, SPECIAL.sep]]))
        logits = network.head(hidden)[0, place + 1] / temperature
        found.append(float(logits.log_softmax(0)[token]))
    return found


def end_of_word(tokens: list[str], place: int) -> int:
    while place + 1 < len(tokens) and tokens[place + 1].startswith("##"):
        place += 1
    return place


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("objective", "network"), [("mlm", "encoder"), ("rtd", "generator")])
def test_each_token_is_masked_in_turn(objective: str, network: str, text: str) -> None:
    built = make_objective(objective)
    (score,) = make_scorer(built, "pll").score([text])
    assert score.token_scores == pytest.approx(by_hand(built.networks()[network], text, lambda _, place: place), abs=1e-4)


@pytest.mark.parametrize("text", TEXTS)
def test_within_a_word_what_follows_is_masked_too(text: str) -> None:
    built = make_objective("mlm")
    (score,) = make_scorer(built, "pll-word-l2r").score([text])
    assert score.token_scores == pytest.approx(by_hand(built.networks()["encoder"], text, end_of_word), abs=1e-4)


def test_the_two_differ_where_a_word_has_several_tokens() -> None:
    built = make_objective("mlm")
    text = next(text for text in TEXTS if any(token.startswith("##") for token in TOKENIZER.encode(text).tokens))
    (one,), (other,) = make_scorer(built, "pll").score([text]), make_scorer(built, "pll-word-l2r").score([text])
    for place, token in enumerate(one.tokens):
        is_last = end_of_word(one.tokens, place) == place
        assert (one.token_scores[place] == pytest.approx(other.token_scores[place], abs=1e-4)) == is_last, token


def test_a_network_that_knows_nothing_gives_each_token_one_in_the_vocabulary() -> None:
    built = make_objective("mlm")
    for parameter in built.networks()["encoder"].head.parameters():
        parameter.zero_()
    for name in ("pll", "pll-word-l2r"):
        for score in make_scorer(built, name).score(TEXTS):
            assert score.total == pytest.approx(-len(score.tokens) * math.log(vocab_size(TOKENIZER)), rel=1e-6)


@pytest.mark.parametrize("text", TEXTS)
def test_two_towers_tell_every_token_in_one_pass(text: str) -> None:
    built = make_objective("electric")
    (score,) = make_scorer(built, "two-tower").score([text])
    ids = ids_of(text)
    logits = built.networks()["generator"].token_logits(torch.tensor([[SPECIAL.cls, *ids, SPECIAL.sep]]))[0, 1:-1]
    expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    assert score.token_scores == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_generator_of_a_model_is_found_and_asked_at_its_temperature() -> None:
    built = make_objective("rtd", temperature=2.0)
    model = ScoringModel(built.networks(), SPECIAL, 0.15, sampling=built.config.sampling_at(0))
    method = generator_likelihood(model)
    assert isinstance(method, PseudoLikelihood)
    (expected,) = make_scorer(built, "pll").score(["purple elephants"])
    hot = by_hand(built.networks()["generator"], "purple elephants", lambda _, place: place, 2.0)
    ids = tuple(ids_of("purple elephants"))
    piece = ScoredWindow(ids, (True,) * len(ids), tuple(range(len(ids))))
    assert method.token_scores([piece])[0] == pytest.approx(hot, abs=1e-4)
    assert hot != pytest.approx(expected.token_scores, abs=1e-2)
    towers = make_objective("rtd", generator="two-tower").networks()
    assert isinstance(generator_likelihood(ScoringModel(towers, SPECIAL)), TwoTowerLikelihood)
    assert generator_likelihood(ScoringModel({"discriminator": towers["discriminator"]}, SPECIAL)) is None


def test_the_pseudo_perplexity_by_hand() -> None:
    """Three texts of 2, 1 and 0 tokens with probabilities 1/2, 1/8 and 1/4: exp of the mean over tokens, not over texts."""
    together = CorpusScore()
    scores = [[math.log(1 / 2), math.log(1 / 8)], [math.log(1 / 4)], []]
    texts = ["Ab c", "é\u0301"]  # 4 characters with the space, and 2: the accent on an accent is one of its own
    together.add([Score(text, sum(each), ["x"] * len(each), [], each, 1) for text, each in zip(texts, scores, strict=False)])
    together.add([Score("", 0.0, [], [], scores[2], 0)])
    assert (together.perplexity, together.tokens) == (pytest.approx(64 ** (1 / 3)), 3)
    assert together.per_token == pytest.approx(-math.log(64) / 3)
    assert (together.per_character, together.characters) == (pytest.approx(-math.log(64) / 6), 6)
    assert (CorpusScore().perplexity, CorpusScore().per_token, CorpusScore().per_character) == (1.0, 0.0, 0.0)
    together.add([Score("", -1e6, ["x"], [], [-1e6], 1)])
    assert together.perplexity == math.inf


def test_the_length_is_that_of_the_text_as_given() -> None:
    """Lower-casing and stripping accents change the tokens, not the number of characters."""
    text = " ÉCLAIRS eat\u00a0İ "
    (score,) = make_scorer(make_objective("mlm"), "pll").score([text])
    assert score.num_characters == 15
    assert score.per_character == pytest.approx(score.total / 15)
    assert score.per_token == pytest.approx(sum(score.token_scores) / len(score.tokens))


def test_only_masking_one_token_at_a_time_gives_a_pseudo_perplexity() -> None:
    named = {name: scorers.load(name).perplexity_name for name in scorers.names()}
    assert {name: value for name, value in named.items() if value} == {
        "pll": "pseudo_perplexity",
        "permutation-lm": "perplexity",
    }


def piece_of(ids: list[int]) -> ScoredWindow:
    return ScoredWindow(tuple(ids), (True,) * len(ids), tuple(range(len(ids))))


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
