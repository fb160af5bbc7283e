"""Error rates and BLEU of a corpus, from sums over its texts; the change by a re-ranking, and its confidence interval."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import ClassVar, TypeAlias, final

import numpy as np
from jaxtyping import Float, Int

from discern.errors import ConfigError, did_you_mean
from discern.inference.nbest import NBest

_MAX_ORDER = 4


class CorpusMetric(abc.ABC):
    """A metric of a corpus that is a function of sums over its texts, so that resampling and tuning need only the sums.

    Attributes:
        package: package that computes the statistics.
        better: 1 if higher is better, -1 if lower is better.
    """

    package: ClassVar[str]
    better: ClassVar[int]

    @abc.abstractmethod
    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        """Contribution of a text to the sums; always the same number of values."""

    @abc.abstractmethod
    def value(self, sums: Float[np.ndarray, "K"]) -> float:
        """The metric, from the sums over the corpus."""


class ErrorRate(CorpusMetric):
    """Substitutions, deletions and insertions over all texts, divided by the number of units of the references."""

    package = "jiwer"
    better = -1

    def value(self, sums: Float[np.ndarray, "K"]) -> float:
        edits, units = float(sums[0]), float(sums[1])
        # If all references are empty, any hypothesis that is not empty is an error.
        return edits / units if units else float(edits > 0)


@final
class WordErrorRate(ErrorRate):
    """Error rate in words, separated by any white space."""

    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        expected, proposed = reference.split(), hypothesis.split()
        if not expected or not proposed:  # jiwer refuses empty texts: all words are inserted, or all are deleted
            return len(proposed) or len(expected), len(expected)
        # jiwer splits only at U+0020: a tab, a no-break space or the ideographic U+3000 would stay inside a word.
        return _word_edits(" ".join(expected), " ".join(proposed)), len(expected)


@final
class CharacterErrorRate(ErrorRate):
    """Error rate in characters, without white space: for writing systems without spaces."""

    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        # As words of one character, so that the units are defined here and not by jiwer.
        spaced, proposed = (" ".join("".join(text.split())) for text in (reference, hypothesis))
        return WordErrorRate().statistics(spaced, proposed)


@final
class Bleu(CorpusMetric):
    """Papineni et al. 2002, as sacrebleu computes it by default (tokenization 13a, exponential smoothing), in 0-1."""

    package = "sacrebleu"
    better = 1

    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        from sacrebleu.metrics.bleu import BLEU

        found = BLEU().corpus_score([hypothesis], [[reference]])
        return (*found.counts, *found.totals, found.sys_len, found.ref_len)

    def value(self, sums: Float[np.ndarray, "K"]) -> float:
        from sacrebleu.metrics.bleu import BLEU

        numbers = [int(number) for number in sums]
        correct, total = numbers[:_MAX_ORDER], numbers[_MAX_ORDER : 2 * _MAX_ORDER]
        return float(BLEU.compute_bleu(correct, total, numbers[-2], numbers[-1], smooth_method="exp").score) / 100


METRICS: dict[str, CorpusMetric] = {"wer": WordErrorRate(), "cer": CharacterErrorRate(), "bleu": Bleu()}
"""Metrics by the names in options and results."""


def corpus_metric(name: str) -> CorpusMetric:
    """The metric with this name.

    Raises:
        ConfigError: there is no such metric, or its package is not installed.
    """
    if name not in METRICS:
        raise ConfigError(f"unknown metric '{name}'", hint=did_you_mean(name, METRICS))
    if not is_installed(METRICS[name]):
        raise ConfigError(
            f"metric '{name}' needs the package {METRICS[name].package}, which is not installed",
            hint="pip install 'discern-nlp[rerank]'",
        )
    return METRICS[name]


def is_installed(metric: CorpusMetric) -> bool:
    """Whether the package of the metric is installed."""
    return find_spec(metric.package) is not None


@lru_cache(maxsize=2**16)
def _word_edits(reference: str, hypothesis: str) -> int:
    from jiwer import process_words

    found = process_words(reference, hypothesis)
    return int(found.substitutions + found.deletions + found.insertions)


Statistics: TypeAlias = Sequence[Sequence[tuple[int, ...]]]
"""The contribution of each hypothesis of each list to the sums of a metric."""
_RESAMPLES, _SEED = 1000, 0


@dataclass(frozen=True)
class Measured:
    """One metric of the winning hypotheses.

    Attributes:
        before, after: the metric over the corpus.
        interval: 95% confidence interval of after - before; None with one list, whose resamples are all the same.
        better: fraction of the resamples in which after is better than before; None with one list.
        best_possible: error rate of the best hypothesis of each list; None for metrics that are not error rates.
    """

    before: float
    after: float
    interval: tuple[float, float] | None
    better: float | None
    best_possible: float | None


def measure(lists: Sequence[NBest], before: Int[np.ndarray, "N"], after: Int[np.ndarray, "N"], metric: CorpusMetric) -> Measured:
    """The metric of two choices of hypotheses from the same lists.

    Args:
        lists: lists with references, at least one.
        before, after: index of the chosen hypothesis of each list.
    """
    first, second = (
        np.array([_statistics(each, place, metric) for each, place in zip(lists, places.tolist(), strict=True)], dtype=np.float64)
        for places in (before, after)
    )
    low, high, better = bootstrap(first, second, metric)
    interval, share = ((low, high), better) if len(lists) > 1 else (None, None)
    least = best_possible(hypothesis_statistics(lists, metric), metric) if isinstance(metric, ErrorRate) else None
    return Measured(metric.value(first.sum(0)), metric.value(second.sum(0)), interval, share, least)


def hypothesis_statistics(lists: Sequence[NBest], metric: CorpusMetric) -> Statistics:
    """Statistics of every hypothesis of lists with references."""
    return [[_statistics(each, place, metric) for place in range(len(each.hypotheses))] for each in lists]


def chosen_statistics(statistics: Statistics, places: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N K"]:
    """Statistics of one hypothesis of each list, chosen by index."""
    return np.array([each[place] for each, place in zip(statistics, places.tolist(), strict=True)], dtype=np.float64)


def bootstrap(
    before: Float[np.ndarray, "N K"], after: Float[np.ndarray, "N K"], metric: CorpusMetric
) -> tuple[float, float, float]:
    """Paired bootstrap of a change: 2.5th and 97.5th percentile of after - before over 1,000 resamples of the lists, and the
    fraction of resamples in which after is better. The random draws are always the same.

    Args:
        before, after: statistics of the chosen hypothesis of each list.

    Reference: Bisani and Ney 2004; Koehn 2004.
    """
    rng, number = np.random.default_rng(_SEED), len(before)
    changes = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        times = np.bincount(rng.integers(number, size=number), minlength=number).astype(np.float64)
        changes[index] = metric.value(times @ after) - metric.value(times @ before)
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high), float((metric.better * changes > 0).mean())


def best_possible(statistics: Statistics, metric: ErrorRate) -> float:
    """The error rate of the hypotheses with the fewest edits in each list."""
    return metric.value(np.array([min(each) for each in statistics], dtype=np.float64).sum(0))


def _statistics(each: NBest, place: int, metric: CorpusMetric) -> tuple[int, ...]:
    assert each.reference is not None
    return metric.statistics(each.reference, each.hypotheses[place].text)
