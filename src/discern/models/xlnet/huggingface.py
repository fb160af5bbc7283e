"""Maps the weights and settings of encoder 'xlnet' to those of Hugging Face's XLNet, and back.

The functions map dictionaries to dictionaries; nothing here reads a file. transformers stores the weights of attention with
shape (D, H, D / H); here they are matrices, as in any linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from discern.models.weight_names import inverted, renamed

SIZE_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "d_model",
    "embedding_size": "d_model",
    "num_heads": "n_head",
    "feedforward_size": "d_inner",
    "clamp_length": "clamp_len",
    "hidden_dropout": "dropout",
    "attention_dropout": "dropout",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of config.json, by the names of our settings."""
ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu": "relu", "silu": "silu"}
"""Names of activations, theirs by ours."""

_TABLE = {
    "encoder.embeddings.word": "transformer.word_embedding",
    "encoder.query_embedding": "transformer.mask_emb",
    "encoder.blocks.#.attention.query.weight": "transformer.layer.#.rel_attn.q",
    "encoder.blocks.#.attention.key.weight": "transformer.layer.#.rel_attn.k",
    "encoder.blocks.#.attention.value.weight": "transformer.layer.#.rel_attn.v",
    "encoder.blocks.#.attention.position.weight": "transformer.layer.#.rel_attn.r",
    "encoder.blocks.#.attention.output.weight": "transformer.layer.#.rel_attn.o",
    "encoder.blocks.#.attention.content_bias": "transformer.layer.#.rel_attn.r_w_bias",
    "encoder.blocks.#.attention.position_bias": "transformer.layer.#.rel_attn.r_r_bias",
    "encoder.blocks.#.attention.segment_bias": "transformer.layer.#.rel_attn.r_s_bias",
    "encoder.blocks.#.attention.segments": "transformer.layer.#.rel_attn.seg_embed",
    "encoder.blocks.#.attention_norm": "transformer.layer.#.rel_attn.layer_norm",
    "encoder.blocks.#.expand": "transformer.layer.#.ff.layer_1",
    "encoder.blocks.#.contract": "transformer.layer.#.ff.layer_2",
    "encoder.blocks.#.feedforward_norm": "transformer.layer.#.ff.layer_norm",
    "head.bias": "lm_loss.bias",
}
_INPUTS = tuple(f".attention.{name}.weight" for name in ("query", "key", "value", "position"))
_OUTPUT = ".attention.output.weight"
_QUERY = "encoder.query_embedding"


def to_huggingface(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The weights of a network, or of its encoder alone, under the names and in the shapes of Hugging Face's XLNet.

    Args:
        weights: any of the weights by our names, `encoder.*` and `head.bias`; the tied output matrix is the word table.
        num_heads: H.
    """
    return {renamed(name, _TABLE): _their_shape(name, tensor, num_heads) for name, tensor in weights.items()}


def from_huggingface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`."""
    table = inverted(_TABLE)
    names = {theirs: renamed(theirs, table) for theirs in weights}
    return {names[theirs]: _our_shape(names[theirs], tensor) for theirs, tensor in weights.items()}


def _their_shape(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    if name == _QUERY:
        return tensor[None]
    # transformers transposes the matrices of the inputs, with their columns by head, but not the matrix of the output.
    if name.endswith(_INPUTS):
        return tensor.t().reshape(tensor.shape[1], num_heads, -1)
    return tensor.reshape(len(tensor), num_heads, -1) if name.endswith(_OUTPUT) else tensor


def _our_shape(name: str, tensor: Tensor) -> Tensor:
    if name == _QUERY:
        return tensor[0]
    if name.endswith(_INPUTS):
        return tensor.flatten(1).t()
    return tensor.flatten(1) if name.endswith(_OUTPUT) else tensor
