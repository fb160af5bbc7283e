"""Rows of token ids with the targets of a task, batches of them, and their order in training.

Any step of a fine-tuning is computed from (seed, place): nothing is remembered from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from discern.data.batching.stream import Integers, Rows, derive_key, hash_uniforms, permute, to_batch
from discern.types import TokenBatch, map_tensors

IGNORED = -100
"""Target of a token that has none."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, stored one after another.

    Attributes:
        values: values of all sequences.
        offsets: (N + 1,) start of each sequence, and the end of the last.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | NDArray[Any]], dtype: type = np.int32) -> Ragged:
        """Build from a list of sequences."""
        arrays: list[NDArray[Any]] = [np.asarray(sequence, dtype) for sequence in sequences]
        offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, dtype), *arrays]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) lengths of the sequences."""
        return np.diff(self.offsets)

    def padded(self, rows: Integers, length: int, fill: int = 0) -> Integers:
        """(R, length) the chosen sequences, none of which is longer than `length`, filled up to it."""
        result = np.full((len(rows), length), fill, np.int64)
        for position, row in enumerate(rows.tolist()):
            result[position, : self.lengths[row]] = self[row]
        return result


Column = NDArray[Any] | Ragged


@dataclass(frozen=True, eq=False)
class Features:
    """N rows of token ids, made from examples; a long example makes several rows.

    Attributes:
        input_ids: token ids of each row, including [CLS] and [SEP], without padding.
        token_types: segment of each token.
        example: (N,) index of the example that a row belongs to, in ascending order.
        targets: targets of the task by name: (N, ...), or one value per token. Empty if the labels are not known.
        places: further values that decoding needs, of the same shapes.
        notes: messages about the examples, one per line ("3 of 200 texts were cut to 128 tokens").
    """

    input_ids: Ragged
    token_types: Ragged
    example: NDArray[np.int64]
    targets: Mapping[str, Column] = field(default_factory=dict)
    places: Mapping[str, Column] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)


def cut_windows(bounds: NDArray[np.int64], room: int, overlap: int) -> list[tuple[int, int, int, int]]:
    """Split a text into windows of whole words, each as long as possible.

    The context of a word in a window is the smaller number of tokens on its two sides; ties go to longer windows, then to
    earlier ones. Every word is predicted in the window where it has the most context; windows that predict none are left out.
    Reference: BERT, run_squad.py, `_check_is_max_context`.

    Args:
        bounds: (W + 1,) first token of each word, and the end of the last; no word has more than `room` tokens.
        room: number of tokens in a window.
        overlap: number of tokens that consecutive windows should share; whole words only, and less if the next word needs the
            room.

    Returns:
        Start and stop of each window, and of the words that are predicted in it. A text without words is one window.
    """
    num_words = len(bounds) - 1
    most_context = np.full(num_words, -1.0)
    window_of_word = np.zeros(num_words, np.int64)
    windows: list[tuple[int, int]] = []
    start, stop = 0, -1
    while stop < num_words:
        stop = int(np.searchsorted(bounds, bounds[start] + room, side="right")) - 1
        inside = bounds[start : stop + 1]
        # BERT's script adds 0.01 times the length of the window.
        context = np.minimum(inside[:-1] - inside[0], inside[-1] - inside[1:]) + 0.01 * (inside[-1] - inside[0])
        better = start + np.flatnonzero(context > most_context[start:stop])
        most_context[better] = context[better - start]
        window_of_word[better] = len(windows)
        windows.append((start, stop))
        if stop < num_words:
            # The next window repeats the last words of this one, but not so many that its first new word has no room.
            start = int(np.searchsorted(bounds, max(bounds[stop] - overlap, bounds[stop + 1] - room)))
    # From left to right, each window overtakes the one before it once: so the words that a window predicts are contiguous.
    edges = np.searchsorted(window_of_word, np.arange(len(windows) + 1)).tolist()
    predicted = zip(windows, pairwise(edges), strict=True)
    return [(*window, *words) for window, words in predicted if words[0] < words[1] or not num_words]


@dataclass(frozen=True)
class TaskRows:
    """The R rows of a batch that belong to one task; R may be 0.

    Attributes:
        rows: (R,) indices in the batch.
        features: (R,) indices in the features of the task.
        targets: (R, ...) targets by name; targets per token may be shorter than the batch.
        share: fraction of the rows of the whole step, over all micro-batches and ranks, that belong to this task.
        count: number of items that their loss is summed over, as `Task.items` counts them once a micro-batch is complete.
    """

    task: str
    rows: Int[Tensor, "R"]
    features: Int[Tensor, "R"]
    targets: Mapping[str, Tensor]
    share: float = 1.0
    count: int = 0

    def between(self, start: int, stop: int) -> TaskRows:
        """The part in rows `start` to `stop - 1` of the batch, with indices counted from `start`."""
        chosen = ((self.rows >= start) & (self.rows < stop)).nonzero().flatten()
        part = map_tensors(self, lambda tensor: tensor[chosen])
        return replace(part, rows=part.rows - start)


@dataclass(frozen=True)
class TaskBatch(TokenBatch):
    """A batch with targets.

    Attributes:
        groups: the rows of each task. Every task has a group in every batch, so that all batches have the same structure.
    """

    groups: tuple[TaskRows, ...] = ()

    def rows(self, start: int, stop: int) -> TaskBatch:
        part = cast(TaskBatch, TokenBatch.rows(replace(self, groups=()), start, stop))
        return replace(part, groups=tuple(group.between(start, stop) for group in self.groups))


def collate(
    features: Mapping[str, Features], rows: Integers, indices: Integers, slots: Integers, step: Integers | None = None
) -> TaskBatch:
    """A batch of rows, padded to the longest.

    Args:
        features: features of each task.
        rows: (B, 2) index of the task of each row, and its index in the features of the task.
        indices: (B,) place of each row in the run's sequence of rows.
        slots: (B,) place of each row in the global batch.
        step: all rows of the step that these are a part of, like `rows`; None: these rows are the whole step.
    """
    lengths = _lengths(features, rows)
    length = int(lengths.max())
    input_ids, types = np.zeros((2, len(rows), length), np.int64)
    tasks_of_step = (rows if step is None else step)[:, 0]
    groups = []
    for task, (name, columns) in enumerate(features.items()):
        of_task = np.flatnonzero(rows[:, 0] == task)
        numbers = rows[of_task, 1]
        input_ids[of_task] = columns.input_ids.padded(numbers, length)
        types[of_task] = columns.token_types.padded(numbers, length)
        longest = int(lengths[of_task].max(initial=1))
        targets = {
            target: torch.from_numpy(column.padded(numbers, longest, IGNORED) if isinstance(column, Ragged) else column[numbers])
            for target, column in columns.targets.items()
        }
        share = float((tasks_of_step == task).mean())
        groups.append(TaskRows(name, torch.from_numpy(of_task), torch.from_numpy(numbers), targets, share))
    positions = np.broadcast_to(np.arange(length), input_ids.shape)
    batch = to_batch(Rows(input_ids, lengths, positions >= lengths[:, None], types, positions, None), indices, slots)
    return TaskBatch(**vars(batch), groups=tuple(groups))


def _lengths(features: Mapping[str, Features], rows: Integers) -> Integers:
    """(B,) number of tokens of each row.

    Args:
        rows: (B, 2) index of the task of each row, and its index in the features of the task.
    """
    lengths = np.zeros(len(rows), np.int64)
    for task, columns in enumerate(features.values()):
        of_task = rows[:, 0] == task
        lengths[of_task] = columns.input_ids.lengths[rows[of_task, 1]]
    return lengths


# Rows are sorted by length within this number of steps: enough that batches need hardly any padding, and few enough that their
# order stays random.
_POOL_STEPS = 64


class TaskStream:
    """The endless sequence of training rows of one or several tasks, in batches of similar length.

    All rows of a task are read once before any is read again, in a new order each time. With several tasks, the task of each
    row is sampled with a probability proportional to its number of rows to the power of `alpha`.

    Args:
        features: features of each task; none may be empty.
        rows_per_step: number of rows per step of the loop.
    """

    def __init__(self, features: Mapping[str, Features], seed: int, rows_per_step: int, alpha: float = 1.0) -> None:
        self.features = dict(features)
        self._seed = seed
        self._rows_per_step = rows_per_step
        sizes = np.array([len(columns) for columns in features.values()])
        # A round consists of whole steps, so that no batch belongs to two rounds.
        self._round = max(1, int(sizes.sum()) // rows_per_step) * rows_per_step
        weights = sizes**alpha
        self._bounds = np.cumsum(weights / weights.sum())
        self._order = lru_cache(maxsize=1)(self._draw)

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places of the sequence: those of one step, or the part of one rank."""
        step = int(indices[0]) // self._rows_per_step
        rows = self._rows_of(step)
        return collate(self.features, rows[indices - step * self._rows_per_step], indices, slots, rows)

    def padding_fraction(self, steps: int) -> float:
        """Fraction of positions that hold padding, over the first steps of a run."""
        tokens = positions = 0
        for step in range(steps):
            lengths = _lengths(self.features, self._rows_of(step))
            tokens, positions = tokens + int(lengths.sum()), positions + int(lengths.max()) * len(lengths)
        return 1 - tokens / positions if positions else 0.0

    def _rows_of(self, step: int) -> Integers:
        """(rows per step, 2) task and row at each place of a step."""
        number, first = divmod(step * self._rows_per_step, self._round)
        return self._order(number)[first : first + self._rows_per_step]

    def _draw(self, number: int) -> Integers:
        """(rows per round, 2) task and row at each place of a round."""
        # The task of each place, in this round and, to know how many rows of each task they read, in all rounds before.
        first, stop = number * self._round, (number + 1) * self._round
        uniforms = hash_uniforms(derive_key(self._seed, "which task"), np.arange(stop))
        tasks = np.minimum(np.searchsorted(self._bounds, uniforms, side="right"), len(self._bounds) - 1)
        read = np.bincount(tasks[:first], minlength=len(self._bounds))
        rows = np.stack([tasks[first:], np.zeros(self._round, np.int64)], 1)

        # The next rows of each task, in the order of the epoch of the task.
        for task, (name, columns) in enumerate(self.features.items()):
            places = np.flatnonzero(rows[:, 0] == task)
            epochs, positions = np.divmod(read[task] + np.arange(len(places)), len(columns))
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                key = derive_key(self._seed, "task rows", name, int(epoch))
                rows[places[chosen], 1] = permute(positions[chosen], len(columns), key)

        # Steps of rows of similar length, in random order.
        lengths, pool = _lengths(self.features, rows), _POOL_STEPS * self._rows_per_step
        order = [start + np.argsort(lengths[start : start + pool], kind="stable") for start in range(0, len(rows), pool)]
        steps = np.concatenate(order).reshape(-1, self._rows_per_step)
        shuffled = permute(np.arange(len(steps)), len(steps), derive_key(self._seed, "task steps", number))
        return rows[steps[shuffled].flatten()]


class TaskRowsInOrder:
    """The rows of each split in turn, the shortest first, for evaluation.

    Args:
        features: features of each task.

    Attributes:
        num_rows: number of rows of all splits.
    """

    def __init__(self, features: Mapping[str, Features]) -> None:
        self.features = dict(features)
        orders = [np.argsort(columns.input_ids.lengths, kind="stable") for columns in features.values()]
        self._rows = np.concatenate([np.stack([np.full_like(order, task), order], 1) for task, order in enumerate(orders)])
        self.num_rows = len(self._rows)

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places."""
        return collate(self.features, self._rows[indices], indices, slots)
