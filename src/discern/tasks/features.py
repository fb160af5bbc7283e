"""Rows of token ids with the targets of a task, batches of them, and their order in training.

Any step of a fine-tuning is computed from (seed, place): nothing is remembered from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from discern.data.batching.stream import Integers, derive_key, hash_uniforms, permute
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
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, dtype), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(N,) lengths of the sequences."""
        return np.diff(self.offsets)

    def padded(self, rows: NDArray[np.int64], length: int, fill: int) -> NDArray[np.int64]:
        """(R, length) the chosen sequences, cut or filled up to `length`."""
        result = np.full((len(rows), length), fill, np.int64)
        for place, row in enumerate(rows):
            sequence = self[int(row)][:length]
            result[place, : len(sequence)] = sequence
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

    def select(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """The targets of some rows as tensors; targets per token are padded with `IGNORED`."""
        length = int(self.input_ids.lengths[rows].max()) if len(rows) else 1
        return {
            name: torch.from_numpy(
                column.padded(rows, length, IGNORED) if isinstance(column, Ragged) else np.ascontiguousarray(column[rows])
            )
            for name, column in self.targets.items()
        }


@dataclass(frozen=True)
class TaskRows:
    """The R rows of a batch that belong to one task; R may be 0.

    Attributes:
        rows: (R,) indices in the batch.
        features: (R,) indices in the features of the task.
        targets: (R, ...) targets by name; targets per token may be shorter than the batch.
        share: fraction of the rows of the whole step, over all micro-batches and ranks, that belong to this task.
        count: number of items that their loss is summed over, as `Task.items` counts them; None: not counted yet.
    """

    task: str
    rows: Int[Tensor, "R"]
    features: Int[Tensor, "R"]
    targets: Mapping[str, Tensor]
    share: float = 1.0
    count: int | None = None

    def to(self, device: torch.device) -> TaskRows:
        """A copy on another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, targets={name: tensor.to(device, non_blocking=True) for name, tensor in self.targets.items()})

    def between(self, start: int, stop: int) -> TaskRows:
        """The part in rows `start` to `stop - 1` of the batch, with indices counted from `start`."""
        chosen = ((self.rows >= start) & (self.rows < stop)).nonzero().flatten()
        targets = {name: tensor[chosen] for name, tensor in self.targets.items()}
        return replace(self, rows=self.rows[chosen] - start, features=self.features[chosen], targets=targets, count=None)


@dataclass(frozen=True)
class TaskBatch(TokenBatch):
    """A batch with targets.

    Attributes:
        groups: the rows of each task. Every task has a group in every batch, so that all batches have the same structure.
    """

    groups: tuple[TaskRows, ...] = ()

    def to(self, device: torch.device) -> TaskBatch:
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, groups=tuple(group.to(device) for group in self.groups))

    def rows(self, start: int, stop: int) -> TaskBatch:
        part = map_tensors(replace(self, spans=None), lambda tensor: tensor[start:stop])
        return replace(part, groups=tuple(group.between(start, stop) for group in self.groups))


def collate(
    features: Mapping[str, Features],
    chosen: Sequence[tuple[str, int]],
    indices: NDArray[np.int64],
    slots: NDArray[np.int64],
    shares: Mapping[str, float] | None = None,
) -> TaskBatch:
    """A batch of rows, padded to the longest.

    Args:
        features: features of each task.
        chosen: (B,) task and index of each row.
        indices: (B,) place of each row in the run's sequence of rows.
        slots: (B,) place of each row in the global batch.
        shares: fraction of the rows of the step that belong to each task; None: these rows are the whole step.
    """
    rows = [features[task].input_ids[number] for task, number in chosen]
    lengths = np.array([len(row) for row in rows])
    length = int(lengths.max())
    input_ids, types = np.zeros((2, len(rows), length), np.int64)
    for place, (task, number) in enumerate(chosen):
        input_ids[place, : lengths[place]] = rows[place]
        types[place, : lengths[place]] = features[task].token_types[number]
    attention = np.arange(length)[None, :] < lengths[:, None]
    groups = []
    for task, rows_of_task in features.items():
        places = [place for place, (name, _) in enumerate(chosen) if name == task]
        numbers = np.array([chosen[place][1] for place in places], np.int64)
        targets = rows_of_task.select(numbers)
        share = len(places) / len(chosen) if shares is None else shares[task]
        groups.append(TaskRows(task, torch.tensor(places, dtype=torch.int64), torch.from_numpy(numbers), targets, share))
    return TaskBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention),
        special_tokens_mask=torch.from_numpy(~attention),
        token_type_ids=torch.from_numpy(types),
        position_ids=torch.arange(length).expand(len(rows), length),
        document_ids=None,
        word_starts=None,
        example_index=torch.from_numpy(indices),
        slot=torch.from_numpy(slots),
        full=bool(attention.all()),
        groups=tuple(groups),
    )


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
        self._step = rows_per_step
        total = sum(len(rows) for rows in features.values())
        # A round consists of whole steps, so that no batch belongs to two rounds.
        self._round = max(1, total // rows_per_step) * rows_per_step
        weights = np.array([len(rows) for rows in features.values()], np.float64) ** alpha
        self._shares = np.cumsum(weights / weights.sum())
        self._names = list(features)
        self._ready: tuple[int, NDArray[np.int64]] = (-1, np.zeros((0, 2), np.int64))

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places of the sequence: those of one step, or the part of one rank."""
        rounds, places = np.divmod(indices, self._round)
        chosen = []
        for number, place in zip(rounds.tolist(), places.tolist(), strict=True):
            task, row = self._order(number)[place]
            chosen.append((self._names[task], int(row)))
        return collate(self.features, chosen, indices.astype(np.int64), slots.astype(np.int64), self._shares_at(int(indices[0])))

    def _shares_at(self, index: int) -> dict[str, float]:
        """Fraction of the rows of each task in the step that contains a place."""
        number, place = divmod(index, self._round)
        first = place // self._step * self._step
        tasks = self._order(number)[first : first + self._step, 0]
        return dict(zip(self._names, (np.bincount(tasks, minlength=len(self._names)) / len(tasks)).tolist(), strict=True))

    def padding_fraction(self, steps: int) -> float:
        """Fraction of positions that hold padding, over the first steps of a run."""
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
        """The rows grouped into batches of similar length, in random order."""
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
    """The rows of each split in turn, the shortest first, for evaluation.

    Args:
        features: features of each task.
    """

    def __init__(self, features: Mapping[str, Features]) -> None:
        self.features = dict(features)
        numbered = [(name, row) for name, rows in features.items() for row in np.argsort(rows.input_ids.lengths, kind="stable")]
        self._rows = [(name, int(row)) for name, row in numbered]

    @property
    def num_rows(self) -> int:
        """Number of rows of all splits."""
        return len(self._rows)

    def batch(self, indices: Integers, slots: Integers) -> TaskBatch:
        """The rows at these places."""
        chosen = [self._rows[int(index)] for index in indices]
        return collate(self.features, chosen, indices.astype(np.int64), slots.astype(np.int64))
