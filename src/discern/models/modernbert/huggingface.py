"""Maps the weights and settings of encoder 'modernbert' to those of Hugging Face's ModernBERT, and back.

The functions map dictionaries to dictionaries; nothing here reads a file. Our weights are named `encoder.*`, `head.*` and
`bilinear.*`; those of transformers as in `ModernBertForMaskedLM` and `ModernBertForTokenClassification`. Queries, keys and values
are three matrices here and one there. Parts that ModernBERT lacks (the bilinear term, the gate of a head that copies) are given
names in the same style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from discern.models.weight_names import inverted, renamed

SIZE_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "feedforward_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "local_window": "local_attention",
    "hidden_dropout": "embedding_dropout",
    "attention_dropout": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "norm_eps",
    "attention_bias": "attention_bias",
    "feedforward_bias": "mlp_bias",
    "norm_bias": "norm_bias",
    "classifier_bias": "classifier_bias",
    "full_attention_every": "global_attn_every_n_layers",
    "full_rope_theta": "global_rope_theta",
    "local_rope_theta": "local_rope_theta",
}
"""Keys of config.json, by the names of our settings. The last three are the older form of `layer_types` and `rope_parameters`."""
REQUIRED = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
"""Settings that config.json must have; the defaults of transformers for the others are ours."""

WORDS, PROJECTION = "encoder.embeddings.word.weight", "encoder.projection.weight"
"""Our names of the word table and of its projection, which ModernBERT lacks: its table is the product of the two."""
_TABLE = {
    "encoder.embeddings.word": "model.embeddings.tok_embeddings",
    "encoder.embedding_norm": "model.embeddings.norm",
    "encoder.blocks.#.attention_norm": "model.layers.#.attn_norm",
    "encoder.blocks.#.attention.output": "model.layers.#.attn.Wo",
    "encoder.blocks.#.feedforward_norm": "model.layers.#.mlp_norm",
    "encoder.blocks.#.expand": "model.layers.#.mlp.Wi",
    "encoder.blocks.#.contract": "model.layers.#.mlp.Wo",
    "encoder.final_norm": "model.final_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "head.bias": "decoder.bias",
    "head.output": "classifier",
    "bilinear.context": "bilinear_term.context",
}
# A head that copies contains a head over the vocabulary, as its attribute `words`.
_COPYING = {ours.replace("head.", "head.words."): theirs for ours, theirs in _TABLE.items() if ours.startswith("head.")}
_COPY_TABLE = {ours: theirs for ours, theirs in _TABLE.items() if not ours.startswith("head.")} | _COPYING
_COPY_TABLE["head.copy_gate"] = "copy_gate"
_THIRDS = ("query", "key", "value")
_THIRD = re.compile(r"encoder\.blocks\.(\d+)\.attention\.(query|key|value)\.(weight|bias)")
_PACKED = re.compile(r"model\.layers\.(\d+)\.attn\.Wqkv\.(weight|bias)")


def to_huggingface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network, or of its encoder alone, under the names and in the shapes of Hugging Face's ModernBERT.

    Args:
        weights: by our names; a tied output matrix is named once, as the word table. A projected word table becomes the product
            of table and projection.
    """
    table = _COPY_TABLE if any(name.startswith(("head.words.", "head.copy_gate.")) for name in weights) else _TABLE
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        third = _THIRD.fullmatch(name)
        if third is not None:
            layer, which, kind = third.groups()
            if which == _THIRDS[0]:
                parts = [weights[f"encoder.blocks.{layer}.attention.{each}.{kind}"] for each in _THIRDS]
                found[f"model.layers.{layer}.attn.Wqkv.{kind}"] = torch.cat(parts)
        elif name == WORDS and PROJECTION in weights:
            found[renamed(name, table)] = tensor @ weights[PROJECTION].t()
        elif name != PROJECTION:
            found[renamed(name, table)] = tensor
    return found


def from_huggingface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`, for a word table that is not projected."""
    table = inverted(_COPY_TABLE if "copy_gate.weight" in weights else _TABLE)
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        packed = _PACKED.fullmatch(name)
        if packed is not None:
            layer, kind = packed.groups()
            for which, part in zip(_THIRDS, tensor.chunk(3), strict=True):
                found[f"encoder.blocks.{layer}.attention.{which}.{kind}"] = part
        else:
            found[renamed(name, table)] = tensor
    return found


def layer_types(num_layers: int, full_attention_every: int) -> list[str]:
    """`layer_types` of config.json."""
    return ["sliding_attention" if layer % full_attention_every else "full_attention" for layer in range(num_layers)]
