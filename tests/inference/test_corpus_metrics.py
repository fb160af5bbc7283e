"""Re-ranking on lists that one can work out by hand: metrics, winners, weights and intervals."""

from __future__ import annotations

import random

import jiwer
import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from discern.errors import ConfigError
from discern.inference import corpus_metrics
from discern.inference.corpus_metrics import (
    METRICS,
    CorpusMetric,
    best_possible,
    bootstrap,
    corpus_metric,
    hypothesis_statistics,
    measure,
)
from discern.inference.nbest import Hypothesis, NBest
from discern.inference.rerank import LENGTH_GRID, UNCHANGED, Candidates, Weights, lambda_grid, score_lists, tune
from tests.inference.small_scorers import make_objective, make_scorer

WER, CER, BLEU_ = METRICS["wer"], METRICS["cer"], METRICS["bleu"]
WORDS = "the a cat dog sat ran on under mat tree".split()


def value(metric: CorpusMetric, *pairs: tuple[str, str]) -> float:
    """Of (reference, hypothesis) pairs."""
    return metric.value(np.array([metric.statistics(*pair) for pair in pairs], dtype=np.float64).sum(0))


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def test_error_rates_by_hand() -> None:
    assert value(WER, ("the cat sat", "the cat sad")) == pytest.approx(1 / 3)
    # One substitution of 3 words and two insertions at 1: 3 edits for 4 words, not the mean of the two rates.
    assert value(WER, ("the cat sat", "the cat sad"), ("x", "a x b")) == pytest.approx(3 / 4)
    assert value(CER, ("ab cd", "abcx")) == pytest.approx(1 / 4), "blanks are no characters"
    assert value(CER, ("今天天气", "今天天器")) == pytest.approx(1 / 4)


@pytest.mark.parametrize("blank", ["\t", "\u3000", "\u00a0", "\u2009", " \t ", "\n"])
def test_every_blank_parts_words(blank: str) -> None:
    expected, heard = f"the{blank}cat{blank}sat", f"the{blank}cat{blank}sad"
    for pair in ((expected, "the cat sad"), ("the cat sat", heard), (expected, heard)):
        assert value(WER, pair) == pytest.approx(1 / 3)
    assert value(WER, (expected, "the cat sat")) == 0
    assert WER.statistics(expected, blank) == (3, 3)


@pytest.mark.parametrize("metric", [WER, CER])
def test_empty_texts(metric: CorpusMetric) -> None:
    assert value(metric, ("a b", "")) == 1
    assert value(metric, ("", "")) == 0
    assert value(metric, ("", "a b"), ("a b", "a b")) == pytest.approx(1), "two are inserted where two are expected in all"
    assert value(metric, ("", "a")) == 1


def test_error_rates_are_jiwers_and_bleu_is_sacrebleus() -> None:
    references, hypotheses = sentences(40, 0), sentences(40, 1)
    pairs = list(zip(references, hypotheses, strict=True))
    assert value(WER, *pairs) == pytest.approx(jiwer.wer(references, hypotheses))
    dense = [["".join(text.split()) for text in texts] for texts in (references, hypotheses)]
    assert value(CER, *pairs) == pytest.approx(jiwer.cer(*dense))
    assert value(BLEU_, *pairs) == pytest.approx(BLEU().corpus_score(hypotheses, [references]).score / 100)
    assert value(BLEU_, *zip(references, references, strict=True)) == pytest.approx(1)


def test_an_unknown_metric_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown metric 'were'") as caught:
        corpus_metric("were")
    assert "did you mean 'wer'" in str(caught.value.hint)
    monkeypatch.setattr(corpus_metrics, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'bleu' needs the package sacrebleu") as caught:
        corpus_metric("bleu")
    assert "discern-nlp[rerank]" in str(caught.value.hint)


def nbest(reference: str, *texts: str) -> NBest:
    return NBest(0, tuple(Hypothesis(text, 0.0) for text in texts), reference)


def arrays(scores: list[list[float]], model: list[list[float]], lengths: list[list[float]]) -> Candidates:
    return Candidates(*(np.array(values, np.float64) for values in (scores, model, lengths)))


# The system prefers the first of each list. Of the first list, the second wins from lambda > 1/2 on; of the second, for
# lambda > 1/4; of the third, never.
LISTS = arrays([[0, -1], [0, -1], [0, -9]], [[-4, -2], [-8, -4], [-1, -1]], [[1, 2], [1, 2], [1, 1]])


@pytest.mark.parametrize(("weight", "winners"), [(0.0, [0, 0, 0]), (0.25, [0, 0, 0]), (0.3, [0, 1, 0]), (0.51, [1, 1, 0])])
def test_winners_by_hand_of_equals_the_first(weight: float, winners: list[int]) -> None:
    assert LISTS.best(Weights(weight)).tolist() == winners


def test_the_length_term_adds_its_weight_a_token() -> None:
    assert LISTS.totals(Weights(0.5, 2.0))[0].tolist() == [0 - 2 + 2, -1 - 1 + 4]
    assert LISTS.best(Weights(0.0, 1.5)).tolist() == [1, 1, 0]


def test_tuning_takes_the_smallest_weight_that_is_best() -> None:
    right_second = [nbest("b", "a", "b"), nbest("b", "a", "b"), nbest("a", "a", "b")]
    found = tune(LISTS, hypothesis_statistics(right_second, WER), WER, lambda_grid(1.0), [0.0])
    assert (found.model, found.length) == (pytest.approx(0.55), 0), "the first of 0, 0.05, 0.1, ... beyond 1/2"
    right_first = [nbest("a", "a", "b")] * 3
    assert tune(LISTS, hypothesis_statistics(right_first, WER), WER, lambda_grid(1.0), LENGTH_GRID) == UNCHANGED
    # The second of the first list is to win and of the second list not, which no lambda brings about.
    mixed = [nbest("b", "a", "b"), nbest("a", "a", "b"), nbest("a", "a", "b")]
    assert tune(LISTS, hypothesis_statistics(mixed, WER), WER, lambda_grid(1.0), [0.0]) == UNCHANGED
    assert tune(LISTS, hypothesis_statistics(right_second, WER), WER, [0.0], LENGTH_GRID) == Weights(0.0, 1.25)


def test_tuning_by_bleu_goes_upwards() -> None:
    long, wrong = "the cat sat on the mat", "the dog ran on the tree"
    lists = [nbest(long, wrong, long)] * 2 + [nbest(long, long, wrong)]
    assert tune(LISTS, hypothesis_statistics(lists, BLEU_), BLEU_, lambda_grid(1.0), [0.0]).model == pytest.approx(0.55)


def test_the_grid_is_that_of_the_paper_and_zero() -> None:
    assert lambda_grid(1.0) == pytest.approx([0.05 * step for step in range(21)])
    assert 0.0 in LENGTH_GRID
    assert sum(LENGTH_GRID) == 0


def test_a_change_that_every_list_shares_is_certain() -> None:
    """One edit of two words less in each list: whatever is drawn, the rate falls by a half."""
    before, after = np.array([[1.0, 2.0]] * 7), np.array([[0.0, 2.0]] * 7)
    assert bootstrap(before, after, WER) == (-0.5, -0.5, 1.0)
    assert bootstrap(before, before, WER) == (0.0, 0.0, 0.0)


def test_the_interval_is_that_of_the_binomial_and_always_the_same() -> None:
    """Half of 400 lists of one word get better by an edit: the mean of 400 draws, of standard deviation 0.5 / 20."""
    before, after = np.ones((400, 2)), np.ones((400, 2))
    after[:200, 0] = 0
    low, high, better = bootstrap(before, after, WER)
    assert (low, high) == (pytest.approx(-0.549, abs=0.006), pytest.approx(-0.451, abs=0.006))
    assert better == 1
    assert bootstrap(before, after, WER) == (low, high, better)


def test_measures_of_two_choices() -> None:
    lists = [nbest("a b", "a x", "a b"), nbest("a b", "x x", "a x", "")]
    found = measure(lists, np.array([0, 0]), np.array([1, 1]), WER)
    assert (found.before, found.after, found.best_possible) == (3 / 4, 1 / 4, 1 / 4)
    assert found.interval is not None
    assert found.interval[0] <= -0.5 <= found.interval[1] < 0
    assert found.better == 1
    assert best_possible(hypothesis_statistics(lists, WER), WER) == 1 / 4  # type: ignore[arg-type]
    assert measure(lists, np.array([0, 0]), np.array([1, 1]), BLEU_).best_possible is None
    alone = measure(lists[:1], np.array([0]), np.array([1]), WER)
    assert (alone.before, alone.after, alone.interval, alone.better) == (1 / 2, 0, None, None)


def test_judging_scores_each_text_once_in_its_place() -> None:
    scorer = make_scorer(make_objective("electric"), "electric")
    texts = [["the chef", "hello", "the chef"], ["hello"]]
    lists = [NBest(0, tuple(Hypothesis(text, -place) for place, text in enumerate(each)), None) for each in texts]
    done: list[int] = []
    found = score_lists(lists, scorer, str, done.append)
    chef, hello = (score.total for score in scorer.score(["the chef", "hello"]))
    assert found.model_scores == pytest.approx(np.array([[chef, hello, chef], [hello, 0, 0]]))
    assert found.scores.tolist() == [[0, -1, -2], [0, -np.inf, -np.inf]]
    assert found.lengths[0, 0] == found.lengths[0, 2] == len(scorer.tokenizer.encode("the chef", add_special_tokens=False))
    assert sum(done) == 4
    assert found.best(Weights(-10.0)).tolist()[1] == 0, "what lies beyond the end never wins"


def test_no_list_has_no_winner() -> None:
    found = score_lists([], make_scorer(make_objective("electric"), "electric"), str, lambda amount: None)
    assert found.scores.shape == (0, 0)
