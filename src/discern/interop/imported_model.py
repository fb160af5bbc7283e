"""Imports networks of other libraries: ELECTRA, BERT, XLNet and ModernBERT folders, or weights by Hugging Face's names.

BERT's masked language model is imported completely, as it computes the same as an ELECTRA generator whose embeddings have the
hidden size. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop import modernbert, xlnet
from discern.interop.config_json import SUPPORTED, encoder_config, model_config, read_huggingface_config, whole_number
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.names import (
    CONFIG_NAME,
    ENCODER_CLASS,
    architecture,
    encoder_weights,
    named_parameters,
)
from discern.interop.pretrained import MODEL_TYPES
from discern.interop.tokenizer import read_max_length
from discern.interop.weight_files import WeightFiles, and_more, open_weight_files
from discern.models.base import Network
from discern.models.config import ModelConfig
from discern.models.electra.config import ElectraConfig
from discern.models.electra.encoder import BertEncoder
from discern.models.electra.huggingface import bert_name, to_huggingface
from discern.models.embeddings import Embeddings
from discern.models.heads import MaskedLMHead, ReplacedTokenHead
from discern.objectives.base import Vocabulary
from discern.training.checkpoint import check_finite

Head = Literal["replaced", "words", "none"]
"""Prediction of a network: which tokens were replaced, words, or nothing."""
Weights = Mapping[str, Callable[[], Tensor]]
"""Functions that read a weight, by Hugging Face's names for ELECTRA."""

_WORDS = "electra.embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class Description:
    """Head and sizes of a network, before any weight is read.

    Attributes:
        head: what the network predicts.
        rows: number of rows of the word embeddings.
        sizes: sizes of the encoder, with the width of its own embeddings.
    """

    head: Head
    rows: int
    sizes: ElectraConfig


@dataclass(frozen=True)
class ImportedModel:
    """Networks imported from another library.

    Attributes:
        kind: kind of source, in words.
        models: the networks by name: 'discriminator' and 'generator', or 'encoder'. The first one is the one to fine-tune.
        sizes: sizes of the encoders, by the same names.
        step: number of training steps; None if unknown.
        max_length: maximum sequence length in tokens; None if unknown.
        left_out: names of the parts of the source that were not imported.
        remarks: notes for the user.
    """

    kind: str
    models: Mapping[str, HuggingFaceModel]
    sizes: Mapping[str, ModelConfig]
    step: int | None = None
    max_length: int | None = None
    left_out: Sequence[str] = ()
    remarks: Sequence[str] = ()


def import_network(
    description: Description, weights: Weights, vocabulary: Vocabulary, path: Path, require: str = "the other weights require"
) -> HuggingFaceModel:
    """Import the weights of a network, in float32.

    Args:
        path: file with the weights, for messages.
        require: what the shapes follow from, with its verb, for messages.

    Raises:
        CheckpointError: a weight is missing or has an unexpected shape.
        NumericsError: a weight contains values that are not finite.
    """
    built = _build(description)
    missing = sorted(built.expected.keys() - weights.keys())
    if missing:
        raise CheckpointError(
            f"{path}: '{missing[0]}' is missing{and_more(missing)}", hint="the files must all come from the same ELECTRA or BERT"
        )
    tensors = {name: _checked(weights[name](), like, name, path, require) for name, like in built.expected.items()}
    return HuggingFaceModel(encoder_config(built.encoder, vocabulary, built.loads_as, "float32"), tensors)


def weight_names(description: Description) -> list[str]:
    """Hugging Face's names of the weights of a network."""
    return list(_build(description).expected)


@dataclass(frozen=True)
class _Built:
    """A network without values.

    Attributes:
        loads_as: class of transformers that loads it.
        expected: its parameters by Hugging Face's names.
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
            return _Built(encoder, ENCODER_CLASS, encoder_weights(encoder))
        head = ReplacedTokenHead(sizes) if description.head == "replaced" else MaskedLMHead(sizes, embeddings.word)
    network = Network(encoder, head)
    return _Built(encoder, architecture(network), to_huggingface(named_parameters(network)))


def shared(one: HuggingFaceModel, other: HuggingFaceModel) -> Literal["all", "embeddings", "token", "none"]:
    """What two networks share: the encoder, its embeddings, the word embeddings, or nothing."""
    encoder = [name for name in {**one.tensors, **other.tensors} if name.startswith("electra.")]
    if all(_equal(one, other, name) for name in encoder):
        return "all"
    tables = [name for name in one.tensors if name.startswith("electra.embeddings.")]
    if all(_equal(one, other, name) for name in tables):
        return "embeddings"
    return "token" if _equal(one, other, _WORDS) else "none"


def _equal(one: HuggingFaceModel, other: HuggingFaceModel, name: str) -> bool:
    """Whether both networks have the weight, with the same shape and values."""
    return name in one.tensors and name in other.tensors and torch.equal(one.tensors[name], other.tensors[name])


def _checked(tensor: Tensor, parameter: Tensor, name: str, path: Path, require: str) -> Tensor:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(tensor.shape)}, but {require} {list(parameter.shape)}",
            hint="the files must all come from the same ELECTRA or BERT",
        )
    check_finite({name: tensor}, path)
    return tensor.float().contiguous()


_KINDS = {"electra": "Hugging Face ELECTRA", "bert": "Hugging Face BERT"}
_HEADS: dict[str, Head] = {
    "discriminator_predictions.dense.weight": "replaced",
    "generator_predictions.dense.weight": "words",
    "cls.predictions.transform.dense.weight": "words",
}
_NETWORKS: dict[Head, str] = {"replaced": "discriminator", "words": "generator", "none": "encoder"}
# Copies of the tied matrix and of the bias, and buffers (0, 1, 2, ...), which transformers may write.
_COPIES = ("generator_lm_head.weight", "cls.predictions.decoder.weight")
_BUFFERS = ("position_ids", "embeddings.token_type_ids")
_BIAS_COPY = "cls.predictions.decoder.bias"
_OWN_PARTS = ("embeddings.", "embeddings_project.", "encoder.")


def read_huggingface(folder: Path, vocabulary: Vocabulary) -> ImportedModel:
    """Read the network in an ELECTRA or BERT folder that save_pretrained() wrote.

    Args:
        vocabulary: vocabulary of its tokenizer.

    Raises:
        CheckpointError: a file is missing, damaged or could run code, the model is of another family or uses an unsupported
            option, or a weight is missing, unexpected, or differs in shape from config.json.
    """
    config, path = read_huggingface_config(folder, MODEL_TYPES), folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "is_decoder": False, "add_cross_attention": False})
    family, rows = config["model_type"], whole_number(config, "vocab_size", path)
    with open_weight_files(folder) as stored:
        head: Head = next((head for name, head in _HEADS.items() if name in stored.tensors), "none")
        description = Description(head, rows, sizes)
        names = {name: _stored_name(name, family, stored) for name in weight_names(description)}
        _check_tied(stored, names)
        weights: Weights = {name: partial(stored.read, theirs) for name, theirs in names.items() if theirs in stored.tensors}
        left_out = _left_out_parts(stored, set(names.values()), family)
        model = import_network(description, weights, vocabulary, stored.path, f"{CONFIG_NAME} requires")
    name = "encoder" if family == "bert" else _NETWORKS[head]
    length = read_max_length(folder, sizes.max_positions)
    return ImportedModel(_KINDS[family], {name: model}, {name: sizes}, max_length=length, left_out=left_out)


def _stored_name(name: str, family: str, stored: WeightFiles) -> str:
    """The name of a weight in the folder, given its name in ELECTRA."""
    name = bert_name(name) if family == "bert" else name
    # In the folder of a bare encoder, names have no prefix.
    alone = not any(each.startswith(f"{family}.") for each in stored.tensors)
    return name.removeprefix(f"{family}.") if alone else name


def _check_tied(stored: WeightFiles, names: dict[str, str]) -> None:
    """Raise an error if the output matrix differs from the word embeddings, which our networks cannot represent."""
    words = names["electra.embeddings.word_embeddings.weight"]
    for copy in _COPIES:
        if copy in stored.tensors and words in stored.tensors and not torch.equal(stored.read(copy), stored.read(words)):
            raise CheckpointError(
                f"{stored.path}: '{copy}' differs from the word embeddings, but only tied embeddings are supported",
                hint="save only the encoder of the model with save_pretrained(), and import that",
            )


def _left_out_parts(stored: WeightFiles, taken: Collection[str], family: str) -> list[str]:
    """Parts of the folder that are not imported, such as poolers and other heads.

    Raises:
        CheckpointError: a weight of the encoder would be ignored, which would change its outputs.
    """
    known = {*taken, *_COPIES, _BIAS_COPY}
    others = sorted(name for name in stored.tensors if name not in known and not name.endswith(_BUFFERS))
    own = tuple(prefix + part for prefix in ("", f"{family}.") for part in _OWN_PARTS)
    foreign = [name for name in others if name.startswith(own)]
    if foreign:
        raise CheckpointError(
            f"{stored.path}: unexpected tensor '{foreign[0]}'{and_more(foreign)}",
            hint=f"{CONFIG_NAME} and {stored.path.name} must come from the same model",
        )
    return sorted({name.rpartition(".")[0] for name in others})


def read_xlnet(folder: Path, vocabulary: Vocabulary) -> ImportedModel:
    """Read the network in an XLNet folder that save_pretrained() wrote.

    Args:
        vocabulary: vocabulary of its tokenizer.

    Raises:
        CheckpointError: a file is missing, damaged or could run code, the model uses an unsupported option, or a weight is
            missing, unexpected, or differs in shape from config.json.
    """
    network = xlnet.network_with_head(folder)
    model, sizes = xlnet.to_huggingface(network, vocabulary), network.encoder.config
    length = read_max_length(folder, sizes.max_positions)
    return ImportedModel(
        "Hugging Face XLNet", {"encoder": model}, {"encoder": sizes}, max_length=length, left_out=_left_out_heads(folder, network)
    )


def read_modernbert(folder: Path, vocabulary: Vocabulary) -> ImportedModel:
    """Read the network in a ModernBERT folder that save_pretrained() wrote.

    Args:
        vocabulary: vocabulary of its tokenizer.

    Raises:
        CheckpointError: as in `read_xlnet`.
    """
    network = modernbert.network_with_head(folder)
    model, sizes = modernbert.to_huggingface(network, vocabulary), network.encoder.config
    with open_weight_files(folder) as stored:
        prefix = "" if any(name.startswith("model.") for name in stored.tensors) else "model."
        others = [name for name in stored.tensors if prefix + name not in model.tensors and name != "decoder.weight"]
    left_out = sorted({name.rpartition(".")[0] for name in others})
    length = read_max_length(folder, sizes.max_positions)
    return ImportedModel("Hugging Face ModernBERT", {"encoder": model}, {"encoder": sizes}, max_length=length, left_out=left_out)


def _left_out_heads(folder: Path, network: Network) -> list[str]:
    """Heads of the folder that are not imported, such as that of a task."""
    with open_weight_files(folder) as stored:
        others = stored.tensors.keys() - xlnet.huggingface_names(network, stored)
    return sorted({name.rpartition(".")[0] for name in others})
