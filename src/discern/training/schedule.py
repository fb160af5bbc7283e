"""The learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from discern.errors import ConfigError
from discern.training.config import OptimizerConfig, TrainConfig

_LONGEST_WARMUP = 0.1  # of the time budget


def learning_rate(config: OptimizerConfig, step: int, length: int, time_used: float | None = None) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    'linear' rises during the warm-up, reaches its peak at the last warm-up step and falls to zero at the end. 'released'
    multiplies warm-up and decay, so that its peak is slightly lower and the very first update has rate 0. 'wsd' stays at its
    peak until the decay begins, `decay_length` steps before the end.

    Args:
        length: number of updates that the schedule spans.
        time_used: fraction of the time budget that is used; None without a time budget. The decay follows
            whichever has progressed further, the steps or the time, and ends when either of them ends. The warm-up ends after a
            tenth of the time at the latest: how many steps fit into the time was not known when its length was chosen.

    Reference: Clark et al. 2020, table 6; google-research/electra, optimization.py for 'released'; Haegele et al. 2024, "Scaling
    laws and compute-optimal training beyond fixed training durations", for 'wsd'.
    """
    done = min(1.0, max(step / length, time_used or 0.0))
    warmup, by_time = max(config.warmup_steps, 1), (time_used or 0.0) / _LONGEST_WARMUP
    if config.schedule == "released":
        rise = min(1.0, max(step / warmup, by_time))
        return float(config.learning_rate * rise * (1 - done) ** config.decay_power)
    rise = min(1.0, max((step + 1) / warmup, by_time))
    if config.schedule == "constant":
        return config.learning_rate * rise
    if config.schedule == "wsd":
        decay = decay_length(config, length)
        # Counted in steps where the steps decide, so that the rate depends on the distance to the end only, not on the length:
        # a decay from a checkpoint then equals that of a run which was as long from the start, bit for bit.
        progress = (step - (length - decay)) / decay
        if time_used is not None:
            progress = max(progress, (time_used - 1) * length / decay + 1)
        return config.learning_rate * rise * (1 - math.sqrt(min(max(progress, 0.0), 1.0)))
    # The decay begins where the warm-up ends. Under a time budget that fraction of the run is unknown, so it begins at once.
    warm = min(config.warmup_steps / length, 1.0) if time_used is None else 0.0
    fall = min(1.0, (1 - done) / (1 - warm)) if warm < 1 else 1.0
    return float(config.learning_rate * rise * fall**config.decay_power)


def decay_length(config: OptimizerConfig, length: int) -> int:
    """Number of steps over which 'wsd' decays, at the end of a run of `length` steps."""
    asked = config.decay_steps if config.decay_steps is not None else round(config.decay_fraction * length)
    return min(max(asked, 1), length)


SCHEDULE_KEYS = ("optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.decay_fraction")


def fitted_schedule(config: OptimizerConfig, train: TrainConfig, user_set: Container[str]) -> dict[str, Any]:
    """Settings of 'wsd', by dotted key, that have to change so that warm-up and decay fit into the run.

    Args:
        user_set: dotted keys that the user set, which are not changed.

    Raises:
        ConfigError: the user's own settings do not fit.
    """
    if config.schedule != "wsd":
        return {}
    warmup_key, steps_key, fraction_key = SCHEDULE_KEYS
    if train.max_hours is not None and config.decay_steps is not None:
        if steps_key in user_set:
            raise ConfigError(
                f"{steps_key} is {config.decay_steps:,}, but the number of steps that train.max_hours allows is not known in "
                f"advance",
                hint=f"set {fraction_key} instead, for example {fraction_key}=0.2",
            )
        return {steps_key: None}
    steps, warmup = train.max_steps, config.warmup_steps
    decay = config.decay_steps if config.decay_steps is not None else max(1, round(config.decay_fraction * steps))
    if warmup + decay <= steps:
        return {}
    keeps_warmup, keeps_decay = warmup_key in user_set, steps_key in user_set or fraction_key in user_set
    if (keeps_warmup and keeps_decay) or (keeps_warmup and warmup >= steps) or (keeps_decay and decay > steps):
        longer = _fewest_steps(config)
        raise ConfigError(
            f"a warm-up of {warmup:,} steps and a decay of {decay:,} (optimizer.schedule 'wsd') do not fit into the "
            f"{steps:,} steps of train.max_steps",
            hint=("" if longer is None else f"--set train.max_steps={longer}, or ")
            + f"a lower {warmup_key}, {steps_key} or {fraction_key}",
        )
    if not keeps_decay:
        # In proportion to the run, then whatever the warm-up leaves.
        shorter = min(decay, max(1, round(config.decay_fraction * steps)), *((steps - warmup,) if keeps_warmup else ()))
        found: dict[str, Any] = {} if shorter == decay else _decay_of(config, shorter, steps)
        decay = shorter
    else:
        found = {}
    # A tenth of the run, so that a stable part remains.
    return found if keeps_warmup else {**found, warmup_key: min(warmup, max(1, steps // 10), steps - decay)}


def _fewest_steps(config: OptimizerConfig) -> int | None:
    """Steps of the shortest run that warm-up and decay fit into; None if no run is long enough."""
    if config.decay_steps is not None:
        return config.warmup_steps + config.decay_steps
    if config.decay_fraction == 1:  # leaves no step for a warm-up
        return None
    return max(config.warmup_steps + 1, math.ceil(config.warmup_steps / (1 - config.decay_fraction)))


def _decay_of(config: OptimizerConfig, decay: int, steps: int) -> dict[str, Any]:
    """The setting that gives a decay of this length, whichever of the two is in use."""
    return {"optimizer.decay_fraction": decay / steps} if config.decay_steps is None else {"optimizer.decay_steps": decay}


def unused_by_schedule(config: OptimizerConfig, user_set: Container[str]) -> dict[str, str]:
    """Names of settings that were given although they have no effect, with the setting that they need.

    Args:
        user_set: dotted keys that the user set.
    """
    users = {"decay_steps": ("wsd",), "decay_fraction": ("wsd",), "decay_power": ("linear", "released")}
    default = OptimizerConfig()
    given = [name for name in users if getattr(config, name) != getattr(default, name)]
    found = {
        name: "schedule " + " or ".join(f"'{each}'" for each in users[name])
        for name in given
        if config.schedule not in users[name]
    }
    _, steps_key, fraction_key = SCHEDULE_KEYS
    # A decay from a run has steps of its own beside the fraction of that run.
    if config.schedule == "wsd" and config.decay_steps is not None and steps_key in user_set and fraction_key in user_set:
        found["decay_fraction"] = "decay_steps 'none'"
    return found
