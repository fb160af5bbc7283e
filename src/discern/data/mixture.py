"""Two sequences of examples in one, in a chosen share: one's own text with some of the text from before."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from discern.data.ordering import Integers
from discern.data.rows import Rows
from discern.data.stream import ExampleStream, join_rows, to_batch
from discern.errors import ConfigError
from discern.types import TokenBatch

_FINEST = 1000


def replay_fraction(share: float) -> Fraction:
    """The share of replayed examples as it is kept to: the nearest fraction with a denominator of at most 1000.

    Raises:
        ConfigError: it is none of at least 0 and below 1, or so near to either that one of the texts would be left out.
    """
    said, hint = f"the share of replayed text is {share}", "--replay-share 0.2 replays one example in five"
    if not 0 <= share < 1:
        raise ConfigError(f"{said}; expected a fraction of at least 0 and below 1", hint=hint)
    found = Fraction(share).limit_denominator(_FINEST)
    if found == 1:
        raise ConfigError(
            f"{said}, which is 1 to within one in {_FINEST}: nothing of one's own text would be trained on",
            hint=f"{hint}; the largest share is {1 - 1 / _FINEST:g}",
        )
    if found == 0 and share > 0:
        raise ConfigError(
            f"{said}, which is 0 to within one in {_FINEST}: nothing would be replayed",
            hint=f"{hint}; the smallest share is {1 / _FINEST:g}, and 0 only measures",
        )
    return found


class MixedStream:
    """An endless sequence in which a share of the examples is replayed, spread as evenly as can be.

    Of the first n examples floor(n * share) are replayed, so that every stretch of n has that number or one more. Which
    place holds what, and which row of either text, follows from the place alone; nothing is remembered. Share 1/5 with
    steps of 10 sequences: two of each step.

    Args:
        main: the text that is trained on.
        replayed: the text that is mixed in.
        share: of the examples, in [0, 1), see `replay_fraction`.
    """

    def __init__(self, main: ExampleStream, replayed: ExampleStream, share: float) -> None:
        self._streams = main, replayed
        self._share = replay_fraction(share)

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of the sequence.

        Args:
            indices: (B,) from 0.
            slots: (B,) place of each row in the global batch.
        """
        before = self._replayed_before(indices)
        is_replayed = self._replayed_before(indices + 1) > before
        parts: list[tuple[Integers, Rows]] = []
        for stream, chosen, numbers in zip(self._streams, (~is_replayed, is_replayed), (indices - before, before), strict=True):
            places = np.flatnonzero(chosen)
            if len(places):
                parts.append((places, stream.rows(numbers[places])))
        return to_batch(join_rows(parts), indices, slots)

    def _replayed_before(self, places: Integers) -> Integers:
        """How many of the examples before each place are replayed."""
        counts: Integers = places * self._share.numerator // self._share.denominator
        return counts
