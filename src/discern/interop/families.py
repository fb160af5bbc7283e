"""Which of the families that transformers knows a network or a folder is of, and what turns one into the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from discern.errors import CheckpointError, ConfigError
from discern.interop import finetuned, huggingface, pretrained, xlnet, xlnet_finetuned
from discern.interop.config_json import read_huggingface_config, read_mark
from discern.interop.finetuned import HeadWeights, OwnHead
from discern.interop.heads import network_with_head
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.names import TWO_TOWER_FAMILY
from discern.interop.tokenizer import Frame
from discern.model.bert import BertEncoder
from discern.model.encoder import Encoder
from discern.model.heads import MaskedLMHead, TokenHead
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Vocabulary


@dataclass(frozen=True)
class Family:
    """How one architecture is written and read.

    Attributes:
        encoders: our classes.
        model_types: values of `model_type` in config.json whose encoder it can hold.
        network_types: those whose networks it can; two towers are no encoder of a task.
        pretrained_type: the one of them whose pre-training heads are ours too; what is written is of it.
        to_huggingface: a network as a folder's content, see `discern.interop.huggingface.to_huggingface`.
        finetuned: an encoder with the head of a task likewise, see `discern.interop.finetuned.finetuned_to_huggingface`.
        network: the network in a folder.
        with_head: the same, but an `nn.Identity` for the head where there is no pre-training head.
        fill: give a network the weights in a folder.
        encoder_from: the encoder in a folder, whatever stands on it.
        frame: of the texts that transformers' classes of this family expect.
    """

    encoders: tuple[type[Encoder], ...]
    model_types: tuple[str, ...]
    network_types: tuple[str, ...]
    pretrained_type: str
    to_huggingface: Callable[[Network, Vocabulary, str], HuggingFaceModel]
    finetuned: Callable[[Any, HeadWeights | OwnHead, Vocabulary, str], HuggingFaceModel]
    network: Callable[[Path], Network]
    with_head: Callable[[Path], Network]
    fill: Callable[[Network, Path], None]
    encoder_from: Callable[[Path], Encoder]
    frame: Frame


def _bert_network(folder: Path) -> Network:
    """Of a folder of ours as it was written, of somebody else's in whatever files it has.

    Raises:
        CheckpointError: a file is missing or damaged, or there is no pre-training head.
    """
    config = read_huggingface_config(folder, NETWORK_TYPES)
    if config["model_type"] == TWO_TOWER_FAMILY or read_mark(config):
        return huggingface.network_from_huggingface(folder)
    network = network_with_head(folder)
    if isinstance(network.head, nn.Identity):
        raise CheckpointError(
            f"{folder} holds no pre-training head: it is a bare encoder, or was fine-tuned for something",
            hint="give an ElectraForPreTraining, an ElectraForMaskedLM or a BertForMaskedLM",
        )
    return network


FAMILIES = (
    Family(
        (BertEncoder, TwoTowerEncoder),
        pretrained.FAMILIES,
        (*pretrained.FAMILIES, TWO_TOWER_FAMILY),
        "electra",
        huggingface.to_huggingface,
        finetuned.finetuned_to_huggingface,
        _bert_network,
        network_with_head,
        huggingface.load_huggingface_weights,
        pretrained.encoder_from_huggingface,
        "cls-first",
    ),
    Family(
        (XLNetEncoder,),
        ("xlnet",),
        ("xlnet",),
        "xlnet",
        xlnet.to_huggingface,
        xlnet_finetuned.finetuned_to_huggingface,
        xlnet.network_from_huggingface,
        xlnet.network_with_head,
        xlnet.load_huggingface_weights,
        xlnet.encoder_from_huggingface,
        "cls-last",
    ),
)
ENCODER_TYPES = tuple(name for family in FAMILIES for name in family.model_types)
"""Values of `model_type` of the folders that an encoder can be taken from."""
NETWORK_TYPES = tuple(name for family in FAMILIES for name in family.network_types)
"""Values of `model_type` of the folders that a pre-trained network with its head can be taken from."""


def name_of(network: Network, model_type: str) -> str:
    """What a network is called whose folder doesn't say.

    Args:
        model_type: of the folder's config.json.
    """
    if isinstance(network.head, TokenHead):
        return "discriminator"
    return "generator" if model_type == "electra" and isinstance(network.head, MaskedLMHead) else "encoder"


def family_of(encoder: Encoder) -> Family:
    """The family that can hold an encoder.

    Raises:
        ConfigError: none can.
    """
    for family in FAMILIES:
        if isinstance(encoder, family.encoders):
            return family
    raise ConfigError(
        f"encoder '{encoder.config.encoder}' has no form in transformers", hint="use the run with discern, as it is"
    )


def family_in(folder: Path) -> Family:
    """The family of the model in a folder.

    Raises:
        CheckpointError: config.json is missing, unreadable, or that of another family.
    """
    kind = read_huggingface_config(folder, NETWORK_TYPES)["model_type"]
    return next(family for family in FAMILIES if kind in family.network_types)


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """The network as config.json and model.safetensors of the family that can hold it.

    Raises:
        ConfigError: none can.
    """
    return family_of(network.encoder).to_huggingface(network, vocabulary, precision)


def finetuned_to_huggingface(
    encoder: Encoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """A fine-tuned encoder and its head as config.json and model.safetensors of the family that can hold them.

    Raises:
        ConfigError: none can.
    """
    return family_of(encoder).finetuned(encoder, head, vocabulary, precision)
