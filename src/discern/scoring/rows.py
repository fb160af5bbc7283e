"""Rows of ids as a network takes them: framed, padded, and some thousand tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from discern.errors import NumericsError
from discern.model.encoder import Encoder
from discern.model.network import Network
from discern.tasks.frames import FRAMES
from discern.types import SpecialTokens, TokenBatch

# A forward pass has no more tokens than this, padding included, and no more rows: enough to keep a few cores busy, little
# memory at any model size. A head over the vocabulary runs on as many states at a time as there may be rows.
TOKENS_PER_BATCH, _ROWS = 4096, 256


def batches(lengths: Sequence[int], tokens: int = TOKENS_PER_BATCH) -> Iterator[list[int]]:
    """Numbers of rows of these lengths that are read at a time, shortest first, so that little is padding.

    Args:
        tokens: of a batch, padding included; a longer row stands alone.
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
    """`[CLS] row [SEP]` and padding, and where there is none; the token at place t of a row stands at position t + 1."""
    return padded([[special.cls, *row, special.sep] for row in rows], special, device)


def padded(
    rows: Sequence[Sequence[int]], special: SpecialTokens, device: torch.device
) -> tuple[Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Rows with padding on the right, and where there is none."""
    ids = [torch.tensor(row) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=special.pad)
    lengths = torch.tensor([len(row) for row in ids])
    mask = torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]
    return input_ids.to(device), mask.to(device)


def read(encoder: Encoder, input_ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"] | None = None) -> Float[Tensor, "B L D"]:
    """Hidden states of rows `[CLS] text [SEP]` and padding, in that order, laid before the encoder as it expects them.

    Raises:
        NumericsError: they are not finite.
    """
    if encoder.fine_tuning.get("finetune.frame") != "cls-last":
        return finite(encoder(input_ids, mask), mask)
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask
    rows, length = input_ids.shape
    tokens = TokenBatch(
        input_ids=input_ids,
        attention_mask=real,
        special_tokens_mask=~real,
        token_type_ids=torch.zeros_like(input_ids),
        position_ids=torch.arange(length, device=input_ids.device).expand(rows, -1),
        document_ids=None,
        word_starts=None,
        example_index=torch.arange(rows),
        slot=torch.arange(rows),
        full=mask is None,
    )
    return finite(FRAMES["cls-last"].states(encoder, tokens), mask)


def finite(values: Tensor, mask: Bool[Tensor, "B L"] | None = None) -> Tensor:
    """Outputs of a network for the tokens of rows, (B, L) or (B, L, D), unchanged.

    Args:
        mask: where there is no padding; None: nowhere is any.

    Raises:
        NumericsError: some of it is not finite, although the weights were when they were loaded.
    """
    if not torch.isfinite(values if mask is None else values[mask]).all():
        raise NumericsError(
            "the outputs of the network are not finite: its weights are so large that they overflow",
            hint="the file is damaged, or training diverged: take an earlier checkpoint, or make the model again",
        )
    return values


def device_of(network: Network) -> torch.device:
    """Where the network computes."""
    return network.encoder.embeddings.weights.device


def log_probabilities(
    network: Network, states: Float[Tensor, "M D"], ids: Sequence[int], temperature: float = 1.0
) -> Float[Tensor, "M"]:
    """Of one id at each state, by the softmax of the network's head, in float32."""
    found = []
    numbers = iter(ids)
    for part in torch.split(states, _ROWS):
        logits: Tensor = network.head(part).float() / temperature
        chosen = torch.tensor(list(islice(numbers, len(part))), device=part.device)
        found.append(logits.gather(1, chosen[:, None]).squeeze(1) - logits.logsumexp(1))
    return finite(torch.cat(found))
