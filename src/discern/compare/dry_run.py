"""What a comparison would run, and how long that would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from discern.compare.plan import CONVENTION, ComparisonPlan, PlannedRun, plan_comparison
from discern.compare.results import Unit, check_results, units
from discern.pretraining.estimate import estimate
from discern.pretraining.run import plan as plan_run


def dry_run(
    config: Path,
    *,
    data: Path,
    out: Path,
    task_data: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
) -> dict[str, Any]:
    """Runs, steps, FLOPs and estimated hours of a comparison; nothing is written. The arguments are those of `compare`.

    Raises:
        ConfigError, DataError: as in `compare`.
    """
    plan = plan_comparison(config, data=data, out=out, task_data=task_data, preset=preset, overrides=overrides, device=device)
    every = units(plan)
    check_results(plan, every)
    hours = _hours(plan)
    rows = [_planned_row(plan, run, [unit for unit in every if unit.run is run], hours[run.name]) for run in plan.runs]
    return {
        "equal": plan.config.equal,
        "convention": CONVENTION,
        "budget": plan.budget,
        "reference": plan.reference.name,
        "seeds": list(plan.seeds),
        "tasks": {task.name: str(task.folder) for task in plan.tasks},
        "runs": rows,
        "estimated_hours_left": sum((row["estimated_hours"] or 0.0) * row["seeds_left"] for row in rows),
        "finetunings_left": plan.config.finetune.seeds * sum(row["tasks_left"] for row in rows),
        "notes": list(plan.notes),
    }


def _planned_row(plan: ComparisonPlan, run: PlannedRun, own: list[Unit], hours: float) -> dict[str, Any]:
    left = [unit for unit in own if not unit.is_finished(plan)]
    return {
        "name": run.name,
        "objective": run.config.objective.name,
        "network": run.network,
        "steps": run.steps,
        "flops": None if run.flops is None else run.flops.executed,
        "flops_paper_convention": None if run.flops is None else run.flops.paper,
        "tokens": run.tokens,
        "parameters": run.parameters,
        "estimated_hours": hours,
        "seeds_left": sum(unit.pretraining() is None for unit in left),
        "tasks_left": sum(not unit.is_finetuned(plan, task) for unit in left for task in plan.tasks),
    }


def _hours(plan: ComparisonPlan) -> dict[str, float]:
    """Estimated hours per pre-training seed of each run."""
    estimated: dict[str, float] = {}
    for run in plan.runs:
        if not run.trained:
            estimated[run.name] = 0.0
        elif plan.config.equal == "seconds" and run is not plan.reference:
            estimated[run.name] = estimated[plan.reference.name] * run.spec.budget
        else:
            planned = plan_run(
                config=run.file,
                data=plan.data.folder,
                out=plan.out,
                preset=run.preset,
                overrides=run.overrides_of(plan.seeds[0]),
                warn=lambda _: None,
            )
            estimated[run.name] = estimate(planned, device=plan.device).values["estimated_seconds"] / 3600
    return estimated
