"""The learning rate as a function of the step and of how much of the run is done."""

from __future__ import annotations

from discern.training.config import OptimizerConfig, TrainConfig


def learning_rate(optimizer: OptimizerConfig, train: TrainConfig, step: int, hours: float = 0.0) -> float:
    """The learning rate of update number `step`, counted from 0.

    With a time budget the decay follows whichever is further gone, the steps or the hours, and ends when the first does.

    'linear' rises over the warm-up, reaches its peak at its last step and falls to zero at the end of the run. 'released'
    multiplies both, so that its peak is a little lower and the very first update has rate 0.

    Reference: Clark et al. 2020, table 6; google-research/electra, optimization.py for 'released'.
    """
    done = min(1.0, max(step / train.max_steps, hours / train.max_hours if train.max_hours else 0.0))
    warmup = max(optimizer.warmup_steps, 1)
    if optimizer.schedule == "released":
        rise = min(1.0, step / warmup)
        return float(optimizer.learning_rate * rise * (1 - done) ** optimizer.decay_power)
    rise = min(1.0, (step + 1) / warmup)
    if optimizer.schedule == "constant":
        return optimizer.learning_rate * rise
    # The decay begins where the warm-up ends; under a time budget nobody knows when that is, so it begins at once.
    warm = 0.0 if train.max_hours else min(optimizer.warmup_steps / train.max_steps, 1.0)
    fall = min(1.0, (1 - done) / (1 - warm)) if warm < 1 else 1.0
    return float(optimizer.learning_rate * rise * fall**optimizer.decay_power)
