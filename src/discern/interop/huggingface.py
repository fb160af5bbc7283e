"""Converts networks to Hugging Face ELECTRA folders and back: names and values of the weights, and config.json.

A discriminator becomes an `ElectraForPreTraining`. A masked language model (the generator, or the encoder of objective `mlm`)
becomes an `ElectraForMaskedLM`. A discriminator whose head has a bilinear term becomes an `ElectraModel`, as ELECTRA cannot
represent the term; its head is in a separate file, which transformers ignores and discern reads. A two-tower generator has no
equivalent in transformers; its folder has the same files, with a `model_type` of its own.

Nothing here imports transformers: the format consists of two files, and it is stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from discern.errors import CheckpointError, MissingHeadError
from discern.interop.config_json import (
    ENCODER_KEYS,
    ENERGY,
    MARK,
    SUPPORTED,
    encoder_config,
    model_config,
    read_huggingface_config,
    read_mark,
    whole_number,
)
from discern.interop.names import (
    CONFIG_NAME,
    DISCRIMINATOR_CLASS,
    GENERATOR_CLASS,
    HEAD_NAME,
    OWN_MODEL_TYPES,
    TWO_TOWER_FAMILY,
    WEIGHTS_NAME,
    architecture,
    named_parameters,
    names_by_file,
)
from discern.interop.weight_files import allocate, and_more, check_shape, opened
from discern.models.base import Network
from discern.models.electra.config import ElectraConfig
from discern.models.electra.encoder import BertEncoder
from discern.models.embeddings import DisentangledEmbeddings, Embeddings
from discern.models.heads import BilinearTerm, CopyMLMHead, EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.models.modernbert.huggingface import PROJECTION, WORDS
from discern.models.two_tower import TwoTowerEncoder, two_tower_generator
from discern.objectives.base import Vocabulary
from discern.storage.checksums import record_checksums
from discern.storage.files import sync_file, write_file
from discern.training.checkpoint import check_finite

WORD_TABLE = "model.embeddings.tok_embeddings.weight"
"""ModernBERT's word embeddings."""
WORD_FACTORS = (WORDS, PROJECTION)
"""Two matrices of which that table may be the product, by our names."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data types in which weights can be stored, by their names in config.json."""

_OF_THE_HEAD = ("head", "gives")  # keys of the mark that describe a network rather than the export

# Written by some versions of transformers and redundant: buffers (0, 1, 2, ...), and the tied output matrix.
_POSITION_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")
_TIED_OUTPUT = "generator_lm_head.weight"
_WORD_TABLE = "electra.embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class HuggingFaceModel:
    """The files of a network in a Hugging Face folder.

    Attributes:
        config: content of config.json.
        tensors: content of model.safetensors, on the CPU.
        head: content of discern_head.safetensors; usually empty, and then the file does not exist.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, precision: str) -> HuggingFaceModel:
        """Read the network in a folder that discern wrote, without the record of the export.

        Of config.json, only keys that discern writes are kept. Others, such as `auto_map`, `custom_pipelines` and
        `_attn_implementation`, may name code that transformers would download and run.

        Args:
            precision: data type for storing the weights, one of `PRECISIONS`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        config, dtype = read_huggingface_config(folder, OWN_MODEL_TYPES), PRECISIONS[precision]
        own = {key: value for key, value in read_mark(config).items() if key in _OF_THE_HEAD}
        contents: list[dict[str, Tensor]] = []
        for name in (WEIGHTS_NAME, HEAD_NAME) if _has_head_beside(config) else (WEIGHTS_NAME,):
            with opened(folder, name) as weights:
                stored = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
            check_finite(stored, folder / name)
            contents.append({key: tensor.to(dtype) for key, tensor in stored.items()})
        config = {key: value for key, value in config.items() if key in ENCODER_KEYS} | {"dtype": precision}
        return cls(config | ({MARK: own} if own else {}), contents[0], contents[1] if len(contents) > 1 else {})

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied matrix is counted once, and a product of matrices as its factors."""
        products = {WORD_TABLE} if self.factors else set()
        return sum(tensor.numel() for name, tensor in (self.tensors | self.head).items() if name not in products)

    @property
    def factors(self) -> dict[str, Tensor]:
        """The matrices of which ModernBERT's word table is the product; empty if it is not one. They are kept in `head`."""
        return {name: tensor for name, tensor in self.head.items() if name in WORD_FACTORS}

    def write(self, folder: Path) -> None:
        """Write the files of the network. The same weights result in the same bytes."""
        write_file(folder / CONFIG_NAME, (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode())
        for name, tensors in ((WEIGHTS_NAME, self.tensors), (HEAD_NAME, self.head)):
            if tensors:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                # safetensors creates files that only their owner can read.
                (folder / name).chmod((folder / CONFIG_NAME).stat().st_mode)
                with (folder / name).open("rb") as file:
                    sync_file(file)
                record_checksums(folder, [CONFIG_NAME, name])


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """Convert a network to config.json and model.safetensors of Hugging Face.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: ELECTRA cannot represent the encoder: it is not BERT-style with a LayerNorm after each residual.
    """
    named, dtype = names_by_file(network), PRECISIONS[precision]
    parameters = named_parameters(network)
    files = {
        file: {theirs: parameters[ours].detach().to("cpu", dtype).contiguous() for ours, theirs in names.items()}
        for file, names in named.items()
    }
    config = encoder_config(network.encoder, vocabulary, architecture(network), precision)
    if isinstance(network.encoder, TwoTowerEncoder):
        config["model_type"] = TWO_TOWER_FAMILY
    mark = {"head": HEAD_NAME} if HEAD_NAME in files else {}
    if isinstance(network.head, EnergyHead):
        mark["gives"] = ENERGY
    if mark:
        config[MARK] = mark
    return HuggingFaceModel(config, files[WEIGHTS_NAME], files.get(HEAD_NAME, {}))


def is_discriminator(folder: Path) -> bool:
    """Whether a Hugging Face folder contains the head of a discriminator.

    Raises:
        CheckpointError: config.json or the weights cannot be read.
    """
    if _holds(folder, "discriminator_predictions.dense.weight"):
        return True
    # The separate file of a masked language model contains only a gate.
    return _has_head_beside(read_huggingface_config(folder)) and not _holds(folder, "generator_predictions.dense.weight")


def network_from_huggingface(folder: Path) -> Network:
    """The discriminator, masked language model or two-tower network in a folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor differs in shape from config.json, or the model uses an
            unsupported option.
        MissingHeadError: the model has no pre-training head.
    """
    config = read_huggingface_config(folder, OWN_MODEL_TYPES)
    path = folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "tie_word_embeddings": True})
    if config["model_type"] == TWO_TOWER_FAMILY:
        return _two_towers(folder, config, sizes)
    judges = is_discriminator(folder)
    if not judges and not _holds(folder, "generator_predictions.dense.weight"):
        raise MissingHeadError(
            f"{folder} has no pre-training head: it is a bare encoder or a fine-tuned model",
            hint=f"use an {DISCRIMINATOR_CLASS} or an {GENERATOR_CLASS}; for a fine-tuned model: discern predict {folder} INPUT",
        )
    with torch.device("meta"):
        embeddings = Embeddings(whole_number(config, "vocab_size", path), sizes.embedding_size, sizes)
        encoder = BertEncoder(embeddings, sizes)
        beside = _has_head_beside(config)
        head: nn.Module
        if judges:
            head = EnergyHead(sizes) if read_mark(config).get("gives") == ENERGY else ReplacedTokenHead(sizes)
        else:
            words = MaskedLMHead(sizes, embeddings.word)
            head = CopyMLMHead(sizes, words) if beside else words
        bilinear = BilinearTerm(sizes, sizes.embedding_size) if judges and beside else None
    parts = nn.ModuleList(part for part in (encoder, head, bilinear) if part is not None).eval()
    network = Network(encoder, head, bilinear)
    _check_files(network, folder)
    allocate(parts, folder)
    load_huggingface_weights(network, folder)
    return network


def _two_towers(folder: Path, config: Mapping[str, Any], sizes: ElectraConfig) -> Network:
    with torch.device("meta"):
        embeddings = Embeddings(whole_number(config, "vocab_size", folder / CONFIG_NAME), sizes.embedding_size, sizes)
        network = two_tower_generator(embeddings, sizes)
    _check_files(network, folder)
    allocate(nn.ModuleList([network.encoder, network.head]).eval(), folder)
    load_huggingface_weights(network, folder)
    return network


def _check_files(network: Network, folder: Path) -> None:
    """Raise an error if a tensor is missing or unexpected, before memory is allocated."""
    for file, names in names_by_file(network).items():
        with opened(folder, file) as weights:
            _check_names(set(weights.keys()), set(names.values()), network, folder / file)


@torch.no_grad()
def load_huggingface_weights(network: Network, folder: Path) -> None:
    """Load all parameters of a network from a Hugging Face folder, stored in any data type.

    If a discriminator uses the generator's embeddings plus a difference, the difference is set so that the sum equals the word
    embeddings of the folder. The generator must therefore be loaded first.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected, or has another shape.
        ConfigError: the encoder is not BERT-style.
    """
    parameters = named_parameters(network)
    for file, names in names_by_file(network).items():
        path = folder / file
        with opened(folder, file) as weights:
            present = set(weights.keys())
            _check_names(present, set(names.values()), network, path)
            for ours, theirs in names.items():
                check_shape(theirs, weights.get_slice(theirs).get_shape(), parameters[ours], path)
                tensor = weights.get_tensor(theirs)
                check_finite({theirs: tensor}, path)
                parameters[ours].copy_(tensor)
            if _TIED_OUTPUT in present and not torch.equal(weights.get_tensor(_TIED_OUTPUT), weights.get_tensor(_WORD_TABLE)):
                raise CheckpointError(
                    f"{path}: '{_TIED_OUTPUT}' differs from the word embeddings, but only tied embeddings are supported",
                    hint="only models with tied word embeddings can be loaded",
                )
    if isinstance(network.encoder.embeddings, DisentangledEmbeddings):
        _take_apart(network.encoder.embeddings, parameters, folder)


def _take_apart(embeddings: DisentangledEmbeddings, merged: Mapping[str, Tensor], folder: Path) -> None:
    """Set the difference and the LayerNorm so that the embeddings compute the same as their merged form."""
    shared, prefix = embeddings.shared, "encoder.embeddings."
    for name in ("position.weight", "token_type.weight"):
        if not torch.equal(merged[prefix + name], shared.get_parameter(name)):
            raise CheckpointError(
                f"{folder}: its {name.partition('.')[0]} embeddings differ from those of the generator, which it should share",
                hint="use both networks of the same run, or set objective.tying=none",
            )
    embeddings.difference.weight.copy_(merged[prefix + "word.weight"] - shared.word.weight)
    embeddings.norm.weight.copy_(merged[prefix + "norm.weight"])
    embeddings.norm.bias.copy_(merged[prefix + "norm.bias"])


def _check_names(present: set[str], expected: set[str], network: Network, path: Path) -> None:
    """Raise an error for missing tensors or, if there are none, for unexpected ones."""
    wanted = architecture(network)
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(
            f"{path}: '{missing[0]}' is missing{and_more(missing)}", hint=f"the folder must contain an {wanted}"
        )
    left_over = sorted(present - expected - {*_POSITION_BUFFERS, _TIED_OUTPUT})
    if left_over:
        raise CheckpointError(
            f"{path}: unexpected tensor '{left_over[0]}'{and_more(left_over)}",
            hint=f"the folder must contain an {wanted} and no other head",
        )


def _holds(folder: Path, tensor: str) -> bool:
    with opened(folder) as weights:
        return tensor in weights.keys()  # noqa: SIM118 - not a mapping


def _has_head_beside(config: Mapping[str, Any]) -> bool:
    return read_mark(config).get("head") == HEAD_NAME
