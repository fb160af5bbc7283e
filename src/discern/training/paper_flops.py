"""Arithmetic of a transformer as the ELECTRA paper counts it, so that a run can stand beside published totals."""

from __future__ import annotations

from dataclasses import dataclass

# Operations an element.
_DROPOUT, _LAYER_NORM, _ACTIVATION, _SOFTMAX = 4, 5, 8, 5
MASKED_SHARE = 0.15625
"""Share of the positions that get a softmax in masked language modelling, whatever the mask probability: 20 of 128."""


@dataclass(frozen=True)
class PaperTransformer:
    """A transformer by the convention of the released `flops_computation.py`.

    A product of m x n numbers counts 2 m n; backward costs as much as forward; looking an embedding up counts as the dense
    product with a one-hot vector, which no program executes but the published totals contain.

    Attributes:
        attention_size: width of queries, keys and values of all heads together; None: the hidden size.
        decoder: attention twice in every layer, to itself and to the encoder's states.

    Reference: Clark et al. 2020, section 3.1 and table 1; ELECTRA-Small, 1M steps of 128 sequences of 128, is 1.2937e18.
    """

    hidden_size: int
    num_layers: int
    sequence_length: int
    vocab_size: int
    embedding_size: int
    feedforward_size: int
    num_heads: int
    attention_size: int | None = None
    decoder: bool = False

    @property
    def layer(self) -> float:
        """One layer, a token, forward."""
        size, inner, length = self.hidden_size, self.feedforward_size, self.sequence_length
        wide = self.attention_size or size
        projections = 6 * size * wide + 3 * wide
        # The weighted values take the hidden size also where the heads are wider; kept, as the totals contain it.
        attention = 2 * (wide + size) * length + (_SOFTMAX + _DROPOUT + 1) * length * self.num_heads
        # The script counts this LayerNorm once a token instead of once an element; kept likewise.
        output = 2 * size**2 + (2 + _DROPOUT) * size + _LAYER_NORM
        feedforward = 4 * size * inner + (1 + _ACTIVATION) * inner + (2 + _DROPOUT + _LAYER_NORM) * size
        return (projections + attention + output) * (2 if self.decoder else 1) + feedforward

    @property
    def embedding(self) -> float:
        """Embeddings of words, positions and segments as dense products, a token, forward."""
        size, width = self.hidden_size, self.embedding_size
        tables = 2 * width * self.vocab_size + 2 * width * (2 + self.sequence_length)
        projection = 2 * size * width + size if size != width else 0
        return tables + (2 + _LAYER_NORM + _DROPOUT) * width + projection

    @property
    def vocabulary_head(self) -> float:
        """Transform, logits over the vocabulary and softmax, a position, forward."""
        width = self.embedding_size
        transform = 2 * self.hidden_size * width + (1 + _ACTIVATION + _LAYER_NORM) * width
        return transform + self.vocabulary_softmax

    @property
    def vocabulary_softmax(self) -> float:
        """Logits over the vocabulary and softmax, a position, forward."""
        return 2 * self.embedding_size * self.vocab_size + (_SOFTMAX + 2) * self.vocab_size

    @property
    def binary_head(self) -> float:
        """The discriminator's dense layer and logit, a token, forward."""
        return 2 * self.hidden_size**2 + (1 + _ACTIVATION + 2) * self.hidden_size

    @property
    def body(self) -> float:
        """Embeddings and layers, a token, forward."""
        return self.embedding + self.num_layers * self.layer

    def training(self, head: float, sequences: float) -> float:
        """Forward and backward over whole rows.

        Args:
            head: FLOPs of the head, a token, forward.
            sequences: rows in all, batch times steps.
        """
        return 2 * (self.body + head) * self.sequence_length * sequences
