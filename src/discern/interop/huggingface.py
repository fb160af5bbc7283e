"""Our networks as Hugging Face ELECTRA folders and back: names and values of the weights, and config.json.

A discriminator becomes an `ElectraForPreTraining`, a masked language model (the generator, or the encoder of objective
`mlm`) an `ElectraForMaskedLM`. A discriminator whose head has a bilinear term becomes an `ElectraModel`, as ELECTRA has no
place for the term; its head stands in a file beside, which transformers passes over and discern reads.
Nothing here imports transformers: the format is two files, and it is stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from discern.data.files import sync_file, write_file
from discern.errors import CheckpointError
from discern.interop.names import (
    CONFIG_NAME,
    DISCRIMINATOR_CLASS,
    GENERATOR_CLASS,
    HEAD_NAME,
    WEIGHTS_NAME,
    architecture,
    named_parameters,
    names_by_file,
)
from discern.model.bert import BertEncoder
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings
from discern.model.encoder import Encoder
from discern.model.heads import BilinearTerm, CopyMLMHead, EnergyHead, MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.objectives.base import Vocabulary

MARK = "discern"
"""Key of config.json that tells an export of ours from somebody else's model."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that weights can be stored in, by their names in config.json."""
SUPPORTED = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
"""What our encoder computes, by the keys of config.json that could say otherwise: GELU by the error function, and so on."""

_ENERGY = "energy"  # what a discriminator's number is, where it is not the logit of *replaced*

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
    mark = {"head": HEAD_NAME} if HEAD_NAME in files else {}
    if isinstance(network.head, EnergyHead):
        mark["gives"] = _ENERGY
    if mark:
        config[MARK] = mark
    return HuggingFaceModel(config, files[WEIGHTS_NAME], files.get(HEAD_NAME, {}))


def read_huggingface_config(folder: Path, families: Sequence[str] = ("electra",)) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Args:
        families: values of `model_type` to accept.

    Raises:
        CheckpointError: it is missing, unreadable, or that of another family.
    """
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a Hugging Face folder: it has no {CONFIG_NAME}",
            hint="give the folder that `discern export RUN --out DIR` wrote, or one made by save_pretrained()",
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}", hint="export or download the model again") from problem
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in families:
        expected, wanted = " or ".join(map(repr, families)), " or ".join(map(str.upper, families))
        raise CheckpointError(f"{path}: model_type is {kind!r}, expected {expected}", hint=f"give an {wanted} model")
    return dict(config)


def read_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """What discern wrote in config.json about an export; empty for somebody else's model."""
    mark = config.get(MARK)
    return mark if isinstance(mark, dict) else {}


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
    """The discriminator or masked language model of a Hugging Face ELECTRA folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor has another shape than config.json says, or the model
            has an option that ours has not, or another head.
    """
    config = read_huggingface_config(folder)
    path = folder / CONFIG_NAME
    sizes = model_config(config, path, {**SUPPORTED, "tie_word_embeddings": True})
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
            head = EnergyHead(sizes) if read_mark(config).get("gives") == _ENERGY else ReplacedTokenHead(sizes)
        else:
            head = CopyMLMHead(sizes, embeddings.word) if beside else MaskedLMHead(sizes, embeddings.word)
        bilinear = BilinearTerm(sizes, sizes.embedding_size) if judges and beside else None
    nn.ModuleList(part for part in (encoder, head, bilinear) if part is not None).to_empty(device="cpu").eval()
    network = Network(encoder, head, bilinear)
    load_huggingface_weights(network, folder)
    return network


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
                parameter = parameters[ours]
                check_shape(theirs, weights.get_slice(theirs).get_shape(), parameter, path)
                parameter.copy_(weights.get_tensor(theirs))
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


def encoder_config(encoder: Encoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """config.json, with every field that ELECTRA's readers look for, so that no version's default matters.

    Args:
        architecture: class of transformers that holds the encoder and its head.
        precision: type that the weights are stored in, one of `PRECISIONS`.
    """
    sizes = encoder.config
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": encoder.embeddings.vocab_size,
        "embedding_size": encoder.embeddings.embedding_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "intermediate_size": sizes.feedforward_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": sizes.hidden_dropout,
        "attention_probs_dropout_prob": sizes.attention_dropout,
        "max_position_embeddings": sizes.max_positions,
        "position_embedding_type": "absolute",
        "type_vocab_size": sizes.num_token_types,
        "initializer_range": sizes.initializer_range,
        "layer_norm_eps": sizes.layer_norm_epsilon,
        "pad_token_id": vocabulary.special.pad,
        "tie_word_embeddings": True,
        # How ElectraForMultipleChoice sums up a sequence: the state of [CLS], as when the released models are fine-tuned.
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
        "dtype": precision,
    }


def model_config(config: Mapping[str, Any], path: Path, supported: Mapping[str, Any]) -> ModelConfig:
    """The sizes that config.json of an ELECTRA or a BERT states; BERT's embeddings are as wide as its hidden states.

    Args:
        path: of config.json.
        supported: what a key must be where it is stated.

    Raises:
        CheckpointError: a key asks for what our encoder cannot do, or a size is missing or impossible.
    """
    family = config["model_type"]
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported",
                hint=f"give an ordinary {family.upper()} model",
            )
    hidden = whole_number(config, "hidden_size", path)
    try:
        return ModelConfig(
            num_layers=whole_number(config, "num_hidden_layers", path),
            hidden_size=hidden,
            embedding_size=hidden if family == "bert" else whole_number(config, "embedding_size", path),
            num_heads=whole_number(config, "num_attention_heads", path),
            feedforward_size=whole_number(config, "intermediate_size", path),
            max_positions=config.get("max_position_embeddings", 512),
            num_token_types=config.get("type_vocab_size", 2),
            hidden_dropout=config.get("hidden_dropout_prob", 0.1),
            attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
            initializer_range=config.get("initializer_range", 0.02),
            layer_norm_epsilon=config.get("layer_norm_eps", 1e-12),
        )
    except ValidationError as problem:
        reasons = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in problem.errors())
        raise CheckpointError(f"{path}: {reasons}", hint="export or download the model again") from problem


def whole_number(config: Mapping[str, Any], key: str, path: Path) -> int:
    """A size that config.json must state.

    Raises:
        CheckpointError: it does not.
    """
    value = config.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a whole number", hint="export or download it again")
    return value


def opened(folder: Path, name: str = WEIGHTS_NAME) -> Any:
    """A file of weights, open; a context manager.

    Raises:
        CheckpointError: it is missing or damaged.
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
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint="export or download the model again") from problem
