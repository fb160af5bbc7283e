"""An averaged structured perceptron that tags sequences: features of each item, and which tag follows which.

Reference: Collins 2002, "Discriminative Training Methods for Hidden Markov Models".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Items = NDArray[np.int64]
"""(T, K) the features of each item of a sequence by their numbers; `padding` where an item has fewer than K."""


class AveragedPerceptron:
    """Linear scores of tags and of transitions, learned from mistakes and averaged over the training.

    Args:
        features: how many there are; the number `features` itself is padding, whose weight stays 0.
        tags: how many there are.
    """

    def __init__(self, features: int, tags: int) -> None:
        self.padding = features
        self._tags = tags
        # The transition to the first tag comes from a tag of its own, the last row.
        self._weights = np.zeros((features + 1, tags), np.float32)
        self._moves = np.zeros((tags + 1, tags), np.float32)

    def fit(self, sequences: Sequence[tuple[Items, NDArray[np.int64]]], passes: int, seed: int = 0) -> None:
        """Go through the sequences so many times, each time in another order.

        Args:
            sequences: features and (T,) tags of each.
        """
        late_weights, late_moves = np.zeros_like(self._weights), np.zeros_like(self._moves)
        generator, step = np.random.default_rng(seed), 1.0
        for _ in range(passes):
            for number in generator.permutation(len(sequences)):
                items, gold = sequences[number]
                said = self.tag(items)
                wrong = np.flatnonzero(said != gold)
                for place in wrong:
                    for tag, sign in ((gold[place], 1.0), (said[place], -1.0)):
                        # Of a feature that an item has twice, one update is lost: no harm.
                        self._weights[items[place], tag] += sign
                        late_weights[items[place], tag] += sign * step
                if len(wrong):
                    before_gold, before_said = np.append(self._tags, gold[:-1]), np.append(self._tags, said[:-1])
                    for before, after, sign in ((before_gold, gold, 1.0), (before_said, said, -1.0)):
                        np.add.at(self._moves, (before, after), sign)
                        np.add.at(late_moves, (before, after), sign * step)
                self._weights[self.padding] = late_weights[self.padding] = 0.0
                step += 1
        # The mean of the weights after each sequence, without having kept them.
        self._weights -= late_weights / np.float32(step)
        self._moves -= late_moves / np.float32(step)

    def tag(self, items: Items) -> NDArray[np.int64]:
        """(T,) the tags of the highest total score (Viterbi)."""
        scores = self._weights[items].sum(1)
        count = len(scores)
        came_from = np.zeros((count, self._tags), np.int64)
        best = scores[0] + self._moves[-1] if count else np.zeros(self._tags)
        moves = self._moves[:-1]
        every = np.arange(self._tags)
        for place in range(1, count):
            reached = best[:, None] + moves
            came_from[place] = reached.argmax(0)
            best = reached[came_from[place], every] + scores[place]
        tags = np.zeros(count, np.int64)
        if count:
            tags[-1] = best.argmax()
            for place in range(count - 1, 0, -1):
                tags[place - 1] = came_from[place, tags[place]]
        return tags
