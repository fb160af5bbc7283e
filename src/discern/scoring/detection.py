"""The probability that each token of a text was replaced, as a discriminator sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Encoding, Tokenizer

from discern.data.tokenizer import special_tokens
from discern.model.network import Network
from discern.scoring.rows import TOKENS_PER_BATCH, batches, finite, framed
from discern.scoring.windows import best_places, windows_of


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


def detect_replaced(
    detector: Detector,
    texts: Sequence[str],
    encodings: Sequence[Encoding],
    advance: Callable[[int], None],
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> list[Detection]:
    """Every token's probability. A text of more than `detector.room` tokens is judged in overlapping windows, and each
    token counts where it has most context.

    Args:
        encodings: of the texts, without special tokens.
        advance: told how many tokens more are done.
        tokens_per_batch: of a forward pass, padding included; it changes the last digits at most.
    """
    found = [[0.0] * len(encoding) for encoding in encodings]
    windows = windows_of([len(encoding) for encoding in encodings], detector.room)
    counting = best_places(windows)
    for batch in batches([window.stop - window.start + 2 for window in windows], tokens_per_batch):
        ids = [encodings[windows[number].text].ids[windows[number].start : windows[number].stop] for number in batch]
        for number, probabilities in zip(batch, _judge(detector, ids), strict=True):
            window = windows[number]
            for place in counting[number]:
                found[window.text][window.start + place] = probabilities[place]
        advance(sum(len(counting[number]) for number in batch))
    return [
        Detection(text, encoding.tokens, encoding.offsets, probabilities)
        for text, encoding, probabilities in zip(texts, encodings, found, strict=True)
    ]


@torch.inference_mode()
def _judge(detector: Detector, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Probabilities of the tokens of each text, which is given as ids and fits."""
    device = detector.network.encoder.embeddings.weights.device
    input_ids, mask = framed(texts, special_tokens(detector.tokenizer), device)
    logits = finite(detector.network.token_logits(input_ids, mask), mask)
    return [row[1 : len(ids) + 1] for row, ids in zip(logits.sigmoid().tolist(), texts, strict=True)]
