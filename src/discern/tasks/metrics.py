"""The official metrics of the tasks, as fractions.

An undefined value (a correlation of constants, F1 without a positive) is 0 and reported as degenerate, never NaN.

Intervals and comparisons say what a limited number of evaluated examples can show. They have a confidence of 95%, and are about
the choice of the evaluated examples, not about the seed of the training. Reference: Wilson 1927 for a fraction; Bonett and Price
2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data"; otherwise the percentile
bootstrap (Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.base import Predictions, Scores, Task
from discern.tasks.baselines import deciding_metrics
from discern.tasks.tags import spans_of

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE_PUNCTUATION = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_CHINESE_WORD = re.compile(r"[\u4e00-\u9fa5]|[^\s\u4e00-\u9fa5]+")

Similarity = Callable[[str, str], float]
"""Compares an answer with a gold answer: 0-1."""


# Classification and regression, as GLUE reports them.


def class_scores(
    gold: Sequence[str], predicted: Sequence[str], names: Sequence[str] = ("accuracy", "macro_f1"), positive: str = "1"
) -> Scores:
    """Metrics of single-label classification.

    Args:
        names: any of `accuracy`, `f1` (of the class `positive`), `macro_f1` (mean over the classes that occur), `matthews`.
        positive: positive class of `f1`.

    Raises:
        ConfigError: a metric does not exist.
    """
    truth, guess = np.array(gold, str), np.array(predicted, str)
    classes = np.unique([truth, guess])[:, None]
    metrics = {
        "accuracy": lambda: np.mean(truth == guess),
        "f1": lambda: _indicator_f1(truth == positive, guess == positive),
        "macro_f1": lambda: _indicator_f1(truth == classes, guess == classes).mean(),
        "matthews": lambda: _matthews(truth == classes, guess == classes),
    }
    no_positive = None if positive in classes else f"no label and no prediction is '{positive}'"
    return _scores(names, metrics, {"f1": no_positive, "matthews": _constant(truth, guess)})


def number_scores(gold: Sequence[float], predicted: Sequence[float], names: Sequence[str] = ("spearman", "pearson")) -> Scores:
    """Metrics of regression.

    Args:
        names: any of `pearson`, `spearman`, `mean_absolute_error`.

    Raises:
        ConfigError: a metric does not exist.
        DataError: a prediction is not finite.
    """
    from scipy import stats  # takes as long to import as torch

    truth, guess = np.array(gold, np.float64), np.array(predicted, np.float64)
    if not np.isfinite(guess).all():
        raise DataError(
            f"prediction {np.isfinite(guess).argmin()} is not finite: no score can be computed",
            hint="a diverged run predicts NaN: lower the learning rate",
        )
    metrics = {
        "pearson": lambda: stats.pearsonr(truth, guess).statistic,
        "spearman": lambda: stats.spearmanr(truth, guess).statistic,
        "mean_absolute_error": lambda: np.mean(np.abs(truth - guess)),
    }
    constant = "a single example has no correlation" if len(truth) < 2 else _constant(truth, guess)
    return _scores(names, metrics, {"pearson": constant, "spearman": constant})


def label_set_scores(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    names: Sequence[str] = ("micro_f1", "macro_f1", "exact_match"),
) -> Scores:
    """Metrics of multi-label classification.

    Args:
        names: any of `micro_f1`, `macro_f1` (mean over the classes that occur), `exact_match` (of the set).

    Raises:
        ConfigError: a metric does not exist.
    """
    classes = sorted(set(chain(*gold, *predicted)))
    truth, guess = (np.array([[label in labels for labels in rows] for label in classes], bool) for rows in (gold, predicted))
    metrics = {
        "micro_f1": lambda: _indicator_f1(truth.ravel(), guess.ravel()),
        "macro_f1": lambda: _indicator_f1(truth, guess).mean(),
        "exact_match": lambda: np.mean([set(labels) == set(chosen) for labels, chosen in zip(gold, predicted, strict=True)]),
    }
    nothing = None if classes else "no label is given or predicted"
    return _scores(names, metrics, {"micro_f1": nothing, "macro_f1": nothing})


def _indicator_f1(truth: NDArray[np.bool_], guess: NDArray[np.bool_]) -> NDArray[np.float64]:
    """F1 of a class, or of each of several, from (N,) or (C, N) whether each example has it; some example must."""
    return np.asarray(2 * (truth & guess).sum(-1) / (truth.sum(-1) + guess.sum(-1)))


def _matthews(truth: NDArray[np.bool_], guess: NDArray[np.bool_]) -> float:
    """The correlation of (C, N) indicators of the classes. scikit-learn's is 20 times slower, too slow for a bootstrap.

    Reference: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation coefficient".
    """
    truth_deviations, guess_deviations = (indicators - indicators.mean(1, keepdims=True) for indicators in (truth, guess))
    variances = (truth_deviations**2).sum() * (guess_deviations**2).sum()
    return float((truth_deviations * guess_deviations).sum() / np.sqrt(variances))


def _constant(truth: NDArray[np.generic], guess: NDArray[np.generic]) -> str | None:
    """Why these have no correlation, or None."""
    for name, values in (("prediction", guess), ("label", truth)):
        if (values == values[0]).all():
            return f"every {name} is {values[0]}"
    return None


def _scores(names: Sequence[str], metrics: Mapping[str, Callable[[], float]], undefined: Mapping[str, str | None]) -> Scores:
    """The metrics of these names.

    Args:
        undefined: by name, why a metric is undefined, or None.
    """
    if unknown := [name for name in names if name not in metrics]:
        raise ConfigError(f"unknown metric '{unknown[0]}'", hint=did_you_mean(unknown[0], metrics))
    degenerate = {name: reason for name in names if (reason := undefined.get(name))}
    return Scores({name: 0.0 if name in degenerate else float(metrics[name]()) for name in names}, degenerate)


# Tagging


def span_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """`precision`, `recall` and `f1` over all spans as conlleval counts them, `accuracy` over all words.

    A span is correct if its start, end and type are. The gold and predicted tags may be in different schemes; the accuracy is
    then not meaningful.
    Reference: Tjong Kim Sang and Buchholz 2000, section 4, and the script conlleval.

    Raises:
        DataError: a tag is neither "O" nor a prefix with a type.
    """
    gold_spans, predicted_spans = (
        {(sentence, span) for sentence, tags in enumerate(rows) for span in spans_of(tags)} for rows in (gold, predicted)
    )
    num_correct = len(gold_spans & predicted_spans)
    values = {
        "precision": num_correct / max(len(predicted_spans), 1),
        "recall": num_correct / max(len(gold_spans), 1),
        "f1": _f1(num_correct, len(predicted_spans), len(gold_spans)),
    }
    degenerate: dict[str, str] = {}
    if not predicted_spans:
        degenerate["precision"] = degenerate["f1"] = "no span is predicted"
    if not gold_spans:
        degenerate["recall"] = degenerate["f1"] = "the labels contain no span"
    return Scores(values | tag_accuracy(gold, predicted).values, degenerate)


def tag_accuracy(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """`accuracy` over all words: the metric of tags that mark no spans."""
    pairs = zip(chain(*gold), chain(*predicted), strict=True)
    return Scores({"accuracy": float(np.mean([gold_tag == tag for gold_tag, tag in pairs]))})


def _f1(num_correct: int, num_predicted: int, num_gold: int) -> float:
    return 2 * num_correct / max(num_predicted + num_gold, 1)


# Answers, as the scripts evaluate-v1.1.py and evaluate-v2.0.py of SQuAD, mrqa_official_eval.py and cmrc2018_evaluate.py.
# Reference: Rajpurkar et al. 2016, 2018; Fisch et al. 2019; Cui et al. 2019.


def normalized_words(text: str) -> list[str]:
    """The words of a text in lower case, without ASCII punctuation and English articles, as in SQuAD."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, gold: str) -> float:
    """1 if the normalized words are equal, else 0. SQuAD and MRQA."""
    return float(normalized_words(answer) == normalized_words(gold))


def word_f1(answer: str, gold: str) -> float:
    """F1 over the normalized words of both; 0 if they share none. SQuAD 1.1 and MRQA."""
    predicted, expected = normalized_words(answer), normalized_words(gold)
    return _f1((Counter(predicted) & Counter(expected)).total(), len(predicted), len(expected))


def word_f1_or_nothing(answer: str, gold: str) -> float:
    """Like `word_f1`, but 1 if neither has a normalized word. SQuAD 2.0."""
    return word_f1(answer, gold) or float(not normalized_words(answer) + normalized_words(gold))


def cmrc_exact_match(answer: str, gold: str) -> float:
    """1 if the two are equal without punctuation and case, else 0. CMRC 2018."""
    return float(_without_punctuation(answer) == _without_punctuation(gold))


def cmrc_f1(answer: str, gold: str) -> float:
    """F1 from the longest contiguous sequence of characters and Latin words that both have in common. CMRC 2018.

    Differs: the script splits Latin text with NLTK's word tokenizer, this function at white space. The results differ where
    words touch punctuation.
    """
    predicted, expected = (_CHINESE_WORD.findall(_without_punctuation(text)) for text in (answer, gold))
    num_common = SequenceMatcher(None, predicted, expected, autojunk=False).find_longest_match().size
    return _f1(num_common, len(predicted), len(expected))


def _without_punctuation(text: str) -> str:
    return text.lower().strip().translate(_CHINESE_PUNCTUATION)


SQUAD1: Mapping[str, Similarity] = {"exact_match": exact_match, "f1": word_f1}
"""Metrics of SQuAD 1.1 and of MRQA."""
SQUAD2: Mapping[str, Similarity] = {"exact_match": exact_match, "f1": word_f1_or_nothing}
CMRC: Mapping[str, Similarity] = {"exact_match": cmrc_exact_match, "f1": cmrc_f1}


def best_similarities(golds: Sequence[Sequence[str]], answers: Sequence[str], similarity: Similarity) -> NDArray[np.float64]:
    """(N,) the best similarity of each answer to one of the golds of its question."""
    return np.array([max(similarity(answer, gold) for gold in texts) for texts, answer in zip(golds, answers, strict=True)])


def squad2_scores(
    golds: Sequence[Sequence[str]], answers: Sequence[str], no_answer: Sequence[float], threshold: float
) -> dict[str, float]:
    """All metrics of the script of SQuAD 2.0, with the given threshold and with the best one.

    For `exact_match` and `f1` the answer is empty where `no_answer` exceeds `threshold`. `HasAns_` and `NoAns_` are the same
    metrics over the questions with and without an answer, if there are any. `best_exact_match` and `best_f1` use the thresholds
    `best_exact_match_threshold` and `best_f1_threshold`, which are selected on these same questions: an upper bound, not a
    result.

    Differs: the script uses 0 as the threshold below which nothing is answered, which is right for probabilities only; here
    that threshold is below every `no_answer`.

    Args:
        golds: gold answers of each question, none if it has no answer.
        answers: best answer to each question, before any threshold.
        no_answer: score of each question for having no answer: a probability, a logit or a difference of logits.
    """
    answerable, odds = np.array([bool(texts) for texts in golds]), np.array(no_answer)
    order = np.argsort(odds, kind="stable")
    # Golds without normalized words do not count; without any others, the gold is the empty answer.
    golds = [list(filter(normalized_words, texts)) or [""] for texts in golds]
    values: dict[str, float] = {}
    for name, similarity in SQUAD2.items():
        raw = best_similarities(golds, answers, similarity)
        applied = np.where(odds > threshold, ~answerable, raw)
        for prefix, chosen in (("", applied), ("HasAns_", applied[answerable]), ("NoAns_", applied[~answerable])):
            if len(chosen):
                values[prefix + name] = float(chosen.mean())
        # The best threshold: at first no question is answered, then one more at a time, the most certain first.
        gains = np.where(answerable, raw, [-bool(answer) for answer in answers])
        totals = np.cumsum([(~answerable).sum(), *gains[order]])
        best = int(totals.argmax())
        thresholds = [0.0 if odds.min() > 0 else math.nextafter(odds.min(), -math.inf), *odds[order]]
        values[f"best_{name}"] = float(totals[best]) / len(answers)
        values[f"best_{name}_threshold"] = float(thresholds[best])
    return values


_RESAMPLES = 1000
_LEVELS = (0.025, 0.975)
# Quantile of the normal distribution at the upper level.
_Z = 1.959964


Verdict = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a model and a baseline on the same examples.

    Attributes:
        metric: the metric that decides; for answers F1, not the headline metric.
        difference: model - baseline.
        interval: its lower and its upper limit.
        verdict: 'better' if the interval is above 0 and no metric that is published together with this one is lower; 'worse' if
            it is below 0.
    """

    metric: str
    difference: float
    interval: list[float]
    verdict: Verdict


def interval(task: Task[Any], examples: Sequence[Any], predictions: Predictions) -> tuple[float, float]:
    """The interval of the headline metric. Its time grows with the number of examples: meant for at most some thousand."""
    metric = task.metrics[0]
    terms = task.metric_terms(metric, examples, predictions)
    if _is_fraction(terms):
        from scipy.stats import binomtest  # takes a second to import

        limits = binomtest(int(terms[:, 0].sum()), len(terms)).proportion_ci(method="wilson")
        return float(limits.low), float(limits.high)
    low, high = np.quantile(_resampled(task, metric, examples, predictions), _LEVELS).tolist()
    return low, high


def paired(
    task: Task[Any], examples: Sequence[Any], predictions: Predictions, baseline_predictions: Predictions
) -> PairedDifference:
    """Whether the examples support that a model is better than a baseline.

    Args:
        predictions, baseline_predictions: of the model and of the baseline, both for these examples.
    """
    both = (predictions, baseline_predictions)
    model, baseline = (task.score(examples, each).values for each in both)
    metric, *others = deciding_metrics(task.metrics[0], baseline)
    model_terms, baseline_terms = (task.metric_terms(metric, examples, each) for each in both)
    if _is_fraction(model_terms) and baseline_terms is not None:
        # Adjusted by one example that only the model has right, and one that only the baseline has right
        gains = np.append(model_terms[:, 0] - baseline_terms[:, 0], (1, -1))
        radius = _Z * gains.std() / math.sqrt(len(gains))
        low, high = float(gains.mean() - radius), float(gains.mean() + radius)
    else:
        # The same resamples for both: their seed is fixed.
        one, other = (_resampled(task, metric, examples, each) for each in both)
        low, high = np.quantile(one - other, _LEVELS).tolist()
    nowhere_lower = all(model[name] >= baseline[name] for name in others)
    verdict: Verdict = "worse" if high < 0 else "better" if low > 0 and nowhere_lower else "undecided"
    return PairedDifference(metric, model[metric] - baseline[metric], [low, high], verdict)


def _is_fraction(terms: NDArray[np.float64] | None) -> TypeGuard[NDArray[np.float64]]:
    """Whether these are the terms of a mean of zeros and ones."""
    return terms is not None and bool((terms[:, 1] == 1).all() and np.isin(terms[:, 0], (0, 1)).all())


def _resampled(task: Task[Any], metric: str, examples: Sequence[Any], predictions: Predictions) -> NDArray[np.float64]:
    """(R,) the metric on resamples of the examples, drawn with replacement."""
    terms = task.metric_terms(metric, examples, predictions)
    generator = np.random.default_rng(0)
    values = []
    for _ in range(_RESAMPLES):
        rows = generator.integers(len(predictions), size=len(predictions))
        if terms is not None:
            numerator, denominator = terms[rows].sum(0)
            values.append(numerator / max(denominator, 1))  # without a denominator, 0
        else:
            scores = task.score([examples[row] for row in rows], [predictions[row] for row in rows])
            values.append(scores.values[metric])
    return np.array(values)
