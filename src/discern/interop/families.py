"""Which of the families that transformers knows a network or a folder is of, and what turns one into the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.errors import ConfigError
from discern.interop import finetuned, huggingface, pretrained, xlnet, xlnet_finetuned
from discern.interop.finetuned import HeadWeights
from discern.interop.huggingface import HuggingFaceModel, read_huggingface_config
from discern.interop.tokenizer import Frame
from discern.model.bert import BertEncoder
from discern.model.encoder import Encoder
from discern.model.network import Network
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Vocabulary


@dataclass(frozen=True)
class Family:
    """How one architecture is written and read.

    Attributes:
        encoder: our class.
        model_types: values of `model_type` in config.json whose encoder it can hold.
        pretrained_type: the one of them whose pre-training heads are ours too; what is written is of it.
        to_huggingface: a network as a folder's content, see `discern.interop.huggingface.to_huggingface`.
        finetuned: an encoder with the head of a task likewise, see `discern.interop.finetuned.finetuned_to_huggingface`.
        network: the network in a folder.
        fill: give a network the weights in a folder.
        encoder_from: the encoder in a folder, whatever stands on it.
        network_name: what the network in somebody else's folder is called here.
        frame: of the texts that transformers' classes of this family expect.
    """

    encoder: type[Encoder]
    model_types: tuple[str, ...]
    pretrained_type: str
    to_huggingface: Callable[[Network, Vocabulary, str], HuggingFaceModel]
    finetuned: Callable[[Any, HeadWeights, Vocabulary, str], HuggingFaceModel]
    network: Callable[[Path], Network]
    fill: Callable[[Network, Path], None]
    encoder_from: Callable[[Path], Encoder]
    network_name: Callable[[Path], str]
    frame: Frame


FAMILIES = (
    Family(
        BertEncoder,
        pretrained.FAMILIES,
        "electra",
        huggingface.to_huggingface,
        finetuned.finetuned_to_huggingface,
        huggingface.network_from_huggingface,
        huggingface.load_huggingface_weights,
        pretrained.encoder_from_huggingface,
        lambda folder: "discriminator" if huggingface.is_discriminator(folder) else "generator",
        "cls-first",
    ),
    Family(
        XLNetEncoder,
        ("xlnet",),
        "xlnet",
        xlnet.to_huggingface,
        xlnet_finetuned.finetuned_to_huggingface,
        xlnet.network_from_huggingface,
        xlnet.load_huggingface_weights,
        xlnet.encoder_from_huggingface,
        lambda folder: "encoder",
        "cls-last",
    ),
)
ENCODER_TYPES = tuple(name for family in FAMILIES for name in family.model_types)
"""Values of `model_type` of the folders that an encoder can be taken from."""
PRETRAINED_TYPES = tuple(family.pretrained_type for family in FAMILIES)
"""Values of `model_type` of the folders that a pre-trained network with its head can be taken from."""


def family_of(encoder: Encoder) -> Family:
    """The family that can hold an encoder.

    Raises:
        ConfigError: none can.
    """
    for family in FAMILIES:
        if isinstance(encoder, family.encoder):
            return family
    raise ConfigError(
        f"encoder '{encoder.config.encoder}' has no form in transformers", hint="use the run with discern, as it is"
    )


def family_in(folder: Path) -> Family:
    """The family of the model in a folder.

    Raises:
        CheckpointError: config.json is missing, unreadable, or that of another family.
    """
    kind = read_huggingface_config(folder, ENCODER_TYPES)["model_type"]
    return next(family for family in FAMILIES if kind in family.model_types)


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """The network as config.json and model.safetensors of the family that can hold it.

    Raises:
        ConfigError: none can.
    """
    return family_of(network.encoder).to_huggingface(network, vocabulary, precision)


def finetuned_to_huggingface(
    encoder: Encoder, head: HeadWeights, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """A fine-tuned encoder and its head as config.json and model.safetensors of the family that can hold them.

    Raises:
        ConfigError: none can.
    """
    return family_of(encoder).finetuned(encoder, head, vocabulary, precision)
