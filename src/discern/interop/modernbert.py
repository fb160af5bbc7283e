"""Converts ModernBERT networks to Hugging Face folders and back.

A discriminator becomes a `ModernBertForTokenClassification` with one label, a masked language model a `ModernBertForMaskedLM`.
A discriminator whose head has a bilinear term becomes a `ModernBertModel`, as no class of transformers has the term; its head is
in a separate file, which transformers ignores and discern reads. A network whose word table is projected is written with the
product of the two; the separate file then has the table and the projection, so that training can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discern.config.problems import quoted
from discern.errors import CheckpointError, ConfigError, MissingHeadError
from discern.interop.config_json import (
    ENERGY,
    MARK,
    REPLACED,
    detector_label,
    read_huggingface_config,
    read_mark,
    validated_sizes,
    whole_number,
)
from discern.interop.huggingface import PRECISIONS, WORD_FACTORS, WORD_TABLE, HuggingFaceModel
from discern.interop.names import (
    CONFIG_NAME,
    HEAD_NAME,
    MODERNBERT_ENCODER_CLASS,
    MODERNBERT_LM_CLASS,
    MODERNBERT_TAGGER_CLASS,
    named_parameters,
)
from discern.interop.weight_files import allocate, check_names, check_shape, open_weight_files, opened
from discern.models.base import Encoder, Network
from discern.models.embeddings import Disentangled, WordEmbeddings
from discern.models.heads import BilinearTerm, CopyMLMHead, EnergyHead, MaskedLMHead, ReplacedTokenHead, TokenHead
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.models.modernbert.huggingface import (
    REQUIRED,
    SIZE_KEYS,
    WORDS,
    from_huggingface,
    layer_types,
)
from discern.models.modernbert.huggingface import to_huggingface as weights_to_huggingface
from discern.objectives.base import Vocabulary
from discern.training.checkpoint import check_finite

_PREFIX = "model."
_PARTS = ("embeddings.", "layers.", "final_norm.")
_DECODER_BIAS, _TIED_OUTPUT = "decoder.bias", "decoder.weight"
_SUPPORTED = {"hidden_activation": "gelu", "classifier_activation": "gelu", "tie_word_embeddings": True}
_ORDINARY = "give an ordinary ModernBERT model"
_DEFAULT_ROPE = "default"
_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
"""Defaults of transformers."""


def to_huggingface(network: Network, vocabulary: Vocabulary, precision: str = "float32") -> HuggingFaceModel:
    """Convert a network to config.json and model.safetensors of Hugging Face.

    Args:
        precision: data type of the stored weights, one of `PRECISIONS`.

    Raises:
        ConfigError: the bilinear term of the head reads words that are not as wide as the hidden states.
    """
    encoder, dtype = _modernbert(network.encoder), PRECISIONS[precision]
    ours = named_parameters(network)
    beside: dict[str, Tensor] = {}
    if network.bilinear is not None:
        if encoder.projection is not None:
            raise ConfigError(
                f"the bilinear term reads words of width {encoder.embeddings.embedding_size}, and an exported ModernBERT has "
                f"them only {encoder.config.hidden_size} wide",
                hint=f"train with model.embedding_size={encoder.config.hidden_size}, or with objective.discriminator_head=dense",
            )
        beside = {name: tensor for name, tensor in ours.items() if not name.startswith("encoder.")}
    elif isinstance(network.head, CopyMLMHead):
        beside = {name: tensor for name, tensor in ours.items() if name.startswith("head.copy_gate")}
    converted = weights_to_huggingface(ours)
    apart = set(weights_to_huggingface(beside)) if beside else set()
    factors = {name: ours[name] for name in WORD_FACTORS} if encoder.projection is not None else {}
    held = {name: _stored(tensor, dtype) for name, tensor in converted.items() if name not in apart}
    head = {name: _stored(converted[name], dtype) for name in apart} | {k: _stored(v, dtype) for k, v in factors.items()}
    config = encoder_config(encoder, vocabulary, _architecture(network), precision)
    if isinstance(network.head, TokenHead) and network.bilinear is None:
        label = ENERGY if isinstance(network.head, EnergyHead) else REPLACED
        config |= {"num_labels": 1, "id2label": {"0": label}, "label2id": {label: 0}}
    mark = ({"head": HEAD_NAME} if head else {}) | ({"gives": ENERGY} if isinstance(network.head, EnergyHead) else {})
    return HuggingFaceModel(config | ({MARK: mark} if mark else {}), held, dict(sorted(head.items())))


def encoder_tensors(encoder: ModernBertEncoder) -> dict[str, Tensor]:
    """The weights of an encoder with Hugging Face's names, which start with `model.`."""
    return weights_to_huggingface(named_parameters(Network(encoder, nn.Identity())))


def encoder_config(encoder: ModernBertEncoder, vocabulary: Vocabulary, architecture: str, precision: str) -> dict[str, Any]:
    """The content of config.json, with full and local attention in both forms that transformers and servers read.

    Args:
        architecture: class of transformers for the encoder and its head.
        precision: data type of the stored weights, one of `PRECISIONS`.
    """
    sizes, special = encoder.config, vocabulary.special
    return {
        "architectures": [architecture],
        "model_type": "modernbert",
        "vocab_size": encoder.embeddings.vocab_size,
        **{key: getattr(sizes, name) for name, key in SIZE_KEYS.items()},
        "layer_types": layer_types(sizes.num_layers, sizes.full_attention_every),
        "rope_parameters": {
            "full_attention": {"rope_type": _DEFAULT_ROPE, "rope_theta": sizes.full_rope_theta},
            "sliding_attention": {"rope_type": _DEFAULT_ROPE, "rope_theta": sizes.local_rope_theta},
        },
        "hidden_activation": "gelu",
        "initializer_cutoff_factor": 2.0,
        "mlp_dropout": 0.0,
        "decoder_bias": True,
        "classifier_pooling": "cls",
        "classifier_dropout": 0.0,
        "classifier_activation": "gelu",
        "pad_token_id": special.pad,
        # Servers need numbers for all four; a text begins with [CLS] and ends with [SEP].
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
        "cls_token_id": special.cls,
        "sep_token_id": special.sep,
        "tie_word_embeddings": True,
        "dtype": precision,
    }


def model_config(config: Mapping[str, Any], path: Path) -> ModernBertConfig:
    """The sizes of an encoder, from config.json of a ModernBERT in the present or the older form.

    Args:
        path: path of config.json, for messages.

    Raises:
        CheckpointError: a key has an unsupported value, or a size is missing or invalid.
    """
    for key, value in _SUPPORTED.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, but only {value!r} is supported", hint=_ORDINARY)
    sizes: dict[str, Any] = {name: whole_number(config, SIZE_KEYS[name], path) for name in REQUIRED}
    apart = ("full_attention_every", "full_rope_theta", "local_rope_theta")
    for name, key in SIZE_KEYS.items():
        if name not in (*REQUIRED, *apart) and config.get(key) is not None:
            sizes[name] = config[key]
    thetas = _thetas(config, path)
    sizes |= {
        "encoder": "modernbert",
        "embedding_size": sizes["hidden_size"],
        "full_attention_every": _full_attention_every(config, sizes["num_layers"], path),
        "full_rope_theta": thetas["full_attention"],
        "local_rope_theta": thetas["sliding_attention"],
    }
    return validated_sizes(ModernBertConfig, sizes, SIZE_KEYS, path)


def _full_attention_every(config: Mapping[str, Any], num_layers: int, path: Path) -> int:
    """The distance of the layers with full attention."""
    stated = config.get("global_attn_every_n_layers")
    every = 3 if stated is None else whole_number(config, "global_attn_every_n_layers", path)
    listed = config.get("layer_types")
    if listed is None:
        return every
    candidates = ([every] if stated is not None else []) + list(range(1, num_layers + 1))
    found = next((each for each in candidates if layer_types(num_layers, each) == listed), None)
    if found is None:
        raise CheckpointError(
            f"{path}: layer_types is {listed!r}, but only full attention in every n-th layer from the first on is supported",
            hint=_ORDINARY,
        )
    return found


def _thetas(config: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The base of the rotary frequencies, by type of layer."""
    old = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    thetas = {kind: config.get(key, _THETAS[kind]) for kind, key in old.items()}
    if thetas["sliding_attention"] is None:  # as the first folders have it: one base for all layers
        thetas["sliding_attention"] = thetas["full_attention"]
    if config.get("rope_scaling") is not None:
        raise CheckpointError(f"{path}: rope_scaling is {config['rope_scaling']!r}, which is not supported", hint=_ORDINARY)
    given = {} if config.get("rope_parameters") is None else config["rope_parameters"]
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: rope_parameters is {quoted(given)}, expected an object", hint=_ORDINARY)
    for kind, parameters in given.items():
        if kind not in thetas or not isinstance(parameters, dict):
            raise CheckpointError(
                f"{path}: rope_parameters has the key '{kind}', expected one entry each for {' and '.join(map(repr, thetas))}",
                hint=_ORDINARY,
            )
        rope_type = parameters.get("rope_type", parameters.get("type", _DEFAULT_ROPE))
        if rope_type != _DEFAULT_ROPE:
            raise CheckpointError(
                f"{path}: rope_parameters.{kind}.rope_type is {rope_type!r}, but only {_DEFAULT_ROPE!r} is supported",
                hint=_ORDINARY,
            )
        others = sorted(parameters.keys() - {"rope_type", "type", "rope_theta"})
        if others:
            raise CheckpointError(f"{path}: rope_parameters.{kind} has '{others[0]}', which is not supported", hint=_ORDINARY)
        thetas[kind] = parameters.get("rope_theta", thetas[kind])
    return thetas


def network_from_huggingface(folder: Path) -> Network:
    """The discriminator or masked language model of a Hugging Face ModernBERT folder, in float32 and evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor differs in shape from config.json, or the model uses an
            unsupported option.
        MissingHeadError: the model has no pre-training head.
    """
    network = network_with_head(folder)
    if isinstance(network.head, nn.Identity):
        raise MissingHeadError(
            f"{folder} has no pre-training head: it is a bare encoder or a fine-tuned model",
            hint=f"use a {MODERNBERT_LM_CLASS}, or a run with a discriminator; for a fine-tuned model: "
            f"discern predict {folder} INPUT",
        )
    return network


def network_with_head(folder: Path) -> Network:
    """The encoder of a Hugging Face ModernBERT with its pre-training head, in float32 and evaluation mode, on the CPU.

    The head is an `nn.Identity` if the folder has none, as with fine-tuned models.

    Raises:
        CheckpointError: as in `network_from_huggingface`.
    """
    config, path = read_huggingface_config(folder, ("modernbert",)), folder / CONFIG_NAME
    sizes, mark = model_config(config, path), read_mark(config)
    beside = _beside(folder, mark)
    names = set(beside)
    with open_weight_files(folder) as stored:
        names |= stored.tensors.keys()
    width = beside[WORDS].shape[1] if WORDS in beside else sizes.hidden_size
    bilinear_head = "bilinear_term.context.weight" in names
    output = mark.get("gives", REPLACED) if bilinear_head else detector_label(config)
    with torch.device("meta"):
        embeddings = WordEmbeddings(whole_number(config, "vocab_size", path), width)
        encoder = ModernBertEncoder(embeddings, sizes)
        head: nn.Module = nn.Identity()
        if {"head.dense.weight", "head.norm.weight"} <= names:
            if _DECODER_BIAS in names or MODERNBERT_LM_CLASS in (config.get("architectures") or ()):
                words = encoder.language_head()
                head = CopyMLMHead(sizes, words) if "copy_gate.weight" in names else words
            elif output is not None:
                head = EnergyHead(sizes) if output == ENERGY else ReplacedTokenHead(sizes)
        bilinear = BilinearTerm(sizes, sizes.hidden_size) if bilinear_head else None
    allocate(nn.ModuleList(part for part in (encoder, head, bilinear) if part is not None).eval(), folder)
    network = Network(encoder, head, bilinear)
    load_huggingface_weights(network, folder)
    return network


def encoder_from_huggingface(folder: Path) -> ModernBertEncoder:
    """The encoder of a Hugging Face ModernBERT, in float32 and evaluation mode, on the CPU. Heads are ignored.

    Raises:
        CheckpointError: as in `network_from_huggingface`.
    """
    config, path = read_huggingface_config(folder, ("modernbert",)), folder / CONFIG_NAME
    sizes = model_config(config, path)
    with torch.device("meta"):
        embeddings = WordEmbeddings(whole_number(config, "vocab_size", path), sizes.hidden_size)
        encoder = ModernBertEncoder(embeddings, sizes)
    allocate(encoder, folder)
    load_huggingface_weights(Network(encoder, nn.Identity()), folder)
    return encoder.eval()


@torch.no_grad()
def load_huggingface_weights(network: Network, folder: Path) -> None:
    """Load all parameters of a network from a Hugging Face folder, stored in any data type.

    If a discriminator uses the generator's embeddings plus a difference, the difference is set so that the sum equals the word
    embeddings of the folder. The generator must therefore be loaded first.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor is missing, unexpected, or has another shape.
    """
    encoder = _modernbert(network.encoder)
    config = read_huggingface_config(folder, ("modernbert",))
    parameters = named_parameters(network)
    expected = weights_to_huggingface(parameters)
    beside = _beside(folder, read_mark(config))
    values: dict[str, Tensor] = {}
    with open_weight_files(folder) as stored:
        _refuse_other_layout(set(stored.tensors), stored.path)
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in stored.tensors) else ""
        in_folder = {name: prefix + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name for name in expected}
        wanted = {theirs for name, theirs in in_folder.items() if name not in beside}
        if config.get("decoder_bias") is False:
            wanted.discard(_DECODER_BIAS)
        check_names(stored, wanted, tuple(prefix + part for part in _PARTS), "a ModernBERT")
        for name, theirs in in_folder.items():
            if name in beside:
                tensor = beside[name]
            elif theirs in wanted:
                tensor = stored.read(theirs)
            else:
                tensor = torch.zeros_like(expected[name])
            check_shape(theirs, tensor.shape, expected[name], stored.path)
            values[name] = tensor.float()
        if _TIED_OUTPUT in stored.tensors and not torch.equal(stored.read(_TIED_OUTPUT).float(), values[WORD_TABLE]):
            raise CheckpointError(
                f"{stored.path}: '{_TIED_OUTPUT}' differs from the word embeddings, but only tied embeddings are supported",
                hint="only models with tied word embeddings can be loaded",
            )
    ours = from_huggingface(values)
    if encoder.projection is not None:
        if not beside.keys() >= set(WORD_FACTORS):
            raise CheckpointError(
                f"{folder} has a word table of width {encoder.config.hidden_size}, and the network to fill projects one of width "
                f"{encoder.embeddings.embedding_size}",
                hint="use a folder that `discern export` made of such a network",
            )
        ours |= {name: beside[name].float() for name in WORD_FACTORS}
    embeddings = encoder.embeddings
    if isinstance(embeddings, Disentangled):
        embeddings.difference.weight.copy_(ours.pop(WORDS) - embeddings.shared.word.weight)
    for name, value in ours.items():
        check_shape(name, value.shape, parameters[name], folder)
        parameters[name].copy_(value)


def _beside(folder: Path, mark: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the separate file; empty if there is none."""
    if mark.get("head") != HEAD_NAME or "task" in mark:
        return {}
    with opened(folder, HEAD_NAME) as weights:
        found = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
    check_finite(found, folder / HEAD_NAME)
    return found


def _refuse_other_layout(names: set[str], path: Path) -> None:
    """Raise an error for checkpoints of the code that ModernBERT was trained with, or of flash_attn's BERT."""
    foreign = sorted(name for name in names if ".mixer." in name or ".encoder.layers." in name or ".mlp.fc1." in name)
    if foreign:
        raise CheckpointError(
            f"{path}: '{foreign[0]}' is a name of flash_attn's BERT or of ModernBERT's training code, not of transformers",
            hint="convert the model to transformers' ModernBERT first, with the script that came with it",
        )


def _architecture(network: Network) -> str:
    if network.bilinear is not None or isinstance(network.head, nn.Identity):
        return MODERNBERT_ENCODER_CLASS
    return MODERNBERT_LM_CLASS if isinstance(network.head, MaskedLMHead | CopyMLMHead) else MODERNBERT_TAGGER_CLASS


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def _modernbert(encoder: Encoder) -> ModernBertEncoder:
    if not isinstance(encoder, ModernBertEncoder):
        raise ConfigError(
            f"transformers has no class for {type(encoder).__name__} of encoder '{encoder.config.encoder}'",
            hint="use the run with discern, without an export; or leave out --all-networks, or choose another with --network",
        )
    return encoder
