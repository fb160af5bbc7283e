"""The packing that a configuration names."""

from __future__ import annotations

from discern.data.config import DataConfig
from discern.data.packed import PackedRows
from discern.data.rows import Packing
from discern.data.segments import SegmentRows
from discern.data.shards import TokenSplit
from discern.errors import DataError
from discern.types import SpecialTokens


def build_packing(split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int, *, training: bool) -> Packing:
    """The packing that the configuration names.

    Args:
        training: False: rows don't change from epoch to epoch, for evaluation.

    Raises:
        DataError: the split has no tokens.
    """
    if split.num_tokens == 0:
        raise DataError("the split has no tokens", hint="prepare more text, or a larger --heldout fraction")
    if config.packing == "packed":
        return PackedRows(split, special, config.sequence_length, seed, rotate=training)
    return SegmentRows(split, special, config, seed)
