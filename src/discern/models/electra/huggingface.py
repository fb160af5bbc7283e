"""ELECTRA and BERT in transformers.

Parts that ELECTRA lacks (the bilinear term, the gate of a head that copies, a second tower) are given names in the same style.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.models.architecture import BERT_BLOCK, BERT_KEYS, MARK, Architecture, Predicts, TaskKind, Weights
from discern.models.config import ModelConfig
from discern.types import SpecialTokens

_BLOCK = BERT_BLOCK | {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
}
_LAYERS = {
    "encoder.embeddings.word": "electra.embeddings.word_embeddings",
    "encoder.embeddings.position": "electra.embeddings.position_embeddings",
    "encoder.embeddings.token_type": "electra.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "electra.embeddings.LayerNorm",
    "head.dense": "generator_predictions.dense",
    "head.norm": "generator_predictions.LayerNorm",
    "head.bias": "generator_lm_head.bias",
    "head.copy_gate": "copy_gate",
    "bilinear.context": "bilinear_term.context",
}
# Two towers take the place of ELECTRA's single encoder.
for _tower in ("", "left.", "right."):
    _LAYERS[f"encoder.{_tower}projection"] = f"electra.{_tower}embeddings_project"
    _LAYERS |= {
        f"encoder.{_tower}blocks.#.{ours}": f"electra.{_tower}encoder.layer.#.{theirs}" for ours, theirs in _BLOCK.items()
    }
_DISCRIMINATOR = {
    "head.dense": "discriminator_predictions.dense",
    "head.output": "discriminator_predictions.dense_prediction",
}
# The classes that compute the same under BERT's names. A discriminator's head has no class there, so that it becomes a body.
_AS_BERT = {
    "ElectraModel": "BertModel",
    "ElectraForPreTraining": "BertModel",
    "ElectraForMaskedLM": "BertForMaskedLM",
    "ElectraForTokenClassification": "BertForTokenClassification",
    "ElectraForQuestionAnswering": "BertForQuestionAnswering",
}
_ELECTRA_ONLY = ("embedding_size", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
# What later commands know of a run does not hold for its body alone.
_OF_A_RUN = ("objective", "networks", "gives", "head")


class ElectraArchitecture(Architecture):
    """Encoder 'bert'. BERT's masked language model is read as an ELECTRA generator whose embeddings have the hidden size."""

    encoder = "bert"
    titles = {"electra": "ELECTRA", "bert": "BERT"}
    classes = {
        "words": "ElectraForMaskedLM",
        "replaced": "ElectraForPreTraining",
        "nothing": "ElectraModel",
        "classification": "ElectraForSequenceClassification",
        "tagging": "ElectraForTokenClassification",
        "span": "ElectraForQuestionAnswering",
    }
    size_keys = BERT_KEYS
    required = ("num_layers", "hidden_size", "num_heads", "feedforward_size")
    supported = {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    layers = _LAYERS
    discriminator_layers = _DISCRIMINATOR
    prefixes = ("electra.", "bert.")
    parts = ("embeddings.", "embeddings_project.", "encoder.")
    strips_prefix = True
    synonyms = {
        "bert.": "electra.",
        "cls.predictions.transform.": "generator_predictions.",
        "cls.predictions.bias": "generator_lm_head.bias",
    }
    tied = ("generator_lm_head.weight", "cls.predictions.decoder.weight")
    redundant = ("position_ids", "embeddings.token_type_ids", "cls.predictions.decoder.bias")
    marks = {
        "copy_gate.weight": "words or copies",
        "generator_predictions.dense.weight": "words",
        "discriminator_predictions.dense.weight": "replaced",
    }
    recipes = {256: "electra-small-google", 768: "electra-base-google", 1024: "electra-large"}

    def check(self, sizes: ModelConfig, predicts: Predicts, *, bilinear: bool) -> None:
        normalization = getattr(sizes, "normalization", "post")
        if normalization != "post":
            raise ConfigError(
                f"ELECTRA has its LayerNorms after each residual, but model.normalization is '{normalization}'",
                hint="train with model.normalization=post to export; `discern detect` accepts the run as it is",
            )

    def constants(self, sizes: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
        return {
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
            "pad_token_id": special.pad,
            "tie_word_embeddings": True,
            # How ElectraForMultipleChoice sums up a sequence: the state of [CLS], as when the released models are fine-tuned.
            "summary_type": "first",
            "summary_use_proj": True,
            "summary_activation": "gelu",
            "summary_last_dropout": 0.1,
        }

    def derived(self, config: Mapping[str, Any], sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
        # BERT does not factorize its embeddings.
        return {"embedding_size": sizes["hidden_size"]} if config["model_type"] == "bert" else {}

    def task_layers(self, kind: TaskKind, model_type: str) -> Mapping[str, str]:
        if kind == "classification" and model_type == "bert":
            return {"summary": "electra.pooler.dense", "output": "classifier"}
        return self.task_parts[kind]

    def task_tensors(self, weights: Weights, kind: TaskKind, scale: float, shift: float) -> dict[str, Tensor]:
        """As for every architecture; a classifier of one layer becomes the two of ELECTRA, out(gelu(dense(h))).

        Let z = W h + b. The first layer computes z and -z, and the second gelu(z) - gelu(-z) = z, because the exact GELU is
        z Phi(z) and Phi(z) + Phi(-z) = 1.
        """
        if kind != "classification" or "summary.weight" in weights:
            return super().task_tensors(weights, kind, scale, shift)
        weight, bias = (weights[f"output.{name}"].detach().float().cpu() for name in ("weight", "bias"))
        classes, size = weight.shape
        spare = size - 2 * classes
        if spare < 0:
            raise ConfigError(
                f"{self.classes[kind]} can represent {size // 2} classes on states of width {size}; this head has {classes}",
                hint=f"export the encoder alone, or fine-tune a model whose hidden_size is {2 * classes} or more",
            )
        select = scale * torch.eye(classes)
        return {
            "classifier.dense.weight": torch.cat([weight, -weight, torch.zeros(spare, size)]),
            "classifier.dense.bias": torch.cat([bias, -bias, torch.zeros(spare)]),
            "classifier.out_proj.weight": torch.cat([select, -select, torch.zeros(classes, spare)], 1),
            "classifier.out_proj.bias": torch.full((classes,), shift),
        }

    def task_settings(self, config: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
        if kind == "classification" and config["model_type"] == "bert":
            return {"head": "summary"}
        return super().task_settings(config, kind)

    def as_form(
        self, config: Mapping[str, Any], tensors: Weights, form: str, *, head_beside: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """An ELECTRA whose embeddings are as wide as its hidden states, as a BERT without a pooler."""
        if form != "bert":
            return super().as_form(config, tensors, form, head_beside=head_beside)
        width, size = config["embedding_size"], config["hidden_size"]
        if width != size:
            raise ConfigError(
                f"BERT cannot express this model: its embeddings are {width} wide and its hidden states {size}, and BERT has "
                "neither the projection between them nor a place for the LayerNorm before it",
                hint=f"leave out --as bert; models with model.embedding_size={size} can be exported as bert",
            )
        theirs = _AS_BERT.get(config["architectures"][0])
        if theirs is None:
            raise ConfigError(
                f"BERT has no class that computes the same as {config['architectures'][0]}: its classifier has a tanh where "
                "that of ELECTRA has a GELU",
                hint="leave out --as bert",
            )
        bare = not any(name.startswith("electra.") for name in tensors)
        if head_beside and (theirs == "BertForMaskedLM" or (theirs == "BertModel" and bare)):
            raise ConfigError("BERT has no class with this head", hint="leave out --as bert")
        if theirs == "BertModel" and not bare:
            tensors = {name: each for name, each in tensors.items() if name.startswith("electra.")}
        names = {ours: synonym for synonym, ours in self.synonyms.items()}
        kept: dict[str, Any] = {key: value for key, value in config.items() if key not in _ELECTRA_ONLY}
        kept |= {"architectures": [theirs], "model_type": "bert"}
        if MARK in kept:
            kept[MARK] = {key: value for key, value in kept[MARK].items() if key not in _OF_A_RUN} | {"form": "bert"}
        found = {}
        for name, tensor in tensors.items():
            ours = next((each for each in names if name.startswith(each)), "")
            found[names.get(ours, "") + name.removeprefix(ours)] = tensor
        return kept, found
