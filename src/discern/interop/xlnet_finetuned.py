"""Our fine-tuned XLNets as Hugging Face folders, whose classes have the same heads.

A classifier or a regression becomes an `XLNetForSequenceClassification`, a tagger an `XLNetForTokenClassification`, a finder of
spans an `XLNetForQuestionAnsweringSimple`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from discern.interop.finetuned import HeadWeights, OwnHead, head_config, linear_tensors
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import XLNET_ENCODER_CLASS
from discern.interop.xlnet import PREFIX, encoder_config, encoder_tensors
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Vocabulary

ARCHITECTURES = {
    "classification": "XLNetForSequenceClassification",
    "tagging": "XLNetForTokenClassification",
    "span": "XLNetForQuestionAnsweringSimple",
}
"""The class of transformers that holds a head, by its kind."""
_LAYERS = {"classification": "logits_proj", "tagging": "classifier", "span": "qa_outputs"}


def finetuned_to_huggingface(
    encoder: XLNetEncoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """The encoder and its head as config.json and model.safetensors of Hugging Face.

    Args:
        precision: type that the weights are stored in, one of `PRECISIONS`.
    """
    tensors = {PREFIX + name: tensor for name, tensor in encoder_tensors(encoder).items()}
    if isinstance(head, HeadWeights):
        tensors |= _summary_tensors(head) | linear_tensors(head, _LAYERS[head.kind])
    dtype = PRECISIONS[precision]
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if isinstance(head, OwnHead):
        bare = encoder_config(encoder, vocabulary, XLNET_ENCODER_CLASS, precision)
        return HuggingFaceModel(bare, stored, head.stored(precision))
    config = encoder_config(encoder, vocabulary, ARCHITECTURES[head.kind], precision)
    return HuggingFaceModel(config | head_config(head) | _summary_config(head), stored)


def _summary_tensors(head: HeadWeights) -> dict[str, Tensor]:
    if head.summary is None:
        return {}
    return {"sequence_summary.summary.weight": head.summary.weight, "sequence_summary.summary.bias": head.summary.bias}


def _summary_config(head: HeadWeights) -> dict[str, Any]:
    """Which state the classifier reads, and through what."""
    return {
        "summary_type": "last" if head.frame == "cls-last" else "first",
        "summary_use_proj": head.summary is not None,
        # Nothing is spelt "": transformers takes no null here.
        "summary_activation": "" if head.summary is None else head.summary.activation,
    }
