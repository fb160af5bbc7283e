"""The stream of rows for a configuration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil
from typing import Protocol, runtime_checkable

from discern.config.schedule import ScheduleSegment
from discern.data.batching.cyclic_text import ForwardText
from discern.data.batching.segments import PackedRows, SegmentRows
from discern.data.batching.stream import ExampleStream, Integers, Packing
from discern.data.batching.two_part import RowOrder, ShuffledOrder, SlotOrder, TextOrder, TwoPartStream
from discern.data.config import DataConfig
from discern.data.dataset.shards import TokenSplit
from discern.errors import DataError
from discern.types import SpecialTokens, TokenBatch


def build_packing(split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int, *, training: bool) -> Packing:
    """The packing that the configuration names.

    Args:
        training: if False, rows are the same in every epoch, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    if split.num_tokens == 0:
        raise DataError("the split has no tokens", hint="prepare more text, or a larger --heldout fraction")
    if config.packing == "packed":
        return PackedRows(split, special, config.sequence_length, seed, rotate=training)
    return SegmentRows(split, special, config, seed)


@runtime_checkable
class RowStream(Protocol):
    """An endless sequence of rows with random access."""

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence."""


def training_rows(
    split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int, *, slots: int | None = None
) -> RowStream:
    """The rows to train on.

    Args:
        slots: rows per step, for a model with memory: each slot continues at the next step where it ended. If None, rows
            are shuffled.

    Raises:
        DataError: the split has no tokens.
    """
    if config.packing != "two-part":
        return ExampleStream(build_packing(split, special, config, seed, training=True), seed)
    text, part = _text(split, special), config.sequence_length // 2
    order: RowOrder = ShuffledOrder(text.size, part, seed, reversed_rows=config.reversed_rows)
    if slots is not None:
        order = SlotOrder(text.size, part, slots, seed, reversed_rows=config.reversed_rows)
    return TwoPartStream(text, special, config.sequence_length, seed, order)


def heldout_rows(split: TokenSplit, special: SpecialTokens, config: DataConfig) -> RowStream:
    """Rows in the order of the text, the same every time, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    if config.packing != "two-part":
        return ExampleStream(build_packing(split, special, config, 0, training=False), 0, shuffle=False)
    text = _text(split, special)
    return TwoPartStream(text, special, config.sequence_length, 0, TextOrder(config.sequence_length // 2))


def _text(split: TokenSplit, special: SpecialTokens) -> ForwardText:
    """The split as one text. Each document ends with the end-of-document token, or with [SEP] if the tokenizer has none."""
    if split.num_tokens == 0:
        raise DataError("the split has no tokens", hint="prepare more text, or a larger --heldout fraction")
    return ForwardText(split, special.sep if special.eod is None else special.eod)


class SuccessiveRows:
    """Streams that are read one after the other. Each begins at the part of the epoch at which the one before it ended.

    If f is the fraction of an epoch, or the number of epochs, that has been read, a stream of n rows per epoch begins with row
    ceil(f n). So each epoch has as much text as without a change, and after the epoch of the change each row is again read once
    per epoch. In that epoch some text is read twice and some not at all: rows of another length are other pieces of the text,
    in another order.

    Args:
        segments: the steps of each stream.
        build: returns the stream of a segment.
        whole_steps: begin each stream with a row number that is a multiple of the rows per step, for rows read in slots.
    """

    def __init__(
        self, segments: Sequence[ScheduleSegment], build: Callable[[ScheduleSegment], RowStream], *, whole_steps: bool = False
    ) -> None:
        self._firsts = [segment.examples for segment in segments]
        self.streams = [build(segment) for segment in segments]
        self._starts: list[int] = []
        self._read = [Fraction(0)]  # epochs read before each stream, and so far
        for number, (segment, stream) in enumerate(zip(segments, self.streams, strict=True)):
            start = ceil(self._read[-1] * stream.num_rows)
            self._starts.append(-(-start // segment.rows) * segment.rows if whole_steps else start)
            if number + 1 < len(segments):
                self._read.append(self._read[-1] + Fraction(self._firsts[number + 1] - segment.examples, stream.num_rows))

    @property
    def num_rows(self) -> int:
        """Rows per epoch of the last stream."""
        return self.streams[-1].num_rows

    def epochs(self, rows: int) -> float:
        """Number of epochs that the first `rows` rows are."""
        number = self._number(rows)
        return float(self._read[number] + Fraction(rows - self._firsts[number], self.streams[number].num_rows))

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence, all of one step.

        Args:
            indices: (B,) from 0.
            slots: (B,) place of each row in the global batch.
        """
        number = self._number(int(indices[0]))
        return self.streams[number].batch(indices - self._firsts[number] + self._starts[number], slots)

    def _number(self, row: int) -> int:
        return bisect_right(self._firsts, row) - 1


def scheduled_rows(
    split: TokenSplit,
    special: SpecialTokens,
    config: DataConfig,
    seed: int,
    segments: Sequence[ScheduleSegment],
    *,
    in_slots: bool,
) -> RowStream:
    """The rows to train on, whose number per step or whose length changes.

    A change of the number of rows does not interrupt a stream of shuffled rows: only a change of their length begins another.

    Args:
        in_slots: whether each slot of the batch continues from step to step, for a model with memory. Slots then begin
            elsewhere in the text after every change.

    Raises:
        DataError: the split has no tokens.
    """

    def build(segment: ScheduleSegment) -> RowStream:
        slots = segment.rows if in_slots else None
        return training_rows(split, special, config.at_length(segment.length), seed, slots=slots)

    changes = [
        segment
        for number, segment in enumerate(segments)
        if in_slots or number == 0 or segment.length != segments[number - 1].length
    ]
    return build(changes[0]) if len(changes) == 1 else SuccessiveRows(changes, build, whole_steps=in_slots)
