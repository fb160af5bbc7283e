"""Random crops of texts: two spans of the same text are a pair that belongs together, without any labels."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.types import TokenBatch

BatchT = TypeVar("BatchT", bound=TokenBatch)
# Length of a crop as a fraction of its text. Izacard et al. 2021, "Unsupervised dense information retrieval with contrastive
# learning" (Contriever), section 3.1 and their code: from 5 or 10 to 50 percent.
_SHORTEST, _LONGEST = 0.1, 0.5
# A crop of one or two tokens says nothing about its text.
_MIN_TOKENS = 4


def cropped(batch: BatchT, count: int, chosen: Bool[Tensor, "B"], randomness: Randomness) -> BatchT:
    """A batch in which each text of the chosen rows is replaced by a random span of its tokens, drawn independently.

    Args:
        batch: rows of texts, each as `[CLS] text [SEP]`, whose segments are the numbers of the texts.
        count: maximum number of texts per row.
        chosen: the rows whose texts are cropped.
        randomness: the random numbers of these rows.
    """
    real, device = batch.attention_mask, batch.input_ids.device
    segments = torch.where(real, batch.token_type_ids, count)
    sizes = torch.zeros(batch.size, count + 1, dtype=torch.int64, device=device).scatter_add_(
        1, segments, torch.ones_like(segments)
    )
    starts = sizes.cumsum(1) - sizes
    words = (sizes[:, :count] - 2).clamp(min=0)  # without [CLS] and [SEP]
    draws = randomness.to(device).uniforms("crops", 2 * count)
    share = _SHORTEST + (_LONGEST - _SHORTEST) * draws[:, :count]
    lengths = torch.minimum((share * words).round().long().clamp(min=_MIN_TOKENS), words)
    first = 1 + (draws[:, count:] * (words - lengths + 1)).long()
    place = torch.arange(real.shape[1], device=device) - starts.gather(1, segments)
    first, lengths, ends = (_of_tokens(each, segments) for each in (first, lengths, words + 1))
    keep = real & ((place == 0) | (place == ends) | ((place >= first) & (place < first + lengths)))
    return _kept(batch, torch.where(chosen[:, None], keep, real))


def _of_tokens(values: Int[Tensor, "B K"], segments: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """The value of each token's text; padding has that of the last text."""
    return values.gather(1, segments.clamp(max=values.shape[1] - 1))


def _kept(batch: BatchT, keep: Bool[Tensor, "B L"]) -> BatchT:
    """The kept tokens of each row, moved to its beginning."""
    sizes = keep.sum(1)
    length = int(sizes.max())
    rows, places = keep.nonzero(as_tuple=True)
    there = rows, (keep.cumsum(1) - 1)[rows, places]
    input_ids, types = (each.new_zeros(batch.size, length) for each in (batch.input_ids, batch.token_type_ids))
    input_ids[there], types[there] = batch.input_ids[keep], batch.token_type_ids[keep]
    real = torch.arange(length, device=keep.device) < sizes[:, None]
    return replace(
        batch,
        input_ids=input_ids,
        token_type_ids=types,
        attention_mask=real,
        special_tokens_mask=~real,
        position_ids=torch.arange(length, device=keep.device).expand(batch.size, length),
        full=bool(real.all()),
        spans=None,
    )
