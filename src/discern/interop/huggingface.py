"""Our networks as Hugging Face ELECTRA folders and back: names and values of the weights, and config.json.

A discriminator becomes an `ElectraForPreTraining`, a masked language model (the generator, or the encoder of objective
`mlm`) an `ElectraForMaskedLM`. A discriminator whose head has a bilinear term becomes an `ElectraModel`, as ELECTRA has no
place for the term; its head stands in a file beside, which transformers passes over and discern reads. A two-tower generator
has no form in transformers at all; its folder looks alike, and says so.
Nothing here imports transformers: the format is two files, and it is stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from discern.artifacts.files import sync_file, utf8_name, write_file
from discern.checksums import verify
from discern.errors import CheckpointError
from discern.interop.allocation import allocate
from discern.interop.config_json import (
    ENCODER_KEYS,
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
    FAMILIES,
    GENERATOR_CLASS,
    HEAD_NAME,
    TWO_TOWER_FAMILY,
    WEIGHTS_NAME,
    architecture,
    named_parameters,
    names_by_file,
)
from discern.model.bert import BertEncoder
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings
from discern.model.heads import BilinearTerm, CopyMLMHead, EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.model.two_tower import TwoTowerEncoder, two_tower_generator
from discern.objectives.base import Vocabulary
from discern.training.finite import check_finite

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that weights can be stored in, by their names in config.json."""

_OF_THE_HEAD = ("head", "gives")  # keys of the mark that are about a network, not about the export
ENERGY = "energy"
"""What the number of a discriminator is, where it is not the logit of *replaced*."""

# Written by some versions of transformers, and nothing that we miss: a counting buffer, and the tied output matrix.
_POSITION_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")
_TIED_OUTPUT = "generator_lm_head.weight"
_WORD_TABLE = "electra.embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a Hugging Face folder holds of a network.

    Attributes:
        config: content of config.json.
        tensors: content of model.safetensors, on the CPU.
        head: content of discern_head.safetensors; mostly empty, and then there is no such file.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    head: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, precision: str) -> HuggingFaceModel:
        """The network in a folder of discern's, whatever its form, without its mark.

        Of config.json, what discern writes itself is kept. The rest may name code that transformers would fetch and run, as
        `auto_map`, `custom_pipelines` and `_attn_implementation` do.

        Args:
            precision: type to store the weights in from now on, one of `PRECISIONS`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        config, dtype = read_huggingface_config(folder, FAMILIES), PRECISIONS[precision]
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
        """A tied matrix counts once."""
        return sum(tensor.numel() for tensor in (self.tensors | self.head).values())

    def write(self, folder: Path) -> None:
        """Write the files of the network; the same weights give the same bytes."""
        write_file(folder / CONFIG_NAME, (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode())
        for name, tensors in ((WEIGHTS_NAME, self.tensors), (HEAD_NAME, self.head)):
            if tensors:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                # safetensors makes files that their owner alone can read.
                (folder / name).chmod((folder / CONFIG_NAME).stat().st_mode)
                with (folder / name).open("rb") as file:
                    sync_file(file)


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """The network as config.json and model.safetensors of Hugging Face.

    Args:
        precision: type that the weights are stored in, one of `PRECISIONS`.

    Raises:
        ConfigError: the encoder is not the BERT-style one with LayerNorm after each residual, which alone ELECTRA can hold.
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
    """Whether a Hugging Face folder holds the head of a discriminator.

    Raises:
        CheckpointError: config.json or the weights cannot be read.
    """
    if _holds(folder, "discriminator_predictions.dense.weight"):
        return True
    # Of a masked language model, only a gate stands beside.
    return _has_head_beside(read_huggingface_config(folder)) and not _holds(folder, "generator_predictions.dense.weight")


def network_from_huggingface(folder: Path) -> Network:
    """The discriminator or masked language model of a Hugging Face ELECTRA folder, in float32 and evaluation mode; or the
    two towers of a folder of ours.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor has another shape than config.json says, or the model
            has an option that ours has not, or another head.
    """
    config = read_huggingface_config(folder, FAMILIES)
    path = folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "tie_word_embeddings": True})
    if config["model_type"] == TWO_TOWER_FAMILY:
        return _two_towers(folder, config, sizes)
    judges = is_discriminator(folder)
    if not judges and not _holds(folder, "generator_predictions.dense.weight"):
        raise CheckpointError(
            f"{folder} holds no pre-training head: it is a bare encoder, or was fine-tuned for something",
            hint=f"give an {DISCRIMINATOR_CLASS} or an {GENERATOR_CLASS}",
        )
    with torch.device("meta"):
        embeddings = Embeddings(whole_number(config, "vocab_size", path), sizes.embedding_size, sizes)
        encoder = BertEncoder(embeddings, sizes)
        beside = _has_head_beside(config)
        head: nn.Module
        if judges:
            head = EnergyHead(sizes) if read_mark(config).get("gives") == ENERGY else ReplacedTokenHead(sizes)
        else:
            head = CopyMLMHead(sizes, embeddings.word) if beside else MaskedLMHead(sizes, embeddings.word)
        bilinear = BilinearTerm(sizes, sizes.embedding_size) if judges and beside else None
    parts = nn.ModuleList(part for part in (encoder, head, bilinear) if part is not None).eval()
    network = Network(encoder, head, bilinear)
    _check_files(network, folder)
    allocate(parts, folder)
    load_huggingface_weights(network, folder)
    return network


def _two_towers(folder: Path, config: Mapping[str, Any], sizes: ModelConfig) -> Network:
    with torch.device("meta"):
        embeddings = Embeddings(whole_number(config, "vocab_size", folder / CONFIG_NAME), sizes.embedding_size, sizes)
        network = two_tower_generator(embeddings, sizes)
    _check_files(network, folder)
    allocate(nn.ModuleList([network.encoder, network.head]).eval(), folder)
    load_huggingface_weights(network, folder)
    return network


def _check_files(network: Network, folder: Path) -> None:
    """Raise where a tensor is missing or left over, before any memory is taken."""
    for file, names in names_by_file(network).items():
        with opened(folder, file) as weights:
            _check_names(set(weights.keys()), set(names.values()), network, folder / file)


@torch.no_grad()
def load_huggingface_weights(network: Network, folder: Path) -> None:
    """Fill every parameter of the network from the weights in a Hugging Face folder, whatever type they are stored in.

    A discriminator that reads the generator's embeddings plus a difference of its own gets the difference that makes its
    words those of the folder: the generator must be filled first.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, is left over, or has another shape.
        ConfigError: the encoder is not the BERT-style one.
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
                    f"{path}: '{_TIED_OUTPUT}' differs from the word embeddings, and ours are tied",
                    hint="only models with tied word embeddings can be loaded",
                )
    if isinstance(network.encoder.embeddings, DisentangledEmbeddings):
        _take_apart(network.encoder.embeddings, parameters, folder)


def _take_apart(embeddings: DisentangledEmbeddings, merged: Mapping[str, Tensor], folder: Path) -> None:
    """Set the difference and the LayerNorm so that the embeddings give what their merged form gives."""
    shared, prefix = embeddings.shared, "encoder.embeddings."
    for name in ("position.weight", "token_type.weight"):
        if not torch.equal(merged[prefix + name], shared.get_parameter(name)):
            raise CheckpointError(
                f"{folder}: its {name.partition('.')[0]} embeddings are not those of the generator, which it is to read",
                hint="take both networks from the same run, or set objective.tying=none",
            )
    embeddings.difference.weight.copy_(merged[prefix + "word.weight"] - shared.word.weight)
    embeddings.norm.weight.copy_(merged[prefix + "norm.weight"])
    embeddings.norm.bias.copy_(merged[prefix + "norm.bias"])


def _check_names(present: set[str], expected: set[str], network: Network, path: Path) -> None:
    """Refuse missing and left-over tensors; what is missing says most, so it is named first."""
    wanted = architecture(network)
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(f"{path}: '{missing[0]}' is missing{and_more(missing)}", hint=f"the folder must hold an {wanted}")
    left_over = sorted(present - expected - {*_POSITION_BUFFERS, _TIED_OUTPUT})
    if left_over:
        raise CheckpointError(
            f"{path}: nothing here can hold '{left_over[0]}'{and_more(left_over)}",
            hint=f"the folder must hold an {wanted} and no other head",
        )


def check_shape(name: str, found: Sequence[int], parameter: Tensor, path: Path) -> None:
    """Make sure that a stored tensor is of the shape of the parameter that it is for.

    Args:
        path: the file that it stands in.

    Raises:
        CheckpointError: it is not.
    """
    if list(parameter.shape) != list(found):
        raise CheckpointError(
            f"{path}: '{name}' has shape {list(found)}, but the network expects {list(parameter.shape)}",
            hint=f"{CONFIG_NAME} and {path.name} must come from the same model",
        )


def and_more(names: Sequence[str]) -> str:
    """What follows the first of some names in a message."""
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _holds(folder: Path, tensor: str) -> bool:
    with opened(folder) as weights:
        return tensor in weights.keys()  # noqa: SIM118 - not a mapping


def _has_head_beside(config: Mapping[str, Any]) -> bool:
    return read_mark(config).get("head") == HEAD_NAME


def opened(folder: Path, name: str = WEIGHTS_NAME) -> Any:
    """A file of weights, open; a context manager.

    Raises:
        CheckpointError: it is missing or damaged, or not the file that its checksum was taken of.
    """
    path = folder / name
    if not path.is_file() and name == HEAD_NAME:
        raise CheckpointError(
            f"{folder} has no {HEAD_NAME}, which holds the head of its discriminator",
            hint="export the run again; a copy of an export needs every file of it",
        )
    if not path.is_file():
        other = "pytorch_model.bin" if (folder / "pytorch_model.bin").is_file() else None
        raise CheckpointError(
            f"{folder} has no {name}" + (f", only {other}, which is a pickle" if other else ""),
            hint="load the model with transformers and write it again with save_pretrained(), which makes one",
        )
    verify(path, error=CheckpointError)
    try:
        with utf8_name(path) as readable:
            return safe_open(readable, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint="export or download the model again") from problem
