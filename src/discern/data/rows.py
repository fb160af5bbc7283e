"""Rows of a fixed length, and what numbers them."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from discern.data.ordering import Integers


@dataclass(frozen=True)
class Rows:
    """Rows as arrays, all (B, L).

    Attributes:
        input_ids: padding holds the pad id.
        lengths: (B,) real tokens; padding stands on the right.
        is_special: [CLS], [SEP] and padding.
        token_types: segments.
        positions: of each token within its piece.
        pieces: which document piece of the row a token belongs to, or None where rows are one piece.
        word_starts: True where a word begins, as the data set has it; None where that isn't known.
    """

    input_ids: Integers
    lengths: Integers
    is_special: NDArray[np.bool_]
    token_types: Integers
    positions: Integers
    pieces: Integers | None
    word_starts: NDArray[np.bool_] | None = None


class Packing(abc.ABC):
    """A numbering of the rows that one epoch over a split consists of.

    Attributes:
        num_rows: rows an epoch.
    """

    num_rows: int

    @abc.abstractmethod
    def rows(self, numbers: Integers, epoch: int) -> Rows:
        """Rows by their numbers, each in [0, num_rows), as they are in this epoch."""
