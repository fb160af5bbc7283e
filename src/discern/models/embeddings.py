"""Embeddings: of words alone, or of words, positions and segments, and two ways to share them between networks."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from discern.models.config import ModelConfig
from discern.models.fused_ops import Dropout


class TokenEmbeddings(nn.Module, abc.ABC):
    """Input of an encoder: a vector for each token."""

    @property
    @abc.abstractmethod
    def table(self) -> nn.Embedding:
        """(V, E) The word table, its own or another network's."""

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.table.embedding_dim

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.table.num_embeddings

    @property
    def weights(self) -> Tensor:
        """The weights of the word table; an encoder computes on their device and in their precision."""
        return self.table.weight

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """Word vectors, without positions, segments and LayerNorm."""
        return looked_up(self.table.weight, input_ids)

    def detached_parameters(self) -> Iterable[Parameter]:
        """Parameters of another network that are read without gradient."""
        return ()


class WordEmbeddings(TokenEmbeddings):
    """Word vectors, for encoders that handle positions, segments and dropout elsewhere.

    Args:
        vocab_size: V.
        embedding_size: E.
        config: not read here; all embeddings are built with the same arguments.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size)

    @property
    def table(self) -> nn.Embedding:
        return self.word


class Embeddings(WordEmbeddings):
    """The sum of word, position and segment vectors, normalized and with dropout. Networks share one by default.

    Reference: Clark et al. 2020, section 3.2 (weight sharing). The released code shares the LayerNorm too.

    Args:
        vocab_size: V.
        embedding_size: E, which may differ from the hidden size of the encoders that read it.
        config: sizes of the tables of positions and segments, dropout and epsilon.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig) -> None:
        super().__init__(vocab_size, embedding_size)
        self.position = nn.Embedding(config.max_positions, embedding_size)
        self.token_type = nn.Embedding(config.num_token_types, embedding_size)
        self.norm = nn.LayerNorm(embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
    ) -> Float[Tensor, "B L E"]:
        """Embeddings of the ids; segments default to 0, positions to 0, 1, 2, ..."""
        places = self.places(input_ids, token_type_ids, position_ids)
        return self.dropout(self.norm(self.words(input_ids) + places[0] + places[1]))  # type: ignore[no-any-return]

    def places(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
    ) -> tuple[Float[Tensor, "#B L E"], Float[Tensor, "B L E"]]:
        """Vectors of positions and of segments, with or without gradient."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        return looked_up(self.position.weight, position_ids), looked_up(self.token_type.weight, token_type_ids)


class Disentangled(TokenEmbeddings):
    """Another network's word vectors, read without gradient, plus a trained difference.

    The discriminator then benefits from the words that the generator learns, and its loss, which weighs fifty times as much,
    does not change them. The difference starts at zero.

    Args:
        shared: the generator's embeddings.
        config: settings of the network that reads them.

    Attributes:
        difference: (V, E), added to the words of `shared`.

    Reference: He et al. 2021 (DeBERTaV3), section 3.2, gradient-disentangled embedding sharing.
    """

    def __init__(self, shared: WordEmbeddings, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.shared: Any = shared
        self.difference = nn.Embedding(shared.vocab_size, shared.embedding_size)

    @property
    def table(self) -> nn.Embedding:
        return self.shared.word  # type: ignore[no-any-return]

    @torch.no_grad()
    def merged(self) -> WordEmbeddings:
        """Ordinary embeddings with the same vectors: the shared tables plus the difference."""
        tables: WordEmbeddings = copy.deepcopy(self.shared)
        tables.word.weight += self.difference.weight
        return tables

    def detached_parameters(self) -> Iterable[Parameter]:
        return self.shared.parameters()  # type: ignore[no-any-return]

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return looked_up(self.table.weight.detach(), input_ids) + looked_up(self.difference.weight, input_ids)


class DisentangledEmbeddings(Disentangled):
    """`Disentangled` with the positions and segments of the other network, without gradient; the LayerNorm is its own."""

    def __init__(self, shared: Embeddings, config: ModelConfig) -> None:
        super().__init__(shared)
        self.norm = nn.LayerNorm(shared.embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def merged(self) -> WordEmbeddings:
        tables = super().merged()
        tables.norm, tables.dropout = copy.deepcopy(self.norm), copy.deepcopy(self.dropout)
        return tables

    forward = Embeddings.forward

    @torch.no_grad()
    def places(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `Embeddings.places`, without gradient."""
        return self.shared.places(*inputs)  # type: ignore[no-any-return]


def looked_up(table: Float[Tensor, "V E"], ids: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
    """Rows of a table. Those of a table in bfloat16 are float32, and their gradients are summed in float32."""
    if table.dtype != torch.bfloat16:
        return F.embedding(ids, table)
    return _LowLookup.apply(table, ids)  # type: ignore[no-any-return, no-untyped-call]


class _LowLookup(torch.autograd.Function):
    """Rows of a table in bfloat16, in which thousands of gradients of a frequent word could not be summed."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        summed: Tensor = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, -1, False)
        return summed, None
