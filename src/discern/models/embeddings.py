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
    def embedding_size(self) -> int:
        """E."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """V."""

    @property
    @abc.abstractmethod
    def weights(self) -> Tensor:
        """The word table; an encoder computes on its device and in its precision."""

    @abc.abstractmethod
    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """Word vectors, without positions, segments and LayerNorm."""

    def detached_parameters(self) -> Iterable[Parameter]:
        """Parameters of another network that are read without gradient."""
        return ()


class WordTable(TokenEmbeddings, abc.ABC):
    """Embeddings with a word table of their own.

    Attributes:
        word: (V, E).
    """

    word: nn.Embedding

    @property
    def embedding_size(self) -> int:
        return self.word.embedding_dim

    @property
    def vocab_size(self) -> int:
        return self.word.num_embeddings

    @property
    def weights(self) -> Tensor:
        return self.word.weight

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return looked_up(self.word.weight, input_ids)


class WordEmbeddings(WordTable):
    """Word vectors, for encoders that handle positions, segments and dropout elsewhere.

    Args:
        vocab_size: V.
        embedding_size: E.
        config: not read; all embeddings are built with the same arguments.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size)


class PlacedEmbeddings(TokenEmbeddings, abc.ABC):
    """The sum of word, position and segment vectors, normalized and with dropout.

    Attributes:
        norm: LayerNorm of the sum of word, position and segment.
        dropout: applied last.
    """

    norm: nn.LayerNorm
    dropout: Dropout

    @abc.abstractmethod
    def positions(self, position_ids: Int[Tensor, "#B L"]) -> Float[Tensor, "#B L E"]:
        """Vectors of the positions."""

    @abc.abstractmethod
    def segments(self, token_type_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """Vectors of the segments."""

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L E"]:
        """Embeddings of the ids; segments default to 0, positions to 0, 1, 2, ..."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        total = self.words(input_ids) + self.positions(position_ids) + self.segments(token_type_ids)
        return self.dropout(self.norm(total))  # type: ignore[no-any-return]


class Embeddings(WordTable, PlacedEmbeddings):
    """Tables of words, positions and segments. Generator and discriminator share one by default.

    Reference: Clark et al. 2020, section 3.2 (weight sharing). The released code shares the LayerNorm too.

    Args:
        vocab_size: V.
        embedding_size: E, which may differ from the hidden size of the encoders that read it.
        config: sizes of the tables of positions and segments, dropout and epsilon.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size)
        self.position = nn.Embedding(config.max_positions, embedding_size)
        self.token_type = nn.Embedding(config.num_token_types, embedding_size)
        self.norm = nn.LayerNorm(embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def positions(self, position_ids: Int[Tensor, "#B L"]) -> Float[Tensor, "#B L E"]:
        return looked_up(self.position.weight, position_ids)

    def segments(self, token_type_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return looked_up(self.token_type.weight, token_type_ids)


class Disentangled(TokenEmbeddings, abc.ABC):
    """Another network's embeddings, read without gradient, plus a trained difference of the words.

    The discriminator then benefits from the words that the generator learns, and its loss, which weighs fifty times as much,
    does not change them. The difference starts at zero.

    Attributes:
        shared: the generator's embeddings.
        difference: (V, E), added to the words of `shared`.

    Reference: He et al. 2021 (DeBERTaV3), section 3.2, gradient-disentangled embedding sharing.
    """

    shared: WordTable
    difference: nn.Embedding

    @abc.abstractmethod
    def merged(self) -> WordTable:
        """Ordinary embeddings with the same vectors: the shared tables plus the difference."""

    def detached_parameters(self) -> Iterable[Parameter]:
        return self.shared.parameters()

    @property
    def embedding_size(self) -> int:
        return self.shared.embedding_size

    @property
    def vocab_size(self) -> int:
        return self.shared.vocab_size

    @property
    def weights(self) -> Tensor:
        return self.shared.word.weight

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return _fixed(self.shared.word, input_ids) + looked_up(self.difference.weight, input_ids)


class DisentangledWords(Disentangled):
    """`Disentangled` for encoders that read words alone.

    Args:
        shared: the generator's embeddings.
        config: not read; all embeddings are built with the same arguments.
    """

    def __init__(self, shared: WordEmbeddings, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.shared: WordEmbeddings = shared
        self.difference = nn.Embedding(shared.vocab_size, shared.embedding_size)

    @torch.no_grad()
    def merged(self) -> WordEmbeddings:
        tables = copy.deepcopy(self.shared)
        tables.word.weight += self.difference.weight
        return tables


class DisentangledEmbeddings(Disentangled, PlacedEmbeddings):
    """`Disentangled` for encoders that read words, positions and segments; the LayerNorm is its own.

    Args:
        shared: the generator's embeddings.
        config: settings of the network that reads them.
    """

    def __init__(self, shared: Embeddings, config: ModelConfig) -> None:
        super().__init__()
        self.shared: Embeddings = shared
        self.difference = nn.Embedding(shared.vocab_size, shared.embedding_size)
        self.norm = nn.LayerNorm(shared.embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    @torch.no_grad()
    def merged(self) -> Embeddings:
        tables = copy.deepcopy(self.shared)
        tables.word.weight += self.difference.weight
        tables.norm = copy.deepcopy(self.norm)
        tables.dropout = copy.deepcopy(self.dropout)
        return tables

    def positions(self, position_ids: Int[Tensor, "#B L"]) -> Float[Tensor, "#B L E"]:
        return _fixed(self.shared.position, position_ids)

    def segments(self, token_type_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return _fixed(self.shared.token_type, token_type_ids)


def _fixed(table: nn.Embedding, ids: Int[Tensor, "#B L"]) -> Float[Tensor, "#B L E"]:
    return looked_up(table.weight.detach(), ids)


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
