"""The length of a fine-tuning: unless it is given, it is fitted to the data, and so are the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from discern.errors import ConfigError
from discern.finetuning.settings import FinetuneConfig, is_fitted
from discern.finetuning.task_files import TaskData
from discern.training.schedule import overlap
from discern.wording import counted

# benchmarks/records/2026-11-22-finetune-defaults.md: of twenty evaluations the best comes late, as the learning rate falls to
# zero, and after dips of up to six evaluations; a patience of less than a third of them is often too short.
_EVALUATIONS = 20
_PATIENCE = 0.4
_MIN_EVALUATIONS = 3
# Evaluating a row takes a third of the time of training on it; evaluations should take a fifth of the time at most.
_EVALUATED_PER_TRAINED_ROW = 0.6
# Small data sets are repeated at most this many times, whatever the minimum number of steps.
_MAX_EPOCHS = 50


def with_steps(
    config: FinetuneConfig, data: Mapping[str, TaskData], user_set: Set[str], *, debug: bool
) -> tuple[FinetuneConfig, str | None]:
    """Set the steps, the warm-up and the evaluations from the settings and the size of the data.

    Args:
        user_set: dotted keys of settings that the user gave, which are not changed.
        debug: train for a few steps only.

    Returns:
        The configuration, and a line about a fitted length or None.
    """
    rows = sum(len(each.train.features) for each in data.values())
    steps = config.train.max_steps if "train.max_steps" in user_set else _steps(config, rows, user_set, debug=debug)
    updates: dict[str, Any] = {"train.max_steps": steps}
    if "optimizer.warmup_steps" not in user_set:
        updates["optimizer.warmup_steps"] = int(steps * config.finetune.warmup_fraction)
    config = _with_values(config, updates)
    if (problem := overlap(config.optimizer, steps)) is not None:
        raise ConfigError(problem, hint="set a lower finetune.warmup_fraction, optimizer.decay_fraction or optimizer.decay_steps")
    if not is_fitted(config.finetune.recipe, user_set):
        return config, None
    updates = {"finetune.retries": 0} if debug else {}
    every = _evaluations(config, data, steps, user_set)
    selects = every > 0 and all(each.selection is not None for each in data.values())
    keeps = config.finetune.keep if "finetune.keep" in user_set else "best" if selects else "last"
    updates |= {"train.evaluate_every_steps": every, "finetune.keep": keeps}
    if "finetune.patience" not in user_set:
        waits = every > 0 and keeps == "best"
        updates["finetune.patience"] = max(_MIN_EVALUATIONS, round(_PATIENCE * steps / every)) if waits else 0
    fitted = _with_values(config, updates)
    return fitted, _length_note(fitted, rows)


def _steps(config: FinetuneConfig, rows: int, user_set: Set[str], *, debug: bool) -> int:
    """The number of steps of the epochs, at least `finetune.min_steps` unless the epochs are given."""
    per_step = config.train.sequences_per_step
    epochs = min(config.finetune.epochs, 3.0) if debug else config.finetune.epochs
    # The released code fills up the last batch of an epoch.
    google = config.finetune.recipe == "google"
    steps = max(1, int(-(-rows // per_step) * epochs) if google else round(rows / per_step * epochs))
    if debug or "finetune.epochs" in user_set:
        return steps
    return max(steps, min(config.finetune.min_steps, round(rows / per_step * _MAX_EPOCHS)))


def _evaluations(config: FinetuneConfig, data: Mapping[str, TaskData], steps: int, user_set: Set[str]) -> int:
    """Steps between evaluations; 0 if the selection is missing, or too large for the length of the training."""
    if "train.evaluate_every_steps" in user_set:
        return config.train.evaluate_every_steps
    selections = [each.selection for each in data.values()]
    chosen = [each for each in selections if each is not None]
    if len(chosen) < len(selections):
        return 0
    rows = sum(len(each.split.features) for each in chosen)
    cheapest = rows / (_EVALUATED_PER_TRAINED_ROW * config.train.sequences_per_step)
    every = max(1, -(-steps // _EVALUATIONS), round(cheapest))
    return every if every * _MIN_EVALUATIONS <= steps else 0


def _length_note(config: FinetuneConfig, rows: int) -> str:
    train, finetune = config.train, config.finetune
    epochs = train.max_steps * train.sequences_per_step / max(rows, 1)
    line = f"{counted(train.max_steps, 'step')}, {epochs:.1f} passes over {counted(rows, 'row')}"
    if finetune.keep == "best" and train.evaluate_every_steps:
        line += f"; evaluated every {counted(train.evaluate_every_steps, 'step')}, the best weights are kept"
    if finetune.patience:
        line += f", and training stops after {counted(finetune.patience, 'evaluation')} without a better score"
    return line


def _with_values(config: FinetuneConfig, updates: Mapping[str, Any]) -> FinetuneConfig:
    """The configuration with other values, given by dotted key."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in updates.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in sections.items()}
    )
