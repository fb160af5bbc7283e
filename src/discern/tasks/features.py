"""Rows ready for a network, of any length, with what a task learns from them; and batches of such rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from discern.types import TokenBatch, map_tensors

IGNORED = -100
"""Stands where a token has no target."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths, one after another.

    Attributes:
        values: of all of them.
        offsets: (N + 1,) where each begins, and the end.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int] | NDArray[Any]], dtype: type = np.int32) -> Ragged:
        """From the sequences themselves."""
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
        """(N,) of the sequences."""
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
    """The rows that a network reads; a long example gives several. N rows.

    Attributes:
        input_ids: of each row, [CLS] and [SEP] included, without padding.
        token_types: segment of each token.
        example: (N,) number of the example that a row belongs to, never falling.
        targets: what the task learns, by name: (N, ...), or a value a token. Empty where the labels are not known.
        places: what decoding needs to know of a row besides, likewise.
        notes: what happened to the examples, a line each ("3 of 200 texts were cut to 128 tokens").
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
        """The targets of some rows as tensors; those a token are filled up with `IGNORED`."""
        length = int(self.input_ids.lengths[rows].max()) if len(rows) else 1
        return {
            name: torch.from_numpy(
                column.padded(rows, length, IGNORED) if isinstance(column, Ragged) else np.ascontiguousarray(column[rows])
            )
            for name, column in self.targets.items()
        }


@dataclass(frozen=True)
class TaskRows:
    """The rows of a batch that are of one task; R of them, possibly none.

    Attributes:
        rows: (R,) their places in the batch.
        features: (R,) their numbers among the task's features.
        targets: (R, ...) by name; values a token may be shorter than the batch is long.
        share: fraction of the rows of the whole step, over all micro-batches and ranks, that are of this task.
    """

    task: str
    rows: Int[Tensor, "R"]
    features: Int[Tensor, "R"]
    targets: Mapping[str, Tensor]
    share: float = 1.0

    def to(self, device: torch.device) -> TaskRows:
        """The same on another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, targets={name: tensor.to(device, non_blocking=True) for name, tensor in self.targets.items()})

    def between(self, start: int, stop: int) -> TaskRows:
        """Those in rows `start` to `stop`, counted from `start`."""
        chosen = ((self.rows >= start) & (self.rows < stop)).nonzero().flatten()
        targets = {name: tensor[chosen] for name, tensor in self.targets.items()}
        return replace(self, rows=self.rows[chosen] - start, features=self.features[chosen], targets=targets)


@dataclass(frozen=True)
class TaskBatch(TokenBatch):
    """A batch with targets.

    Attributes:
        groups: the rows of each task; every task of the training has one, so that all batches look alike.
    """

    groups: tuple[TaskRows, ...] = ()

    def to(self, device: torch.device) -> TaskBatch:
        moved = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, groups=tuple(group.to(device) for group in self.groups))

    def rows(self, start: int, stop: int) -> TaskBatch:
        part = map_tensors(self, lambda tensor: tensor[start:stop])
        return replace(part, groups=tuple(group.between(start, stop) for group in self.groups))


def collate(
    features: Mapping[str, Features],
    chosen: Sequence[tuple[str, int]],
    indices: NDArray[np.int64],
    slots: NDArray[np.int64],
    shares: Mapping[str, float] | None = None,
) -> TaskBatch:
    """Rows as a batch, as long as its longest.

    Args:
        features: by task.
        chosen: (B,) task and number of each row.
        indices: (B,) place of each row in the run's sequence of rows.
        slots: (B,) place of each row in the global batch.
        shares: fraction of the step's rows that each task has; None: these rows are the whole step.
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
