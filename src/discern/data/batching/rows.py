"""The stream of rows for a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from discern.config.schema import ScheduleSegment
from discern.data.batching.mixture import MixedStream, weights_by_size
from discern.data.batching.segments import ExampleStream, PackedRows, SegmentRows
from discern.data.batching.stream import RowStream
from discern.data.batching.two_part import ForwardText, TwoPartStream
from discern.data.config import DataConfig
from discern.data.dataset.shards import TokenSplit
from discern.errors import DataError
from discern.types import SpecialTokens


def training_rows(
    split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int, *, slots: int | None = None, training: bool = True
) -> RowStream:
    """The rows to train on.

    Args:
        slots: rows per step, for a model with memory: each slot continues at the next step where it ended. If None, rows
            are shuffled.
        training: if False, rows come in the order of the text and are the same in every epoch, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    if split.num_tokens == 0:
        raise DataError("the split has no tokens", hint="prepare more text, or a larger --heldout fraction")
    length = config.sequence_length
    if config.packing == "two-part":
        # Each document ends with the end-of-document token, or with [SEP] if the tokenizer has none.
        text = ForwardText(split, special.sep if special.eod is None else special.eod)
        backwards = config.reversed_rows and training
        return TwoPartStream(text, special, length, seed, slots=slots, reversed_rows=backwards, shuffle=training)
    if config.packing == "packed":
        return ExampleStream(PackedRows(split, special, length, seed, rotate=training), seed, shuffle=training)
    return ExampleStream(SegmentRows(split, special, config, seed), seed, shuffle=training)


def heldout_rows(split: TokenSplit, special: SpecialTokens, config: DataConfig) -> RowStream:
    """Rows in the order of the text, the same every time, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    return training_rows(split, special, config, 0, training=False)


def scheduled_rows(
    splits: Sequence[TokenSplit],
    special: SpecialTokens,
    config: DataConfig,
    seed: int,
    segments: Sequence[ScheduleSegment],
    *,
    in_slots: bool,
) -> MixedStream:
    """The rows to train on, from one or several sources, whose number per step, length or mixture changes.

    A change of the number of rows does not interrupt a stream of shuffled rows: only a change of their length begins another.

    Args:
        splits: the text of each source.
        in_slots: whether each slot of the batch continues from step to step, for a model with memory. Slots then begin
            elsewhere in the text after every change.

    Raises:
        DataError: a split has no tokens.
    """
    built: dict[tuple[int, int | None], list[RowStream]] = {}

    def build(segment: ScheduleSegment) -> list[RowStream]:
        slots, settings = segment.rows if in_slots else None, config.at_length(segment.length)
        if (segment.length, slots) not in built:
            built[segment.length, slots] = [training_rows(split, special, settings, seed, slots=slots) for split in splits]
        return built[segment.length, slots]

    tokens = [split.num_tokens for split in splits]
    return MixedStream(segments, build, tokens, weights_by_size(tokens, config), whole_steps=in_slots)
