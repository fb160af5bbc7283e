"""Warm start: the weights of a run that continues from a model.

Weights are used wherever the model has them; the rest keeps its initial weights. A generator alone may also start from the
weights of a masked language model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.opening import open_model
from discern.data.dataset.shards import TokenData
from discern.data.tokenizer.extension import pieces_of_added
from discern.errors import ConfigError, DataError
from discern.interop.names import named_parameters
from discern.models.base import Network
from discern.models.embeddings import Disentangled, DisentangledEmbeddings
from discern.models.heads import LanguageHead, MaskedLMHead
from discern.objectives.base import Objective

GENERATOR = "generator"

# Parameters with one row or number per token: word tables, and the bias of heads that predict words.
_OF_VOCABULARY = re.compile(r"(\.|^)(word|difference|word_embeddings)\.weight$|(^|generator_)head(\.words)?\.bias$")
# Settings that the shapes of the weights show.
_SHOWN_BY_SHAPES = frozenset({"embedding_size", "max_positions"})


@dataclass(frozen=True)
class Filled:
    """How the weights of a model were used.

    Attributes:
        fresh: parts that keep the weights of step 0, in words: "the generator", "the head of the discriminator".
        added_tokens: number of tokens that the vocabulary has in addition to the model's.
    """

    fresh: tuple[str, ...]
    added_tokens: int


def main_network(start: ModelFolder) -> Network:
    """The first network of the model, which determines the sizes."""
    return next(iter(start.networks_to_train.values()))


def added_pieces(start: ModelFolder, data: TokenData) -> list[list[int]]:
    """Tokens that only the data set's tokenizer has, not the model's, each as the ids of its pieces in the model.

    Raises:
        DataError: its tokenizer is neither the model's nor an extension of it.
    """
    if data.tokenizer_fingerprint in start.tokenizer_fingerprints:
        return []
    found = pieces_of_added(start.tokenizer, data.tokenizer())
    if found is None:
        raise DataError(
            f"{data.folder} was made with a different tokenizer ({data.tokenizer_fingerprint[:12]}) from that of {start.folder} "
            f"({start.tokenizer_fingerprints[0][:12]}): the same ids stand for other tokens",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {start.tokenizer_path}",
        )
    return found


def lacks_generator(objective: Objective, start: ModelFolder) -> bool:
    """Whether the objective has a generator for which the model has no weights."""
    networks = objective.networks()
    return GENERATOR in networks and _sources(networks, start)[GENERATOR] is None


@torch.no_grad()
def fill(objective: Objective, start: ModelFolder, pieces: Sequence[Sequence[int]]) -> Filled:
    """Copy the weights of a model into an initialized objective. Parts that the model lacks keep the weights of step 0.

    The embedding and output bias of an added token are initialized with the means over its pieces.

    Args:
        pieces: for each added token, the ids of its pieces in the model.

    Raises:
        ConfigError: a network of the model has other sizes, or shares fewer weights than the objective's.
    """
    if start.whole_objective is not None and (whole := _resized_all(objective, start, pieces)) is not None:
        for name, parameter in objective.named_parameters():
            parameter.copy_(whole[name])
        return Filled((), len(pieces))
    networks = objective.networks()
    sources = _sources(networks, start)
    fresh: list[str] = []
    wanted: dict[str, dict[str, Tensor]] = {}
    # Networks that read the embeddings of another come last.
    for name in sorted(networks, key=lambda name: isinstance(networks[name].encoder.embeddings, Disentangled)):
        source = sources[name]
        if source is None:
            fresh.append(f"the {name}")
            continue
        values = _values(name, networks[name], source, start, pieces)
        _copy(networks[name], values, lone=sources.get(GENERATOR) is None)
        wanted[name] = values
        if not any(key.startswith("head.") for key in values):
            fresh.append(f"the head of the {name}")
        elif networks[name].bilinear is not None and source.bilinear is None:
            fresh.append(f"the bilinear term of the {name}")
    _check_kept(networks, wanted, start)
    return Filled(tuple(fresh), len(pieces))


def _resized_all(objective: Objective, start: ModelFolder, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor] | None:
    """All parameters of a run, for an objective with the same parameters; None if they differ."""
    whole = start.whole_objective
    assert whole is not None
    own, theirs = dict(objective.named_parameters()), dict(whole.named_parameters())
    if own.keys() != theirs.keys():
        return None
    values = {name: resized(name, theirs[name], start.num_entries, pieces) for name in own}
    return values if all(values[name].shape == own[name].shape for name in own) else None


def _sources(networks: Mapping[str, Network], start: ModelFolder) -> dict[str, Network | None]:
    """The network of the model for each network of the objective: by name, or else the main one for the main one."""
    found: dict[str, Network | None] = {}
    main = next(iter(networks))
    for name, network in networks.items():
        source = start.networks_to_train.get(name)
        if source is None and name == main:
            source = main_network(start)
        if source is None and name == GENERATOR and _could_generate(main_network(start), network):
            source = main_network(start)
        if source is not None and type(source.encoder) is not type(network.encoder):
            source = None
        found[name] = source
    return found


def _could_generate(source: Network, generator: Network) -> bool:
    """Whether a masked language model has the sizes of the generator."""
    if not isinstance(source.head, MaskedLMHead) or not isinstance(generator.head, MaskedLMHead):
        return False
    return _generator_sizes(source) == _generator_sizes(generator)


def _values(
    name: str, network: Network, source: Network, start: ModelFolder, pieces: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Values from the source for the parameters of a network, by name; a head of another kind is left out.

    Raises:
        ConfigError: the sizes differ, or the head would lose a term.
    """
    if source.bilinear is not None and network.bilinear is None and type(source.head) is type(network.head):
        raise ConfigError(
            f"the {name} of {start.folder} has a bilinear term in its head, which the configured objective does not have: "
            "without it, the head would compute something different",
            hint="set objective.discriminator_head=bilinear",
        )
    own, theirs = named_parameters(network), named_parameters(source)
    kept = ("encoder.", "head.", "bilinear.") if type(source.head) is type(network.head) else ("encoder.",)
    values = {key: resized(key, theirs[key], start.num_entries, pieces) for key in own if key.startswith(kept) and key in theirs}
    lost = [key for key in own if key.startswith("encoder.") and key not in values]
    differing = [*lost, *(key for key, value in values.items() if value.shape != own[key].shape)]
    if differing:
        key = differing[0]
        there = str(tuple(theirs[key].shape)) if key in theirs else "absent"
        raise ConfigError(
            f"the {name} of {start.folder} ({_sizes_text(source)}) does not fit the configured one ({_sizes_text(network)}): "
            f"{len(differing)} weights differ, the first is {key}, of shape {there} in the model and {tuple(own[key].shape)} "
            f"here",
            hint="leave out the settings of [model], and objective.generator_size, generator_depth and tying: the model "
            "determines them",
        )
    return values


def resized(name: str, value: Tensor, entries: int, pieces: Sequence[Sequence[int]]) -> Tensor:
    """A parameter of the model resized to the present vocabulary; the row of an added token is the mean of its pieces' rows.

    Parameters without one row per token are returned unchanged.

    Args:
        name: name of the parameter.
        value: its value in the model, with at least one row per token of the model's vocabulary.
        entries: number of entries of the model's tokenizer.
        pieces: for each added token, the ids of its pieces in the model.
    """
    if not _OF_VOCABULARY.search(name):
        return value
    kept = value[:entries]
    return torch.cat([kept, *(kept[list(ids)].mean(0, keepdim=True) for ids in pieces)])


def _copy(network: Network, values: Mapping[str, Tensor], *, lone: bool) -> None:
    """Set the parameters of a network, by the names of `named_parameters`.

    Args:
        lone: the generator is fresh, so the shared weights are those of the discriminator.
    """
    embeddings = network.encoder.embeddings
    own = named_parameters(network)
    if isinstance(embeddings, Disentangled):
        prefix = "encoder.embeddings."
        words = values[f"{prefix}word.weight"]
        if lone:
            for key, parameter in embeddings.shared.named_parameters():
                parameter.copy_(values[prefix + key])
        embeddings.difference.weight.copy_(words - embeddings.shared.word.weight)
        if isinstance(embeddings, DisentangledEmbeddings):
            embeddings.norm.weight.copy_(values[f"{prefix}norm.weight"])
            embeddings.norm.bias.copy_(values[f"{prefix}norm.bias"])
        values = {key: value for key, value in values.items() if not key.startswith(prefix)}
    for key, value in values.items():
        own[key].copy_(value)


def _check_kept(networks: Mapping[str, Network], wanted: Mapping[str, Mapping[str, Tensor]], start: ModelFolder) -> None:
    """Raise an error if the weights of a network were overwritten by those of another that shares them."""
    for name, values in wanted.items():
        own = named_parameters(networks[name])
        for key, value in values.items():
            if not torch.allclose(own[key], value, rtol=1e-5, atol=1e-6):
                raise ConfigError(
                    f"the networks of {start.folder} each have '{key.partition('.')[2]}' of their own, and with the "
                    f"configured objective.tying they would share it: the {name} would lose its own",
                    hint="set objective.tying=none, as in those networks",
                )


def _generator_sizes(network: Network) -> tuple[int, ...]:
    config, embeddings = network.encoder.config, network.encoder.embeddings
    return (
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.feedforward_size,
        config.max_positions,
        config.num_token_types,
        embeddings.embedding_size,
    )


def _sizes_text(network: Network) -> str:
    config = network.encoder.config
    return f"{config.num_layers} layers of {config.hidden_size}, embeddings of {network.encoder.embeddings.embedding_size}"


@torch.no_grad()
def start_generator(objective: Objective, folder: Path, tokenizer_fingerprint: str, warn: Callable[[str], None]) -> None:
    """Copy the masked language model of a folder into the objective's generator, including the embeddings that it reads.

    Args:
        folder: a run, an export or a Hugging Face ELECTRA. From a run, the generator or the encoder of objective `mlm` is used.
        tokenizer_fingerprint: fingerprint of the data set's tokenizer.
        warn: called for each damaged checkpoint that was skipped.

    Raises:
        ConfigError: the folder has no masked language model, or one with other sizes.
        DataError: the folder holds no model, or one with another tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    loaded = open_model(folder, warn=warn)
    _check_generator_tokenizer(folder, loaded, tokenizer_fingerprint)
    source, target = _masked_language_model(folder, loaded), objective.networks()["generator"]
    values, own = _by_part(source), _by_part(target)
    differing = sorted(
        name
        for name in values.keys() | own.keys()
        if name not in values or name not in own or values[name].shape != own[name].shape
    )
    if differing:
        name = differing[0]
        there, here = (str(tuple(each[name].shape)) if name in each else "absent" for each in (values, own))
        raise ConfigError(
            f"the generator of {folder} ({_sizes_text(source)}) does not fit this one ({_sizes_text(target)}): "
            f"{len(differing)} weights differ, the first is {name}, of shape {there} in the model and {here} here",
            hint="set [model] and objective.generator, generator_size, generator_depth and tying to the values of that model",
        )
    theirs, ours = source.encoder.config.fixed(), target.encoder.config.fixed()
    unequal = [key for key in theirs if key not in _SHOWN_BY_SHAPES and theirs[key] != ours.get(key)]
    if unequal:
        settings = ", ".join(f"{key} {theirs[key]} there and {ours.get(key)} here" for key in unequal)
        raise ConfigError(
            f"the generator of {folder} has weights of the same shapes but computes something else: {settings}",
            hint=f"set [model] and objective.generator_size so that {', '.join(unequal)} are those of that model",
        )
    for name, parameter in own.items():
        parameter.copy_(values[name])


def _check_generator_tokenizer(folder: Path, loaded: ModelFolder, wanted: str) -> None:
    """Raise a DataError if the model was trained with another tokenizer."""
    found = loaded.tokenizer_fingerprints
    if wanted not in found:
        raise DataError(
            f"the generator of {folder} was trained with a different tokenizer ({found[0][:12]}) from that of the data set "
            f"({wanted[:12]})",
            hint=f"prepare the data again: discern prepare TEXT --out DATA --tokenizer {loaded.tokenizer_path}",
        )


def _masked_language_model(folder: Path, loaded: ModelFolder) -> Network:
    ordered = sorted(loaded.networks().items(), key=lambda item: item[0] != "generator")
    for _, network in ordered:
        if isinstance(network.head, LanguageHead):
            return network
    raise ConfigError(
        f"{folder} has no masked language model: its {' and '.join(loaded.networks())} cannot predict words",
        hint="give a run of objective 'rtd' or 'mlm', or what `discern export RUN --out DIR --network generator` writes",
    )


def _by_part(network: Network) -> dict[str, Parameter]:
    """Parameters of encoder and head under the names of the modules, shared ones included."""
    parts = {"encoder": network.encoder, "head": network.head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.named_parameters()}
