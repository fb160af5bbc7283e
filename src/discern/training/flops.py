"""Arithmetic of a configuration by two conventions: the ELECTRA paper's, and what is executed."""

from __future__ import annotations

from collections.abc import Iterable

from discern.model.config import ModelConfig
from discern.model.heads import MaskedLMHead
from discern.model.network import Network
from discern.objectives.config import MaskingConfig, ObjectiveConfig

# Operations an element, as the paper's script counts them.
_DROPOUT, _LAYER_NORM, _ACTIVATION, _SOFTMAX = 4, 5, 8, 5
_OUTPUT_SHARE = 0.15625  # of the positions that the paper's script gives a softmax: 20 of 128


def paper_flops(networks: Iterable[Network], sequence_length: int, sequences: int) -> float:
    """Training FLOPs by the convention of the paper's `flops_computation.py`.

    A product of m x n numbers counts 2 m n; backward costs as much as forward; looking an embedding up counts as the
    dense product with a one-hot vector, which no program executes but the published totals contain.

    Args:
        sequence_length: positions a row.
        sequences: rows of the whole run, batch times steps.

    Reference: Clark et al. 2020, section 3.1 and the released script; ELECTRA-Small at 1M steps is 1.2937e18.
    """
    each = 0.0
    for network in networks:
        config, embeddings = network.encoder.config, network.encoder.embeddings
        table = embeddings.embedding_size, embeddings.vocab_size
        each += config.num_layers * _block(config, sequence_length) + _embedding(config.hidden_size, *table, sequence_length)
        if isinstance(network.head, MaskedLMHead):
            each += _OUTPUT_SHARE * _softmax_head(config.hidden_size, *table)
        else:
            each += 2 * config.hidden_size**2 + (1 + _ACTIVATION + 2) * config.hidden_size
    return 2 * each * sequence_length * sequences


def executed_flops(networks: Iterable[Network], sequence_length: int, sequences: int, masked_share: float) -> float:
    """FLOPs of the matrix products that training executes: forward once, backward twice that.

    Args:
        masked_share: share of the positions on which the vocabulary's head runs.
    """
    each = 0.0
    for network in networks:
        config, embeddings = network.encoder.config, network.encoder.embeddings
        hidden, width = config.hidden_size, embeddings.embedding_size
        attention = 4 * hidden**2 + 2 * hidden * sequence_length
        each += config.num_layers * 2 * (attention + 2 * hidden * config.feedforward_size)
        each += 2 * hidden * width if hidden != width else 0
        if isinstance(network.head, MaskedLMHead):
            head_width = network.head.word_embeddings.embedding_dim
            each += masked_share * 2 * (hidden * head_width + head_width * network.head.word_embeddings.num_embeddings)
        else:
            each += 2 * (hidden**2 + hidden)
    return 3 * each * sequence_length * sequences


def masked_share(config: ObjectiveConfig) -> float:
    """Share of the positions that the vocabulary's head runs on."""
    return config.mask_probability if isinstance(config, MaskingConfig) else 1.0


def _block(config: ModelConfig, length: int) -> float:
    """One transformer block, a token."""
    size, inner, heads = config.hidden_size, config.feedforward_size, config.num_heads
    projections = 6 * size**2 + 3 * size
    attention = 4 * size * length + (_SOFTMAX + _DROPOUT + 1) * length * heads
    # The script counts this LayerNorm once a token instead of once an element; kept, as the totals contain it.
    attention_output = 2 * size**2 + (2 + _DROPOUT) * size + _LAYER_NORM
    feedforward = 4 * size * inner + (1 + _ACTIVATION) * inner + (2 + _DROPOUT + _LAYER_NORM) * size
    return projections + attention + attention_output + feedforward


def _embedding(hidden: int, width: int, vocabulary: int, length: int) -> float:
    """Embedding lookup as dense products, a token."""
    tables = 2 * width * vocabulary + 2 * width * (2 + length)
    projection = 2 * hidden * width + hidden if hidden != width else 0
    return tables + (2 + _LAYER_NORM + _DROPOUT) * width + projection


def _softmax_head(hidden: int, width: int, vocabulary: int) -> float:
    """Transform, logits over the vocabulary and softmax, a position."""
    transform = 2 * hidden * width + (1 + _ACTIVATION + _LAYER_NORM) * width
    return transform + 2 * width * vocabulary + (_SOFTMAX + 2) * vocabulary
