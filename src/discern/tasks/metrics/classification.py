"""Metrics of classification and regression as GLUE reports them: the implementations of scikit-learn and SciPy.

An undefined value (a correlation of constants, F1 without a positive) is 0 and reported as degenerate, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats
from sklearn import metrics

from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.metrics import Scores

Result = tuple[float, str | None]


def class_scores(
    gold: Sequence[str], predicted: Sequence[str], names: Sequence[str] = ("accuracy", "macro_f1"), positive: str | None = None
) -> Scores:
    """Metrics of single-label classification.

    Args:
        names: any of `accuracy`, `f1` (of the class `positive`), `macro_f1` (mean over the classes that occur), `matthews`.
        positive: positive class of `f1`, "1" by default.

    Raises:
        ConfigError: a metric does not exist.
        DataError: there are no examples, or the numbers of labels and predictions differ.
    """
    _check(len(gold), len(predicted))
    truth, guess = np.asarray(gold, dtype=object).astype(str), np.asarray(predicted, dtype=object).astype(str)
    known: dict[str, Callable[[], Result]] = {
        "accuracy": lambda: (float(metrics.accuracy_score(truth, guess)), None),
        "f1": lambda: _f1(truth, guess, positive if positive is not None else "1"),
        "macro_f1": lambda: (float(metrics.f1_score(truth, guess, average="macro", zero_division=0)), None),
        "matthews": lambda: _matthews(truth, guess),
    }
    return _collect(known, names)


def number_scores(gold: Sequence[float], predicted: Sequence[float], names: Sequence[str] = ("spearman", "pearson")) -> Scores:
    """Metrics of regression.

    Args:
        names: any of `pearson`, `spearman`, `mean_squared_error`, `mean_absolute_error`.

    Raises:
        ConfigError: a metric does not exist.
        DataError: there are no examples, the numbers of labels and predictions differ, or a value is not finite.
    """
    _check(len(gold), len(predicted))
    truth, guess = np.asarray(gold, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    for what, values in (("label", truth), ("prediction", guess)):
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"{what} {place} is {values[place]}: no score can be computed",
                hint="a diverged run predicts NaN: lower the learning rate",
            )
    known: dict[str, Callable[[], Result]] = {
        "pearson": lambda: _correlation(lambda: stats.pearsonr(truth, guess).statistic, truth, guess),
        "spearman": lambda: _correlation(lambda: stats.spearmanr(truth, guess).statistic, truth, guess),
        "mean_squared_error": lambda: (float(np.mean((truth - guess) ** 2)), None),
        "mean_absolute_error": lambda: (float(np.mean(np.abs(truth - guess))), None),
    }
    return _collect(known, names)


def label_set_scores(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    names: Sequence[str] = ("micro_f1", "macro_f1", "exact_match"),
) -> Scores:
    """Metrics of multi-label classification.

    Args:
        names: any of `micro_f1`, `macro_f1` (mean over the classes that occur), `exact_match` (of the set), `precision`
            and `recall` (micro).

    Raises:
        ConfigError: a metric does not exist.
        DataError: there are no examples, or the numbers of labels and predictions differ.
    """
    _check(len(gold), len(predicted))
    classes = {name: place for place, name in enumerate(sorted({name for row in (*gold, *predicted) for name in row}))}
    truth, guess = _indicators(gold, classes), _indicators(predicted, classes)
    nothing = "no label is given or predicted" if not classes else None

    def averaged(score: Callable[..., float], average: str) -> Result:
        if len(classes) == 1:  # scikit-learn would count the examples without the label as a class of their own
            return float(score(truth[:, 0], guess[:, 0], average="binary", zero_division=0)), nothing
        return (float(score(truth, guess, average=average, zero_division=0)) if classes else 0.0), nothing

    known: dict[str, Callable[[], Result]] = {
        "micro_f1": lambda: averaged(metrics.f1_score, "micro"),
        "macro_f1": lambda: averaged(metrics.f1_score, "macro"),
        "precision": lambda: averaged(metrics.precision_score, "micro"),
        "recall": lambda: averaged(metrics.recall_score, "micro"),
        "exact_match": lambda: (float(np.mean((truth == guess).all(axis=1))), None),
    }
    return _collect(known, names)


def _indicators(rows: Sequence[Sequence[str]], classes: dict[str, int]) -> np.ndarray:
    table = np.zeros((len(rows), len(classes)), dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, [classes[name] for name in row]] = 1
    return table


def _f1(truth: np.ndarray, guess: np.ndarray, positive: str) -> Result:
    if not ((truth == positive) | (guess == positive)).any():
        return 0.0, f"no label and no prediction is '{positive}'"
    return float(metrics.f1_score(truth == positive, guess == positive, zero_division=0)), None


def _matthews(truth: np.ndarray, guess: np.ndarray) -> Result:
    if constant := _constant(truth, guess):
        return 0.0, constant
    return float(metrics.matthews_corrcoef(truth, guess)), None


def _correlation(compute: Callable[[], float], truth: np.ndarray, guess: np.ndarray) -> Result:
    if len(truth) < 2:
        return 0.0, "a single example has no correlation"
    if constant := _constant(truth, guess):
        return 0.0, constant
    value = float(compute())
    return (value, None) if math.isfinite(value) else (0.0, "the predictions hardly differ")


def _constant(truth: np.ndarray, guess: np.ndarray) -> str | None:
    if (guess == guess[0]).all():
        return f"every prediction is {guess[0]}"
    return f"every label is {truth[0]}" if (truth == truth[0]).all() else None


def _collect(known: dict[str, Callable[[], Result]], names: Sequence[str]) -> Scores:
    values: dict[str, float] = {}
    degenerate: dict[str, str] = {}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown metric '{name}'", hint=did_you_mean(name, known))
        values[name], reason = known[name]()
        if reason is not None:
            degenerate[name] = reason
    return Scores(values, degenerate)


def _check(gold: int, predicted: int) -> None:
    if gold != predicted or not gold:
        raise DataError(f"{gold} labels and {predicted} predictions", hint="give as many predictions as labels, and at least one")
