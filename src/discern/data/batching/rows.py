"""The stream of rows for a configuration."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from discern.data.batching.cyclic_text import ForwardText
from discern.data.batching.ordering import Integers
from discern.data.batching.packed import PackedRows
from discern.data.batching.segments import SegmentRows
from discern.data.batching.stream import ExampleStream, Packing
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
