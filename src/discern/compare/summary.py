"""The summary of a comparison: medians and ranges of the scores, and permutation tests of the differences from the reference."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from discern import __version__
from discern.compare.plan import CONVENTION, ComparisonPlan, PlannedRun
from discern.config.schema import ABSENT, NONE, diff, plain

if TYPE_CHECKING:
    from discern.compare.run import Unit

FORMAT = 1
_EXACT_UP_TO = 200_000  # partitions of the seeds; if there are more, this many are drawn at random
_COSTS = ("steps", "flops", "flops_paper_convention", "seconds", "tokens", "positions")
# Units of the budget. 'tokens' counts positions, because padding costs as much as tokens; `tokens` in a row excludes padding.
_UNITS = {"flops": "FLOPs", "seconds": "seconds of training", "tokens": "positions (padding included)"}


def summarize(plan: ComparisonPlan, units: Sequence[Unit]) -> dict[str, Any]:
    """The contents of comparison.json, from the results that exist; missing values are None, and `complete` is then False."""
    rows = [_row(plan, run, [unit for unit in units if unit.run is run]) for run in plan.runs]
    done = [unit.pretraining for unit in units if unit.pretraining is not None]
    statistics = plan.data.manifest.statistics
    return {
        "format": FORMAT,
        "discern": __version__,
        "complete": all(unit.is_finished for unit in units),
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
            "documents": statistics.documents,
            "tokens": statistics.tokens,
        },
        "machines": _distinct(record["machine"] for record in done),
        "versions": _distinct(record["versions"] for record in done),
        "runs": rows,
        "significance": [entry for row in rows[1:] for entry in _significance(row, rows[0])],
        "notes": [reason for unit in units if (reason := unit.why_left_out)],
    }


def _row(plan: ComparisonPlan, run: PlannedRun, units: Sequence[Unit]) -> dict[str, Any]:
    # The costs of a run that diverged are not those of a whole run.
    records = [unit.succeeded for unit in units]
    done = [record for record in records if record is not None]
    held = dict.fromkeys(key for record in done for key in record["held_out"])

    # For each task the median over the fine-tuning seeds of each pre-training seed; an earlier comparison may have run more seeds
    scores = {}
    for task in plan.tasks:
        results = [unit.result["tasks"].get(task.name, {}) for unit in units]
        one: dict[str, Any] = next(filter(None, results), {})
        scores[task.name] = {
            **{key: one.get(key) for key in ("metric", "split", "examples")},
            **_spread([_spread(result.get("scores", ())[: plan.config.finetune.seeds])["median"] for result in results]),
            "failed_finetunings": {
                str(number): result["failed_seeds"] for number, result in enumerate(results) if result.get("failed_seeds")
            },
        }
    if len(scores) > 1:
        columns = zip(*(score["values"] for score in scores.values()), strict=True)
        means = [None if None in column else fmean(column) for column in columns]
        mean = {"metric": "mean of the headlines", "split": None, "examples": None, **_spread(means)}
        scores = {"mean": mean, **scores}

    return {
        "name": run.name,
        "objective": run.config.objective.name,
        "trained": run.trained,
        "network": run.network,
        "finished_seeds": sum(unit.is_finished and unit.succeeded is not None for unit in units),
        **{key: _spread([record[key] for record in done])["median"] for key in _COSTS},
        "parameters": run.parameters,
        "shape": {key: getattr(run.encoder, key) for key in ("num_layers", "hidden_size", "num_heads", "feedforward_size")},
        "scores": scores,
        "held_out": {key: _spread([record["held_out"].get(key) if record else None for record in records]) for key in held},
        "failures": {str(unit.seed): unit.failure for unit in units if unit.failure is not None},
        # 'none' as in a file; None for a setting that the run does not have
        "settings": {
            key: None if now is ABSENT else NONE if now is None else plain(now)
            for key, _, now in diff(plan.reference.config, run.config)
        },
        "curves": [{"seed": unit.seed, "points": unit.pretraining["curve"]} for unit in units if unit.pretraining],
    }


def _significance(row: Mapping[str, Any], reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row against the reference, on the mean over the tasks and on each task."""
    entries = []
    for column in row["scores"]:
        first, second = ([value for value in side["scores"][column]["values"] if value is not None] for side in (row, reference))
        if first and second:
            tested = {**compare_samples(first, second), "seeds": [len(first), len(second)]}
            entries.append({"run": row["name"], "against": reference["name"], "task": column, **tested})
    return entries


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    present = [value for value in values if value is not None]
    middle = median(present) if present else None
    return {"median": middle, "lowest": min(present, default=None), "highest": max(present, default=None), "values": [*values]}


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value): value for value in values}.values())


def compare_samples(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Compare two samples of at least one value each.

    The p-value is that of a two-sided permutation test: the fraction of all partitions of the pooled values into two groups of
    these sizes whose means are at least as far apart; if there are more than 200,000 partitions, of that many random ones. The
    test only assumes that the values are exchangeable if there is no difference. It is unpaired, because with so few seeds a
    paired test has an even larger smallest p-value (2 of 2^n instead of 2 of n from 2n).

    Returns:
        `difference_of_medians`; `p`, None if a sample has fewer than two values; `exact`: whether `p` counts every partition;
        `smallest_p`: the smallest p-value that samples of these sizes can have; `verdict`: whether they overlap, in words.
    """
    from scipy.stats import permutation_test

    def distance(a: np.ndarray, b: np.ndarray, axis: int) -> Any:
        # Partitions with the same values in another order must count as equally far apart, despite rounding.
        return np.round(np.abs(a.mean(axis) - b.mean(axis)), 12)

    ways, p = math.comb(len(first) + len(second), len(first)), None
    if min(len(first), len(second)) >= 2:
        options: dict[str, Any] = {"n_resamples": _EXACT_UP_TO, "vectorized": True, "alternative": "greater", "random_state": 0}
        p = float(permutation_test((first, second), distance, **options).pvalue)
    verdict = "the seeds overlap"
    if min(first) > max(second) or max(first) < min(second):
        side = "above" if min(first) > max(second) else "below"
        verdict = f"every seed {side} every seed of the reference"
    return {
        "difference_of_medians": median(first) - median(second),
        "p": p,
        "exact": ways <= _EXACT_UP_TO,
        # With equal sizes, swapping the two groups gives another partition that is as far apart.
        "smallest_p": min(1.0, (2 if len(first) == len(second) else 1) / ways),
        "verdict": verdict,
    }
