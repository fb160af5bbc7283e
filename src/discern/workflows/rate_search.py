"""A learning rate found by short trainings, before the seeds are trained with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from discern.errors import ConfigError
from discern.progress import Progress
from discern.records import read_object
from discern.training.interrupt import StopRequest
from discern.training.parallel import Ranks
from discern.workflows.finetune_seed import Plan, train_network
from discern.workflows.finetune_settings import FinetuneConfig
from discern.workflows.finetuned import write_json

_FACTORS = (1.0, 1 / 3, 3.0)
# Of the steps of a seed, but no fewer than so many.
_SHARE, _LEAST = 1 / 3, 100
TRIALS_FILE = "trials.json"


def search_rate(plan: Plan, ranks: Ranks, progress: Progress, stop: StopRequest) -> dict[str, Any]:
    """The rate whose short training scored best on the selection: `learning_rate`, and under `trials` what each came to.

    A trial has a warm-up and a decay of its own. Among equal scores the lower loss decides; the setting comes first, and is taken
    where every trial diverges. What is done is not repeated; what was interrupted goes on.

    Raises:
        ConfigError: there is nothing to choose by.
    """
    without = next((name for name, data in plan.data.items() if data.selection is None), None)
    if without is not None:
        raise ConfigError(
            f"{without}: there are too few held-out examples to choose a learning rate",
            hint="give a larger training file or a dev file, or leave out --sweep-rates",
        )
    folder = plan.out / "rates"
    trials = _kept(folder / TRIALS_FILE)
    for factor in _FACTORS[len(trials) :]:
        rate = float(f"{plan.config.optimizer.learning_rate * factor:.2g}")
        trial = _trial(plan, rate)
        trained = train_network(trial, trial.config.train.seed, folder / f"{rate:g}", f"rate {rate:g}", ranks, progress, stop)
        score, loss = (None, None) if trained.diverged else (trained.state.best, trained.state.best_loss)
        came_to = "diverged" if score is None else f"{score:.4f}"
        progress.note(f"learning rate {rate:g}: {came_to} after {trained.state.step:,} steps")
        trials = [*trials, {"learning_rate": rate, "steps": trained.state.step, "score": score, "loss": loss}]
        if ranks.writes:
            write_json(folder / TRIALS_FILE, {"trials": trials})
            shutil.rmtree(folder / f"{rate:g}" / "checkpoints", ignore_errors=True)
    best = max(trials, key=lambda each: (-1e9, 0.0) if each["score"] is None else (each["score"], -each["loss"]))
    tried = ", ".join(format(each["learning_rate"], "g") for each in trials)
    progress.note(f"learning rate {best['learning_rate']:g}, the best of {tried}")
    return {"learning_rate": best["learning_rate"], "trials": trials}


def at_rate(config: FinetuneConfig, rate: float) -> FinetuneConfig:
    """The same with another learning rate."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": rate})})


def _trial(plan: Plan, rate: float) -> Plan:
    """A short training with a rate, evaluated at its end."""
    whole, config = plan.config.train.max_steps, at_rate(plan.config, rate)
    steps = min(whole, max(_LEAST, round(whole * _SHARE)))
    warmup = round(config.optimizer.warmup_steps * steps / whole)
    return replace(
        plan,
        config=config.model_copy(
            update={
                "optimizer": config.optimizer.model_copy(update={"warmup_steps": warmup}),
                "train": config.train.model_copy(update={"max_steps": steps, "evaluate_every_steps": steps}),
                "finetune": config.finetune.model_copy(update={"keep": "last", "patience": 0}),
            }
        ),
    )


def _kept(path: Path) -> list[dict[str, Any]]:
    """The trials that were finished before an interruption."""
    if not path.is_file():
        return []
    hint = f"remove {path.parent}, then run the same `discern finetune` command"
    found: list[dict[str, Any]] = read_object(path, hint=hint).get("trials", [])
    return found
