"""Export of fine-tuned models to the Hugging Face format: an ELECTRA, XLNet or ModernBERT encoder with the head of a task.

A tagger becomes an `ElectraForTokenClassification`, a model that extracts spans an `ElectraForQuestionAnswering`, and a
classifier or a regression an `ElectraForSequenceClassification`. The latter has one more layer than our head; its weights are
chosen so that the outputs are the same. The classes of XLNet and ModernBERT are the corresponding ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from discern.errors import ConfigError
from discern.interop import modernbert, xlnet
from discern.interop.config_json import encoder_config
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import ENCODER_CLASS, MODERNBERT_ENCODER_CLASS, XLNET_ENCODER_CLASS, encoder_weights
from discern.interop.tokenizer import Frame
from discern.models.electra.encoder import BertEncoder
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.models.xlnet.encoder import XLNetEncoder
from discern.objectives.base import Vocabulary

Kind = Literal["classification", "tagging", "span", "vectors"]
Problem = Literal["single", "multi", "regression"]
ARCHITECTURES: dict[Kind, str] = {
    "classification": "ElectraForSequenceClassification",
    "tagging": "ElectraForTokenClassification",
    "span": "ElectraForQuestionAnswering",
}
"""The class of transformers that holds a head, by its kind."""
PROBLEMS: dict[Problem, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
"""`problem_type` in config.json, by our name."""
# Error of a stored offset that is accepted, as a part of the spread of the scores.
_ROUNDING = 0.01


@dataclass(frozen=True)
class Summary:
    """A layer between hidden state and head: activation(W h + b) replaces h, normalized by a LayerNorm in ModernBERT.

    Attributes:
        weight: (D, D) W.
        bias: (D,) b; None: no bias.
        activation: tanh or the exact GELU.
        norm_weight: (D,) gain of the LayerNorm; None: there is none.
        norm_bias: (D,) its bias; None: no bias.
    """

    weight: Float[Tensor, "D D"]
    bias: Float[Tensor, "D"] | None
    activation: Literal["tanh", "gelu"] = "tanh"
    norm_weight: Float[Tensor, "D"] | None = None
    norm_bias: Float[Tensor, "D"] | None = None


@dataclass(frozen=True)
class HeadWeights:
    """The head of a fine-tuned model: maps a hidden state h to the C outputs `scale * (W h + b) + shift`.

    Attributes:
        kind: 'classification' reads one state, see `pooling`; 'tagging' and 'span' read the state of every token. The two
            outputs of 'span' are the logits of the start and the end.
        weight: (C, D) W.
        bias: (C,) b.
        labels: names of the C outputs; empty if they have no names (span, regression).
        problem: kind of classification. 'single': exactly one class is correct; 'multi': any number of classes is; 'regression':
            the outputs themselves are the prediction.
        scale: factor that undoes a normalization of the targets.
        shift: offset that undoes it, in the unit of the targets.
        summary: layer before W; None if there is none. Only ModernBERT has one in heads other than those for classification.
        frame: position of [CLS] in the input.
        pooling: state that a classification reads: that of [CLS], or the mean over all tokens.
    """

    kind: Kind
    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"]
    labels: tuple[str, ...] = ()
    problem: Problem = "single"
    scale: float = 1.0
    shift: float = 0.0
    summary: Summary | None = None
    frame: Frame = "cls-first"
    pooling: Literal["cls", "mean"] = "cls"

    def __post_init__(self) -> None:
        if self.labels and len(self.labels) != len(self.bias):
            raise ValueError(f"{len(self.labels)} labels for {len(self.bias)} outputs")
        if self.kind == "span" and len(self.bias) != 2:
            raise ValueError(f"a span has a start and an end, not {len(self.bias)} outputs")


@dataclass(frozen=True)
class OwnHead:
    """A head that transformers has no class for.

    The encoder is exported as the bare model of transformers, and the head to a separate file, which `discern.load` and
    `discern predict` read.

    Attributes:
        kind: as in `HeadWeights`.
        tensors: weights by our own names.
        labels: as in `HeadWeights`.
        problem: as in `HeadWeights`.
        frame: position of [CLS] in the input.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()
    problem: Problem = "single"
    frame: Frame = "cls-first"

    def stored(self, precision: str) -> dict[str, Tensor]:
        """The tensors on the CPU, in the data type of the stored weights."""
        dtype = PRECISIONS[precision]
        return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.tensors.items()}


def finetuned_to_huggingface(
    encoder: BertEncoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """Convert the encoder and its head to config.json and model.safetensors of Hugging Face.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: ELECTRA cannot represent the model: the encoder is not BERT-style with a LayerNorm after each residual, or
            the head has a summary layer with tanh or a LayerNorm, pools by the mean, or has too many classes; or the precision is
            too coarse for the scores.
    """
    if isinstance(head, OwnHead):
        return _bare(encoder, head, vocabulary, precision)
    _check_layers(head, ARCHITECTURES[head.kind], ("gelu",))
    _check_rounding(head, precision)
    tensors = encoder_weights(encoder) | _head_tensors(head)
    dtype = PRECISIONS[precision]
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    config = encoder_config(encoder, vocabulary, ARCHITECTURES[head.kind], precision)
    config |= head_config(head) | {"classifier_dropout": encoder.config.hidden_dropout}
    return HuggingFaceModel(config, stored)


def _check_rounding(head: HeadWeights, precision: str) -> None:
    """Raise a ConfigError if a precision is too coarse for the offset of the scores, which is part of the stored bias.

    bfloat16 stores 2005 as 2008: scores that differ by a few units would all be off by about as much as they differ.
    """
    offset = (head.scale * head.bias.detach().float().cpu() + head.shift).to(PRECISIONS[precision]).double()
    lost = float((offset - head.scale * head.bias.detach().double().cpu() - head.shift).abs().max())
    if head.problem == "regression" and lost > _ROUNDING * abs(head.scale):
        raise ConfigError(
            f"{precision} would shift all scores by {lost:.3g}: they lie around {head.shift:.6g} and vary by {head.scale:.3g}",
            hint="export with --precision float32, or fine-tune on labels from which a constant is subtracted",
        )


def _check_layers(head: HeadWeights, architecture: str, activations: tuple[str, ...]) -> None:
    """Raise a ConfigError if a head pools or has a layer that the class of transformers lacks.

    Args:
        activations: activations of the layer that the class has before the last one in a classification.
    """
    without = "; `discern predict` accepts this model without an export"
    if head.pooling != "cls":
        raise ConfigError(
            f"{architecture} reads the state of [CLS], and this head the mean of all states",
            hint=f"fine-tune with --set task.pooling=cls to export{without}",
        )
    summary = head.summary
    hint = f"fine-tune with --set task.head={'span' if head.kind == 'span' else 'linear'} to export{without}"
    if summary is not None and summary.norm_weight is not None:
        raise ConfigError(f"{architecture} has no LayerNorm before its last layer, and this head has one", hint=hint)
    if summary is not None and (head.kind != "classification" or summary.activation not in activations):
        raise ConfigError(f"{architecture} has no summary layer, and this head has one", hint=hint)


def _bare(encoder: BertEncoder, head: OwnHead, vocabulary: Vocabulary, precision: str) -> HuggingFaceModel:
    """The encoder as an `ElectraModel`, with the head beside it."""
    weights, dtype = encoder_weights(encoder), PRECISIONS[precision]
    stored = {name.removeprefix("electra."): each.detach().to("cpu", dtype).contiguous() for name, each in weights.items()}
    return HuggingFaceModel(encoder_config(encoder, vocabulary, ENCODER_CLASS, precision), stored, head.stored(precision))


def head_config(head: HeadWeights) -> dict[str, Any]:
    """The keys of config.json that describe a head, for any encoder.

    Keys are strings, as JSON requires; transformers converts those of `id2label` to numbers. If several outputs have the same
    label, `label2id` maps it to the first of them.
    """
    labels = head.labels or tuple(f"LABEL_{number}" for number in range(len(head.bias)))
    config: dict[str, Any] = {
        "num_labels": len(labels),
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: labels.index(label) for label in labels},
    }
    return config | ({"problem_type": PROBLEMS[head.problem]} if head.kind == "classification" else {})


def _head_tensors(head: HeadWeights) -> dict[str, Tensor]:
    """The tensors of the head, by Hugging Face's names."""
    if head.kind == "classification":
        return _two_layers(head)
    return linear_tensors(head, "classifier" if head.kind == "tagging" else "qa_outputs")


def linear_tensors(head: HeadWeights, layer: str) -> dict[str, Tensor]:
    """The head as a single linear layer with this name."""
    weight, bias = _linear(head)
    return {f"{layer}.weight": head.scale * weight, f"{layer}.bias": head.scale * bias + head.shift}


def _linear(head: HeadWeights) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
    return head.weight.detach().float().cpu(), head.bias.detach().float().cpu()


def _two_layers(head: HeadWeights) -> dict[str, Tensor]:
    """The weights of ELECTRA's head, out(gelu(dense(h))), with which it computes the same as ours.

    Let z = W h + b. The first layer computes z and -z, and the second gelu(z) - gelu(-z) = z, because the exact GELU is z Phi(z)
    and Phi(z) + Phi(-z) = 1. A head that already has a layer with GELU is stored unchanged.
    """
    weight, bias = _linear(head)
    if head.summary is not None:
        return {
            "classifier.dense.weight": head.summary.weight,
            **({} if head.summary.bias is None else {"classifier.dense.bias": head.summary.bias}),
            "classifier.out_proj.weight": head.scale * weight,
            "classifier.out_proj.bias": head.scale * bias + head.shift,
        }
    classes, size = weight.shape
    spare = size - 2 * classes
    if spare < 0:
        raise ConfigError(
            f"{ARCHITECTURES[head.kind]} can represent {size // 2} classes on states of width {size}; this head has {classes}",
            hint=f"export the encoder alone, or fine-tune a model whose hidden_size is {2 * classes} or more",
        )
    select = head.scale * torch.eye(classes)
    return {
        "classifier.dense.weight": torch.cat([weight, -weight, torch.zeros(spare, size)]),
        "classifier.dense.bias": torch.cat([bias, -bias, torch.zeros(spare)]),
        "classifier.out_proj.weight": torch.cat([select, -select, torch.zeros(classes, spare)], 1),
        "classifier.out_proj.bias": torch.full((classes,), head.shift),
    }


XLNET_ARCHITECTURES = {
    "classification": "XLNetForSequenceClassification",
    "tagging": "XLNetForTokenClassification",
    "span": "XLNetForQuestionAnsweringSimple",
}
"""The class of transformers that holds a head, by its kind."""
_XLNET_LAYERS = {"classification": "logits_proj", "tagging": "classifier", "span": "qa_outputs"}


def xlnet_to_huggingface(
    encoder: XLNetEncoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """Convert the encoder and its head to config.json and model.safetensors of Hugging Face.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: XLNet's classes lack a layer of the head or its pooling, or the precision is too coarse for the scores.
    """
    tensors = xlnet.encoder_tensors(encoder)
    if isinstance(head, HeadWeights):
        _check_layers(head, XLNET_ARCHITECTURES[head.kind], ("tanh", "gelu"))
        _check_rounding(head, precision)
        tensors |= _summary_tensors(head) | linear_tensors(head, _XLNET_LAYERS[head.kind])
    dtype = PRECISIONS[precision]
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if isinstance(head, OwnHead):
        bare = xlnet.encoder_config(encoder, vocabulary, XLNET_ENCODER_CLASS, precision)
        return HuggingFaceModel(bare, stored, head.stored(precision))
    config = xlnet.encoder_config(encoder, vocabulary, XLNET_ARCHITECTURES[head.kind], precision)
    return HuggingFaceModel(config | head_config(head) | _summary_config(head), stored)


def _summary_tensors(head: HeadWeights) -> dict[str, Tensor]:
    if head.summary is None:
        return {}
    bias = {} if head.summary.bias is None else {"sequence_summary.summary.bias": head.summary.bias}
    return {"sequence_summary.summary.weight": head.summary.weight} | bias


def _summary_config(head: HeadWeights) -> dict[str, Any]:
    """The keys of config.json about which state the classifier reads, and through which layer."""
    return {
        "summary_type": "last" if head.frame == "cls-last" else "first",
        "summary_use_proj": head.summary is not None,
        # transformers does not accept null here; "" means no activation.
        "summary_activation": "" if head.summary is None else head.summary.activation,
    }


MODERNBERT_ARCHITECTURES: dict[Kind, str] = {
    "classification": "ModernBertForSequenceClassification",
    "tagging": "ModernBertForTokenClassification",
    "span": "ModernBertForQuestionAnswering",
}
"""The class of transformers that holds a head, by its kind."""


def modernbert_to_huggingface(
    encoder: ModernBertEncoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """Convert the encoder and its head to config.json and model.safetensors of Hugging Face.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: the head lacks the layers that ModernBERT's classes have before the last one, or the precision is too coarse
            for the scores.
    """
    tensors, dtype = modernbert.encoder_tensors(encoder), PRECISIONS[precision]
    if isinstance(head, HeadWeights):
        _check_rounding(head, precision)
        summary = head.summary
        if summary is None or summary.norm_weight is None:
            raise ConfigError(
                f"{MODERNBERT_ARCHITECTURES[head.kind]} has a dense layer, a GELU and a LayerNorm before its last layer, "
                "but this head does not",
                hint="fine-tune with --set task.head=prediction to export; `discern predict` accepts this model as it is",
            )
        tensors |= {"head.dense.weight": summary.weight, "head.norm.weight": summary.norm_weight}
        tensors |= {} if summary.bias is None else {"head.dense.bias": summary.bias}
        tensors |= {} if summary.norm_bias is None else {"head.norm.bias": summary.norm_bias}
        tensors |= linear_tensors(head, "classifier")
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if isinstance(head, OwnHead):
        bare = modernbert.encoder_config(encoder, vocabulary, MODERNBERT_ENCODER_CLASS, precision)
        return HuggingFaceModel(bare, stored, head.stored(precision))
    config = modernbert.encoder_config(encoder, vocabulary, MODERNBERT_ARCHITECTURES[head.kind], precision)
    config |= head_config(head) | {"classifier_dropout": encoder.config.hidden_dropout, "classifier_pooling": head.pooling}
    return HuggingFaceModel(config, stored)
