"""Rows of ids as a network reads them: overlapping windows of long texts, framed, padded and batched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from discern.errors import NumericsError
from discern.models.base import Encoder, Network
from discern.tasks.supervised import cls_last_states
from discern.types import SpecialTokens


@dataclass(frozen=True)
class TextModel:
    """A tokenizer and the limit of a network in evaluation mode, which a subclass adds.

    Attributes:
        max_length: number of positions it was trained on, including [CLS] and [SEP]; at least 3.
    """

    tokenizer: Tokenizer
    max_length: int

    @property
    def window_size(self) -> int:
        """Number of tokens of text that are read at a time."""
        return self.max_length - 2


@dataclass(frozen=True)
class TextWindow:
    """Tokens `start` to `stop` of the text with index `text`, which has `whole` tokens."""

    text: int
    start: int
    stop: int
    whole: int

    def context(self, position: int) -> float:
        """Number of context tokens on the shorter side; a side that reaches the end of the text counts as unlimited."""
        left = position - self.start if self.start else math.inf
        right = self.stop - 1 - position if self.stop < self.whole else math.inf
        return min(left, right)


def windows_of(lengths: Sequence[int], window_size: int) -> list[TextWindow]:
    """Windows of at most `window_size` tokens that cover texts of these lengths; neighbors overlap by at least one half."""
    step = max(window_size // 2, 1)
    return [
        TextWindow(text, start, min(start + window_size, length), length)
        for text, length in enumerate(lengths)
        if length
        for start in [*range(0, length - window_size, step), max(length - window_size, 0)]
    ]


def best_places(windows: Sequence[TextWindow], *, reads_ahead: bool = True) -> list[tuple[int, ...]]:
    """For each window, the positions of the tokens that have most context there; ties go to the first window.

    Args:
        windows: all windows of their texts.
        reads_ahead: whether context on the right counts.

    Returns:
        Positions from the beginning of the window, ascending; every token of every text is assigned to exactly one window.
    """
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for number, window in enumerate(windows):
        for position in range(window.start, window.stop):
            context = window.context(position) if reads_ahead else position - window.start
            token = window.text, position
            if token not in best or context > best[token][0]:
                best[token] = context, number
    places: list[list[int]] = [[] for _ in windows]
    for (_, position), (_, number) in sorted(best.items(), key=lambda item: item[0]):
        places[number].append(position - windows[number].start)
    return [tuple(each) for each in places]


# Maximum number of tokens of a forward pass, including padding, and of rows: enough to keep a few cores busy, with little
# memory at any model size. A head over the vocabulary runs on at most that many states at a time.
TOKENS_PER_BATCH, _ROWS = 4096, 256


def batches(lengths: Sequence[int], tokens: int = TOKENS_PER_BATCH) -> Iterator[list[int]]:
    """Batches of indices of rows with these lengths, shortest first, so that there is little padding.

    Args:
        tokens: maximum number of tokens of a batch, including padding; a longer row is a batch of its own.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and ((len(batch) + 1) * lengths[number] > tokens or len(batch) == _ROWS):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def framed(
    rows: Sequence[Sequence[int]], special: SpecialTokens, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Rows as `[CLS] row [SEP]`, padded, and the attention mask; token t of a row is at position t + 1."""
    return padded([[special.cls, *row, special.sep] for row in rows], special, device)


def padded(
    rows: Sequence[Sequence[int]], special: SpecialTokens, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Rows padded on the right, and the attention mask."""
    ids = [torch.tensor(row) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=special.pad)
    lengths = torch.tensor([len(row) for row in ids])
    mask = torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]
    return input_ids.to(device), mask.to(device)


def read(encoder: Encoder, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L D"]:
    """Hidden states of padded rows `[CLS] text [SEP]`, in this order; the encoder may read the rows in another framing.

    Raises:
        NumericsError: the states are not finite.
    """
    if encoder.fine_tuning.get("finetune.frame") != "cls-last":
        return finite(encoder(input_ids, mask), mask)
    return finite(cls_last_states(encoder, input_ids, mask, torch.zeros_like(input_ids)), mask)


def finite(values: Tensor, mask: Bool[Tensor, "B L"] | None = None) -> Tensor:
    """Check the outputs of a network, (B, L) or (B, L, D), and return them.

    Args:
        mask: attention mask; None: there is no padding.

    Raises:
        NumericsError: an output is not finite, although the weights were when they were loaded.
    """
    if not torch.isfinite(values if mask is None else values[mask]).all():
        raise NumericsError(
            "the outputs of the network are not finite: its weights are so large that they overflow",
            hint="the file is damaged, or training diverged: use an earlier checkpoint, or train the model again",
        )
    return values


def moved(network: Network, device: torch.device) -> Network:
    """The network, after moving it to a device, in evaluation mode."""
    for part in network.parts():
        part.to(device).eval()
    return network


def device_of(network: Network) -> torch.device:
    """The device of the network."""
    return network.encoder.embeddings.weights.device


def log_probabilities(
    network: Network, states: Float[Tensor, "M D"], ids: Sequence[int], temperature: float = 1.0
) -> Float[Tensor, "M"]:
    """Log-probability of one id at each state, by the softmax of the network's head, in float32."""
    found = []
    numbers = iter(ids)
    for part in torch.split(states, _ROWS):
        logits: Tensor = network.head(part).float() / temperature
        chosen = torch.tensor(list(islice(numbers, len(part))), device=part.device)
        found.append(logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1))
    return finite(torch.cat(found))
