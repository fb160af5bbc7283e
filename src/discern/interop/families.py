"""The model families of transformers that discern reads and writes: one entry per architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from discern.errors import ConfigError, MissingHeadError
from discern.interop import finetuned, huggingface, modernbert, pretrained, xlnet
from discern.interop.config_json import model_config, read_huggingface_config, read_mark
from discern.interop.finetuned import HeadWeights, OwnHead
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.names import CONFIG_NAME, OWN_MODEL_TYPES, TWO_TOWER_FAMILY
from discern.interop.pretrained import network_with_head
from discern.interop.tokenizer import Frame
from discern.models.base import Encoder, Network
from discern.models.electra.encoder import BertEncoder
from discern.models.heads import MaskedLMHead, TokenHead
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.models.two_tower import TwoTowerEncoder
from discern.models.xlnet.encoder import XLNetEncoder
from discern.objectives.base import Vocabulary


@dataclass(frozen=True)
class Family:
    """How one architecture is written to and read from folders.

    Attributes:
        encoders: our encoder classes.
        model_types: values of `model_type` in config.json whose encoders can be read.
        network_types: values of `model_type` whose pre-trained networks can be read; includes two towers, which cannot be
            fine-tuned.
        pretrained_type: the `model_type` that is written; its pre-training heads are the same as ours.
        to_huggingface: converts a network, see `discern.interop.huggingface.to_huggingface`.
        finetuned: converts an encoder with the head of a task, see `discern.interop.finetuned.finetuned_to_huggingface`.
        network: reads the network in a folder.
        with_head: the same, but with an `nn.Identity` as head if the folder has no pre-training head.
        fill: loads the weights in a folder into a network.
        encoder_from: reads the encoder in a folder with any head.
        again: reads a network that discern wrote, to be stored in some precision, without the record of the export.
        frame: input framing that the classes of transformers expect.
        has_segments: whether they take segment ids.
        prediction_heads: whether the heads of all tasks have the layers of its masked language model before the last one.
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
    again: Callable[[Path, Vocabulary, str], HuggingFaceModel]
    frame: Frame
    has_segments: bool = True
    prediction_heads: bool = False


def _bert_network(folder: Path) -> Network:
    """The network in a folder: an export of discern, or a folder of transformers in any of its file formats.

    Raises:
        CheckpointError: a file is missing or damaged.
        MissingHeadError: there is no pre-training head.
    """
    config = read_huggingface_config(folder, NETWORK_TYPES)
    if config["model_type"] == TWO_TOWER_FAMILY or (read_mark(config) and config["model_type"] in OWN_MODEL_TYPES):
        return huggingface.network_from_huggingface(folder)
    network = network_with_head(folder)
    if isinstance(network.head, nn.Identity):
        raise MissingHeadError(
            f"{folder} has no pre-training head: it is a bare encoder or a fine-tuned model",
            hint="use an ElectraForPreTraining, an ElectraForMaskedLM or a BertForMaskedLM; for a fine-tuned model: "
            f"discern predict {folder} INPUT",
        )
    return network


def _bert_again(folder: Path, vocabulary: Vocabulary, precision: str) -> HuggingFaceModel:
    model_config(read_huggingface_config(folder, OWN_MODEL_TYPES), folder / CONFIG_NAME, {})  # raises if a size is damaged
    return HuggingFaceModel.read(folder, precision)


def _xlnet_again(folder: Path, vocabulary: Vocabulary, precision: str) -> HuggingFaceModel:
    return xlnet.to_huggingface(xlnet.network_with_head(folder), vocabulary, precision)


def _modernbert_again(folder: Path, vocabulary: Vocabulary, precision: str) -> HuggingFaceModel:
    return modernbert.to_huggingface(modernbert.network_with_head(folder), vocabulary, precision)


FAMILIES = (
    Family(
        (BertEncoder, TwoTowerEncoder),
        pretrained.MODEL_TYPES,
        (*pretrained.MODEL_TYPES, TWO_TOWER_FAMILY),
        "electra",
        huggingface.to_huggingface,
        finetuned.finetuned_to_huggingface,
        _bert_network,
        network_with_head,
        huggingface.load_huggingface_weights,
        pretrained.encoder_from_huggingface,
        _bert_again,
        "cls-first",
    ),
    Family(
        (XLNetEncoder,),
        ("xlnet",),
        ("xlnet",),
        "xlnet",
        xlnet.to_huggingface,
        finetuned.xlnet_to_huggingface,
        xlnet.network_from_huggingface,
        xlnet.network_with_head,
        xlnet.load_huggingface_weights,
        xlnet.encoder_from_huggingface,
        _xlnet_again,
        "cls-last",
    ),
    Family(
        (ModernBertEncoder,),
        ("modernbert",),
        ("modernbert",),
        "modernbert",
        modernbert.to_huggingface,
        finetuned.modernbert_to_huggingface,
        modernbert.network_from_huggingface,
        modernbert.network_with_head,
        modernbert.load_huggingface_weights,
        modernbert.encoder_from_huggingface,
        _modernbert_again,
        "cls-first",
        has_segments=False,
        prediction_heads=True,
    ),
)
ENCODER_TYPES = tuple(name for family in FAMILIES for name in family.model_types)
"""Values of `model_type` of folders from which an encoder can be read."""
NETWORK_TYPES = tuple(name for family in FAMILIES for name in family.network_types)
"""Values of `model_type` of folders from which a pre-trained network with its head can be read."""


def name_of(network: Network, model_type: str) -> str:
    """The default name of a network whose folder does not state one.

    Args:
        model_type: `model_type` in config.json of the folder.
    """
    if isinstance(network.head, TokenHead):
        return "discriminator"
    return "generator" if model_type == "electra" and isinstance(network.head, MaskedLMHead) else "encoder"


def family_of(encoder: Encoder) -> Family:
    """The family that can represent an encoder.

    Raises:
        ConfigError: no family can represent it.
    """
    for family in FAMILIES:
        if isinstance(encoder, family.encoders):
            return family
    raise ConfigError(
        f"encoder '{encoder.config.encoder}' has no equivalent in transformers", hint="use the run itself with discern"
    )


def family_in(folder: Path) -> Family:
    """The family of the model in a folder.

    Raises:
        CheckpointError: config.json is missing or damaged, or the model is of another family.
    """
    return family_of_type(read_huggingface_config(folder, NETWORK_TYPES)["model_type"])


def family_of_type(model_type: str) -> Family:
    """The family of the models of a type, one of `NETWORK_TYPES`."""
    return next(family for family in FAMILIES if model_type in family.network_types)


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """Convert a network to config.json and model.safetensors of its family.

    Raises:
        ConfigError: no family can represent it.
    """
    return family_of(network.encoder).to_huggingface(network, vocabulary, precision)


def finetuned_to_huggingface(
    encoder: Encoder, head: HeadWeights | OwnHead, vocabulary: Vocabulary, precision: str = "float32"
) -> HuggingFaceModel:
    """Convert a fine-tuned encoder and its head to config.json and model.safetensors of its family.

    Raises:
        ConfigError: no family can represent it.
    """
    return family_of(encoder).finetuned(encoder, head, vocabulary, precision)
