"""Somebody else's weights as networks of ours, by Hugging Face's names, whatever file they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop.config_json import encoder_config
from discern.interop.huggingface import HuggingFaceModel, and_more
from discern.interop.names import (
    ENCODER_CLASS,
    architecture,
    encoder_names,
    encoder_parameters,
    named_parameters,
    parameter_names,
)
from discern.model.bert import BertEncoder
from discern.model.config import ModelConfig
from discern.model.embeddings import Embeddings
from discern.model.heads import MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.objectives.base import Vocabulary
from discern.training.finite import check_finite

Head = Literal["replaced", "words", "none"]
"""What a network predicts: which tokens were replaced, words, or nothing."""
Weights = Mapping[str, Callable[[], Tensor]]
"""By Hugging Face's name of an ELECTRA's weight, what reads it."""

_WORDS = "electra.embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class Description:
    """What a source says of a network, before any weight is read.

    Attributes:
        head: what it predicts.
        rows: of the word table.
        sizes: with the width of its own embeddings.
    """

    head: Head
    rows: int
    sizes: ModelConfig


@dataclass(frozen=True)
class Adopted:
    """Networks that came from elsewhere.

    Attributes:
        kind: of the source, in words.
        models: by name; the first is the one that one fine-tunes. 'discriminator', 'generator', and 'encoder' where there
            is one network.
        sizes: by the same names.
        step: updates that the weights have had, where that is known.
        max_length: tokens of a row, where that is known.
        left_out: what the source holds besides, by its own names.
        remarks: what its owner should know.
    """

    kind: str
    models: Mapping[str, HuggingFaceModel]
    sizes: Mapping[str, ModelConfig]
    step: int | None = None
    max_length: int | None = None
    left_out: Sequence[str] = ()
    remarks: Sequence[str] = ()


def adopt(description: Description, weights: Weights, vocabulary: Vocabulary, path: Path) -> HuggingFaceModel:
    """Take over a network's weights, in float32.

    Args:
        path: what the weights stand in, for messages.

    Raises:
        CheckpointError: one is missing, or of another shape than the sizes say.
        NumericsError: one holds values that are not finite.
    """
    built = _build(description)
    missing = sorted(built.expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(
            f"{path}: '{missing[0]}' is missing{and_more(missing)}", hint="the files must all come from the same ELECTRA or BERT"
        )
    tensors = {name: _checked(weights[name](), like, name, path) for name, like in built.expected.items()}
    return HuggingFaceModel(encoder_config(built.encoder, vocabulary, built.loads_as, "float32"), tensors)


def weight_names(description: Description) -> list[str]:
    """Hugging Face's names of a network's weights."""
    return list(_build(description).expected)


@dataclass(frozen=True)
class _Built:
    """A network without values.

    Attributes:
        loads_as: class of transformers.
        expected: its parameters by Hugging Face's name.
    """

    encoder: BertEncoder
    loads_as: str
    expected: Mapping[str, Tensor]


def _build(description: Description) -> _Built:
    sizes = description.sizes
    with torch.device("meta"):
        embeddings = Embeddings(description.rows, sizes.embedding_size, sizes)
        encoder = BertEncoder(embeddings, sizes)
        if description.head == "none":
            parameters = encoder_parameters(encoder)
            named = {f"electra.{theirs}": parameters[ours] for ours, theirs in encoder_names(encoder).items()}
            return _Built(encoder, ENCODER_CLASS, named)
        head = ReplacedTokenHead(sizes) if description.head == "replaced" else MaskedLMHead(sizes, embeddings.word)
    network = Network(encoder, head)
    parameters = named_parameters(network)
    return _Built(encoder, architecture(network), {theirs: parameters[ours] for ours, theirs in parameter_names(network).items()})


def shared(one: HuggingFaceModel, other: HuggingFaceModel) -> Literal["all", "embeddings", "token", "none"]:
    """What two networks have in common: the encoder, its embeddings, the words, or nothing."""
    encoder = [name for name in {**one.tensors, **other.tensors} if name.startswith("electra.")]
    if all(_equal(one, other, name) for name in encoder):
        return "all"
    tables = [name for name in one.tensors if name.startswith("electra.embeddings.")]
    if all(_equal(one, other, name) for name in tables):
        return "embeddings"
    return "token" if _equal(one, other, _WORDS) else "none"


def _equal(one: HuggingFaceModel, other: HuggingFaceModel, name: str) -> bool:
    """`torch.equal`, which also compares the shapes, where both have the weight."""
    return name in one.tensors and name in other.tensors and torch.equal(one.tensors[name], other.tensors[name])


def _checked(tensor: Tensor, parameter: Tensor, name: str, path: Path) -> Tensor:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(tensor.shape)}, and the others make it {list(parameter.shape)}",
            hint="the files must all come from the same ELECTRA or BERT",
        )
    check_finite({name: tensor}, path)
    return tensor.float().contiguous()
