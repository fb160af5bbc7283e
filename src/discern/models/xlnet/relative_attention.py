"""Attention of two streams to the same keys, by content, distance and segment.

All tensors are head-major, (H, B, ...). All rows of a direction have the same keys for the distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from discern import kernels
from discern.models.layers import Dropout
from discern.models.xlnet.config import XLNetConfig

HIDDEN, SAME, OTHER = 0, 1, 2
"""Relation of a key to a query: not visible, in the same segment, in another segment."""


@dataclass(frozen=True)
class StreamMask:
    """The keys that the queries of one stream see.

    Attributes:
        starts: (B, Q) column of the distance between each query and the first key; see `distances`.
        in_order: whether the queries are those of all positions, in order.
        relation: (B, Q, K) `HIDDEN`, `SAME` or `OTHER`; None: all keys are visible and in the same segment.
        segmented: whether `OTHER` may occur.
        blind: (B, Q) True where a query sees no key; None: every query sees a key.
    """

    starts: Int[Tensor, "B Q"]
    in_order: bool
    relation: UInt8[Tensor, "B Q K"] | None = None
    segmented: bool = False
    blind: Bool[Tensor, "B Q"] | None = None


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that all blocks share.

    Attributes:
        table: (S, K + L, D) sinusoidal embeddings of the distances, see `distances`; S = 2 for rows that run forwards and rows
            that run backwards, or 1 if all rows run forwards.
        batch: B.
        length: L.
        direction: (B,) 1 = the row runs backwards; None: all rows run forwards.
    """

    table: Float[Tensor, "S W D"]
    batch: int
    length: int
    direction: Int[Tensor, "B"] | None


def distances(length: int, keys: int, device: torch.device | None = None) -> Float[Tensor, "W"]:
    """All distances (position of the query minus position of the key) in descending order: K, K - 1, ..., 1 - L.

    The distance between the query at position i and key j is in column L - i + j.
    """
    return torch.arange(keys, -length, -1, device=device).float()


def sinusoids(offsets: Float[Tensor, "S W"], size: int, clamp_length: int) -> Float[Tensor, "S W D"]:
    """Sines, then cosines, of the distances at frequencies from 1 down to almost 1/10000.

    Args:
        clamp_length: larger distances are clamped to it; 0: no clamping.
    """
    if clamp_length > 0:
        offsets = offsets.clamp(-clamp_length, clamp_length)
    frequencies = 1 / torch.pow(10000, torch.arange(0, size, 2, device=offsets.device).float() / size)
    angles = offsets[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :size]


def stream_mask(
    input_ids: Int[Tensor, "B L"],
    visible: Bool[Tensor, "B L L"] | None,
    token_type_ids: Int[Tensor, "B L"] | None,
    before: int,
    positions: Int[Tensor, "B P"] | None = None,
) -> StreamMask:
    """The keys that the queries at `positions` see; without them, those of every position, each of which also sees itself.

    Args:
        visible: which tokens of a row see which; None: all tokens see all tokens.
        token_type_ids: segments; None: a single segment.
        before: number of positions of memory, which are visible to all and in segment 0.
    """
    length = input_ids.shape[1]
    where = torch.arange(length, device=input_ids.device).expand_as(input_ids) if positions is None else positions
    starts = (length - where).contiguous()
    if positions is None and visible is None and token_type_ids is None:
        return StreamMask(starts, in_order=True)
    if visible is None:
        visible = torch.ones(1, length, length, dtype=torch.bool, device=input_ids.device).expand(len(input_ids), -1, -1)
    if positions is None:
        seen = visible | torch.eye(length, dtype=torch.bool, device=input_ids.device)
    else:
        seen = visible.gather(1, positions[:, :, None].expand(-1, -1, length))
    relation = F.pad(seen, (before, 0), value=True).to(torch.uint8)
    if token_type_ids is not None:
        segments = token_type_ids if positions is None else token_type_ids.gather(1, positions)
        other = segments[:, :, None] != F.pad(token_type_ids, (before, 0))[:, None, :]
        relation = relation * (1 + other.to(torch.uint8))
    blind = None if positions is None or before else ~seen.any(-1)
    return StreamMask(starts, positions is None, relation, token_type_ids is not None, blind)


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores are (q + r_w) k + (q + r_r) W_r R(distance) + (q + r_s) s(same segment or not).

    Both streams attend to the same keys and values, those of memory and content, with the same weights.

    Attributes:
        content_bias, position_bias, segment_bias: r_w, r_r and r_s of the paper; (H, D / H) each.
        segments: (2, H, D / H) keys of "the same segment" and "another".

    Reference: Yang et al. 2019, sections 2.5 and A.2; no projection has a bias.
    """

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query, self.key, self.value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.position = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        shape = config.num_heads, size // config.num_heads
        self.content_bias, self.position_bias, self.segment_bias = (Parameter(torch.zeros(shape)) for _ in range(3))
        self.segments = Parameter(torch.zeros(2, *shape))
        self.dropout = Dropout(config.attention_dropout)

    def forward(
        self,
        tokens: Float[Tensor, "tokens D"],
        memory: Float[Tensor, "B M D"] | None,
        shared: SharedInputs,
        content: StreamMask | None,
        query: StreamMask | None,
    ) -> Float[Tensor, "queries D"]:
        """The attended values of each query, heads concatenated. The caller applies `output`.

        Args:
            tokens: (B * (L + P), D) content, then queries.
            content, query: what the two streams see; None for a stream that does not attend.
        """
        batch, length = shared.batch, shared.length
        here, querying = tokens[: batch * length], tokens
        if content is None:
            querying = tokens[batch * length :]
        seen = here.view(batch, length, tokens.shape[1])
        if memory is not None:
            seen = torch.cat([memory.to(seen.dtype), seen], 1)
        both = F.linear(seen, torch.cat([self.key.weight, self.value.weight]))
        keys, values = (self._split(part) for part in both.chunk(2, -1))
        position_keys = self._split(self.position(shared.table))  # (H, S, W, d)
        masks = [mask for mask in (content, query) if mask is not None]
        parts = self.query(querying).split([mask.starts.numel() for mask in masks])
        gathered = []
        for part, mask in zip(parts, masks, strict=True):
            queries = self._split(part.view(*mask.starts.shape, part.shape[1]))
            probabilities = self._probabilities(queries, keys, position_keys, shared.direction, mask)
            gathered.append((probabilities @ values).permute(1, 2, 0, 3).flatten(2).flatten(0, 1))
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered)

    def _probabilities(
        self,
        queries: Float[Tensor, "H B Q d"],
        keys: Float[Tensor, "H B K d"],
        position_keys: Float[Tensor, "H S W d"],
        direction: Int[Tensor, "B"] | None,
        mask: StreamMask,
    ) -> Float[Tensor, "H B Q K"]:
        # The terms of the scores: content, all distances, and the difference between "another segment" and "the same"
        scale = 1 / math.sqrt(queries.shape[-1])
        queries = queries * scale

        def biased(bias: Float[Tensor, "H d"]) -> Float[Tensor, "H B Q d"]:
            return queries + (bias * scale).to(queries.dtype)[:, None, None, :]

        content, by_position = biased(self.content_bias) @ keys.transpose(-1, -2), biased(self.position_bias)
        if direction is not None:
            position_scores = by_position @ position_keys.index_select(1, direction).transpose(-1, -2)
        else:
            position_scores = by_position.flatten(1, 2) @ position_keys[:, 0].transpose(-1, -2)
            position_scores = position_scores.view(*queries.shape[:3], position_keys.shape[2])
        gain = None
        if mask.segmented:
            # Only the difference: softmax does not change if the term of "the same segment" is subtracted for all keys.
            difference = (self.segments[1] - self.segments[0]).to(queries.dtype)
            gain = biased(self.segment_bias).mul(difference[:, None, None, :]).sum(-1)

        if kernels.usable(content, position_scores):
            return kernels.relative_softmax(content, position_scores, gain, mask.relation, mask.starts, self.dropout.active)
        scores = content + _rel_shift(position_scores, mask, content.shape[-1])
        if mask.relation is not None:
            if gain is not None:
                scores = scores + gain[..., None] * (mask.relation == OTHER).to(gain.dtype)
            # The smallest finite number instead of -inf, so that the result is finite for any mask.
            scores = scores.masked_fill(mask.relation == HIDDEN, torch.finfo(scores.dtype).min)
        # Softmax returns float32 under autocast; the product with the values casts it back.
        probabilities: Tensor = self.dropout(scores.softmax(-1).to(content.dtype))
        if mask.blind is not None:
            # If no key is visible, softmax is uniform over all keys, including the token to predict.
            probabilities = probabilities.masked_fill(mask.blind[..., None], 0)
        return probabilities

    def _split(self, projected: Float[Tensor, "B L D"]) -> Float[Tensor, "H B L d"]:
        rows, length, size = projected.shape
        return projected.view(rows, length, self.num_heads, size // self.num_heads).permute(2, 0, 1, 3)


def _rel_shift(position_scores: Float[Tensor, "H B Q W"], mask: StreamMask, keys: int) -> Float[Tensor, "H B Q K"]:
    """Scores by distance, shifted so that each query's columns are its keys."""
    if not mask.in_order:
        columns = mask.starts[..., None] + torch.arange(keys, device=position_scores.device)
        return position_scores.gather(-1, columns.expand(position_scores.shape[0], -1, -1, -1))
    # All positions in order: each row starts one column earlier than the previous one. Reading the same memory from element L on,
    # in rows that are one element shorter, has that effect, without a copy.
    heads, batch, length, width = position_scores.shape
    return position_scores.flatten(2)[..., length:].view(heads, batch, length, width - 1)[..., :keys]
