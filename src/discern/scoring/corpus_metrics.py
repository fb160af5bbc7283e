"""How far chosen texts are from their references: error rates and BLEU, from numbers that add up over a corpus.

The counting is jiwer's and sacrebleu's, of the extra `rerank`.
"""

from __future__ import annotations

import abc
from functools import lru_cache
from importlib.util import find_spec
from typing import ClassVar, final

import numpy as np
from jaxtyping import Float

from discern.errors import ConfigError, did_you_mean

_MAX_ORDER = 4


class CorpusMetric(abc.ABC):
    """A figure of a corpus that depends on its texts through sums alone, so that resampling and tuning need only these.

    Attributes:
        package: that counts.
        better: 1 where a higher figure is better, -1 where a lower one is.
    """

    package: ClassVar[str]
    better: ClassVar[int]

    @abc.abstractmethod
    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        """What a text adds to the sums; as many numbers for each."""

    @abc.abstractmethod
    def value(self, sums: Float[np.ndarray, "K"]) -> float:
        """The figure, from the sums over the corpus."""


class ErrorRate(CorpusMetric):
    """Edits by units of the reference: substitutions, deletions and insertions over all texts, divided by the units."""

    package = "jiwer"
    better = -1

    def value(self, sums: Float[np.ndarray, "K"]) -> float:
        edits, units = float(sums[0]), float(sums[1])
        # Without a word in any reference, whatever was put there is wrong as a whole.
        return edits / units if units else float(edits > 0)


@final
class WordErrorRate(ErrorRate):
    """In words, which blanks of any kind part."""

    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        expected, proposed = reference.split(), hypothesis.split()
        if not expected or not proposed:  # jiwer refuses empty texts: all is inserted, or all is missing
            return len(proposed) or len(expected), len(expected)
        # jiwer parts at U+0020 alone: a tab, a no-break space or the ideographic U+3000 would stay within a word.
        return _word_edits(" ".join(expected), " ".join(proposed)), len(expected)


@final
class CharacterErrorRate(ErrorRate):
    """In characters, blanks left out: for writing that does not part words."""

    def statistics(self, reference: str, hypothesis: str) -> tuple[int, ...]:
        # As words of one character, so that what counts as a unit is decided here.
        spaced, proposed = (" ".join("".join(text.split())) for text in (reference, hypothesis))
        return WordErrorRate().statistics(spaced, proposed)


@final
class Bleu(CorpusMetric):
    """Papineni et al. 2002, as sacrebleu computes it by default (tokenisation 13a, exponential smoothing), in 0-1."""

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
"""By the names that options and results use."""


def corpus_metric(name: str) -> CorpusMetric:
    """The metric of a name.

    Raises:
        ConfigError: no such metric, or its package is not installed.
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
    """Whether the package that counts is there."""
    return find_spec(metric.package) is not None


@lru_cache(maxsize=2**16)
def _word_edits(reference: str, hypothesis: str) -> int:
    from jiwer import process_words

    found = process_words(reference, hypothesis)
    return int(found.substitutions + found.deletions + found.insertions)
