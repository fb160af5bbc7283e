"""XLNet encoders and their head as Hugging Face folders and back: names, shapes and values of the weights, and config.json.

A network with the tied head becomes an `XLNetLMHeadModel`, from which `XLNetModel` takes the encoder. transformers keeps the
weights of the attention as (D, H, D / H); ours are matrices, as any layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discern.errors import CheckpointError, ConfigError
from discern.interop.allocation import allocate
from discern.interop.config_json import read_huggingface_config, validated_sizes, whole_number
from discern.interop.huggingface import PRECISIONS, HuggingFaceModel, check_shape
from discern.interop.names import CONFIG_NAME, UNLIMITED_POSITIONS, XLNET_CLASS, XLNET_ENCODER_CLASS
from discern.interop.stored import Stored, check_names, stored_weights
from discern.model.config import ModelConfig
from discern.model.embeddings import WordEmbeddings
from discern.model.encoder import Encoder
from discern.model.heads import TiedLMHead
from discern.model.network import Network
from discern.model.xlnet import XLNetEncoder
from discern.objectives.base import Vocabulary

PREFIX = "transformer."
"""Stands before the encoder's names where a head stands beside it."""
_HEAD_BIAS, _TIED_OUTPUT = "lm_loss.bias", "lm_loss.weight"
_ACTIVATIONS = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu": "relu", "silu": "silu"}
"""Names of activations, theirs by ours."""
_SYNONYMS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
"""Other names of theirs for the same."""
_KEYS = {"num_layers": "n_layer", "hidden_size": "d_model", "embedding_size": "d_model", "num_heads": "n_head"}
_KEYS |= {"feedforward_size": "d_inner", "clamp_length": "clamp_len", "hidden_dropout": "dropout", "attention_dropout": "dropout"}
_KEYS |= {"layer_norm_epsilon": "layer_norm_eps"}
"""Keys of config.json by our names."""
_SUPPORTED = {"attn_type": "bi", "same_length": False, "untie_r": True, "tie_word_embeddings": True}


@dataclass(frozen=True)
class _Place:
    """Where one of our parameters stands.

    Attributes:
        name: theirs.
        theirs: our tensor in their shape.
        ours: their tensor in our shape, heads being H.
    """

    name: str
    theirs: Callable[[Tensor, int], Tensor] = lambda tensor, heads: tensor
    ours: Callable[[Tensor, int], Tensor] = lambda tensor, heads: tensor


def _input(name: str) -> _Place:
    """A projection of the states: theirs is the transposed matrix, its columns by head."""
    return _Place(name, lambda tensor, heads: _by_head(tensor.t(), heads), lambda tensor, heads: tensor.flatten(1).t())


def _output(name: str) -> _Place:
    """The projection of what was gathered: theirs is not transposed."""
    return _Place(name, _by_head, lambda tensor, heads: tensor.flatten(1))


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(len(tensor), heads, -1)


_ATTENTION = {
    **{f"{ours}.weight": _input(theirs) for ours, theirs in zip(("query", "key", "value", "position"), "qkvr", strict=True)},
    "output.weight": _output("o"),
    "content_bias": _Place("r_w_bias"),
    "position_bias": _Place("r_r_bias"),
    "segment_bias": _Place("r_s_bias"),
    "segments": _Place("seg_embed"),
}
_LAYERS = {"attention_norm": "rel_attn.layer_norm", "expand": "ff.layer_1", "contract": "ff.layer_2"}
_LAYERS["feedforward_norm"] = "ff.layer_norm"


def encoder_places(encoder: XLNetEncoder) -> dict[str, _Place]:
    """Where each parameter of an encoder stands in Hugging Face's, by our name; without `PREFIX`."""
    places = {
        "embeddings.word.weight": _Place("word_embedding.weight"),
        "query_embedding": _Place("mask_emb", lambda tensor, heads: tensor[None], lambda tensor, heads: tensor[0]),
    }
    for index in range(len(encoder.blocks)):
        for ours, place in _ATTENTION.items():
            name = f"layer.{index}.rel_attn.{place.name}"
            places[f"blocks.{index}.attention.{ours}"] = _Place(name, place.theirs, place.ours)
        for ours, theirs in _LAYERS.items():
            for kind in ("weight", "bias"):
                places[f"blocks.{index}.{ours}.{kind}"] = _Place(f"layer.{index}.{theirs}.{kind}")
    return places


def encoder_tensors(encoder: XLNetEncoder) -> dict[str, Tensor]:
    """The weights of an encoder by Hugging Face's names and in its shapes; without `PREFIX`."""
    parameters, heads = dict(encoder.named_parameters()), encoder.config.num_heads
    return {place.name: place.theirs(parameters[ours], heads) for ours, place in encoder_places(encoder).items()}


def huggingface_names(network: Network, stored: Stored) -> set[str]:
    """What a folder calls the weights that a network takes from it."""
    head = {_HEAD_BIAS, _TIED_OUTPUT} if isinstance(network.head, TiedLMHead) else set()
    prefix = _prefix(stored)
    return head | {prefix + place.name for place in encoder_places(_xlnet(network.encoder)).values()}


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """The network as config.json and model.safetensors of Hugging Face.

    Args:
        network: its head XLNet's, or an `nn.Identity` where it has none.
        precision: type that the weights are stored in, one of `PRECISIONS`.

    Raises:
        ConfigError: the head is another than XLNet's.
    """
    encoder, head = _xlnet(network.encoder), network.head
    if not isinstance(head, TiedLMHead | nn.Identity):
        raise ConfigError(
            f"XLNet has no head like {type(head).__name__} in transformers", hint="use the run with discern, as it is"
        )
    architecture = XLNET_CLASS if isinstance(head, TiedLMHead) else XLNET_ENCODER_CLASS
    tensors = {PREFIX + name: tensor for name, tensor in encoder_tensors(encoder).items()}
    tensors |= {_HEAD_BIAS: head.bias} if isinstance(head, TiedLMHead) else {}
    stored = {name: tensor.detach().to("cpu", PRECISIONS[precision]).contiguous() for name, tensor in tensors.items()}
    return HuggingFaceModel(encoder_config(encoder, vocabulary, architecture, precision), stored)


def network_from_huggingface(folder: Path) -> Network:
    """The language model of a Hugging Face XLNet folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor has another shape than config.json says, or the model has an
            option that ours has not, or another head.
    """
    network = network_with_head(folder)
    if isinstance(network.head, nn.Identity):
        raise _no_head(folder)
    return network


@torch.no_grad()
def network_with_head(folder: Path) -> Network:
    """The encoder of a Hugging Face XLNet with its language model's head, or with an `nn.Identity` where it has none; in float32
    and evaluation mode, on the CPU.

    Raises:
        CheckpointError: as of `network_from_huggingface`; other heads are passed over.
    """
    with stored_weights(folder) as stored:
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
    """Fill every parameter of the network from the weights in a Hugging Face folder, whatever type they are stored in.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, is left over, or has another shape.
    """
    encoder, head = _xlnet(network.encoder), network.head
    with stored_weights(folder) as stored:
        if _HEAD_BIAS not in stored.tensors or not isinstance(head, TiedLMHead):
            raise _no_head(stored.path)
        _fill(encoder, stored)
        _fill_head(head, stored)


@torch.no_grad()
def encoder_from_huggingface(folder: Path) -> XLNetEncoder:
    """The encoder of a Hugging Face XLNet with any head or none, in float32 and evaluation mode, on the CPU.

    Raises:
        CheckpointError: as of `network_from_huggingface`; heads are passed over.
    """
    with stored_weights(folder) as stored:
        encoder = _empty_encoder(folder)
        _fill(encoder, stored)
    return encoder.eval()


def encoder_config(encoder: XLNetEncoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """config.json, with every field that XLNet's readers look for, so that no version's default matters.

    As for fine-tuning: no memory, no reversed rows; how the model was trained its settings say.

    Args:
        architecture: class of transformers that holds the encoder and its head.
        precision: type that the weights are stored in, one of `PRECISIONS`.
    """
    sizes = encoder.config
    return {
        "architectures": [architecture],
        "model_type": "xlnet",
        "vocab_size": encoder.embeddings.vocab_size,
        "d_model": sizes.hidden_size,
        "n_layer": sizes.num_layers,
        "n_head": sizes.num_heads,
        "d_head": sizes.hidden_size // sizes.num_heads,
        "d_inner": sizes.feedforward_size,
        "ff_activation": _ACTIVATIONS[sizes.activation],
        "attn_type": "bi",
        "untie_r": True,
        "same_length": False,
        "bi_data": False,
        "clamp_len": sizes.clamp_length or -1,
        "mem_len": None,
        "reuse_len": None,
        "use_mems_eval": False,
        "use_mems_train": False,
        "initializer_range": sizes.initializer_range,
        "layer_norm_eps": sizes.layer_norm_epsilon,
        # One number for hidden states and attention.
        "dropout": sizes.hidden_dropout,
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


def model_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """The sizes that config.json of an XLNet states.

    Args:
        path: of config.json.

    Raises:
        CheckpointError: a key asks for what our encoder cannot do, or a size is missing or impossible.
    """
    for key, value in _SUPPORTED.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{path}: {key} is {config[key]!r}, but only {value!r} is supported", hint="give an ordinary XLNet model"
            )
    width, heads = whole_number(config, "d_model", path), whole_number(config, "n_head", path)
    # `d_head` is left out by some, and must be what the other two come to, in transformers as well.
    if config.get("d_head") not in (None, width // heads):
        raise CheckpointError(f"{path}: d_head {config['d_head']} is not d_model / n_head", hint="give an ordinary XLNet model")
    theirs = config.get("ff_activation", "gelu")
    activation = next((ours for ours, name in _ACTIVATIONS.items() if name == _SYNONYMS.get(theirs, theirs)), None)
    if activation is None:
        known = ", ".join((*_ACTIVATIONS.values(), *_SYNONYMS))
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
    return validated_sizes(sizes, _KEYS, path)


def _clamp_length(config: Mapping[str, Any], path: Path) -> int:
    """Ours is 0 where theirs is none at all or not above it: distances are not cut."""
    if config.get("clamp_len") is None:
        return 0
    return max(0, whole_number(config, "clamp_len", path, least=-1))


def _empty_encoder(folder: Path) -> XLNetEncoder:
    """An encoder of the sizes in config.json, its weights not yet filled."""
    config, path = read_huggingface_config(folder, ("xlnet",)), folder / CONFIG_NAME
    sizes = model_config(config, path)
    with torch.device("meta"):
        encoder = XLNetEncoder(WordEmbeddings(whole_number(config, "vocab_size", path), sizes.hidden_size, sizes), sizes)
    allocate(encoder, folder)
    return encoder


def _fill(encoder: XLNetEncoder, stored: Stored) -> None:
    """Copy the encoder's weights, whatever type they are stored in."""
    prefix, places = _prefix(stored), encoder_places(encoder)
    parts = tuple(prefix + part for part in ("word_embedding.", "mask_emb", "layer."))
    check_names(stored, {prefix + place.name for place in places.values()}, parts, "an XLNet")
    parameters, heads = dict(encoder.named_parameters()), encoder.config.num_heads
    for ours, place in places.items():
        tensor = stored.read(prefix + place.name)
        parameter = parameters[ours]
        check_shape(prefix + place.name, tensor.shape, place.theirs(parameter, heads), stored.path)
        parameter.copy_(place.ours(tensor, heads))


def _fill_head(head: TiedLMHead, stored: Stored) -> None:
    """Copy the bias of the words; their matrix is the encoder's."""
    bias = stored.read(_HEAD_BIAS)
    check_shape(_HEAD_BIAS, bias.shape, head.bias, stored.path)
    head.bias.copy_(bias)
    table = stored.tensors[PREFIX + "word_embedding.weight"]
    if _TIED_OUTPUT in stored.tensors and not torch.equal(stored.tensors[_TIED_OUTPUT](), table()):
        raise CheckpointError(
            f"{stored.path}: '{_TIED_OUTPUT}' differs from the word embeddings, and ours are tied",
            hint="only models with tied word embeddings can be loaded",
        )


def _no_head(where: Path) -> CheckpointError:
    return CheckpointError(
        f"{where} holds no '{_HEAD_BIAS}': it is a bare encoder, or was fine-tuned for something", hint=f"give an {XLNET_CLASS}"
    )


def _prefix(stored: Stored) -> str:
    """What stands before the encoder's names."""
    return PREFIX if any(name.startswith(PREFIX) for name in stored.tensors) else ""


def _xlnet(encoder: Encoder) -> XLNetEncoder:
    assert isinstance(encoder, XLNetEncoder)
    return encoder
