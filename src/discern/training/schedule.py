"""The learning rate of each update."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discern.config.stages import rescaled, stage_at
from discern.data.batching.rows import RowStretch
from discern.data.config import DataConfig
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


BATCH_KEY, LENGTH_KEY = "train.batch_schedule", "data.length_schedule"
ROWS_KEY, SEQUENCE_KEY = "train.sequences_per_step", "data.sequence_length"
_LAST_STAGE = 0.5
"""Fraction of a run after which the last stage of a shortened schedule begins."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of the same size.

    Attributes:
        first: the first step.
        rows: rows per step, over all ranks.
        length: positions per row.
        examples: rows read before the first step.
        positions: positions read before the first step.
    """

    first: int
    rows: int
    length: int
    examples: int = 0
    positions: int = 0

    def following(self, steps: int, rows: int, length: int) -> Stretch:
        """The stretch after `steps` steps of this one."""
        read = steps * self.rows
        return Stretch(self.first + steps, rows, length, self.examples + read, self.positions + read * self.length)


@dataclass(frozen=True)
class StepSizes:
    """The sizes of all steps of a run.

    Attributes:
        stretches: in order, the first from step 0; the last one has no end.
    """

    stretches: Sequence[Stretch]

    @classmethod
    def constant(cls, rows: int, length: int) -> StepSizes:
        """Steps that all have the same size."""
        return cls((Stretch(0, rows, length),))

    @property
    def row_stretches(self) -> list[RowStretch]:
        """The stretches as the stream of rows needs them."""
        return [RowStretch(each.examples, each.rows, each.length) for each in self.stretches]

    def at(self, step: int) -> Stretch:
        """The stretch that a step belongs to."""
        return self.stretches[bisect_right(self.stretches, step, key=lambda stretch: stretch.first) - 1]

    def examples_before(self, step: int) -> int:
        """Rows read before a step."""
        stretch = self.at(step)
        return stretch.examples + (step - stretch.first) * stretch.rows

    def positions_before(self, step: int) -> int:
        """Positions read before a step."""
        stretch = self.at(step)
        return stretch.positions + (step - stretch.first) * stretch.rows * stretch.length

    def changes_at(self, step: int) -> bool:
        """Whether the size of the step differs from that of the step before."""
        return step > 0 and self.at(step).first == step


def step_sizes(train: TrainConfig, data: DataConfig) -> StepSizes:
    """The sizes of all steps of a run.

    A stage begins with the first step before which its number of tokens has been read. A step has as many whole rows as fit
    into its tokens.

    Raises:
        ValueError: a row does not fit into the tokens of an update.
    """
    batch = train.batch_schedule or ((0, train.sequences_per_step * data.sequence_length),)
    lengths = data.length_schedule or ((0, data.sequence_length),)
    found: list[Stretch] = []
    for begin in sorted({begin for begin, _ in (*batch, *lengths)}):
        tokens, length = stage_at(batch, begin), stage_at(lengths, begin)
        rows = tokens // length
        if rows < 1:
            raise ValueError(
                f"from token {begin:,} on, an update of {tokens:,} tokens cannot hold a row of {length:,}; set larger numbers of "
                f"tokens in {BATCH_KEY}, or shorter rows in {LENGTH_KEY}"
            )
        if not found:
            found.append(Stretch(0, rows, length))
            continue
        last = found[-1]
        if (rows, length) == (last.rows, last.length):
            continue
        steps = max(0, -(-(begin - last.positions) // (last.rows * last.length)))
        following = last.following(steps, rows, length)
        # A stage that would begin and end within one step is skipped.
        found = [*(found if steps else found[:-1]), following]
    return StepSizes(tuple(found))


def fitted_lengths(sections: Mapping[str, Any], user_set: Container[str], *, limited: bool) -> dict[str, Any]:
    """Changes that make the row length of a run the last one of its schedule.

    A length that the user sets turns the schedule of a preset off.

    Args:
        limited: whether model.max_positions limits the rows.

    Raises:
        ConfigError: the user's own settings do not suit.
    """
    data = sections["data"]
    if not data.length_schedule or data.length_schedule[-1][1] == data.sequence_length:
        return {}
    last, most = data.length_schedule[-1][1], sections["model"].max_positions
    if LENGTH_KEY not in user_set:
        return {LENGTH_KEY: ()}
    if SEQUENCE_KEY in user_set:
        raise ConfigError(
            f"the schedule ends with rows of {last}, but {SEQUENCE_KEY} is {data.sequence_length}; expected the same",
            hint=f"leave out {SEQUENCE_KEY}, or --set {SEQUENCE_KEY}={last}; --set {LENGTH_KEY}=[] turns the schedule off",
        )
    if limited and last > most:
        raise ConfigError(
            f"the last rows have {last} positions, beyond model.max_positions, which is {most}",
            hint=f"--set model.max_positions={last}, or a schedule that ends with {most}",
        )
    return {SEQUENCE_KEY: last}


def fitted_batch(sections: Mapping[str, Any], user_set: Container[str]) -> dict[str, Any]:
    """Changes that make `train.sequences_per_step` the rows of the last stage of the batch schedule.

    A number of sequences that the user sets turns the schedule of a preset off.

    Raises:
        ConfigError: the user's own settings do not suit.
    """
    data, train = sections["data"], sections["train"]
    if not train.batch_schedule:
        return {}
    last = train.batch_schedule[-1][1]
    rows = last // data.sequence_length
    if BATCH_KEY not in user_set:
        keeps = rows > 0 and (ROWS_KEY not in user_set or rows == train.sequences_per_step)
        return {BATCH_KEY: ()} if not keeps else {} if rows == train.sequences_per_step else {ROWS_KEY: rows}
    if rows < 1:
        raise ConfigError(
            f"the schedule ends with {last:,} tokens per update, fewer than a row of {SEQUENCE_KEY} {data.sequence_length:,}",
            hint=f"--set '{BATCH_KEY}=[[0, {data.sequence_length * 16}], [1000000, {data.sequence_length * 64}]]', for example",
        )
    if ROWS_KEY in user_set and rows != train.sequences_per_step:
        raise ConfigError(
            f"they set different sizes of an update: {last:,} tokens, which are {rows:,} rows of {data.sequence_length:,}, and "
            f"{train.sequences_per_step:,} rows",
            hint=f"leave out {ROWS_KEY}, or --set {BATCH_KEY}=[] for updates of the same size throughout",
        )
    return {} if rows == train.sequences_per_step else {ROWS_KEY: rows}


def shortened_schedules(sections: Mapping[str, Any], user_set: Container[str]) -> dict[str, Any]:
    """Changes that make batch and length schedules end within the run. Those of a preset are shortened with it.

    Raises:
        ConfigError: a schedule of the user does not end within the run.
    """
    data, train = sections["data"], sections["train"]
    stages = {BATCH_KEY: train.batch_schedule, LENGTH_KEY: data.length_schedule}
    if train.max_hours is not None or not any(stages.values()):
        return {}
    try:
        sizes = step_sizes(train, data)
    except ValueError:  # reported with the rules between sections
        return {}
    total = sizes.positions_before(train.max_steps)
    beyond = [key for key, each in stages.items() if each and each[-1][0] >= total]
    for key in beyond:
        if key in user_set:
            raise ConfigError(
                f"the last stage begins at token {stages[key][-1][0]:,}, but the {train.max_steps:,} steps of train.max_steps "
                f"read only {total:,} tokens",
                hint=f"--set train.max_steps={2 * sizes.stretches[-1].first}, for example, or stages that begin earlier; --set "
                f"{key}=[] turns the schedule off",
            )
    found: dict[str, Any] = {}
    for key in beyond:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            trial = rescaled(stages[key], middle)
            tried = (
                step_sizes(train.model_copy(update={"batch_schedule": trial}), data)
                if key == BATCH_KEY
                else step_sizes(train, data.model_copy(update={"length_schedule": trial}))
            )
            early = trial[-1][0] <= _LAST_STAGE * tried.positions_before(train.max_steps)
            low, high = (middle, high) if early else (low, middle)
        found[key] = rescaled(stages[key], low)
    return found
