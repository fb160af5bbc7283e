"""What a comparison would do and cost, before it starts."""

from __future__ import annotations

from typing import Any

from discern.workflows.compare_plan import CONVENTION, ComparePlan, CompareRequest, PlannedRun, plan_comparison
from discern.workflows.compare_results import Unit, check_results, units
from discern.workflows.plan import plan as plan_run


def dry_run(request: CompareRequest) -> dict[str, Any]:
    """Runs, steps, FLOPs and estimated hours; nothing is written.

    Raises:
        ConfigError, DataError: what `compare` would refuse.
    """
    plan = plan_comparison(request)
    every = units(plan)
    check_results(plan, every)
    hours = _hours(plan)
    rows = [_row(plan, run, [unit for unit in every if unit.run is run], hours[run.name]) for run in plan.runs]
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


def _row(plan: ComparePlan, run: PlannedRun, own: list[Unit], hours: float) -> dict[str, Any]:
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
        "tasks_left": sum(not unit.is_judged(plan, task) for unit in left for task in plan.tasks),
    }


def _hours(plan: ComparePlan) -> dict[str, float]:
    """Estimated hours of one pre-training of each run."""
    estimated: dict[str, float] = {}
    for run in plan.runs:
        if not run.trained:
            estimated[run.name] = 0.0
        elif plan.config.equal == "seconds" and run is not plan.reference:
            estimated[run.name] = estimated[plan.reference.name] * run.spec.budget
        else:
            request = run.request(plan.seeds[0], plan.request.out, plan.request.data, plan.request.device)
            estimated[run.name] = plan_run(request).values["estimated_seconds"] / 3600
    return estimated
