"""An objective's networks filled with those of a model to go on from, whatever else is fresh or has grown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.interop.names import named_parameters
from discern.model.embeddings import DisentangledEmbeddings
from discern.model.heads import MaskedLMHead
from discern.model.network import Network
from discern.objectives.base import Objective
from discern.workflows.start import Start

GENERATOR = "generator"
# The parameters that have a row or a number for each token: word tables, and the bias of what predicts words.
_OF_VOCABULARY = re.compile(r"(\.|^)(word|difference|word_embeddings)\.weight$|(^|_)head(\.words)?\.bias$")


@dataclass(frozen=True)
class Filled:
    """What came of it.

    Attributes:
        fresh: what keeps the weights of step 0, in words: "the generator", "the head of the discriminator".
        added_tokens: how many tokens the vocabulary has beyond the model's.
    """

    fresh: tuple[str, ...]
    added_tokens: int


def lacks_generator(objective: Objective, start: Start) -> bool:
    """Whether the objective has a generator, and the model nothing that it could begin as."""
    networks = objective.networks()
    return GENERATOR in networks and _sources(networks, start)[GENERATOR] is None


@torch.no_grad()
def fill(objective: Objective, start: Start, pieces: Sequence[Sequence[int]]) -> Filled:
    """Give an initialised objective the model's weights; what the model lacks keeps those of step 0.

    An added token begins as the mean of its pieces, in the word table and in the bias of the words.

    Args:
        pieces: of each added token, ids of the model.

    Raises:
        ConfigError: a network of the model has other sizes, or shares less than the objective's.
    """
    if start.objective is not None and (whole := _resized_all(objective, start, pieces)) is not None:
        for name, parameter in objective.named_parameters():
            parameter.copy_(whole[name])
        return Filled((), len(pieces))
    networks = objective.networks()
    sources = _sources(networks, start)
    fresh: list[str] = []
    wanted: dict[str, dict[str, Tensor]] = {}
    # Those that read another's embeddings last.
    for name in sorted(networks, key=lambda name: isinstance(networks[name].encoder.embeddings, DisentangledEmbeddings)):
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


def _resized_all(objective: Objective, start: Start, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor] | None:
    """All parameters of a run for an objective of the same parts; None where it is built otherwise."""
    assert start.objective is not None
    own, theirs = dict(objective.named_parameters()), dict(start.objective.named_parameters())
    if own.keys() != theirs.keys():
        return None
    values = {name: resized(name, theirs[name], start.entries, pieces) for name in own}
    return values if all(values[name].shape == own[name].shape for name in own) else None


def _sources(networks: Mapping[str, Network], start: Start) -> dict[str, Network | None]:
    """The model's network for each of the objective's: that of its name; for the main one otherwise the model's main one."""
    found: dict[str, Network | None] = {}
    main = next(iter(networks))
    for name, network in networks.items():
        source = start.networks.get(name)
        if source is None and name == main:
            source = start.main
        if source is None and name == GENERATOR and _could_generate(start.main, network):
            source = start.main
        if source is not None and type(source.encoder) is not type(network.encoder):
            source = None
        found[name] = source
    return found


def _could_generate(source: Network, generator: Network) -> bool:
    """Whether a masked language model is one of a generator's sizes."""
    if not isinstance(source.head, MaskedLMHead) or not isinstance(generator.head, MaskedLMHead):
        return False
    return _sizes(source) == _sizes(generator)


def _values(name: str, network: Network, source: Network, start: Start, pieces: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The source's values for the parameters of a network, by our names; a head of another kind is left out.

    Raises:
        ConfigError: the sizes differ, or the head would lose a term.
    """
    if source.bilinear is not None and network.bilinear is None and type(source.head) is type(network.head):
        raise ConfigError(
            f"the {name} of {start.folder} has a bilinear term in its head, which the objective that is set has not: without "
            "it the head says something else",
            hint="set objective.discriminator_head=bilinear",
        )
    own, theirs = named_parameters(network), named_parameters(source)
    kept = ("encoder.", "head.", "bilinear.") if type(source.head) is type(network.head) else ("encoder.",)
    values = {key: resized(key, theirs[key], start.entries, pieces) for key in own if key.startswith(kept) and key in theirs}
    lost = [key for key in own if key.startswith("encoder.") and key not in values]
    differing = [*lost, *(key for key, value in values.items() if value.shape != own[key].shape)]
    if differing:
        key = differing[0]
        there = str(tuple(theirs[key].shape)) if key in theirs else "absent"
        raise ConfigError(
            f"the {name} of {start.folder} ({_sizes_text(source)}) does not fit the one that is set ({_sizes_text(network)}): "
            f"{len(differing)} weights differ, the first is {key}, {there} there and {tuple(own[key].shape)} here",
            hint="leave out what sets [model], objective.generator_size, generator_depth and tying: they come from the model",
        )
    return values


def resized(name: str, value: Tensor, entries: int, pieces: Sequence[Sequence[int]]) -> Tensor:
    """A parameter of the model for the vocabulary as it is now: rows of added tokens are the means of their pieces' rows.

    One that has no row for each token comes back as it is.

    Args:
        name: of the parameter.
        value: of the model; a row for each token of its vocabulary, or more.
        entries: of the model's tokenizer.
        pieces: of each added token, ids of the model.
    """
    if not _OF_VOCABULARY.search(name):
        return value
    kept = value[:entries]
    return torch.cat([kept, *(kept[list(ids)].mean(0, keepdim=True) for ids in pieces)])


def _copy(network: Network, values: Mapping[str, Tensor], *, lone: bool) -> None:
    """Set a network's parameters, named as `named_parameters` has them.

    Args:
        lone: the generator is fresh, so that what it shares is the discriminator's to decide.
    """
    embeddings = network.encoder.embeddings
    own = named_parameters(network)
    if isinstance(embeddings, DisentangledEmbeddings):
        prefix = "encoder.embeddings."
        words = values[f"{prefix}word.weight"]
        if lone:
            for key, parameter in embeddings.shared.named_parameters():
                parameter.copy_(values[prefix + key])
        embeddings.difference.weight.copy_(words - embeddings.shared.word.weight)
        embeddings.norm.weight.copy_(values[f"{prefix}norm.weight"])
        embeddings.norm.bias.copy_(values[f"{prefix}norm.bias"])
        values = {key: value for key, value in values.items() if not key.startswith(prefix)}
    for key, value in values.items():
        own[key].copy_(value)


def _check_kept(networks: Mapping[str, Network], wanted: Mapping[str, Mapping[str, Tensor]], start: Start) -> None:
    """Raise where one network's weights were overwritten by another's that shares them."""
    for name, values in wanted.items():
        own = named_parameters(networks[name])
        for key, value in values.items():
            if not torch.allclose(own[key], value, rtol=1e-5, atol=1e-6):
                raise ConfigError(
                    f"the networks of {start.folder} each have '{key.partition('.')[2]}' of their own, and with the "
                    f"objective.tying that is set they would share it: the {name} would lose its own",
                    hint="set objective.tying=none, as those networks are",
                )


def _sizes(network: Network) -> tuple[int, ...]:
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
