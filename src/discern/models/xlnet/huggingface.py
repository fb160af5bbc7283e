"""XLNet in transformers, which stores the weights of attention with shape (D, H, D / H); here they are matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from discern.errors import CheckpointError, ConfigError
from discern.models.architecture import UNLIMITED_POSITIONS, Architecture, Predicts, TaskKind, Weights, unsupported
from discern.models.config import ModelConfig
from discern.types import SpecialTokens

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu-tanh",  # other names in transformers for the same
}
_SUMMARIES = {"tanh": "summary", "gelu": "dense"}
_INPUTS = tuple(f".attention.{name}.weight" for name in ("query", "key", "value", "position"))
_OUTPUT = ".attention.output.weight"
_QUERY = "encoder.query_embedding"


class XLNetArchitecture(Architecture):
    """Encoder 'xlnet'."""

    encoder = "xlnet"
    titles = {"xlnet": "XLNet"}
    frame = "cls-last"
    positions = "relative"
    classes = {
        "words": "XLNetLMHeadModel",
        "nothing": "XLNetModel",
        "classification": "XLNetForSequenceClassification",
        "tagging": "XLNetForTokenClassification",
        "span": "XLNetForQuestionAnsweringSimple",
    }
    size_keys = {
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
    required = ("num_layers", "hidden_size", "embedding_size", "num_heads", "feedforward_size")
    supported = {
        "attn_type": "bi",
        "same_length": False,
        "untie_r": True,
        "tie_word_embeddings": True,
    }
    layers = {
        "encoder.embeddings.word": "transformer.word_embedding",
        _QUERY: "transformer.mask_emb",
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
    prefixes = ("transformer.",)
    parts = ("word_embedding.", "mask_emb", "layer.")
    tied = ("lm_loss.weight",)
    marks = {"lm_loss.bias": "words"}
    task_heads = Architecture.task_heads | {"classification": ("linear", "dense", "summary")}  # type: ignore[operator]
    task_parts = Architecture.task_parts | {  # type: ignore[operator]
        "classification": {"summary": "sequence_summary.summary", "output": "logits_proj"}
    }
    no_graph = (
        "its attention is relative to the positions of each row, it reads padding on the left, and its head predicts from a "
        "second stream, which depends on the order that is asked for"
    )
    recipes = {256: "xlnet-small", 768: "xlnet-base", 1024: "xlnet-large"}
    objective = {"objective.name": "permutation-lm", "data.packing": "two-part"}

    def check(self, sizes: ModelConfig, predicts: Predicts, *, bilinear: bool) -> None:
        if predicts not in ("words", "nothing"):
            raise ConfigError(
                f"transformers has no XLNet with a head that predicts {predicts}", hint="use the run itself with discern"
            )

    def constants(self, sizes: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
        """The values are those for fine-tuning: no memory and no reversed rows."""
        activation, clamp_length = sizes.activation, sizes.clamp_length  # type: ignore[attr-defined]
        return {
            "d_head": sizes.hidden_size // sizes.num_heads,
            "ff_activation": next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == activation),
            "attn_type": "bi",
            "untie_r": True,
            "same_length": False,
            "bi_data": False,
            "clamp_len": clamp_length or -1,
            "mem_len": None,
            "reuse_len": None,
            "use_mems_eval": False,
            "use_mems_train": False,
            "dropout": sizes.hidden_dropout,  # one number for hidden states and attention
            "summary_type": "last",
            "summary_use_proj": True,
            "summary_activation": "tanh",
            "summary_last_dropout": 0.1,
            "pad_token_id": special.pad,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": True,
        }

    def derived(self, config: Mapping[str, Any], sizes: Mapping[str, Any], path: Path) -> dict[str, Any]:
        # `d_head` is optional; transformers also requires it to be d_model / n_head.
        if config.get("d_head") not in (None, sizes["hidden_size"] // sizes["num_heads"]):
            raise unsupported(path, f"d_head {config['d_head']} is not d_model / n_head")
        activation = config.get("ff_activation", "gelu")
        if activation not in _ACTIVATIONS:
            raise unsupported(path, f"ff_activation is {activation!r}, expected one of {', '.join(_ACTIVATIONS)}")
        return {
            "max_positions": UNLIMITED_POSITIONS,
            "activation": _ACTIVATIONS[activation],
            "clamp_length": max(0, config.get("clamp_len") or 0),  # null, 0 and -1: not limited
        }

    def to_huggingface(self, weights: Weights, sizes: ModelConfig) -> dict[str, Tensor]:
        # transformers transposes the matrices of the inputs, with their columns by head, but not the matrix of the output.
        theirs = {}
        for name, tensor in weights.items():
            if name == _QUERY:
                tensor = tensor[None]
            elif name.endswith((*_INPUTS, _OUTPUT)):
                matrix = tensor if name.endswith(_OUTPUT) else tensor.t()
                tensor = matrix.reshape(len(matrix), sizes.num_heads, -1)
            theirs[name] = tensor
        return super().to_huggingface(theirs, sizes)

    def from_huggingface(self, weights: Weights) -> dict[str, Tensor]:
        ours = super().from_huggingface(weights)
        for name, tensor in ours.items():
            if name == _QUERY:
                ours[name] = tensor[0]
            elif name.endswith((*_INPUTS, _OUTPUT)):
                matrix = tensor.flatten(1)
                ours[name] = matrix if name.endswith(_OUTPUT) else matrix.t()
        return ours

    def task_config(self, sizes: ModelConfig, head: str, pooling: str, frame: str) -> dict[str, Any]:
        return {
            "summary_type": "last" if frame == "cls-last" else "first",
            "summary_use_proj": head in _SUMMARIES.values(),
            # transformers does not accept null here; "" means no activation.
            "summary_activation": next((theirs for theirs, ours in _SUMMARIES.items() if ours == head), ""),
        }

    def task_settings(self, config: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
        if kind != "classification":
            return super().task_settings(config, kind)
        if not config.get("summary_use_proj", True):
            return {"head": "linear"}
        activation = config.get("summary_activation", "tanh")
        if activation not in _SUMMARIES:
            raise CheckpointError(
                f"config.json has summary_activation '{activation}', expected {' or '.join(_SUMMARIES)}",
                hint="fine-tune the model again with discern finetune",
            )
        return {"head": _SUMMARIES[activation]}
