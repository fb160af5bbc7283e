"""What every encoder is to the objectives, and how one is built by name."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from discern.model import encoders
from discern.model.config import ModelConfig
from discern.model.embeddings import Embeddings, TokenEmbeddings, WordEmbeddings
from discern.model.heads import LanguageHead, MaskedLMHead, TiedLMHead


class Encoder(nn.Module, abc.ABC):
    """Token ids to hidden states, one a position.

    Attributes:
        config: its sizes.
        embeddings: read by this encoder, possibly shared with another.
        embeddings_class: what embeddings it reads where it shares none.
        head_class: what predicts words from its states.
        fine_tuning: settings of fine-tuning that it was made for, by dotted key; `classification.head` and the like are for
            tasks of that family.
        limits_positions: rows may have `config.max_positions` positions at most, as it has a table of them.
        reads_backwards: its `forward` takes `is_reversed` too, (B,) True = the row's text runs backwards.
    """

    embeddings_class: ClassVar[type[Embeddings] | type[WordEmbeddings]] = Embeddings
    head_class: ClassVar[type[MaskedLMHead] | type[TiedLMHead]] = MaskedLMHead
    fine_tuning: ClassVar[Mapping[str, object]] = {}
    limits_positions: ClassVar[bool] = True
    reads_backwards: ClassVar[bool] = False
    config: ModelConfig
    embeddings: TokenEmbeddings

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
            document_ids: attention stays among equal ids of a row, which stand together; None: a row is one document.
        """


def build_encoder(embeddings: TokenEmbeddings, config: ModelConfig, *, gradient_checkpointing: bool = False) -> Encoder:
    """The encoder that `config.encoder` names.

    Raises:
        ConfigError: no such encoder; the hint names the nearest.
    """
    build = encoders.load(config.encoder)
    encoder: Encoder = build(embeddings, config, gradient_checkpointing=gradient_checkpointing)
    return encoder


def build_embeddings(vocab_size: int, embedding_size: int, config: ModelConfig) -> Embeddings | WordEmbeddings:
    """Embeddings of the kind that the encoder reads that `config.encoder` names.

    Raises:
        ConfigError: no such encoder; the hint names the nearest.
    """
    kind: type[Encoder] = encoders.load(config.encoder)
    return kind.embeddings_class(vocab_size, embedding_size, config)


def build_language_head(embeddings: Embeddings | WordEmbeddings, config: ModelConfig) -> LanguageHead:
    """What predicts words from the states of the encoder that `config.encoder` names, tied to its embeddings.

    Raises:
        ConfigError: no such encoder; the hint names the nearest.
    """
    kind: type[Encoder] = encoders.load(config.encoder)
    return kind.head_class(config, embeddings.word)
