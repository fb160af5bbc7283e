"""The search for a learning rate by short training runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from discern.errors import ConfigError
from discern.finetuning.seed import FinetunePlan, train_network
from discern.finetuning.settings import FinetuneConfig
from discern.finetuning.task_files import MIN_SELECTION
from discern.progress import Progress
from discern.storage.checksums import read_object, write_json
from discern.training.distributed import Ranks
from discern.training.interrupt import StopRequest

_RATE_FACTORS = (1.0, 1 / 3, 3.0)
# Length of a trial: a fraction of the steps of a seed, and a minimum.
_TRIAL_FRACTION, _MIN_TRIAL_STEPS = 1 / 3, 100
TRIALS_FILE = "trials.json"


def check_selection(plan: FinetunePlan) -> None:
    """Check that there are examples to choose a learning rate by, if one is to be chosen.

    Raises:
        ConfigError: there are too few held-out examples.
    """
    without = next((name for name, data in plan.data.items() if data.selection is None), None)
    if plan.config.finetune.rate_search and without is not None:
        file = "a dev file" if plan.data[without].dev_name == "dev" else "a larger training file, or a dev file"
        raise ConfigError(
            f"{without}: there are too few held-out examples to choose a learning rate",
            hint=f"give {file} of at least {MIN_SELECTION} examples, or leave out --sweep-rates",
        )


def search_rate(plan: FinetunePlan, ranks: Ranks, progress: Progress, stop: StopRequest) -> dict[str, Any]:
    """The learning rate whose short training run scored best on the selection, with all trials under `trials`.

    Each trial has its own warm-up and decay. Equal scores are decided by the lower loss. The configured rate is tried first,
    and is used if every trial diverges. Finished trials are not repeated; an interrupted one is continued.

    The plan has passed `check_selection`.
    """
    folder = plan.out / "rates"
    trials = _kept_trials(folder / TRIALS_FILE)
    for factor in _RATE_FACTORS[len(trials) :]:
        given = plan.config.optimizer.learning_rate
        rate = given if factor == 1 else float(f"{given * factor:.2g}")
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
    """The configuration with another learning rate."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": rate})})


def _trial(plan: FinetunePlan, rate: float) -> FinetunePlan:
    """The plan of a short training with a learning rate, evaluated at its end."""
    whole, config = plan.config.train.max_steps, at_rate(plan.config, rate)
    steps = min(whole, max(_MIN_TRIAL_STEPS, round(whole * _TRIAL_FRACTION)))
    shorter: dict[str, int] = {"warmup_steps": round(config.optimizer.warmup_steps * steps / whole)}
    if config.optimizer.decay_steps is not None:
        shorter["decay_steps"] = max(1, round(config.optimizer.decay_steps * steps / whole))
    return replace(
        plan,
        config=config.model_copy(
            update={
                "optimizer": config.optimizer.model_copy(update=shorter),
                "train": config.train.model_copy(update={"max_steps": steps, "evaluate_every_steps": steps}),
                "finetune": config.finetune.model_copy(update={"keep": "last", "patience": 0}),
            }
        ),
    )


def _kept_trials(path: Path) -> list[dict[str, Any]]:
    """The trials that were finished before the search was interrupted."""
    if not path.is_file():
        return []
    hint = f"remove {path.parent}, then run the same `discern finetune` command"
    found: list[dict[str, Any]] = read_object(path, hint=hint).get("trials", [])
    return found
