"""A mixture of two streams: new text with a fraction of replayed text."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from discern.data.batching.stream import ExampleStream, Integers, Rows, join_rows, to_batch
from discern.errors import ConfigError
from discern.types import TokenBatch

_FINEST = 1000


def replay_fraction(share: float) -> Fraction:
    """The fraction of replayed examples, rounded to the nearest one with a denominator of at most 1000.

    Raises:
        ConfigError: the share is not in [0, 1), or rounds to 0 or 1, so that one of the texts would be left out.
    """
    said, hint = f"the share of replayed text is {share}", "--replay-share 0.2 replays one example in five"
    if not 0 <= share < 1:
        raise ConfigError(f"{said}; expected a fraction of at least 0 and below 1", hint=hint)
    found = Fraction(share).limit_denominator(_FINEST)
    if found == 1:
        raise ConfigError(
            f"{said}, which rounds to 1, in steps of 1/{_FINEST}: your own text would not be trained on",
            hint=f"{hint}; the largest share is {1 - 1 / _FINEST:g}",
        )
    if found == 0 and share > 0:
        raise ConfigError(
            f"{said}, which rounds to 0, in steps of 1/{_FINEST}: nothing would be replayed",
            hint=f"{hint}; the smallest share is {1 / _FINEST:g}; 0 only measures what is forgotten",
        )
    return found


class MixedStream:
    """An endless sequence in which a fraction of the examples is replayed, spread as evenly as possible.

    Of the first n examples floor(n * share) are replayed, and of any n consecutive examples that number or one more. The place
    of an example decides which text it comes from and which row it is; there is no state. With a share of 1/5 and 10 sequences
    per step, two examples of each step are replayed.

    Args:
        main: stream of the text to train on.
        replayed: stream of the text to mix in.
        share: fraction of replayed examples, in [0, 1); see `replay_fraction`.
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
        """Number of replayed examples before each place."""
        counts: Integers = places * self._share.numerator // self._share.denominator
        return counts
