"""Our networks as Hugging Face ELECTRA folders and back: names and values of the weights, and config.json.

A discriminator becomes an `ElectraForPreTraining`, a masked language model (the generator, or the encoder of objective
`mlm`) an `ElectraForMaskedLM`. Nothing here imports transformers: the format is two files, and it is stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from discern.data.files import sync_file
from discern.errors import CheckpointError, ConfigError
from discern.model.bert import BertEncoder
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings
from discern.model.heads import MaskedLMHead, ReplacedTokenHead
from discern.model.network import Network
from discern.objectives.base import Vocabulary

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
DISCRIMINATOR_CLASS = "ElectraForPreTraining"
ENCODER_CLASS = "ElectraModel"
GENERATOR_CLASS = "ElectraForMaskedLM"

# Our name -> theirs, of the layers that have a weight and a bias.
_BLOCK_LAYERS = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
_DISCRIMINATOR_LAYERS = {"dense": "dense", "output": "dense_prediction"}
_GENERATOR_LAYERS = {"dense": "dense", "norm": "LayerNorm"}
_TABLES = {"word": "word_embeddings", "position": "position_embeddings", "token_type": "token_type_embeddings"}

# Written by some versions of transformers, and nothing that we miss: a counting buffer, and the tied output matrix.
_POSITION_BUFFERS = ("electra.embeddings.position_ids", "electra.embeddings.token_type_ids")
_TIED_OUTPUT = "generator_lm_head.weight"
_WORD_TABLE = "electra.embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a Hugging Face folder holds of a network.

    Attributes:
        config: content of config.json.
        tensors: content of model.safetensors, float32 on the CPU.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def config_bytes(self) -> bytes:
        """config.json, keys in the order given here."""
        return (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode()

    def write_weights(self, path: Path) -> None:
        """Write model.safetensors; the same weights give the same bytes."""
        save_file(self.tensors, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            sync_file(file)


def to_huggingface(network: Network, vocabulary: Vocabulary) -> HuggingFaceModel:
    """The network as config.json and model.safetensors of Hugging Face.

    A discriminator whose head has a bilinear term is given without its head, as a bare `ElectraModel`: ELECTRA has no place
    for the term, and the rest of the head would say something else than the whole.

    Raises:
        ConfigError: the encoder is not the BERT-style one with LayerNorm after each residual, which alone ELECTRA can hold.
    """
    names = parameter_names(network)
    parameters = _parameters(network)
    if network.bilinear is not None:
        names = {ours: theirs for ours, theirs in names.items() if ours.startswith("encoder.")}
    tensors = {theirs: parameters[ours].detach().to("cpu", torch.float32).contiguous() for ours, theirs in names.items()}
    return HuggingFaceModel(_config(network, vocabulary), tensors)


def parameter_names(network: Network) -> dict[str, str]:
    """Hugging Face's name of every parameter, by ours: `encoder.<name in the encoder>` or `head.<name in the head>`.

    The tied output matrix of a masked language model is the word table and is named once, as that.

    Raises:
        ConfigError: the encoder is not the BERT-style one.
    """
    encoder = network.encoder
    if not isinstance(encoder, BertEncoder):
        raise ConfigError(
            f"encoder '{encoder.config.encoder}' has no Hugging Face ELECTRA form",
            hint="only encoder 'bert' can be exported to ELECTRA",
        )
    if encoder.config.normalisation != "post":
        raise ConfigError(
            f"ELECTRA has its LayerNorms after each residual; here model.normalisation is '{encoder.config.normalisation}'",
            hint="train with model.normalisation=post to export; `discern detect` takes the run as it is",
        )
    names = {f"encoder.embeddings.{ours}.weight": f"electra.embeddings.{theirs}.weight" for ours, theirs in _TABLES.items()}
    names |= _both("encoder.embeddings.norm", "electra.embeddings.LayerNorm")
    if encoder.projection is not None:
        names |= _both("encoder.projection", "electra.embeddings_project")
    for index in range(len(encoder.blocks)):
        for ours, theirs in _BLOCK_LAYERS.items():
            names |= _both(f"encoder.blocks.{index}.{ours}", f"electra.encoder.layer.{index}.{theirs}")
    if isinstance(network.head, ReplacedTokenHead):
        for ours, theirs in _DISCRIMINATOR_LAYERS.items():
            names |= _both(f"head.{ours}", f"discriminator_predictions.{theirs}")
        return names
    for ours, theirs in _GENERATOR_LAYERS.items():
        names |= _both(f"head.{ours}", f"generator_predictions.{theirs}")
    return names | {"head.bias": "generator_lm_head.bias"}


def read_huggingface_config(folder: Path) -> dict[str, Any]:
    """config.json of an ELECTRA folder.

    Raises:
        CheckpointError: it is missing, unreadable, or not ELECTRA's.
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
    if kind != "electra":
        raise CheckpointError(f"{path}: model_type is {kind!r}, expected 'electra'", hint="give an ELECTRA model")
    return dict(config)


def is_discriminator(folder: Path) -> bool:
    """Whether the weights in a Hugging Face folder include the head of a discriminator.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    with _opened(folder) as weights:
        return "discriminator_predictions.dense.weight" in weights.keys()  # noqa: SIM118 - not a mapping


def network_from_huggingface(folder: Path) -> Network:
    """The discriminator or masked language model of a Hugging Face ELECTRA folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor has another shape than config.json says, or the model
            has an option that ours has not.
    """
    config = read_huggingface_config(folder)
    path = folder / CONFIG_NAME
    sizes = _model_config(config, path)
    with torch.device("meta"):
        embeddings = Embeddings(_number(config, "vocab_size", path), sizes.embedding_size, sizes)
        encoder = BertEncoder(embeddings, sizes)
        head = ReplacedTokenHead(sizes) if is_discriminator(folder) else MaskedLMHead(sizes, embeddings.word)
    nn.ModuleList([encoder, head]).to_empty(device="cpu").eval()
    network = Network(encoder, head)
    load_huggingface_weights(network, folder)
    return network


@torch.no_grad()
def load_huggingface_weights(network: Network, folder: Path) -> None:
    """Fill every parameter of the network from model.safetensors of a Hugging Face folder.

    Raises:
        CheckpointError: the file is missing or damaged, or a tensor is missing, is left over, or has another shape.
        ConfigError: the encoder is not the BERT-style one.
    """
    parameters = _parameters(network)
    names = parameter_names(network)
    path = folder / WEIGHTS_NAME
    with _opened(folder) as weights:
        present = set(weights.keys())
        _check_names(present, set(names.values()), network, path)
        for ours, theirs in names.items():
            parameter, found = parameters[ours], weights.get_slice(theirs).get_shape()
            if list(parameter.shape) != found:
                raise CheckpointError(
                    f"{path}: '{theirs}' has shape {found}, but the network expects {list(parameter.shape)}",
                    hint=f"{CONFIG_NAME} and {WEIGHTS_NAME} must come from the same model",
                )
            parameter.copy_(weights.get_tensor(theirs))
        if _TIED_OUTPUT in present and not torch.equal(weights.get_tensor(_TIED_OUTPUT), weights.get_tensor(_WORD_TABLE)):
            raise CheckpointError(
                f"{path}: '{_TIED_OUTPUT}' differs from the word embeddings, and ours are tied",
                hint="only models with tied word embeddings can be loaded",
            )


def _check_names(present: set[str], expected: set[str], network: Network, path: Path) -> None:
    """Refuse missing and left-over tensors; what is missing says most, so it is named first."""
    wanted = DISCRIMINATOR_CLASS if isinstance(network.head, ReplacedTokenHead) else GENERATOR_CLASS
    missing = sorted(expected - present)
    if missing:
        raise CheckpointError(f"{path}: '{missing[0]}' is missing{_and_more(missing)}", hint=f"the folder must hold an {wanted}")
    left_over = sorted(present - expected - {*_POSITION_BUFFERS, _TIED_OUTPUT})
    if left_over:
        raise CheckpointError(
            f"{path}: nothing here can hold '{left_over[0]}'{_and_more(left_over)}",
            hint=f"the folder must hold an {wanted} and no other head",
        )


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def _parameters(network: Network) -> dict[str, Tensor]:
    """Parameters by our name; the word table that a head shares stands under the encoder's name only."""
    found: dict[str, Tensor] = {f"encoder.{name}": value for name, value in network.encoder.named_parameters()}
    embeddings = network.encoder.embeddings
    if isinstance(embeddings, DisentangledEmbeddings):
        found = {name: value for name, value in found.items() if not name.startswith("encoder.embeddings.")}
        found |= {f"encoder.embeddings.{name}": value for name, value in embeddings.merged().named_parameters()}
    taken = {id(value) for value in found.values()}
    return found | {f"head.{name}": value for name, value in network.head.named_parameters() if id(value) not in taken}


def _config(network: Network, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json, with every field that ELECTRA's readers look for, so that no version's default matters."""
    sizes = network.encoder.config
    architecture = DISCRIMINATOR_CLASS if isinstance(network.head, ReplacedTokenHead) else GENERATOR_CLASS
    if network.bilinear is not None:
        architecture = ENCODER_CLASS
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": vocabulary.size,
        "embedding_size": network.encoder.embeddings.embedding_size,
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
        "dtype": "float32",
    }


def _model_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """The sizes that config.json states; what our encoder cannot do is refused."""
    expected = {"hidden_act": "gelu", "position_embedding_type": "absolute", "tie_word_embeddings": True}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported", hint="give an ordinary ELECTRA model"
            )
    hidden = _number(config, "hidden_size", path)
    try:
        return ModelConfig(
            num_layers=_number(config, "num_hidden_layers", path),
            hidden_size=hidden,
            embedding_size=_number(config, "embedding_size", path),
            num_heads=_number(config, "num_attention_heads", path),
            feedforward_size=_number(config, "intermediate_size", path),
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


def _number(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a whole number", hint="export or download it again")
    return value


def _opened(folder: Path) -> Any:
    """The weights file, open; a context manager."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        other = "pytorch_model.bin" if (folder / "pytorch_model.bin").is_file() else None
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_NAME}" + (f", only {other}, which is a pickle" if other else ""),
            hint="load the model with transformers and write it again with save_pretrained(), which makes one",
        )
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem}", hint="export or download the model again") from problem
