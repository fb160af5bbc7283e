"""ModernBERT in transformers.

A discriminator is a `ModernBertForTokenClassification` with one label. Queries, keys and values are three matrices here and one
there. A word table that is projected is written as the product of the two; table and projection are kept beside it, so that
training can be continued. Parts that ModernBERT lacks (the bilinear term, the gate of a head that copies) are given names in the
same style.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.models.architecture import WORDS, Architecture, Predicts, TaskKind, Weights, unsupported
from discern.models.config import ModelConfig
from discern.types import SpecialTokens

PROJECTION = "encoder.projection.weight"
_TASK = {"inner.dense": "head.dense", "inner.norm": "head.norm", "output": "classifier"}
_THIRDS = ("query", "key", "value")
_THIRD = re.compile(r"encoder\.blocks\.(\d+)\.attention\.(query|key|value)\.(weight|bias)")
_PACKED = re.compile(r"model\.layers\.(\d+)\.attn\.Wqkv\.(weight|bias)")


class ModernBertArchitecture(Architecture):
    """Encoder 'modernbert'."""

    encoder = "modernbert"
    titles = {"modernbert": "ModernBERT"}
    has_segments = False
    positions = "rotary"
    classes = {
        "words": "ModernBertForMaskedLM",
        "replaced": "ModernBertForTokenClassification",
        "nothing": "ModernBertModel",
        "classification": "ModernBertForSequenceClassification",
        "tagging": "ModernBertForTokenClassification",
        "span": "ModernBertForQuestionAnswering",
    }
    # The last three are the older form of `layer_types` and `rope_parameters`.
    size_keys = {
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
    required = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    supported = {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "tie_word_embeddings": True,
        "rope_scaling": None,
    }
    layers = {
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
        "head.copy_gate": "copy_gate",
        "bilinear.context": "bilinear_term.context",
    }
    prefixes = ("model.",)
    parts = ("embeddings.", "layers.", "final_norm.")
    tied = ("decoder.weight",)
    zeros = {"decoder.bias": "decoder_bias"}
    factors = (WORDS, PROJECTION)
    marks = {
        "copy_gate.weight": "words or copies",
        "decoder.bias": "words",
        "classifier.weight": "replaced",
    }
    task_heads = dict.fromkeys(("classification", "tagging", "span"), ("prediction",))
    poolings = ("cls", "mean")
    task_parts = dict.fromkeys(("classification", "tagging", "span"), _TASK)
    recipes = {256: "modern-small", 768: "modern-base"}

    def check(self, sizes: ModelConfig, predicts: Predicts, *, bilinear: bool) -> None:
        if bilinear and sizes.embedding_size != sizes.hidden_size:
            raise ConfigError(
                f"the bilinear term reads words of width {sizes.embedding_size}, and an exported ModernBERT has them only "
                f"{sizes.hidden_size} wide",
                hint=f"train with model.embedding_size={sizes.hidden_size}, or with objective.discriminator_head=dense",
            )

    def config_json(
        self, sizes: ModelConfig, vocab_size: int, output: Predicts | TaskKind, special: SpecialTokens, precision: str
    ) -> dict[str, Any]:
        config = super().config_json(sizes, vocab_size, output, special, precision)
        if output in ("replaced", "energy"):
            config |= {"num_labels": 1, "id2label": {"0": output}, "label2id": {output: 0}}
        return config

    def constants(self, sizes: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
        thetas = {"full_attention": sizes.full_rope_theta, "sliding_attention": sizes.local_rope_theta}  # type: ignore[attr-defined]
        return {
            "layer_types": _layer_types(sizes.num_layers, sizes.full_attention_every),  # type: ignore[attr-defined]
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
            "hidden_activation": "gelu",
            "initializer_cutoff_factor": 2.0,
            "mlp_dropout": 0.0,
            "decoder_bias": True,
            "classifier_pooling": "cls",
            "classifier_dropout": 0.0,
            "classifier_activation": "gelu",
            "pad_token_id": special.pad,
            # Servers need numbers for all four; a text begins with [CLS] and ends with [SEP].
            "bos_token_id": special.cls,
            "eos_token_id": special.sep,
            "cls_token_id": special.cls,
            "sep_token_id": special.sep,
            "tie_word_embeddings": True,
        }

    def derived(self, config: Mapping[str, Any], sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
        # The distance of the layers with full attention
        every, layers, listed = config.get("global_attn_every_n_layers") or 3, sizes["num_layers"], config.get("layer_types")
        if listed is not None:
            every = next((each for each in (every, *range(1, layers + 1)) if _layer_types(layers, each) == listed), None)
        if every is None:
            raise unsupported(
                path, f"layer_types is {listed!r}, but only full attention in every n-th layer from the first on is supported"
            )

        # The bases of the rotary frequencies; the first folders have one base for all layers.
        full = config.get("global_rope_theta", 160_000.0)
        local = config.get("local_rope_theta", 10_000.0) or full
        thetas = {"full_attention": full, "sliding_attention": local}
        for kind, given in (config.get("rope_parameters") or {}).items():
            given = {"rope_theta": thetas.get(kind), "rope_type": given.get("type", "default"), **given}
            if kind not in thetas or given.keys() - {"rope_theta", "rope_type", "type"} or given["rope_type"] != "default":
                raise unsupported(path, f"rope_parameters has the entry '{kind}': {given!r:.80}, which is not supported")
            thetas[kind] = given["rope_theta"]
        return {
            "embedding_size": sizes["hidden_size"],
            "full_attention_every": every,
            "full_rope_theta": thetas["full_attention"],
            "local_rope_theta": thetas["sliding_attention"],
        }

    def predicts(self, names: Collection[str], config: Mapping[str, Any]) -> Predicts:
        if not {"head.dense.weight", "head.norm.weight"} <= set(names):
            return "nothing"
        found = super().predicts(names, config)
        if found not in ("replaced", "energy") and self.classes["words"] in (config.get("architectures") or ()):
            return "words" if found == "nothing" else found
        return _output(config) if found == "replaced" and "bilinear_term.context.weight" not in names else found

    def task_kind(self, config: Mapping[str, Any]) -> TaskKind | None:
        return super().task_kind(config) if _output(config) == "nothing" else None

    def to_huggingface(self, weights: Weights, sizes: ModelConfig) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            third = _THIRD.fullmatch(name)
            if third is not None:
                layer, which, kind = third.groups()
                if which == _THIRDS[0]:
                    parts = [weights[f"encoder.blocks.{layer}.attention.{each}.{kind}"] for each in _THIRDS]
                    found[f"model.layers.{layer}.attn.Wqkv.{kind}"] = torch.cat(parts)
            elif name == WORDS and PROJECTION in weights:
                found[self.named(name)] = tensor @ weights[PROJECTION].t()
            elif name != PROJECTION:
                found[self.named(name)] = tensor
        return found

    def from_huggingface(self, weights: Weights) -> dict[str, Tensor]:
        """The inverse of `to_huggingface`, for a word table that is not projected."""
        packed = {name: found for name in weights if (found := _PACKED.fullmatch(name))}
        ours = super().from_huggingface({name: tensor for name, tensor in weights.items() if name not in packed})
        for name, found in packed.items():
            for which, part in zip(_THIRDS, weights[name].chunk(3), strict=True):
                ours[f"encoder.blocks.{found[1]}.attention.{which}.{found[2]}"] = part
        return ours

    def task_config(self, sizes: ModelConfig, head: str, pooling: str, frame: str) -> dict[str, Any]:
        return super().task_config(sizes, head, pooling, frame) | {"classifier_pooling": pooling}

    def task_settings(self, config: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
        pooling = {"pooling": config.get("classifier_pooling", "cls")} if kind == "classification" else {}
        return super().task_settings(config, kind) | pooling


def _output(config: Mapping[str, Any]) -> Predicts:
    """What a tagger with a single label outputs, if that label is none of a task."""
    labels, names = [*(config.get("id2label") or {}).values()], config.get("architectures") or [""]
    is_ours = labels in (["replaced"], ["energy"]) and names[0].endswith("ForTokenClassification")
    return labels[0] if is_ours else "nothing"


def _layer_types(num_layers: int, full_attention_every: int) -> list[str]:
    return ["sliding_attention" if layer % full_attention_every else "full_attention" for layer in range(num_layers)]
