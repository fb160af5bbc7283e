"""Which row comes when: any step of a fine-tuning run is computed from (seed, place), nothing is remembered."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from discern.data.ordering import Integers, derive_key, hash_uniforms, permute
from discern.tasks.features import Features, TaskBatch, collate

# Rows are sorted by length among this many steps' worth: enough that batches hardly need padding, and few enough that their
# order stays random.
_POOL_STEPS = 64


class TaskStream:
    """The endless sequence of rows that training reads, in batches of similar length, from one or several tasks.

    Each task's rows are read once before any of them is read again, in a new order every time. With several tasks each row
    is drawn from a task with probability proportional to its number of rows to the power of `alpha`.

    Args:
        features: by task; none may be empty.
        rows_per_step: as the loop will ask for them.
    """

    def __init__(self, features: Mapping[str, Features], seed: int, rows_per_step: int, alpha: float = 1.0) -> None:
        self.features = dict(features)
        self._seed = seed
        self._step = rows_per_step
        total = sum(len(rows) for rows in features.values())
        # A round is whole steps, so that the batches of one round do not straddle those of the next.
        self._round = max(1, total // rows_per_step) * rows_per_step
        weights = np.array([len(rows) for rows in features.values()], np.float64) ** alpha
        self._shares = np.cumsum(weights / weights.sum())
        self._names = list(features)
        self._ready: tuple[int, NDArray[np.int64]] = (-1, np.zeros((0, 2), np.int64))

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places of the sequence: those of one step, or one rank's part of them."""
        rounds, places = np.divmod(indices, self._round)
        chosen = []
        for number, place in zip(rounds.tolist(), places.tolist(), strict=True):
            task, row = self._order(number)[place]
            chosen.append((self._names[task], int(row)))
        return collate(self.features, chosen, indices.astype(np.int64), slots.astype(np.int64), self._shares_at(int(indices[0])))

    def _shares_at(self, index: int) -> dict[str, float]:
        """Fraction of the rows of a place's step that each task has."""
        number, place = divmod(index, self._round)
        first = place // self._step * self._step
        tasks = self._order(number)[first : first + self._step, 0]
        return dict(zip(self._names, (np.bincount(tasks, minlength=len(self._names)) / len(tasks)).tolist(), strict=True))

    def padding_fraction(self, steps: int) -> float:
        """Share of slots that hold padding, over the first steps of a run."""
        real = slots = 0
        for step in range(steps):
            number, first = divmod(step * self._step, self._round)
            lengths = self._lengths(self._order(number)[first : first + self._step])
            real, slots = real + int(lengths.sum()), slots + int(lengths.max()) * len(lengths)
        return 1 - real / slots if slots else 0.0

    def _order(self, number: int) -> NDArray[np.int64]:
        """(rows, 2) task and row at each place of a round."""
        if self._ready[0] != number:
            self._ready = number, self._make(number)
        return self._ready[1]

    def _make(self, number: int) -> NDArray[np.int64]:
        first, count = number * self._round, self._round
        tasks = self._tasks_at(np.arange(first, first + count))
        before = np.bincount(self._tasks_at(np.arange(first)), minlength=len(self._names)) if len(self._names) > 1 else [first]
        drawn = np.zeros((count, 2), np.int64)
        drawn[:, 0] = tasks
        for task, name in enumerate(self._names):
            mine = np.flatnonzero(tasks == task)
            size = len(self.features[name])
            cycles, places = np.divmod(before[task] + np.arange(len(mine)), size)
            for cycle in np.unique(cycles):
                these = cycles == cycle
                key = derive_key(self._seed, "task rows", name, int(cycle))
                drawn[mine[these], 1] = permute(places[these], size, key)
        return self._by_length(drawn, number)

    def _tasks_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(self._names) == 1:
            return np.zeros(len(places), np.int64)
        uniforms = hash_uniforms(derive_key(self._seed, "which task"), places)
        return np.minimum(np.searchsorted(self._shares, uniforms, side="right"), len(self._names) - 1)

    def _by_length(self, drawn: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """The same rows in batches of similar length, the batches in random order."""
        pool = _POOL_STEPS * self._step
        lengths = self._lengths(drawn)
        order = np.concatenate(
            [start + np.argsort(lengths[start : start + pool], kind="stable") for start in range(0, len(drawn), pool)]
        )
        steps = order.reshape(-1, self._step)
        shuffled = permute(np.arange(len(steps)), len(steps), derive_key(self._seed, "task steps", number))
        return np.asarray(drawn[steps[shuffled].reshape(-1)])

    def _lengths(self, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = np.zeros(len(drawn), np.int64)
        for task, name in enumerate(self._names):
            mine = drawn[:, 0] == task
            lengths[mine] = self.features[name].input_ids.lengths[drawn[mine, 1]]
        return lengths


class TaskRowsInOrder:
    """The rows of one split after another, the shortest first, for evaluation.

    Args:
        features: by task.
    """

    def __init__(self, features: Mapping[str, Features]) -> None:
        self.features = dict(features)
        numbered = [(name, row) for name, rows in features.items() for row in np.argsort(rows.input_ids.lengths, kind="stable")]
        self._rows = [(name, int(row)) for name, row in numbered]

    @property
    def num_rows(self) -> int:
        """Of all splits together."""
        return len(self._rows)

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places."""
        chosen = [self._rows[int(index)] for index in indices]
        return collate(self.features, chosen, indices.astype(np.int64), slots.astype(np.int64))
