"""Length of a fine-tuning: as given, or fitted to the data with evaluations that choose the best weights."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from discern.workflows.finetune_settings import FinetuneConfig, is_fitted
from discern.workflows.task_files import TaskData

# benchmarks/records/2026-11-22-finetune-defaults.md: the best of twenty evaluations comes late, as the rate falls to zero, and
# after dips of up to six evaluations; to wait for less than a third of them is often not enough.
_EVALUATIONS = 20
_PATIENCE = 0.4
_FEWEST_EVALUATIONS = 3
# A row is evaluated in a third of the time that training on it takes; evaluations are to take a fifth of the time at most.
_ROWS_PER_ROW_OF_A_STEP = 0.6
# Small data sets are repeated so many times at most, whatever the least number of steps.
_MOST_EPOCHS = 50


def with_steps(
    config: FinetuneConfig, data: Mapping[str, TaskData], user_set: Set[str], *, debug: bool
) -> tuple[FinetuneConfig, str | None]:
    """The steps, the warm-up and the evaluations that the settings and the data come to, and a line on what was decided.

    Args:
        user_set: dotted keys of settings that somebody gave; these stay as they are.
        debug: the fewest steps that go the whole way.
    """
    rows = sum(len(each.train.features) for each in data.values())
    steps = config.train.max_steps if "train.max_steps" in user_set else _steps(config, rows, user_set, debug=debug)
    updates: dict[str, Any] = {"train.max_steps": steps}
    if "optimizer.warmup_steps" not in user_set:
        updates["optimizer.warmup_steps"] = int(steps * config.finetune.warmup_fraction)
    if not is_fitted(config.finetune.recipe, user_set):
        return _updated(config, updates), None
    if debug:
        updates["finetune.retries"] = 0
    every = _evaluations(config, data, steps, user_set)
    keeps = config.finetune.keep if "finetune.keep" in user_set else "best" if every else "last"
    updates |= {"train.evaluate_every_steps": every, "finetune.keep": keeps}
    if "finetune.patience" not in user_set:
        waits = every > 0 and keeps == "best"
        updates["finetune.patience"] = max(_FEWEST_EVALUATIONS, round(_PATIENCE * steps / every)) if waits else 0
    fitted = _updated(config, updates)
    return fitted, _note(fitted, rows)


def _steps(config: FinetuneConfig, rows: int, user_set: Set[str], *, debug: bool) -> int:
    """The steps that the epochs come to, and no fewer than `finetune.min_steps` unless the epochs were given."""
    per_step = config.train.sequences_per_step
    epochs = min(config.finetune.epochs, 3.0) if debug else config.finetune.epochs
    # The released code fills the last batch of an epoch up.
    google = config.finetune.recipe == "google"
    steps = max(1, int(-(-rows // per_step) * epochs) if google else round(rows / per_step * epochs))
    if debug or "finetune.epochs" in user_set:
        return steps
    return max(steps, min(config.finetune.min_steps, round(rows / per_step * _MOST_EPOCHS)))


def _evaluations(config: FinetuneConfig, data: Mapping[str, TaskData], steps: int, user_set: Set[str]) -> int:
    """Steps between evaluations; 0: none, as there is nothing to choose weights by, or too much of it for the time."""
    if "train.evaluate_every_steps" in user_set:
        return config.train.evaluate_every_steps
    selections = [each.selection for each in data.values()]
    chosen = [each for each in selections if each is not None]
    if len(chosen) < len(selections):
        return 0
    rows = sum(len(each.split.features) for each in chosen)
    dearest = rows / (_ROWS_PER_ROW_OF_A_STEP * config.train.sequences_per_step)
    every = max(1, -(-steps // _EVALUATIONS), round(dearest))
    return every if every * _FEWEST_EVALUATIONS <= steps else 0


def _note(config: FinetuneConfig, rows: int) -> str:
    train, finetune = config.train, config.finetune
    epochs = train.max_steps * train.sequences_per_step / max(rows, 1)
    line = f"{train.max_steps:,} steps, {epochs:.1f} passes over {rows:,} rows"
    if finetune.keep == "best" and train.evaluate_every_steps:
        line += f"; evaluated every {train.evaluate_every_steps:,} steps, the best weights are kept"
    if finetune.patience:
        line += f", and training stops after {finetune.patience} evaluations without a better score"
    return line


def _updated(config: FinetuneConfig, updates: Mapping[str, Any]) -> FinetuneConfig:
    """With other values, by dotted key."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in updates.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    )
