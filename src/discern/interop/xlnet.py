"""Converts XLNet networks to Hugging Face folders and back: names, shapes and values of the weights, and config.json.

A network with the tied head becomes an `XLNetLMHeadModel`, from which `XLNetModel` loads the encoder. transformers stores the
weights of the attention as (D, H, D / H); ours are matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discern.errors import CheckpointError, ConfigError
from discern.interop.config_json import read_huggingface_config, validated_sizes, whole_number
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel
from discern.interop.names import CONFIG_NAME, UNLIMITED_POSITIONS, XLNET_CLASS, XLNET_ENCODER_CLASS
from discern.interop.weight_files import WeightFiles, allocate, check_names, check_shape, open_weight_files
from discern.models.base import Encoder, Network
from discern.models.embeddings import WordEmbeddings
from discern.models.heads import TiedLMHead
from discern.models.xlnet.config import XLNetConfig
from discern.models.xlnet.encoder import XLNetEncoder
from discern.models.xlnet.huggingface import ACTIVATIONS, SIZE_KEYS, from_huggingface
from discern.models.xlnet.huggingface import to_huggingface as weights_to_huggingface
from discern.objectives.base import Vocabulary

PREFIX = "transformer."
"""Prefix of the encoder's names in a model with a head."""
_HEAD_BIAS, _TIED_OUTPUT = "lm_loss.bias", "lm_loss.weight"
_SYNONYMS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
"""Other names in transformers for the same activations."""
_SUPPORTED = {"attn_type": "bi", "same_length": False, "untie_r": True, "tie_word_embeddings": True}


def encoder_tensors(encoder: XLNetEncoder) -> dict[str, Tensor]:
    """The weights of an encoder with Hugging Face's names, which start with `PREFIX`, and shapes."""
    return weights_to_huggingface(_named(encoder), encoder.config.num_heads)


def huggingface_names(network: Network, stored: WeightFiles) -> set[str]:
    """The names in a folder of the weights that a network uses."""
    head = {_HEAD_BIAS, _TIED_OUTPUT} if isinstance(network.head, TiedLMHead) else set()
    return head | set(_names(_xlnet(network.encoder), stored))


def _named(encoder: XLNetEncoder) -> dict[str, Tensor]:
    return {f"encoder.{name}": value for name, value in encoder.named_parameters()}


def _names(encoder: XLNetEncoder, stored: WeightFiles) -> dict[str, str]:
    """Hugging Face's names of an encoder's weights, by their names in the folder, which lack the prefix in a bare encoder."""
    prefix = _prefix(stored)
    return {prefix + name.removeprefix(PREFIX): name for name in encoder_tensors(encoder)}


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """Convert a network to config.json and model.safetensors of Hugging Face.

    Args:
        network: network with the head of XLNet, or with an `nn.Identity` if it has no head.
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: the network has another head.
    """
    encoder, head = _xlnet(network.encoder), network.head
    if not isinstance(head, TiedLMHead | nn.Identity):
        raise ConfigError(
            f"transformers has no XLNet with a head like {type(head).__name__}", hint="use the run itself with discern"
        )
    architecture = XLNET_CLASS if isinstance(head, TiedLMHead) else XLNET_ENCODER_CLASS
    tensors = encoder_tensors(encoder)
    tensors |= {_HEAD_BIAS: head.bias} if isinstance(head, TiedLMHead) else {}
    stored = {name: tensor.detach().to("cpu", PRECISIONS[precision]).contiguous() for name, tensor in tensors.items()}
    return HuggingFaceModel(encoder_config(encoder, vocabulary, architecture, precision), stored)


def network_from_huggingface(folder: Path) -> Network:
    """The language model of a Hugging Face XLNet folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor differs in shape from config.json, or the model uses an
            unsupported option or another head.
    """
    network = network_with_head(folder)
    if isinstance(network.head, nn.Identity):
        raise _no_head(folder)
    return network


@torch.no_grad()
def network_with_head(folder: Path) -> Network:
    """The encoder of a Hugging Face XLNet with its language-model head, in float32 and evaluation mode, on the CPU.

    The head is an `nn.Identity` if the folder has none. Other heads are ignored.

    Raises:
        CheckpointError: as in `network_from_huggingface`.
    """
    with open_weight_files(folder) as stored:
        encoder = _empty_encoder(folder)
        assert isinstance(encoder.embeddings, WordEmbeddings)
        _fill(encoder, stored)
        head: nn.Module = nn.Identity()
        if _HEAD_BIAS in stored.tensors:
            head = TiedLMHead(encoder.config, encoder.embeddings.word)
            _fill_head(head, stored)
    return Network(encoder.eval(), head.eval())


@torch.no_grad()
def load_huggingface_weights(network: Network, folder: Path) -> None:
    """Load all parameters of a network from a Hugging Face folder, stored in any data type.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected, or has another shape.
    """
    encoder, head = _xlnet(network.encoder), network.head
    with open_weight_files(folder) as stored:
        if _HEAD_BIAS not in stored.tensors or not isinstance(head, TiedLMHead):
            raise _no_head(stored.path)
        _fill(encoder, stored)
        _fill_head(head, stored)


@torch.no_grad()
def encoder_from_huggingface(folder: Path) -> XLNetEncoder:
    """The encoder of a Hugging Face XLNet, in float32 and evaluation mode, on the CPU. Heads are ignored.

    Raises:
        CheckpointError: as in `network_from_huggingface`.
    """
    with open_weight_files(folder) as stored:
        encoder = _empty_encoder(folder)
        _fill(encoder, stored)
    return encoder.eval()


def encoder_config(encoder: XLNetEncoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """The content of config.json for an XLNet. All fields are written, so that defaults of transformers do not matter.

    The values are those for fine-tuning: no memory and no reversed rows. The settings of pre-training are in a file of their own.

    Args:
        architecture: class of transformers for the encoder and its head.
        precision: data type of the stored weights, one of `PRECISIONS`.
    """
    sizes = encoder.config
    return {
        "architectures": [architecture],
        "model_type": "xlnet",
        "vocab_size": encoder.embeddings.vocab_size,
        **{key: getattr(sizes, name) for name, key in SIZE_KEYS.items()},
        "d_head": sizes.hidden_size // sizes.num_heads,
        "ff_activation": ACTIVATIONS[sizes.activation],
        "attn_type": "bi",
        "untie_r": True,
        "same_length": False,
        "bi_data": False,
        "clamp_len": sizes.clamp_length or -1,
        "mem_len": None,
        "reuse_len": None,
        "use_mems_eval": False,
        "use_mems_train": False,
        "dropout": sizes.hidden_dropout,  # one number for hidden states and attention
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
        "summary_last_dropout": 0.1,
        "pad_token_id": vocabulary.special.pad,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "dtype": precision,
    }


def model_config(config: Mapping[str, Any], path: Path) -> XLNetConfig:
    """The sizes of an encoder, from config.json of an XLNet.

    Args:
        path: path of config.json, for messages.

    Raises:
        CheckpointError: a key has an unsupported value, or a size is missing or invalid.
    """
    for key, value in _SUPPORTED.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported", hint="give an ordinary XLNet model"
            )
    width, heads = whole_number(config, "d_model", path), whole_number(config, "n_head", path)
    # `d_head` is optional; transformers also requires it to be d_model / n_head.
    if config.get("d_head") not in (None, width // heads):
        raise CheckpointError(f"{path}: d_head {config['d_head']} is not d_model / n_head", hint="give an ordinary XLNet model")
    theirs = config.get("ff_activation", "gelu")
    activation = next((ours for ours, name in ACTIVATIONS.items() if name == _SYNONYMS.get(theirs, theirs)), None)
    if activation is None:
        known = ", ".join((*ACTIVATIONS.values(), *_SYNONYMS))
        raise CheckpointError(
            f"{path}: ff_activation is {theirs!r}, expected one of {known}", hint="give an ordinary XLNet model"
        )
    sizes = {
        "encoder": "xlnet",
        "num_layers": whole_number(config, "n_layer", path),
        "hidden_size": width,
        "embedding_size": width,
        "num_heads": heads,
        "feedforward_size": whole_number(config, "d_inner", path),
        "max_positions": UNLIMITED_POSITIONS,
        "activation": activation,
        "clamp_length": _clamp_length(config, path),
        "hidden_dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("dropout", 0.1),
        "initializer_range": config.get("initializer_range", 0.02),
        "layer_norm_epsilon": config.get("layer_norm_eps", 1e-12),
    }
    return validated_sizes(XLNetConfig, sizes, SIZE_KEYS, path)


def _clamp_length(config: Mapping[str, Any], path: Path) -> int:
    """Our clamp length, which is 0 if distances are not limited; there it is null, 0 or -1."""
    if config.get("clamp_len") is None:
        return 0
    return max(0, whole_number(config, "clamp_len", path, least=-1))


def _empty_encoder(folder: Path) -> XLNetEncoder:
    """An encoder with the sizes in config.json and uninitialized weights."""
    config, path = read_huggingface_config(folder, ("xlnet",)), folder / CONFIG_NAME
    sizes = model_config(config, path)
    with torch.device("meta"):
        encoder = XLNetEncoder(WordEmbeddings(whole_number(config, "vocab_size", path), sizes.hidden_size), sizes)
    allocate(encoder, folder)
    return encoder


def _fill(encoder: XLNetEncoder, stored: WeightFiles) -> None:
    """Copy the weights of the encoder, stored in any data type."""
    names, parts = _names(encoder, stored), ("word_embedding.", "mask_emb", "layer.")
    check_names(stored, names.keys(), tuple(_prefix(stored) + part for part in parts), "an XLNet")
    parameters, expected = _named(encoder), encoder_tensors(encoder)
    for name, theirs in names.items():
        tensor = stored.read(name)
        check_shape(name, tensor.shape, expected[theirs], stored.path)
        ((ours, shaped),) = from_huggingface({theirs: tensor}).items()
        parameters[ours].copy_(shaped)


def _fill_head(head: TiedLMHead, stored: WeightFiles) -> None:
    """Copy the bias of the head; its matrix is tied to the word embeddings."""
    bias = stored.read(_HEAD_BIAS)
    check_shape(_HEAD_BIAS, bias.shape, head.bias, stored.path)
    head.bias.copy_(bias)
    table = stored.tensors[PREFIX + "word_embedding.weight"]
    if _TIED_OUTPUT in stored.tensors and not torch.equal(stored.tensors[_TIED_OUTPUT](), table()):
        raise CheckpointError(
            f"{stored.path}: '{_TIED_OUTPUT}' differs from the word embeddings, but only tied embeddings are supported",
            hint="only models with tied word embeddings can be loaded",
        )


def _no_head(where: Path) -> CheckpointError:
    return CheckpointError(
        f"{where} has no '{_HEAD_BIAS}': it is a bare encoder or a fine-tuned model", hint=f"use an {XLNET_CLASS}"
    )


def _prefix(stored: WeightFiles) -> str:
    """The prefix of the encoder's names."""
    return PREFIX if any(name.startswith(PREFIX) for name in stored.tensors) else ""


def _xlnet(encoder: Encoder) -> XLNetEncoder:
    assert isinstance(encoder, XLNetEncoder)
    return encoder
