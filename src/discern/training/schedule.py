"""The learning rate and the size of each update."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from discern.config.schedule import MixtureSchedule, ScheduleSegment, SizeSchedule, to_step, to_steps
from discern.data.config import DataConfig
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
    warmup_steps = to_step(config.warmup_steps, length)
    warmup, by_time = max(warmup_steps, 1), (time_used or 0.0) / _LONGEST_WARMUP
    if config.schedule == "released":
        rise = min(1.0, max(step / warmup, by_time))
        return float(config.learning_rate * rise * (1 - done))
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
    warm = min(warmup_steps / length, 1.0) if time_used is None else 0.0
    fall = min(1.0, (1 - done) / (1 - warm)) if warm < 1 else 1.0
    return float(config.learning_rate * rise * fall)


def decay_length(config: OptimizerConfig, length: int) -> int:
    """Number of steps over which 'wsd' decays, at the end of a run of `length` steps."""
    steps = config.decay_fraction * length if config.decay_steps is None else to_step(config.decay_steps, length)
    return min(max(round(steps), 1), length)


def overlap(config: OptimizerConfig, length: int) -> str | None:
    """What is wrong if warm-up and decay of 'wsd' do not fit into `length` steps; otherwise None."""
    warmup, decay = to_step(config.warmup_steps, length), decay_length(config, length)
    if config.schedule != "wsd" or length == 1 or warmup + decay <= length:
        return None
    return f"a warm-up of {warmup:,} steps and a decay of {decay:,} need more than the {length:,} steps of train.max_steps"


@dataclass(frozen=True)
class StepSizes:
    """The sizes of all steps of a run.

    Attributes:
        segments: in order, the first from step 0; the last one has no end.
    """

    segments: Sequence[ScheduleSegment]

    def at(self, step: int) -> ScheduleSegment:
        """The segment that a step belongs to."""
        return self.segments[bisect_right(self.segments, step, key=lambda segment: segment.first) - 1]

    def examples_before(self, step: int) -> int:
        """Rows read before a step."""
        segment = self.at(step)
        return segment.examples + (step - segment.first) * segment.rows

    def positions_before(self, step: int) -> int:
        """Positions read before a step."""
        segment = self.at(step)
        return segment.positions + (step - segment.first) * segment.rows * segment.length

    def changes_at(self, step: int) -> bool:
        """Whether the size of the step differs from that of the step before."""
        return step > 0 and self.at(step).first == step


def step_sizes(train: TrainConfig, data: DataConfig) -> StepSizes:
    """The sizes of all steps of a run. A step has as many whole rows as fit into its tokens.

    Raises:
        ValueError: a row does not fit into the tokens of an update.
    """
    batch: SizeSchedule = to_steps(train.batch_schedule, train.max_steps)
    lengths: SizeSchedule = to_steps(data.length_schedule, train.max_steps)
    mixture: MixtureSchedule = to_steps(data.mixture, train.max_steps) or ((0, ()),)
    batch = batch or ((0, train.sequences_per_step * data.sequence_length),)
    lengths = lengths or ((0, data.sequence_length),)
    sizes = StepSizes(())
    schedules: tuple[Any, ...] = batch, lengths, mixture
    for first in sorted({first for schedule in schedules for first, _ in schedule}):
        tokens, length, weights = (next(value for begin, value in reversed(one) if begin <= first) for one in schedules)
        rows = tokens // length
        if rows < 1:
            raise ValueError(
                f"from step {first:,} on, an update of {tokens:,} tokens cannot hold a row of {length:,}; set larger numbers of "
                "tokens in train.batch_schedule, or shorter rows in data.length_schedule"
            )
        last = sizes.segments[-1] if sizes.segments else None
        if last is None or (rows, length, weights) != (last.rows, last.length, last.weights):
            before = (sizes.examples_before(first), sizes.positions_before(first)) if first else (0, 0)
            sizes = StepSizes((*sizes.segments, ScheduleSegment(first, rows, length, *before, weights)))
    return sizes
