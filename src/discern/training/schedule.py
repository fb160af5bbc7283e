"""The learning rate of each update."""

from __future__ import annotations

from discern.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, length: int, time_used: float | None = None) -> float:
    """Return the learning rate of update number `step`, counted from 0.

    'linear' rises during the warm-up, reaches its peak at the last warm-up step and falls to zero at the end. 'released'
    multiplies warm-up and decay, so that its peak is slightly lower and the very first update has rate 0.

    Args:
        length: number of updates that the schedule spans.
        time_used: fraction of the time budget that is used; None without a time budget. The decay follows
            whichever has progressed further, the steps or the time, and ends when either of them ends.

    Reference: Clark et al. 2020, table 6; google-research/electra, optimization.py for 'released'.
    """
    done = min(1.0, max(step / length, time_used or 0.0))
    warmup = max(config.warmup_steps, 1)
    if config.schedule == "released":
        rise = min(1.0, step / warmup)
        return float(config.learning_rate * rise * (1 - done) ** config.decay_power)
    rise = min(1.0, (step + 1) / warmup)
    if config.schedule == "constant":
        return config.learning_rate * rise
    # The decay begins where the warm-up ends. Under a time budget that fraction of the run is unknown, so it begins at once.
    warm = min(config.warmup_steps / length, 1.0) if time_used is None else 0.0
    fall = min(1.0, (1 - done) / (1 - warm)) if warm < 1 else 1.0
    return float(config.learning_rate * rise * fall**config.decay_power)
