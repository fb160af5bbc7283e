"""The encoder of DeBERTa: disentangled attention, whose scores have terms of their own for the distance of two tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.errors import DataError
from discern.models.attention import TransformerBlock, Unpadding
from discern.models.base import StackedEncoder
from discern.models.config import ModelConfig
from discern.models.deberta.config import DebertaConfig
from discern.models.deberta.huggingface import DebertaArchitecture
from discern.models.heads import TiedLMHead
from discern.models.layers import (
    Disentangled,
    Dropout,
    States,
    TokenEmbeddings,
    WordEmbeddings,
    as_states,
    looked_up,
    normalized,
    parts_flops,
)


@dataclass(frozen=True)
class RelativePositions:
    """Vectors of the distances that occur in a batch.

    Attributes:
        vectors: (W, D) one for each bucket of distances, in the order of query minus key.
        buckets: (2 L - 1,) row of the vectors for each distance, key minus query, from 1 - L to L - 1.
    """

    vectors: Float[Tensor, "W D"]
    buckets: Int[Tensor, "distances"]


def distance_rows(length: int, config: DebertaConfig, device: torch.device | None = None) -> Int[Tensor, "distances"]:
    """Row of the table of vectors for each distance, key minus query, from 1 - length to length - 1.

    Let m be half of the buckets. A distance of up to m has a bucket of its own; d > m has the bucket
    m + ceil((m - 1) log(d / m) / log((M - 1) / m)), where M is the longest distance.

    Differs from the released code, and not from transformers: distances beyond M continue this scale until the table ends.

    Reference: He et al. 2021 (DeBERTa), appendix A.5, and transformers' `make_log_bucket_position`.
    """
    distance = torch.arange(length - 1, -length, -1, device=device)  # query minus key
    span = config.distance_rows // 2
    if config.position_buckets:
        near = config.position_buckets // 2
        # In float32, operation by operation as in transformers: rounding decides about distances at the edge of a bucket.
        ratio = torch.log(distance.abs().clamp(min=near) / near) / torch.log(torch.tensor((config.longest_distance - 1) / near))
        far = (torch.ceil(ratio * (near - 1)) + near).long() * distance.sign()
        distance = torch.where(distance.abs() <= near, distance, far)
    return (distance + span).clamp(0, 2 * span - 1)


class DisentangledAttention(nn.Module):
    """Multi-head attention with the scores (q_i k_j + q_i K(i - j) + k_j Q(i - j)) / sqrt(3 d).

    K and Q are projections of the vectors of distances, by the matrices of keys and queries or by their own.

    Reference: He et al. 2021 (DeBERTa), section 3.1.
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.terms = config.num_heads, config.pos_att_type.split("|")
        self.query, self.key, self.value, self.output = (nn.Linear(size, size) for _ in range(4))
        own = {term for term in self.terms if not config.share_att_key}
        self.position_key = nn.Linear(size, size) if "c2p" in own else None
        self.position_query = nn.Linear(size, size) if "p2c" in own else None
        self.dropout = Dropout(config.attention_dropout)
        self.position_dropout = Dropout(config.hidden_dropout)
        self.scale = 1 / math.sqrt((1 + len(self.terms)) * size / config.num_heads)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens D"],
        unpadding: Unpadding,
        positions: RelativePositions,
        queries: Float[Tensor, "*tokens D"] | None,
    ) -> Float[Tensor, "*tokens D"]:
        """The attended values of each token, heads concatenated. The caller applies `output`.

        Args:
            queries: states that the queries are projected from; None: `hidden`.
        """
        layers = (self.query, self.key, self.value)
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        packed = F.linear(hidden, weight, bias)
        if queries is not None:
            packed = torch.cat([self.query(queries), packed[..., hidden.shape[-1] :]], -1)
        vectors = self.position_dropout(positions.vectors)
        both = (("c2p", self.position_key or self.key), ("p2c", self.position_query or self.query))
        projected = [layer(vectors) if term in self.terms else torch.zeros_like(vectors) for term, layer in both]
        position = torch.cat(projected, -1)
        if unpadding.offsets is not None:
            attended = kernels.attention(
                packed.flatten(0, -2),
                self.num_heads,
                unpadding.offsets,
                self.dropout.active,
                positions=position,
                buckets=positions.buckets,
                scale=self.scale,
                directions=unpadding.directions,
            )
            return attended.view(hidden.shape)
        batch, length, size = hidden.shape
        query, key, value = packed.view(batch, length, 3, self.num_heads, size // self.num_heads).transpose(1, 3).unbind(2)
        content_to_position = _scores_by_distance(query, position[:, :size], positions.buckets)
        position_to_content = _scores_by_distance(key, position[:, size:], positions.buckets.flip(0))
        bias = (content_to_position + position_to_content.mT) * self.scale
        if unpadding.visible is not None:
            # The smallest finite number instead of -inf, so that the result is finite for any mask.
            bias = bias.masked_fill(~unpadding.visible, torch.finfo(bias.dtype).min)
        if query.device.type == "cpu" and not torch.compiler.is_compiling():
            scores = (query * self.scale) @ key.transpose(-1, -2) + bias
            attended = self.dropout(scores.softmax(-1).to(value.dtype)) @ value
        else:
            # Compiled, the two terms and the mask are one pass that writes the bias once.
            attended = F.scaled_dot_product_attention(query, key, value, bias, self.dropout.active, scale=self.scale)
        return attended.transpose(1, 2).flatten(2)

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of documents of `length` tokens, without the projections of the distances, which a batch shares."""
        size = self.value.out_features
        distances = 2 * length
        layers = parts_flops(length, self.query, self.key, self.value, self.output)
        return layers + 4 * size * length + 2 * size * len(self.terms) * distances


def _scores_by_distance(
    states: Float[Tensor, "B H L d"], vectors: Float[Tensor, "W D"], buckets: Int[Tensor, "distances"]
) -> Float[Tensor, "B H L L"]:
    """Products of state i with the vector of distance j - i, for every j.

    Args:
        buckets: row of the vectors for each distance from 1 - L to L - 1.
    """
    batch, heads, length, width = states.shape
    # One more column in front, so that each row starts one element earlier than the one before. Reading the same memory from
    # element L on, in rows that are one element shorter, has that effect: nothing is gathered, and nothing scattered backward.
    by_distance = F.embedding(torch.cat([buckets[:1], buckets]), vectors).view(2 * length, heads, width).permute(1, 2, 0)
    scores = (states @ by_distance).flatten(2)[..., length:]
    return scores.view(batch, heads, length, 2 * length - 1)[..., :length]


class DebertaBlock(TransformerBlock):
    """A post-norm block, as in BERT, whose queries may come from other states than its keys and values."""

    attention_class = DisentangledAttention

    def forward(
        self, states: States, unpadding: Unpadding, positions: RelativePositions, queries: States | None = None
    ) -> States:
        """The hidden states after this block.

        Args:
            states: what keys and values are projected from.
            queries: what queries are projected from, and the residual path; None: `states`.
        """
        attended = self.attention(states.operand, unpadding, positions, None if queries is None else queries.operand)
        return self.after_attention(attended, (queries or states).values)


class Convolution(nn.Module):
    """Each token and its neighbors, added to the output of the first block. Tokens that are not seen count as zeros.

    Reference: He et al. 2021, the released DeBERTa-v2-xlarge (`ConvLayer`).
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.reach = config.conv_kernel_size // 2
        self.conv = nn.Conv1d(size, size, config.conv_kernel_size)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)
        self.activation = torch.tanh if config.conv_act == "tanh" else F.gelu

    def forward(self, embedded: Float[Tensor, "B L D"], states: States, unpadding: Unpadding) -> States:
        length = embedded.shape[1]
        positions, window = torch.arange(length, device=embedded.device), torch.arange(-self.reach, self.reach + 1)
        neighbors = positions[:, None] + window.to(embedded.device)
        inside, neighbors = (neighbors >= 0) & (neighbors < length), neighbors.clamp(0, length - 1)
        seen = inside[None]
        if unpadding.offsets is not None:
            span = torch.searchsorted(unpadding.offsets, positions, right=True)
            seen = seen & (span[neighbors] == span[:, None])
        elif unpadding.visible is not None:
            visible = unpadding.visible[:, 0].expand(-1, length, -1)
            seen = seen & visible.gather(2, neighbors.expand(len(visible), -1, -1))
        read = embedded[:, neighbors] * seen[..., None]  # (B, L, window, D)
        mixed = F.linear(read.flatten(2), self.conv.weight.permute(0, 2, 1).flatten(1), self.conv.bias)
        return as_states(self.norm(states.values + self.activation(self.dropout(mixed))))

    def forward_flops(self, length: int) -> float:
        """FLOPs per token."""
        return 2.0 * self.conv.weight.numel()


class DebertaEncoder(StackedEncoder):
    """Token ids to hidden states. Positions are read from distances; rows may have any length if there are no absolute ones.

    Attributes:
        position: absolute positions: those that are added to the words, or those of the mask decoder, which only networks that
            predict words have.

    Reference: He et al. 2021 (DeBERTa), section 3; He et al. 2021 (DeBERTaV3); the modeling code of transformers.
    Differs: embeddings narrower than the hidden states are projected without a bias, as in transformers' `embed_proj`.
    """

    Config = DebertaConfig
    architecture = DebertaArchitecture()
    config: DebertaConfig
    embeddings_class = WordEmbeddings
    disentangled_class = Disentangled
    fine_tuning: ClassVar[Mapping[str, object]] = {"classification.head": "dense"}
    position_tables = ("position_biased_input", "mask_decoder")
    takes_spans = False
    contiguous = True

    def __init__(self, embeddings: TokenEmbeddings, config: DebertaConfig, **options: Any) -> None:
        super().__init__(embeddings, config, projection_bias=False, **options)
        size, width = config.hidden_size, embeddings.embedding_size
        self.position = nn.Embedding(config.max_positions, width) if config.position_biased_input else None
        self.token_type = nn.Embedding(config.num_token_types, width) if config.num_token_types else None
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)
        self.distance = nn.Embedding(config.distance_rows, size)
        normed = config.norm_rel_ebd == "layer_norm"
        self.distance_norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon) if normed else None
        self.blocks = nn.ModuleList(DebertaBlock(config) for _ in range(config.num_layers))
        self.convolution = Convolution(config) if config.conv_kernel_size else None

    def language_head(self, config: ModelConfig | None = None) -> TiedLMHead:
        if self.config.mask_decoder:
            self.position = nn.Embedding(self.config.max_positions, self.config.hidden_size)
        return super().language_head(config)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Fill the convolution from the same normal as the other layers."""
        if self.convolution is not None:
            nn.init.trunc_normal_(self.convolution.conv.weight, std=self.config.initializer_range, generator=generator)
            self.convolution.conv.bias.zero_()  # type: ignore[union-attr]

    @property
    def decodes(self) -> bool:
        """Whether the last block runs as the mask decoder."""
        return self.position is not None and not self.config.position_biased_input

    def for_tasks(self) -> DebertaEncoder:
        if not self.config.mask_decoder:
            return self
        encoder = copy.copy(self)
        encoder.config = self.config.model_copy(update={"mask_decoder": False})
        encoder._modules = {**self._modules, "position": None}
        return encoder

    def blocks_flops(self, length: int) -> float:
        return parts_flops(length, self.blocks, self.convolution, self.blocks[-1] if self.decodes else None)

    def last_states(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
        unpadding: Unpadding,
    ) -> Float[Tensor, "B L D"]:
        # Words, and absolute positions and segments where the model has them
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.embeddings.words(input_ids)
        if self.position is not None:
            # Checked here: an index beyond the table would fail without saying why
            if position_ids.shape[1] > (entries := self.position.num_embeddings) and not torch.compiler.is_compiling():
                longest = int(position_ids.max()) + 1
                if longest > entries:
                    raise DataError(
                        f"a text has {longest:,} tokens, but the model has only {entries:,} absolute positions",
                        hint=f"use rows of at most {entries:,} tokens",
                    )
            absolute = looked_up(self.position.weight, position_ids)
            hidden = hidden if self.decodes else hidden + absolute
        if self.token_type is not None:
            token_type_ids = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            hidden = hidden + looked_up(self.token_type.weight, token_type_ids)
        states = normalized(self.embedding_norm, hidden if self.projection is None else self.projection(hidden))
        states = as_states(self.dropout(states.values)) if self.dropout.active else states

        # The vectors of the distances that occur
        if torch.compiler.is_compiling():  # the length may be unknown
            vectors, rows = self.distance.weight, distance_rows(input_ids.shape[1], self.config, input_ids.device)
        else:
            longest = input_ids.shape[1] if unpadding.offsets is None else int(unpadding.offsets.diff().max())
            rows = distance_rows(longest, self.config)
            first, last = int(rows[-1]), int(rows[0])
            used = torch.arange(first, last + 1, device=input_ids.device)
            vectors = looked_up(self.distance.weight, used)
            rows = (rows - first).to(input_ids.device, non_blocking=True)
        if self.distance_norm is not None:
            vectors = normalized(self.distance_norm, vectors).operand
        positions = RelativePositions(vectors, rows)

        embedded = states
        for number, block in enumerate(self.blocks):
            if self.decodes and number == len(self.blocks) - 1:
                # The enhanced mask decoder: keys and values remain those of this block, its queries are refined twice.
                queries = as_states(states.values + absolute)
                for _ in range(2):
                    queries = self.run_block(block, states, unpadding, positions, queries)
                return queries.values
            states = self.run_block(block, states, unpadding, positions)
            if number == 0 and self.convolution is not None:
                states = self.convolution(embedded.values, states, unpadding)
        return states.values
