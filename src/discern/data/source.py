"""The stream of rows that a configuration names."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from discern.data.config import DataConfig
from discern.data.ordering import Integers
from discern.data.packing import build_packing
from discern.data.ring import ForwardRing
from discern.data.shards import TokenSplit
from discern.data.stream import ExampleStream
from discern.data.two_part import RowOrder, ShuffledOrder, SlotOrder, TextOrder, TwoPartStream
from discern.errors import DataError
from discern.types import SpecialTokens, TokenBatch


@runtime_checkable
class RowStream(Protocol):
    """An endless sequence of rows, reached by number."""

    @property
    def num_rows(self) -> int:
        """Rows an epoch."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence."""


def training_rows(
    split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int, *, slots: int | None = None
) -> RowStream:
    """The rows to train on.

    Args:
        slots: rows a step, each of which goes on at the next step where it ended, for a memory; None: rows are shuffled.

    Raises:
        DataError: the split has no tokens.
    """
    if config.packing != "two-part":
        return ExampleStream(build_packing(split, special, config, seed, training=True), seed)
    ring, part = _text(split, special), config.sequence_length // 2
    order: RowOrder = ShuffledOrder(ring.size, part, seed, reversed_rows=config.reversed_rows)
    if slots is not None:
        order = SlotOrder(ring.size, part, slots, seed, reversed_rows=config.reversed_rows)
    return TwoPartStream(ring, special, config.sequence_length, seed, order)


def heldout_rows(split: TokenSplit, special: SpecialTokens, config: DataConfig) -> RowStream:
    """Rows in the order of the text, the same every time, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    if config.packing != "two-part":
        return ExampleStream(build_packing(split, special, config, 0, training=False), 0, shuffle=False)
    ring = _text(split, special)
    return TwoPartStream(ring, special, config.sequence_length, 0, TextOrder(config.sequence_length // 2))


def _text(split: TokenSplit, special: SpecialTokens) -> ForwardRing:
    """The split as one text, each document closed by the tokenizer's end of document, or by [SEP] where it has none."""
    if split.num_tokens == 0:
        raise DataError("the split has no tokens", hint="prepare more text, or a larger --heldout fraction")
    return ForwardRing(split, special.sep if special.eod is None else special.eod)
