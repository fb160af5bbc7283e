"""Re-rank n-best lists: the score of the system plus lambda times the score of a text encoder."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from discern.errors import ConfigError, DataError
from discern.inference import PREFERRED_TO_RERANK
from discern.inference.corpus_metrics import (
    METRICS,
    CorpusMetric,
    Measured,
    Statistics,
    chosen_statistics,
    corpus_metric,
    hypothesis_statistics,
    is_installed,
    measure,
)
from discern.inference.nbest import NBest, read_nbest
from discern.inference.scoring import TextScorer, load_scorer
from discern.inference.texts import TextReport
from discern.progress import Progress
from discern.storage.files import whole_file
from discern.storage.output import check_output

LAMBDA_STEPS = 20
"""Number of steps of the grid of lambdas from 0 to the largest. Electric, section 4.2: 0.05, 0.1, ... 1.0; here also 0."""
LENGTH_GRID = tuple(number / 4 for number in range(-8, 9))
"""Weights per token that are tried, in units of the lists' scores; a coarse grid, as a fine one would overfit."""
# Texts are sorted by length in blocks of this size: large enough for little padding, small enough to show progress.
_BLOCK = 1024


@dataclass(frozen=True)
class Weights:
    """total = score + model x model score + length x number of tokens.

    Attributes:
        model: lambda.
        length: weight of each token of the model's tokenizer; a positive weight favors longer texts.
    """

    model: float
    length: float = 0.0


UNCHANGED = Weights(0.0)
"""The weights that keep the ranking of the system."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Scores of N lists of up to H hypotheses each, padded; padding never wins.

    Attributes:
        scores: scores of the system that proposed the hypotheses; -inf for padding.
        model_scores: scores of the model in nats; 0 for padding.
        lengths: numbers of tokens of the model; 0 for padding.
    """

    scores: Float[np.ndarray, "N H"]
    model_scores: Float[np.ndarray, "N H"]
    lengths: Float[np.ndarray, "N H"]

    def totals(self, weights: Weights) -> Float[np.ndarray, "N H"]:
        """The weighted sum by which hypotheses are ranked."""
        totals: np.ndarray = self.scores + weights.model * self.model_scores + weights.length * self.lengths
        return totals

    def best(self, weights: Weights) -> Int[np.ndarray, "N"]:
        """Index of the winner of each list; ties go to the first hypothesis."""
        best: np.ndarray = self.totals(weights).argmax(axis=1)
        return best

    def chosen(self, lists: Sequence[int]) -> Candidates:
        """Some of the lists."""
        rows = np.asarray(lists, dtype=np.intp)
        return Candidates(self.scores[rows], self.model_scores[rows], self.lengths[rows])


def score_lists(
    lists: Sequence[NBest],
    scorer: TextScorer,
    as_read: Callable[[str], str],
    advance: Callable[[int], None],
    report: TextReport | None = None,
) -> Candidates:
    """Score the hypotheses of the lists; each distinct text is scored once.

    Args:
        as_read: maps a hypothesis to the text that the model reads.
        advance: called with the number of further hypotheses that are done.
        report: told of the tokens of each distinct text.
    """
    found: dict[str, tuple[float, int]] = {}
    times: dict[str, int] = {}
    for each in lists:
        for hypothesis in each.hypotheses:
            text = as_read(hypothesis.text)
            times[text] = times.get(text, 0) + 1
    texts = list(times)
    for first in range(0, len(texts), _BLOCK):
        block = texts[first : first + _BLOCK]
        for score in scorer.score(block):
            found[score.text] = score.total, len(score.tokens)
            if report is not None:
                report.add(f"{score.text!r:.40}", score.tokens)
        advance(sum(times[text] for text in block))
    seen = [[found[as_read(hypothesis.text)] for hypothesis in each.hypotheses] for each in lists]
    return Candidates(
        _padded([[hypothesis.score for hypothesis in each.hypotheses] for each in lists], -np.inf),
        _padded([[total for total, _ in each] for each in seen], 0.0),
        _padded([[length for _, length in each] for each in seen], 0.0),
    )


def lambda_grid(largest: float) -> tuple[float, ...]:
    """Values of lambda to try, from 0 to the largest."""
    return tuple(largest * step / LAMBDA_STEPS for step in range(LAMBDA_STEPS + 1))


def tune(
    lists: Candidates, statistics: Statistics, metric: CorpusMetric, models: Sequence[float], lengths: Sequence[float]
) -> Weights:
    """The weights whose winners are best by the metric; of equally good ones, those closest to zero.

    Args:
        statistics: statistics of each hypothesis of each list against its reference.
        models: values of lambda to try.
        lengths: weights per token to try.
    """
    pairs = sorted(itertools.product(lengths, models), key=lambda pair: (abs(pair[0]), abs(pair[1]), pair))
    tried = [Weights(model, length) for length, model in pairs]
    values = [metric.better * metric.value(chosen_statistics(statistics, lists.best(weights)).sum(0)) for weights in tried]
    return tried[int(np.argmax(values))]


def _padded(rows: Sequence[Sequence[float]], filler: float) -> Float[np.ndarray, "N H"]:
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[filler] * (width - len(row))] for row in rows], dtype=np.float64).reshape(len(rows), width)


UNTUNED_LAMBDA = 0.5
"""Lambda if it is not tuned: the middle of the range in the Electric paper."""


@dataclass(frozen=True)
class Reranked:
    """Result of a re-ranking.

    Attributes:
        lists, hypotheses: number of lists and number of hypotheses that were ranked.
        references: number of lists with a reference.
        changed: number of lists with a new best hypothesis.
        scorer: name of the scorer.
        weights: weights that were used.
        metrics: each metric over the lists with references; None if it could not be measured.
        dev_metrics: the same for the lists that the weights were tuned on; empty without tuning.
    """

    lists: int
    hypotheses: int
    references: int
    changed: int
    scorer: str
    weights: Weights
    metrics: Mapping[str, Measured | None]
    dev_metrics: Mapping[str, Measured | None]


def rerank(
    model: Path,
    input: Path,
    progress: Progress,
    warn: Callable[[str], None],
    *,
    out: Path,
    dev: Path | None = None,
    weight: float | None = None,
    max_weight: float | None = None,
    length_weight: float | None = None,
    tune_length: bool = False,
    metric: str | None = None,
    scorer: str | None = None,
    lowercase: bool = False,
    device: str = "auto",
) -> Reranked:
    """Re-rank n-best lists, write them, and measure the change.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA.
        input: n-best lists, see `read_nbest`.
        warn: called with messages about weights that were not tuned or are at the edge of the grid, texts that are read in
            several windows, metrics that are not installed, and damaged checkpoints that were skipped.
        out: JSON lines file to write, complete or not at all.
        dev: n-best lists with references to tune the weights on; None: use the given or default weights.
        weight: lambda, instead of tuning it.
        max_weight: largest lambda to try; None: 1.
        length_weight: weight of each token; None: 0.
        tune_length: also tune the weight of each token.
        metric: metric to optimize: 'wer', 'cer' or 'bleu'; None: 'wer'.
        scorer: name of the scorer; None: the first of `PREFERRED_TO_RERANK` that the model supports.
        lowercase: pass the hypotheses to the model in lower case.

    Raises:
        ConfigError: options contradict each other, the model does not support the scorer, or the package of a metric is missing.
        DataError: a file is missing or is not a list of n-best lists, or the lists to tune on have no references.
        CheckpointError: the weights are missing or damaged.
    """
    _check_weights(dev, weight, max_weight, length_weight, metric, tune_length=tune_length)
    max_weight, metric = 1.0 if max_weight is None else max_weight, metric or "wer"
    if dev is not None:
        corpus_metric(metric)
    check_output("--out", out, "reranked.jsonl", model, input, dev)
    lists = read_nbest(input)
    dev_lists = [] if dev is None else _with_references(read_nbest(dev), dev)
    chosen = load_scorer(model, scorer, device, warn=warn, preferred=PREFERRED_TO_RERANK)
    installed = {name: each for name, each in METRICS.items() if is_installed(each)}
    if len(installed) < len(METRICS):
        warn(f"{' and '.join(sorted(METRICS.keys() - installed))} are not measured: pip install 'discern-nlp[rerank]'")

    def scored(lists: Sequence[NBest]) -> Candidates:
        progress.start("scoring", sum(len(each.hypotheses) for each in lists), "hypotheses")
        report = TextReport(chosen.tokenizer, chosen.window_size, progress, warn)
        found = score_lists(lists, chosen, str.lower if lowercase else str, progress.advance, report)
        progress.finish()
        report.finish()
        return found

    def measured(lists: Sequence[NBest], found: Candidates, weights: Weights) -> dict[str, Measured | None]:
        places = found.best(UNCHANGED), found.best(weights)
        return {name: measure(lists, *places, installed[name]) if name in installed and lists else None for name in METRICS}

    weights, dev_metrics = Weights(UNTUNED_LAMBDA if weight is None else weight, length_weight or 0.0), {}
    if dev is not None:
        if dev.samefile(input):
            warn(f"the weights are tuned on {input} itself, so the improvement there is larger than elsewhere")
        tuned_on = scored(dev_lists)
        lambdas = lambda_grid(max_weight) if weight is None else (weight,)
        lengths = LENGTH_GRID if tune_length else (length_weight or 0.0,)
        optimized = corpus_metric(metric)
        weights = tune(tuned_on, hypothesis_statistics(dev_lists, optimized), optimized, lambdas, lengths)
        if len(lambdas) > 1 and weights.model == lambdas[-1]:
            warn(f"the best lambda is the largest one tried; to try larger ones: --max-lambda {4 * max_weight:g}")
        dev_metrics = measured(dev_lists, tuned_on, weights)
    elif weight is None:
        warn(
            f"lambda is {UNTUNED_LAMBDA:g}, a guess: the right one depends on the scale of the scores; tune it on other lists "
            "with references (--dev FILE), or set it (--lambda VALUE)"
        )
    found = scored(lists)
    _write(out, lists, found, weights)
    known = [number for number, each in enumerate(lists) if each.reference is not None]
    winners = zip(lists, found.best(UNCHANGED).tolist(), found.best(weights).tolist(), strict=True)
    return Reranked(
        lists=len(lists),
        hypotheses=sum(len(each.hypotheses) for each in lists),
        references=len(known),
        changed=sum(each.hypotheses[before].text != each.hypotheses[after].text for each, before, after in winners),
        scorer=chosen.name,
        weights=weights,
        metrics=measured([lists[number] for number in known], found.chosen(known), weights),
        dev_metrics=dev_metrics,
    )


def _check_weights(
    dev: Path | None,
    weight: float | None,
    max_weight: float | None,
    length_weight: float | None,
    metric: str | None,
    *,
    tune_length: bool,
) -> None:
    """Refuse weights that are no finite numbers, options that contradict each other, and options that nothing would read."""
    for option, value in {"--lambda": weight, "--max-lambda": max_weight, "--length-weight": length_weight}.items():
        if value is not None and (not math.isfinite(value) or (value <= 0 and option == "--max-lambda")):
            expected = "more than 0" if math.isfinite(value) else "a finite number"
            raise ConfigError(f"{option} is {value:g}, expected {expected}", hint=f"for example {option} 0.5")
    tuning = {"--tune-length": tune_length or None, "--max-lambda": max_weight, "--metric": metric}
    for option in (option for option, value in tuning.items() if value is not None and dev is None):
        raise ConfigError(f"{option} is for tuning, which needs --dev FILE", hint="FILE holds n-best lists with references")
    for contradicts, one, other in (
        (tune_length and length_weight is not None, "--tune-length", "--length-weight"),
        (weight is not None and max_weight is not None, "--max-lambda", "--lambda"),
        (dev is not None and weight is not None and not tune_length, "--dev", "--lambda"),
    ):
        if contradicts:
            raise ConfigError(f"{one} and {other} are both given", hint="give one of them")


def _with_references(lists: Sequence[NBest], path: Path) -> list[NBest]:
    found = [each for each in lists if each.reference is not None]
    if not found:
        raise DataError(f"{path}: no list has a reference, so there is nothing to tune on", hint='add "reference": "..." to each')
    return found


def _write(out: Path, lists: Sequence[NBest], found: Candidates, weights: Weights) -> None:
    """Write a JSON line for each list, with its best hypotheses first."""
    totals = found.totals(weights)
    with whole_file(out) as file:
        for number, each in enumerate(lists):
            order = sorted(range(len(each.hypotheses)), key=lambda place: -totals[number, place])
            record: dict[str, Any] = {"id": each.id} if each.reference is None else {"id": each.id, "reference": each.reference}
            record["hypotheses"] = [
                {
                    "text": each.hypotheses[place].text,
                    "score": each.hypotheses[place].score,
                    "model_score": float(found.model_scores[number, place]),
                    "total": float(totals[number, place]),
                }
                for place in order
            ]
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
