"""The summary of a comparison: medians and ranges of the scores, and permutation tests of the differences from the reference."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from discern import __version__
from discern.compare.plan import CONVENTION, ComparisonPlan, PlannedRun
from discern.compare.results import FORMAT, Unit, why_left_out
from discern.config.schema import ABSENT, NONE, diff, plain

MEAN = "mean"
"""Name of the column with the mean over all tasks."""

_EXACT_UP_TO = 200_000  # partitions of the seeds; if there are more, this many are drawn at random
_COSTS = ("steps", "flops", "flops_paper_convention", "seconds", "tokens", "positions")
# Units of the budget. 'tokens' counts positions, because padding costs as much as tokens; `tokens` in a row excludes padding.
_UNITS = {"flops": "FLOPs", "seconds": "seconds of training", "tokens": "positions (padding included)"}
Values = Sequence[float | None]


def summarize(plan: ComparisonPlan, every: Sequence[Unit]) -> dict[str, Any]:
    """The contents of comparison.json, from the existing result files; missing values are None, and `complete` is then False."""
    rows = [_row(plan, run, [unit for unit in every if unit.run is run]) for run in plan.runs]
    done = next((found for unit in every if (found := unit.pretraining()) is not None), {})
    return {
        "format": FORMAT,
        "discern": __version__,
        "complete": all(unit.is_finished(plan) for unit in every),
        "equal": plan.config.equal,
        "convention": CONVENTION,
        "budget": plan.budget if plan.budget is not None else rows[0]["seconds"],
        "budget_unit": _UNITS[plan.config.equal],
        "reference": plan.reference.name,
        "seeds": list(plan.seeds),
        "finetune_seeds": plan.config.finetune.seeds,
        "tasks": [task.name for task in plan.tasks],
        "data": {
            "fingerprint": plan.data.fingerprint,
            "vocab_size": plan.data.vocab_size,
            **{key: done.get("statistics", {}).get(key) for key in ("documents", "tokens")},
        },
        "machines": _distinct(found["machine"] for unit in every if (found := unit.pretraining()) is not None),
        "versions": _distinct(found["versions"] for unit in every if (found := unit.pretraining()) is not None),
        "runs": rows,
        "significance": _significance(rows, [task.name for task in plan.tasks]),
        "notes": [*plan.notes, *filter(None, (why_left_out(plan, unit) for unit in every))],
    }


def _row(plan: ComparisonPlan, run: PlannedRun, own: Sequence[Unit]) -> dict[str, Any]:
    found = [unit.pretraining() for unit in own]
    # The costs of a run that diverged are not those of a whole run.
    good = [record if record and "failure" not in record else None for record in found]
    done = [record for record in good if record is not None]
    asked = plan.config.finetune.seeds
    scores = {task.name: _scores([_first(unit.scores(task), asked) for unit in own]) for task in plan.tasks}
    held = {key: None for record in done for key in record["held_out"]}
    model, train = run.encoder, run.config.train
    return {
        "name": run.name,
        "objective": run.config.objective.name,
        "trained": run.trained,
        "network": run.network,
        "budget_share": run.spec.budget,
        "finished_seeds": sum(unit.has_succeeded(plan) for unit in own),
        **{key: _median([record[key] for record in done]) for key in _COSTS},
        "parameters": run.parameters,
        "shape": {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_heads": model.num_heads,
            "feedforward_size": model.feedforward_size,
            "sequence_length": run.config.data.sequence_length,
            "sequences_per_step": train.sequences_per_step,
        },
        "scores": {**scores, **_mean_of(scores)},
        "held_out": {key: _spread([record["held_out"].get(key) if record else None for record in good]) for key in held},
        "failures": {
            str(unit.seed): record["failure"] for unit, record in zip(own, found, strict=True) if record and "failure" in record
        },
        "settings": _differing(plan.reference, run),
        "curves": [{"seed": unit.seed, "points": record["curve"]} for unit, record in zip(own, found, strict=True) if record],
    }


def _first(found: Mapping[str, Any] | None, count: int) -> dict[str, Any] | None:
    """The scores of the first `count` fine-tuning seeds, as an earlier comparison may have run more."""
    if found is None:
        return None
    seeds = {str(seed) for seed in found["seeds"][:count]}
    failed = {seed: reason for seed, reason in found["failed_seeds"].items() if seed in seeds}
    return {**found, "median": _median(found["scores"][:count]), "failed_seeds": failed}


def _scores(found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One task: the median over the fine-tuning seeds for each pre-training seed, with median and range of these."""
    one = next((each for each in found if each is not None), None)
    facts = {key: one.get(key) if one else None for key in ("metric", "split", "examples")}
    failed = {f"{number}": each["failed_seeds"] for number, each in enumerate(found) if each and each["failed_seeds"]}
    return {**facts, **_spread([each["median"] if each else None for each in found]), "failed_finetunings": failed}


def _mean_of(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over the tasks for each pre-training seed that has all of them; empty with fewer than two tasks."""
    if len(scores) < 2:
        return {}
    columns = zip(*(each["values"] for each in scores.values()), strict=True)
    values = [None if None in column else statistics.fmean(column) for column in columns]
    return {MEAN: {"metric": "mean of the headlines", "split": None, "examples": None, **_spread(values)}}


def _significance(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Every row against the first, on the mean over the tasks and on each task."""
    reference, *others = rows
    columns = [*([MEAN] if len(tasks) > 1 else []), *tasks]
    found = []
    for row in others:
        for column in columns:
            first, second = (_present(each["scores"][column]["values"]) for each in (row, reference))
            if first and second:
                difference = compare_samples(first, second)
                found.append(
                    {
                        "run": row["name"],
                        "against": reference["name"],
                        "task": column,
                        "difference_of_medians": difference.median,
                        "p": difference.p,
                        "exact": difference.exact,
                        "smallest_p": difference.smallest_p,
                        "verdict": difference.verdict,
                        "seeds": [len(first), len(second)],
                    }
                )
    return found


def _spread(values: Values) -> dict[str, Any]:
    present = _present(values)
    return {
        "median": _median(values),
        "lowest": min(present, default=None),
        "highest": max(present, default=None),
        "values": list(values),
    }


def _median(values: Values) -> float | None:
    present = _present(values)
    return statistics.median(present) if present else None


def _present(values: Values) -> list[float]:
    return [value for value in values if value is not None]


def _differing(reference: PlannedRun, run: PlannedRun) -> dict[str, Any]:
    """The settings that differ from the reference's: 'none' as in a file; None for a setting that the run does not have."""
    pairs = diff(reference.config, run.config)
    return {key: None if now is ABSENT else NONE if now is None else plain(now) for key, _, now in pairs}


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


@dataclass(frozen=True)
class Difference:
    """Two samples compared.

    Attributes:
        median: median of the first sample minus that of the second.
        p: p-value of a two-sided permutation test of the difference of the means; None if a sample has fewer than two values.
        exact: whether `p` counts every partition, rather than a sample of them.
        smallest_p: the smallest p-value that is possible with samples of these sizes.
        verdict: whether the samples overlap, in words.
    """

    median: float
    p: float | None
    exact: bool
    smallest_p: float
    verdict: str


def compare_samples(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two samples of at least one value each.

    The p-value is the fraction of all partitions of the pooled values into two groups of these sizes whose means are at least
    as far apart; if there are more than 200,000 partitions, of that many random ones. The test only assumes that the values are
    exchangeable if there is no difference. It is unpaired, because with so few seeds a paired test has an even larger smallest
    p-value (2 of 2^n instead of 2 of n from 2n).
    """
    ways = math.comb(len(first) + len(second), len(first))
    # With equal sizes, swapping the two groups gives another partition that is as far apart.
    smallest = min(1.0, (2 if len(first) == len(second) else 1) / ways)
    p = None
    if min(len(first), len(second)) >= 2:
        p = _permuted(np.asarray(first, float), np.asarray(second, float), ways)
    return Difference(float(np.median(first) - np.median(second)), p, ways <= _EXACT_UP_TO, smallest, _verdict(first, second))


def _permuted(first: np.ndarray, second: np.ndarray, ways: int) -> float:
    """Fraction of the partitions whose means are at least as far apart as those of the samples."""
    pooled, size = np.concatenate([first, second]), len(first)
    if ways <= _EXACT_UP_TO:
        chosen = np.array(list(itertools.combinations(range(len(pooled)), size)))
    else:
        draws = np.random.default_rng(0).random((_EXACT_UP_TO, len(pooled))).argsort(axis=1)[:, :size]
        chosen = np.concatenate([np.arange(size)[None], draws])  # the samples themselves are one of the partitions
    sums = pooled[chosen].sum(axis=1)
    apart = np.abs(sums / size - (pooled.sum() - sums) / len(second))
    # Partitions with the same values in another order must count as equally far apart, despite rounding.
    return float(np.mean(apart >= abs(first.mean() - second.mean()) - 1e-12))


def _verdict(first: Sequence[float], second: Sequence[float]) -> str:
    if min(first) > max(second):
        return "every seed above every seed of the reference"
    if max(first) < min(second):
        return "every seed below every seed of the reference"
    return "the seeds overlap"
