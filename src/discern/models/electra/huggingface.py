"""Maps the weights and settings of encoder 'bert' to those of Hugging Face's ELECTRA and BERT, and back.

The functions map dictionaries to dictionaries; nothing here reads a file. Our weights are named `encoder.*`, `head.*` and
`bilinear.*`; those of transformers as in `ElectraForPreTraining` and `ElectraForMaskedLM`. Parts that ELECTRA lacks (the
bilinear term, the gate of a head that copies, a second tower) are given names in the same style.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from discern.models.weight_names import inverted, renamed

SIZE_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "embedding_size": "embedding_size",
    "num_heads": "num_attention_heads",
    "feedforward_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of config.json, by the names of our settings."""
REQUIRED = ("num_layers", "hidden_size", "embedding_size", "num_heads", "feedforward_size")
"""Settings that config.json must have; the defaults of transformers for the others are ours."""

_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_ENCODER = {
    "encoder.embeddings.word": "electra.embeddings.word_embeddings",
    "encoder.embeddings.position": "electra.embeddings.position_embeddings",
    "encoder.embeddings.token_type": "electra.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "electra.embeddings.LayerNorm",
}
# Two towers take the place of ELECTRA's single encoder.
for _tower in ("", "left.", "right."):
    _ENCODER[f"encoder.{_tower}projection"] = f"electra.{_tower}embeddings_project"
    _ENCODER |= {
        f"encoder.{_tower}blocks.#.{ours}": f"electra.{_tower}encoder.layer.#.{theirs}" for ours, theirs in _BLOCK.items()
    }

_DISCRIMINATOR = {
    "head.dense": "discriminator_predictions.dense",
    "head.output": "discriminator_predictions.dense_prediction",
    "bilinear.context": "bilinear_term.context",
}
_GENERATOR = {
    "head.dense": "generator_predictions.dense",
    "head.norm": "generator_predictions.LayerNorm",
    "head.bias": "generator_lm_head.bias",
}
# A head that copies contains a generator's head, as its attribute `words`.
_COPYING = {ours.replace("head.", "head.words."): theirs for ours, theirs in _GENERATOR.items()} | {"head.copy_gate": "copy_gate"}

_AS_BERT = {
    "electra.": "bert.",
    "generator_predictions.": "cls.predictions.transform.",
    "generator_lm_head.bias": "cls.predictions.bias",
}


def to_huggingface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a network, or of its encoder alone, under the names of Hugging Face's ELECTRA, in the same order.

    Args:
        weights: weights by our names; a tied output matrix occurs once, as the word table.
    """
    table = _table(discriminates="head.output.weight" in weights, copies="head.copy_gate.weight" in weights)
    return {renamed(name, table): tensor for name, tensor in weights.items()}


def from_huggingface(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_huggingface`."""
    discriminates = any(name.startswith("discriminator_predictions.") for name in weights)
    table = inverted(_table(discriminates=discriminates, copies="copy_gate.weight" in weights))
    return {renamed(name, table): tensor for name, tensor in weights.items()}


def bert_name(name: str) -> str:
    """The name in Hugging Face's BERT of a weight of ELECTRA's encoder or generator; other names are unchanged."""
    for electra, bert in _AS_BERT.items():
        if name.startswith(electra):
            return bert + name.removeprefix(electra)
    return name


def _table(*, discriminates: bool, copies: bool) -> dict[str, str]:
    if discriminates:
        return _ENCODER | _DISCRIMINATOR
    return _ENCODER | (_COPYING if copies else _GENERATOR)
