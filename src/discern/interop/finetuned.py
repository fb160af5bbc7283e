"""Our fine-tuned models as Hugging Face ELECTRA folders: an encoder with one linear layer on it. XLNet's: `xlnet_finetuned`.

A tagger becomes an `ElectraForTokenClassification`, a finder of spans an `ElectraForQuestionAnswering`, a classifier or a
regression an `ElectraForSequenceClassification`, which computes the same by way of a layer that ours does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from discern.errors import ConfigError
from discern.interop.config_json import encoder_config
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import ENCODER_CLASS, encoder_names, encoder_parameters
from discern.interop.tokenizer import Frame
from discern.model.bert import BertEncoder
from discern.objectives.base import Vocabulary

Kind = Literal["classification", "tagging", "span"]
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


@dataclass(frozen=True)
class Summary:
    """What stands between state and head: activation(W h + b) takes the place of h.

    Attributes:
        weight: (D, D) W.
        bias: (D,) b.
        activation: tanh, or the exact GELU.
    """

    weight: Float[Tensor, "D D"]
    bias: Float[Tensor, "D"]
    activation: Literal["tanh", "gelu"] = "tanh"


@dataclass(frozen=True)
class HeadWeights:
    """What a fine-tuned model computes from a state h: `scale * (W h + b) + shift`, C numbers.

    Attributes:
        kind: 'classification' reads the state of [CLS], 'tagging' and 'span' that of every token; a span's two numbers are
            the logits of its start and of its end.
        weight: (C, D) W.
        bias: (C,) b.
        labels: what each of the C numbers is for; empty where they have no names (span, regression).
        problem: of classification. 'single': one class is right; 'multi': any number of them; 'regression': the numbers are
            what is asked for.
        scale: factor that undoes a normalisation of the targets.
        shift: in the targets' unit, likewise.
        summary: of classification; None: there is none.
        frame: of the texts: where [CLS] stands.
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

    def __post_init__(self) -> None:
        if self.labels and len(self.labels) != len(self.bias):
            raise ValueError(f"{len(self.labels)} labels for {len(self.bias)} outputs")
        if self.kind == "span" and len(self.bias) != 2:
            raise ValueError(f"a span has a start and an end, not {len(self.bias)} outputs")


@dataclass(frozen=True)
class OwnHead:
    """A head that transformers has no class for. The encoder is written as transformers' bare model, the head to a file
    beside it, which `discern.load` and `discern predict` read.

    Attributes:
        kind: as of `HeadWeights`.
        tensors: by our own names.
        labels: likewise as of `HeadWeights`.
        problem: likewise.
        frame: of the texts: where [CLS] stands.
    """

    kind: Kind
    tensors: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()
    problem: Problem = "single"
    frame: Frame = "cls-first"

    def stored(self, precision: str) -> dict[str, Tensor]:
        """The tensors on the CPU, in the type that weights are stored in."""
        dtype = PRECISIONS[precision]
        return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.tensors.items()}


def finetuned_to_huggingface(
    encoder: BertEncoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """The encoder and its head as config.json and model.safetensors of Hugging Face.

    Args:
        precision: type that the weights are stored in, one of `PRECISIONS`.

    Raises:
        ConfigError: the encoder is not the BERT-style one with LayerNorm after each residual, which alone ELECTRA can hold, or
            the head has a summary with tanh, or more classes than ELECTRA's can represent.
    """
    if isinstance(head, OwnHead):
        return _bare(encoder, head, vocabulary, precision)
    if head.summary is not None and head.summary.activation != "gelu":
        raise ConfigError(
            f"{ARCHITECTURES[head.kind]} has no place for a summary",
            hint="--set task.head=linear trains a head that it has; `discern predict` takes this one as it is",
        )
    names, parameters = encoder_names(encoder), encoder_parameters(encoder)
    tensors = {f"electra.{theirs}": parameters[ours] for ours, theirs in names.items()} | _head_tensors(head)
    dtype = PRECISIONS[precision]
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    config = encoder_config(encoder, vocabulary, ARCHITECTURES[head.kind], precision)
    config |= head_config(head) | {"classifier_dropout": encoder.config.hidden_dropout}
    return HuggingFaceModel(config, stored)


def _bare(encoder: BertEncoder, head: OwnHead, vocabulary: Vocabulary, precision: str) -> HuggingFaceModel:
    """The encoder as an `ElectraModel`, with the head beside it."""
    names, parameters, dtype = encoder_names(encoder), encoder_parameters(encoder), PRECISIONS[precision]
    stored = {theirs: parameters[ours].detach().to("cpu", dtype).contiguous() for ours, theirs in names.items()}
    return HuggingFaceModel(encoder_config(encoder, vocabulary, ENCODER_CLASS, precision), stored, head.stored(precision))


def head_config(head: HeadWeights) -> dict[str, Any]:
    """What config.json says of a head, whatever it stands on.

    Keys are strings, as JSON has them; transformers makes numbers of those in `id2label`. Where several outputs have the
    same label, `label2id` has the first of them.
    """
    labels = head.labels or tuple(f"LABEL_{number}" for number in range(len(head.bias)))
    config: dict[str, Any] = {
        "num_labels": len(labels),
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: labels.index(label) for label in labels},
    }
    return config | ({"problem_type": PROBLEMS[head.problem]} if head.kind == "classification" else {})


def _head_tensors(head: HeadWeights) -> dict[str, Tensor]:
    """The head's tensors by Hugging Face's name."""
    if head.kind == "classification":
        return _two_layers(head)
    return linear_tensors(head, "classifier" if head.kind == "tagging" else "qa_outputs")


def linear_tensors(head: HeadWeights, layer: str) -> dict[str, Tensor]:
    """A head as one layer of this name."""
    weight, bias = _linear(head)
    return {f"{layer}.weight": head.scale * weight, f"{layer}.bias": head.scale * bias + head.shift}


def _linear(head: HeadWeights) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
    return head.weight.detach().float().cpu(), head.bias.detach().float().cpu()


def _two_layers(head: HeadWeights) -> dict[str, Tensor]:
    """ELECTRA's head, out(gelu(dense(h))), such that it computes ours.

    With z = W h + b, the first layer gives z and -z, and the second takes gelu(z) - gelu(-z), which is z: the exact GELU is
    z Phi(z), and Phi(z) + Phi(-z) = 1. A head that has a layer with GELU is stored as it is.
    """
    weight, bias = _linear(head)
    if head.summary is not None:
        return {
            "classifier.dense.weight": head.summary.weight,
            "classifier.dense.bias": head.summary.bias,
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
