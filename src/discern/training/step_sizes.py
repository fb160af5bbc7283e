"""The number and the length of the rows of every step, which batch and length schedules change during a run.

    sizes = step_sizes(config.train, config.data)
    sizes.at(1000).rows               # rows of update number 1000
    sizes.examples_before(1000)       # rows read before it, so the place in the data where it begins

Both are functions of the step alone. They count tokens as positions, rows times length, padding included, because the real
tokens of a step are known only when it is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discern.config.stages import rescaled, stage_at
from discern.data.batching.successive import RowStretch
from discern.data.config import DataConfig
from discern.errors import ConfigError
from discern.training.config import TrainConfig

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
