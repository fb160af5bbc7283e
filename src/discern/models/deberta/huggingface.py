"""DeBERTa in transformers, where v2 and v3 are one type, and in Microsoft's released files.

A discriminator's head has the names of the released code; transformers has no class for it and reads the encoder alone. DeBERTa
v1 is read and written as v2: its joined queries, keys and values are taken apart, and the biases that it lacks are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from discern.models.architecture import BERT_BLOCK, BERT_KEYS, Architecture, Readers, unsupported
from discern.models.config import ModelConfig
from discern.types import SpecialTokens

_BLOCK = BERT_BLOCK | {
    "attention.query": "attention.self.query_proj",
    "attention.key": "attention.self.key_proj",
    "attention.value": "attention.self.value_proj",
    "attention.position_key": "attention.self.pos_key_proj",
    "attention.position_query": "attention.self.pos_query_proj",
}
_FROM_V1 = {
    "q_bias": "query_proj.bias",
    "v_bias": "value_proj.bias",
    "pos_proj.": "pos_key_proj.",
    "pos_q_proj.": "pos_query_proj.",
}
_POSITIONS = "deberta.embeddings.position_embeddings"
_WORDS = "deberta.embeddings.word_embeddings"
_SAME_KEYS = (
    *("position_buckets", "max_relative_positions", "pos_att_type", "share_att_key", "norm_rel_ebd", "position_biased_input"),
    *("conv_kernel_size", "conv_act", "mask_decoder"),
)
"""Settings that have the names of keys."""
_TERMS = ("c2p|p2c", "c2p", "p2c")


class DebertaArchitecture(Architecture):
    """Encoder 'deberta'."""

    encoder = "deberta"
    titles = {"deberta-v2": "DeBERTa", "deberta": "DeBERTa v1"}
    positions = "relative"
    classes = {
        "words": "DebertaV2ForMaskedLM",
        "replaced": "DebertaV2Model",
        "nothing": "DebertaV2Model",
        "classification": "DebertaV2ForSequenceClassification",
        "tagging": "DebertaV2ForTokenClassification",
        "span": "DebertaV2ForQuestionAnswering",
    }
    size_keys = BERT_KEYS | {name: name for name in _SAME_KEYS}
    required = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    supported = {"hidden_act": "gelu", "pooler_hidden_act": "gelu", "conv_groups": 1, "tie_word_embeddings": True}
    layers = {
        "encoder.embeddings.word": _WORDS,
        "encoder.position": _POSITIONS,
        "encoder.token_type": "deberta.embeddings.token_type_embeddings",
        "encoder.projection": "deberta.embeddings.embed_proj",
        "encoder.embedding_norm": "deberta.embeddings.LayerNorm",
        "encoder.distance": "deberta.encoder.rel_embeddings",
        "encoder.distance_norm": "deberta.encoder.LayerNorm",
        "encoder.convolution.conv": "deberta.encoder.conv.conv",
        "encoder.convolution.norm": "deberta.encoder.conv.LayerNorm",
        **{f"encoder.blocks.#.{ours}": f"deberta.encoder.layer.#.{theirs}" for ours, theirs in _BLOCK.items()},
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.bias": "cls.predictions.bias",
        "head.copy_gate": "copy_gate",
        "bilinear.context": "bilinear_term.context",
    }
    discriminator_layers = {
        "head.dense": "mask_predictions.dense",
        "head.norm": "mask_predictions.LayerNorm",
        "head.output": "mask_predictions.classifier",
    }
    prefixes = ("deberta.",)
    parts = ("embeddings.", "encoder.")
    # The released names, which transformers calls "not legacy"; there, words cannot be narrower than the hidden states.
    synonyms = {
        "lm_predictions.lm_head.bias": "cls.predictions.bias",
        "lm_predictions.lm_head.": "cls.predictions.transform.",
    }
    tied = ("cls.predictions.decoder.weight",)
    redundant = ("position_ids", "position_embeddings.weight", "embeddings._weight", "cls.predictions.decoder.bias")
    marks = {
        "copy_gate.weight": "words or copies",
        "mask_predictions.classifier.weight": "replaced",
        "cls.predictions.transform.dense.weight": "words",
    }
    task_heads = Architecture.task_heads | {"classification": ("dense",)}  # type: ignore[operator]
    task_parts = Architecture.task_parts | {  # type: ignore[operator]
        "classification": {"summary": "pooler.dense", "output": "classifier"}
    }
    recipes = {384: "deberta-v3-xsmall", 768: "deberta-v3-base", 1024: "deberta-v3-large"}
    detection = {"objective.tying": "gradient-disentangled", "objective.generator_size": 1.0, "objective.generator_depth": 0.5}

    def constants(self, sizes: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
        return {
            # Ours is 0 where theirs is -1.
            **{key: getattr(sizes, key) or -1 for key in ("position_buckets", "max_relative_positions")},
            "hidden_act": "gelu",
            "relative_attention": True,
            "legacy": True,
            "pooler_hidden_size": sizes.hidden_size,
            "pooler_hidden_act": "gelu",
            "pooler_dropout": 0.0,
            "pad_token_id": special.pad,
            "tie_word_embeddings": True,
        }

    def derived(self, config: Mapping[str, Any], sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
        stated = config.get("pos_att_type")
        terms = stated.lower().split("|") if isinstance(stated, str) else stated or ()
        named = "|".join(sorted(str(term).strip() for term in terms))
        if named not in _TERMS:
            raise unsupported(path, f"pos_att_type is {stated!r}, but only 'c2p', 'p2c' and both are supported")
        if not config.get("relative_attention", False):
            raise unsupported(path, "relative_attention is false, but only relative attention is supported")
        width = sizes["hidden_size"] // sizes["num_heads"]
        if config.get("attention_head_size", width) != width:
            raise unsupported(path, f"attention_head_size is {config['attention_head_size']}, not {width}, the width of a head")
        # The defaults of transformers, which are not ours.
        return {
            "embedding_size": config.get("embedding_size") or sizes["hidden_size"],
            "position_buckets": max(0, config.get("position_buckets") or 0) if config["model_type"] == "deberta-v2" else 0,
            "max_relative_positions": max(0, config.get("max_relative_positions") or 0),
            "pos_att_type": named,
            "share_att_key": bool(config.get("share_att_key", False)),
            "norm_rel_ebd": "layer_norm" if "layer_norm" in (config.get("norm_rel_ebd") or "none") else "none",
            "position_biased_input": bool(config.get("position_biased_input", True)),
        }

    def shown(self, sizes: ModelConfig, names: Collection[str]) -> ModelConfig:
        """The released generator has absolute positions that it does not add to its input: those of its mask decoder."""
        if sizes.position_biased_input or f"{_POSITIONS}.weight" not in names:  # type: ignore[attr-defined]
            return sizes
        return sizes.model_copy(update={"mask_decoder": True})

    def canonical(self, names: Collection[str]) -> dict[str, str]:
        usual = super().canonical(names)
        difference = usual.get(f"{_WORDS}._weight")
        return usual if difference is None or f"{_WORDS}.weight" in usual else usual | {f"{_WORDS}.weight": difference}

    def stored(self, tensors: Readers, config: Mapping[str, Any]) -> Readers:
        """The tensors of v2. v1 has queries, keys and values of each head side by side, and no bias for any keys."""

        def third(number: int, read: Callable[[], Tensor]) -> Tensor:
            joined = read()
            heads = config["num_attention_heads"]
            return joined.view(heads, 3, -1, joined.shape[1])[:, number].reshape(-1, joined.shape[1])

        found: dict[str, Callable[[], Tensor]] = {}
        for name, read in tensors.items():
            start, joined, _ = name.partition("in_proj.weight")
            if not joined:
                for old, new in _FROM_V1.items():
                    name = name.replace(f".self.{old}", f".self.{new}")
                found[name] = read
                continue
            for number, part in enumerate(("query", "key", "value")):
                found[f"{start}{part}_proj.weight"] = partial(third, number, read)
            for old, new in {"in_proj": "key_proj", "pos_proj": "pos_key_proj"}.items():
                if f"{start}{old}.weight" in tensors:
                    found[f"{start}{new}.bias"] = partial(torch.zeros, config["hidden_size"])
        return found
