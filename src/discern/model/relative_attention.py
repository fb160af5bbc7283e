"""Attention by content, by distance and by segment, of two streams to one set of keys.

Everything here is head-major, (H, B, ...): the keys of the distances are the same for all rows, so that one product of a head
serves the whole batch.
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
from discern.model.config import ModelConfig
from discern.model.dropout import Dropout

HIDDEN, SAME, OTHER = 0, 1, 2
"""What a key is to a query: not to be seen, of the same segment, of another."""


@dataclass(frozen=True)
class Sight:
    """What the queries of one stream see.

    Attributes:
        starts: (B, Q) the column in which a query finds its distance to the first key; see `distances`.
        in_order: the queries are those of all positions, in order.
        relation: (B, Q, K) `HIDDEN`, `SAME` or `OTHER`; None: everything is seen, and all is of one segment.
        segmented: whether there may be an `OTHER`.
        blind: (B, Q) True where a query sees nothing at all; None: none does.
    """

    starts: Int[Tensor, "B Q"]
    in_order: bool
    relation: UInt8[Tensor, "B Q K"] | None = None
    segmented: bool = False
    blind: Bool[Tensor, "B Q"] | None = None


@dataclass(frozen=True)
class Surroundings:
    """What is the same for all blocks.

    Attributes:
        table: (S, K + L, D) the distances, see `distances`, as waves; for rows that run forwards and for those that run
            backwards, S = 2, or for the one kind that there is.
        batch: B.
        length: L.
        forward: how many rows, which come first, run forwards.
    """

    table: Float[Tensor, "S W D"]
    batch: int
    length: int
    forward: int


def distances(length: int, keys: int, device: torch.device | None = None) -> Float[Tensor, "W"]:
    """Query minus key, from the largest down: K, K - 1, ..., 1 - L.

    The query at position i finds its distance to key j in column L - i + j.
    """
    return torch.arange(keys, -length, -1, device=device).float()


def sinusoids(apart: Float[Tensor, "S W"], size: int, clamp_length: int) -> Float[Tensor, "S W D"]:
    """Sines, then cosines, of the distances at frequencies from 1 down to almost 1/10000.

    Args:
        clamp_length: distances beyond it are taken for it; 0: none are.
    """
    if clamp_length > 0:
        apart = apart.clamp(-clamp_length, clamp_length)
    frequencies = 1 / torch.pow(10000, torch.arange(0, size, 2, device=apart.device).float() / size)
    angles = apart[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :size]


def look(
    input_ids: Int[Tensor, "B L"],
    visible: Bool[Tensor, "B L L"] | None,
    token_type_ids: Int[Tensor, "B L"] | None,
    before: int,
    positions: Int[Tensor, "B P"] | None = None,
) -> Sight:
    """What the queries at some positions see, or, without `positions`, those at all, each of which sees itself besides.

    Args:
        visible: which tokens of a row see which; None: all see all.
        token_type_ids: segments; None: one.
        before: positions of memory, which all see, and which are of segment 0.
    """
    length = input_ids.shape[1]
    where = torch.arange(length, device=input_ids.device).expand_as(input_ids) if positions is None else positions
    starts = (length - where).contiguous()
    if positions is None and visible is None and token_type_ids is None:
        return Sight(starts, in_order=True)
    if visible is None:
        visible = torch.ones(1, length, length, dtype=torch.bool, device=input_ids.device).expand(len(input_ids), -1, -1)
    if positions is None:
        seen = visible | torch.eye(length, dtype=torch.bool, device=input_ids.device)
    else:
        seen = visible.gather(1, positions[:, :, None].expand(-1, -1, length))
    relation = F.pad(seen, (before, 0), value=True).to(torch.uint8)
    if token_type_ids is not None:
        own = token_type_ids if positions is None else token_type_ids.gather(1, positions)
        other = own[:, :, None] != F.pad(token_type_ids, (before, 0))[:, None, :]
        relation = relation * (1 + other.to(torch.uint8))
    blind = None if positions is None or before else ~seen.any(-1)
    return Sight(starts, positions is None, relation, token_type_ids is not None, blind)


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores are (q + r_w) k + (q + r_r) W_r R(distance) + (q + r_s) s(same segment or not).

    Both streams ask the same keys and values, those of memory and content, with the same weights.

    Attributes:
        content_bias, position_bias, segment_bias: r_w, r_r and r_s of the paper; (H, D / H) each.
        segments: (2, H, D / H) keys of "the same segment" and "another".

    Reference: Yang et al. 2019, sections 2.5 and A.2; no projection has a bias.
    """

    def __init__(self, config: ModelConfig) -> None:
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
        surroundings: Surroundings,
        content: Sight | None,
        query: Sight | None,
    ) -> Float[Tensor, "asking D"]:
        """What each token that asks gathered, head by head; `output` is the caller's to apply.

        Args:
            tokens: (B * (L + P), D) content, then queries.
            content, query: what the two streams see; those of a stream without one don't ask.
        """
        batch, length = surroundings.batch, surroundings.length
        here, asking = tokens[: batch * length], tokens
        if content is None:
            asking = tokens[batch * length :]
        seen = here.view(batch, length, tokens.shape[1])
        if memory is not None:
            seen = torch.cat([memory.to(seen.dtype), seen], 1)
        both = F.linear(seen, torch.cat([self.key.weight, self.value.weight]))
        keys, values = (self._split(part) for part in both.chunk(2, -1))
        by_distance = self._split(self.position(surroundings.table))  # (H, S, W, d)
        sights = [sight for sight in (content, query) if sight is not None]
        parts = self.query(asking).split([sight.starts.numel() for sight in sights])
        gathered = []
        for part, sight in zip(parts, sights, strict=True):
            asked = self._split(part.view(*sight.starts.shape, part.shape[1]))
            terms = self._terms(asked, keys, by_distance, surroundings.forward, sight.segmented)
            gathered.append((self._probabilities(*terms, sight) @ values).permute(1, 2, 0, 3).flatten(2).flatten(0, 1))
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered)

    def _terms(
        self,
        asked: Float[Tensor, "H B Q d"],
        keys: Float[Tensor, "H B K d"],
        by_distance: Float[Tensor, "H S W d"],
        forward: int,
        segmented: bool,
    ) -> tuple[Float[Tensor, "H B Q K"], Float[Tensor, "H B Q W"], Float[Tensor, "H B Q"] | None]:
        """What scores are made of: content, all distances, and how much more "another segment" says than "the same"."""
        scale = 1 / math.sqrt(asked.shape[-1])
        asked = asked * scale

        def biased(bias: Float[Tensor, "H d"]) -> Float[Tensor, "H B Q d"]:
            return asked + (bias * scale).to(asked.dtype)[:, None, None, :]

        content = biased(self.content_bias) @ keys.transpose(-1, -2)
        apart = _by_direction(biased(self.position_bias), by_distance, forward)
        if not segmented:
            return content, apart, None
        # What "the same segment" says is said of all keys, so a softmax can tell the difference of the two alone.
        difference = (self.segments[1] - self.segments[0]).to(asked.dtype)
        return content, apart, biased(self.segment_bias).mul(difference[:, None, None, :]).sum(-1)

    def _probabilities(self, content: Tensor, apart: Tensor, gain: Tensor | None, sight: Sight) -> Float[Tensor, "H B Q K"]:
        if kernels.usable(content, apart):
            return kernels.relative_softmax(content, apart, gain, sight.relation, sight.starts, self.dropout.active)
        scores = content + _shifted(apart, sight, content.shape[-1])
        if gain is not None and sight.relation is not None:
            scores = scores + gain[..., None] * (sight.relation == OTHER).to(gain.dtype)
        if sight.relation is not None:
            # The smallest finite number instead of -inf: finite whatever the mask.
            scores = scores.masked_fill(sight.relation == HIDDEN, torch.finfo(scores.dtype).min)
        # Softmax returns float32 under autocast; the product with the values takes it back down.
        probabilities: Tensor = self.dropout(scores.softmax(-1).to(content.dtype))
        if sight.blind is not None:
            # A softmax over nothing is even over everything, also over the token that is to be predicted.
            probabilities = probabilities.masked_fill(sight.blind[..., None], 0)
        return probabilities

    def _split(self, projected: Float[Tensor, "B L D"]) -> Float[Tensor, "H B L d"]:
        rows, length, size = projected.shape
        return projected.view(rows, length, self.num_heads, size // self.num_heads).permute(2, 0, 1, 3)


def _by_direction(
    asked: Float[Tensor, "H B Q d"], by_distance: Float[Tensor, "H S W d"], forward: int
) -> Float[Tensor, "H B Q W"]:
    """Products of queries with the keys of the distances, of each row with those of its direction."""
    heads, batch, queries, size = asked.shape
    tables = by_distance.transpose(-1, -2)
    if tables.shape[1] == 1 or 2 * forward == batch:
        # As many rows of either kind: one product with as many tables.
        kinds, width = tables.shape[1], tables.shape[-1]
        return (asked.reshape(heads, kinds, batch // kinds * queries, size) @ tables).view(heads, batch, queries, width)
    parts = (asked[:, :forward], tables[:, 0]), (asked[:, forward:], tables[:, 1])
    products = [(rows.flatten(1, 2) @ table).view(heads, rows.shape[1], queries, table.shape[-1]) for rows, table in parts]
    return torch.cat(products, 1)


def _shifted(apart: Float[Tensor, "H B Q W"], sight: Sight, keys: int) -> Float[Tensor, "H B Q K"]:
    """The columns of each query's keys."""
    if not sight.in_order:
        columns = sight.starts[..., None] + torch.arange(keys, device=apart.device)
        return apart.gather(-1, columns.expand(apart.shape[0], -1, -1, -1))
    # All positions in order: each row begins one column earlier than the one before, so that the same memory, read in rows
    # one element shorter from element L on, is what is wanted. Nothing is copied.
    heads, batch, length, width = apart.shape
    return apart.flatten(2)[..., length:].view(heads, batch, length, width - 1)[..., :keys]
