"""The probability that each token of a text was replaced, as a discriminator sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Encoding, Tokenizer
from torch.nn.utils.rnn import pad_sequence

from discern.data.tokenizer import special_tokens
from discern.model.network import Network

# Tokens a forward pass, padding included: enough to keep a few cores busy, little memory at any model size.
_TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Detection:
    """What the discriminator says of one text. The special tokens around it are left out.

    Attributes:
        text: as it was given.
        tokens: as the tokenizer writes them.
        offsets: (start, end) of each token in the text, in characters.
        replaced_probability: of each token, in 0-1.
    """

    text: str
    tokens: list[str]
    offsets: list[tuple[int, int]]
    replaced_probability: list[float]


@dataclass(frozen=True)
class Detector:
    """A discriminator, in evaluation mode, with its tokenizer.

    Attributes:
        max_length: positions it was trained on, [CLS] and [SEP] included; at least 3.
    """

    network: Network
    tokenizer: Tokenizer
    max_length: int

    @property
    def room(self) -> int:
        """Tokens of text that it takes at a time."""
        return self.max_length - 2


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of text number `text`, which has `whole` tokens."""

    text: int
    start: int
    stop: int
    whole: int

    def context(self, position: int) -> float:
        """Tokens of context that a token has on its poorer side; the ends of the text itself take nothing away."""
        left = position - self.start if self.start else math.inf
        right = self.stop - 1 - position if self.stop < self.whole else math.inf
        return min(left, right)


def detect_replaced(
    detector: Detector, texts: Sequence[str], encodings: Sequence[Encoding], advance: Callable[[int], None]
) -> list[Detection]:
    """Every token's probability. A text of more than `detector.room` tokens is judged in overlapping windows, and each
    token counts where it has most context.

    Args:
        encodings: of the texts, without special tokens.
        advance: told how many tokens more are done.
    """
    found = [[0.0] * len(encoding) for encoding in encodings]
    context = [[-1.0] * len(encoding) for encoding in encodings]
    for batch in batches(windows_of([len(encoding) for encoding in encodings], detector.room)):
        ids = [encodings[window.text].ids[window.start : window.stop] for window in batch]
        new = 0
        for window, probabilities in zip(batch, _judge(detector, ids), strict=True):
            for position, probability in enumerate(probabilities, window.start):
                margin = window.context(position)
                new += context[window.text][position] < 0
                if margin > context[window.text][position]:
                    context[window.text][position], found[window.text][position] = margin, probability
        advance(new)
    return [
        Detection(text, encoding.tokens, encoding.offsets, probabilities)
        for text, encoding, probabilities in zip(texts, encodings, found, strict=True)
    ]


def windows_of(lengths: Sequence[int], room: int) -> list[Window]:
    """Windows of at most `room` tokens that cover texts of these lengths, each overlapping the one before by a half or more."""
    step = max(room // 2, 1)
    return [
        Window(text, start, min(start + room, length), length)
        for text, length in enumerate(lengths)
        if length
        for start in [*range(0, length - room, step), max(length - room, 0)]
    ]


def batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Windows of like length together, so that little is padding."""
    batch: list[Window] = []
    for window in sorted(windows, key=lambda window: window.stop - window.start):
        if batch and (len(batch) + 1) * (window.stop - window.start + 2) > _TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


@torch.inference_mode()
def _judge(detector: Detector, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Probabilities of the tokens of each text, which is given as ids and fits."""
    special = special_tokens(detector.tokenizer)
    rows = [torch.tensor([special.cls, *ids, special.sep]) for ids in texts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=special.pad)
    mask = torch.arange(input_ids.shape[1])[None, :] < torch.tensor([len(row) for row in rows])[:, None]
    logits = detector.network.token_logits(input_ids, mask)
    return [row[1 : len(ids) + 1] for row, ids in zip(logits.sigmoid().tolist(), texts, strict=True)]
