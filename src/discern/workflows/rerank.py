"""N-best lists re-ranked: the system's score plus lambda times what a text encoder makes of each hypothesis."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import whole_file
from discern.artifacts.guard import check_output
from discern.data.unknown import UnknownTokens
from discern.errors import ConfigError, DataError, did_you_mean
from discern.progress import Progress
from discern.scoring import PREFERRED_TO_RERANK
from discern.scoring.base import Scorer
from discern.scoring.corpus_metrics import METRICS, corpus_metric, is_installed
from discern.scoring.nbest import NBest, read_nbest
from discern.scoring.rank_measures import Measured, hypothesis_statistics, measure
from discern.scoring.reranking import LENGTH_GRID, UNCHANGED, Candidates, Weights, judge, lambda_grid, tune
from discern.workflows.score import load_scorer

UNTUNED_LAMBDA = 0.5
"""The middle of what Electric tried; where nothing was tuned, a guess."""


@dataclass(frozen=True)
class RerankRequest:
    """What to re-rank with what.

    Attributes:
        model: a run, an export, or a Hugging Face ELECTRA.
        input: n-best lists, see `read_nbest`.
        out: file for JSON lines, there whole or not at all.
        dev: n-best lists with references on which the weights are tuned; None: they are those given, or the defaults.
        weight: lambda, instead of tuning it.
        max_weight: the largest lambda to try.
        length_weight: of a token, instead of 0.
        tune_length: tune that too.
        metric: metric to optimize: 'wer', 'cer' or 'bleu'.
        scorer: None: the first of `PREFERRED_TO_RERANK` that the model serves.
        lowercase: give the model the hypotheses in lower case.
    """

    model: Path
    input: Path
    out: Path
    dev: Path | None = None
    weight: float | None = None
    max_weight: float = 1.0
    length_weight: float | None = None
    tune_length: bool = False
    metric: str = "wer"
    scorer: str | None = None
    lowercase: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class Reranked:
    """What came of it.

    Attributes:
        lists, hypotheses: how many were ranked.
        references: how many lists have one.
        changed: lists with another winner than before.
        scorer: which judged them.
        weights: that were used.
        measured: by metric, over the lists with references; None where it could not be measured.
        dev: likewise, of the lists that the weights were tuned on; empty where there were none.
    """

    lists: int
    hypotheses: int
    references: int
    changed: int
    scorer: str
    weights: Weights
    measured: Mapping[str, Measured | None]
    dev: Mapping[str, Measured | None]


def rerank(request: RerankRequest, progress: Progress, warn: Callable[[str], None]) -> Reranked:
    """Rank every list anew, write them, and measure what that is worth.

    Args:
        warn: told of weights that were not tuned or reach the edge of what was tried, of texts read in several windows, of
            metrics that are not installed, and of damaged checkpoints that were passed over.

    Raises:
        ConfigError: options contradict each other, the model serves no such scorer, or the package of a metric is missing.
        DataError: a file is missing or holds no n-best lists, or those to tune on no references.
        CheckpointError: the weights are missing or damaged.
    """
    _check(request)
    lists = read_nbest(request.input)
    dev_lists = [] if request.dev is None else _referenced(read_nbest(request.dev), request.dev)
    scorer = load_scorer(request.model, request.scorer, request.device, warn=warn, preferred=PREFERRED_TO_RERANK)
    metrics = {name: metric for name, metric in METRICS.items() if is_installed(metric)}
    if len(metrics) < len(METRICS):
        warn(f"{' and '.join(sorted(METRICS.keys() - metrics))} are not measured: pip install 'discern-nlp[rerank]'")

    def judged(lists: Sequence[NBest]) -> Candidates:
        return _judged(lists, scorer, request, progress, warn)

    def measured(lists: Sequence[NBest], found: Candidates, weights: Weights) -> dict[str, Measured | None]:
        places = found.best(UNCHANGED), found.best(weights)
        return {name: measure(lists, *places, metrics[name]) if name in metrics and lists else None for name in METRICS}

    weights, dev = _given(request, warn), {}
    if request.dev is not None:
        if request.dev.samefile(request.input):
            warn(f"the weights are tuned on {request.input} itself, so what they gain there is more than they gain elsewhere")
        tuned_on = judged(dev_lists)
        weights = _tuned(dev_lists, tuned_on, request, warn)
        dev = measured(dev_lists, tuned_on, weights)
    found = judged(lists)
    _write(request.out, lists, found, weights)
    known = [number for number, each in enumerate(lists) if each.reference is not None]
    winners = zip(lists, found.best(UNCHANGED).tolist(), found.best(weights).tolist(), strict=True)
    return Reranked(
        lists=len(lists),
        hypotheses=sum(len(each.hypotheses) for each in lists),
        references=len(known),
        changed=sum(each.hypotheses[before].text != each.hypotheses[after].text for each, before, after in winners),
        scorer=scorer.name,
        weights=weights,
        measured=measured([lists[number] for number in known], found.chosen(known), weights),
        dev=dev,
    )


def _check(request: RerankRequest) -> None:
    """What can be known to be wrong before anything is read."""
    if request.dev is None and request.tune_length:
        raise ConfigError("--tune-length without lists to tune on", hint="add --dev FILE, n-best lists with references")
    if request.tune_length and request.length_weight is not None:
        raise ConfigError("--tune-length and --length-weight are both given", hint="give one of them")
    if request.dev is not None and request.weight is not None and not request.tune_length:
        raise ConfigError("--dev and --lambda are both given, so there is nothing to tune", hint="leave out one of them")
    given = {"--lambda": request.weight, "--max-lambda": request.max_weight, "--length-weight": request.length_weight}
    for option, value in given.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{option} is {value}, expected a finite number", hint=f"for example {option} 0.5")
    if request.max_weight <= 0:
        raise ConfigError(f"--max-lambda is {request.max_weight:g}, expected more than 0", hint="--max-lambda 1")
    if request.metric not in METRICS:
        raise ConfigError(f"unknown metric '{request.metric}'", hint=did_you_mean(request.metric, METRICS))
    if request.dev is not None:
        corpus_metric(request.metric)
    check_output("--out", request.out, "reranked.jsonl", request.model, request.input, request.dev)


def _referenced(lists: Sequence[NBest], path: Path) -> list[NBest]:
    """The lists that can be tuned on."""
    found = [each for each in lists if each.reference is not None]
    if not found:
        raise DataError(f"{path}: no list has a reference, so there is nothing to tune on", hint='add "reference": "..." to each')
    return found


def _judged(
    lists: Sequence[NBest], scorer: Scorer, request: RerankRequest, progress: Progress, warn: Callable[[str], None]
) -> Candidates:
    progress.start("scoring", sum(len(each.hypotheses) for each in lists), "hypotheses")
    unknown = UnknownTokens(scorer.tokenizer)
    found = judge(lists, scorer, str.lower if request.lowercase else str, progress.advance, unknown.add_tokens)
    progress.finish()
    unknown.report(progress.note, warn)
    if found.too_long:
        which, were = ("1 text is", "was") if found.too_long == 1 else (f"{found.too_long:,} texts are", "were")
        warn(f"{which} longer than the {scorer.room} tokens of the model, and {were} read in windows")
    return found


def _given(request: RerankRequest, warn: Callable[[str], None]) -> Weights:
    """The weights where none are tuned."""
    if request.weight is None and request.dev is None:
        warn(
            f"lambda is {UNTUNED_LAMBDA:g}, a guess: the right one depends on the scale of the scores; tune it on other lists "
            "with references (--dev FILE), or say it (--lambda VALUE)"
        )
    return Weights(UNTUNED_LAMBDA if request.weight is None else request.weight, request.length_weight or 0.0)


def _tuned(lists: Sequence[NBest], found: Candidates, request: RerankRequest, warn: Callable[[str], None]) -> Weights:
    """The weights that serve the lists best, of those that were not given."""
    metric = corpus_metric(request.metric)
    models = lambda_grid(request.max_weight) if request.weight is None else (request.weight,)
    lengths = LENGTH_GRID if request.tune_length else (request.length_weight or 0.0,)
    weights = tune(found, hypothesis_statistics(lists, metric), metric, models, lengths)
    if len(models) > 1 and weights.model == models[-1]:
        warn(f"the best lambda is the largest of those tried; for larger ones: --max-lambda {4 * request.max_weight:g}")
    return weights


def _write(out: Path, lists: Sequence[NBest], found: Candidates, weights: Weights) -> None:
    """A JSON line for each list, its hypotheses best first."""
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
