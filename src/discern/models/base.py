"""The contract of an encoder, an encoder with its head, and how both are built by name."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from discern.models import encoders
from discern.models.config import ModelConfig
from discern.models.embeddings import (
    DisentangledEmbeddings,
    DisentangledWords,
    Embeddings,
    TokenEmbeddings,
    WordEmbeddings,
    WordTable,
)
from discern.models.heads import BilinearTerm, LanguageHead, MaskedLMHead, TiedLMHead
from discern.types import Spans


class Encoder(nn.Module, abc.ABC):
    """Token ids to hidden states, one per position. Base of every architecture.

    Attributes:
        Config: class of its settings.
        config: its settings.
        embeddings: embeddings that this encoder reads, possibly shared with another encoder.
        embeddings_class: class of its embeddings, unless it shares those of another network.
        disentangled_class: class of its embeddings if they are those of another network plus a difference; None: it cannot share
            embeddings with a generator.
        head_class: class of the head that predicts words from its states.
        one_way: whether it can be built with a `direction`, so that a token does not attend to what is behind, or ahead of, it.
        fine_tuning: its default settings of fine-tuning, by dotted key; `classification.head` and the like apply to tasks of
            that family, `questions.head` and the like to every task of question answering.
        limits_positions: whether rows are limited to `config.max_positions`, because it has a table of positions.
        reads_backwards: whether its `forward` also takes `is_reversed`, (B,) True = the row's text runs backwards.
        takes_spans: whether its `forward` also takes `spans` as its last argument, and then attends without padding.
    """

    Config: ClassVar[type[ModelConfig]]
    embeddings_class: ClassVar[type[Embeddings] | type[WordEmbeddings]] = Embeddings
    disentangled_class: ClassVar[type[DisentangledEmbeddings] | type[DisentangledWords] | None] = DisentangledEmbeddings
    head_class: ClassVar[type[MaskedLMHead] | type[TiedLMHead]] = MaskedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {}
    one_way: ClassVar[bool] = False
    limits_positions: ClassVar[bool] = True
    reads_backwards: ClassVar[bool] = False
    takes_spans: ClassVar[bool] = False
    config: ModelConfig
    embeddings: TokenEmbeddings

    def language_head(self, config: ModelConfig | None = None) -> LanguageHead:
        """A new head that predicts words from this encoder's states, tied to its word table.

        Args:
            config: settings of the head; None: those of the encoder.
        """
        assert isinstance(self.embeddings, WordTable)
        return self.head_class(config or self.config, self.embeddings.word)

    def initialize(self, generator: torch.Generator) -> None:
        """Fill the weights whose initial values differ from the rules of `discern.models.initialization`."""

    def glorot_layers(self) -> list[nn.Linear]:
        """Layers whose weights are initialized Glorot uniform."""
        return []

    def stacked_layers(self) -> Mapping[nn.Linear, int]:
        """Layers whose weight holds several matrices of equal height, one below the other, with the number of matrices.

        An encoder that computes query, key and value in one layer returns that layer with 3. Optimizer 'muon' needs it.
        """
        return {}

    def repeated_blocks(self) -> list[nn.Module]:
        """Modules of the same structure that make up most of the network, to be compiled one by one; empty if it has none."""
        return []

    @abc.abstractmethod
    def forward_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        """FLOPs of the matrix products of a forward pass, per token of rows of `length` tokens.

        Args:
            query_share: fraction of the positions that the query stream also computes; 0 for an encoder without one.
            remembered: positions of earlier rows that each row attends to.
        """

    def recomputed_flops(self, length: int, *, query_share: float = 0.0, remembered: int = 0) -> float:
        """The part of `forward_flops` that gradient checkpointing computes again in the backward pass; 0 without it."""
        return 0.0

    @abc.abstractmethod
    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Bool[Tensor, "B L"] | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        document_ids: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Hidden states of the last layer.

        Args:
            attention_mask: True = real token; None: all are.
            token_type_ids: segments; None: all 0.
            position_ids: None: 0, 1, 2, ...
            document_ids: tokens attend only to tokens with the same id, which are contiguous; None: a row is one document.
        """


@dataclass(frozen=True)
class Network:
    """An encoder with its head: one of an objective's networks.

    Attributes:
        encoder: ids to hidden states.
        head: hidden states to logits.
        bilinear: a term added to the logits of a discriminator's head, or None.
        companions: modules that are trained with it and used only in training; they are not exported.
    """

    encoder: Encoder
    head: nn.Module
    bilinear: BilinearTerm | None = None
    companions: tuple[nn.Module, ...] = ()

    def token_logits(
        self, input_ids: Int[Tensor, "B L"], *context: Bool[Tensor, "B L"] | Int[Tensor, "B L"] | Spans | None
    ) -> Float[Tensor, "B L *V"]:
        """The head's logits at every position; `context` are the encoder's other arguments, mask first."""
        return self.logits_of(self.encoder(input_ids, *context), input_ids)

    def logits_of(self, hidden: Float[Tensor, "B L D"], input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L *V"]:
        """The head's logits, given the encoder's hidden states of these ids."""
        logits: Tensor = self.head(hidden)
        if self.bilinear is not None:
            logits = logits + self.bilinear(hidden, self.encoder.embeddings.words(input_ids))
        return logits

    def parts(self) -> list[nn.Module]:
        """All modules of the network."""
        parts = [self.encoder, self.head, self.bilinear, *self.companions]
        return [part for part in parts if part is not None]

    def trained(self) -> set[Parameter]:
        """The parameters that training this network updates, without those of another network that it reads without gradient."""
        held = {parameter for part in self.parts() for parameter in part.parameters()}
        return held - set(self.encoder.embeddings.detached_parameters())


def build_encoder(embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> Encoder:
    """The encoder that `config.encoder` names.

    Raises:
        ConfigError: there is no such encoder; the hint names the nearest.
    """
    build = encoders.load(config.encoder)
    encoder: Encoder = build(embeddings, config, gradient_checkpointing=gradient_checkpointing)
    return encoder


def build_embeddings(vocab_size: int, embedding_size: int, config: ModelConfig) -> Embeddings | WordEmbeddings:
    """Embeddings for the encoder that `config.encoder` names.

    Raises:
        ConfigError: there is no such encoder; the hint names the nearest.
    """
    kind: type[Encoder] = encoders.load(config.encoder)
    return kind.embeddings_class(vocab_size, embedding_size, config)
