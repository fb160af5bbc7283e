"""A generator that begins as the masked language model of an earlier run or of an export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.parameter import Parameter

from discern.data.tokenizer import load_tokenizer
from discern.errors import ConfigError, DataError
from discern.model.heads import LanguageHead
from discern.model.network import Network
from discern.objectives.base import Objective
from discern.workflows.models import LoadedModel, load_model


@torch.no_grad()
def start_generator(objective: Objective, folder: Path, tokenizer_fingerprint: str, warn: Callable[[str], None]) -> None:
    """Fill the objective's generator, with the embeddings that it reads, from the masked language model in a folder.

    Args:
        folder: a run, an export, or a Hugging Face ELECTRA; of a run the generator, or the encoder of objective `mlm`.
        tokenizer_fingerprint: of the data set.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        ConfigError: there is no masked language model, or it has other sizes.
        DataError: the folder holds no model, or one of another tokenizer.
        CheckpointError: its weights are missing or damaged.
    """
    loaded = load_model(folder, beside=True, warn=warn)
    _check_tokenizer(folder, loaded, tokenizer_fingerprint)
    source, target = _masked_language_model(folder, loaded), objective.networks()["generator"]
    values, own = _parameters(source), _parameters(target)
    differing = sorted(
        name
        for name in values.keys() | own.keys()
        if name not in values or name not in own or values[name].shape != own[name].shape
    )
    if differing:
        name = differing[0]
        there, here = (str(tuple(each[name].shape)) if name in each else "absent" for each in (values, own))
        raise ConfigError(
            f"the generator of {folder} ({_sizes(source)}) does not fit this one ({_sizes(target)}): "
            f"{len(differing)} weights differ, the first is {name}, {there} there and {here} here",
            hint="set [model] and objective.generator, generator_size, generator_depth and tying as they were there",
        )
    for name, parameter in own.items():
        parameter.copy_(values[name])


def _check_tokenizer(folder: Path, loaded: LoadedModel, wanted: str) -> None:
    """Raise a DataError where the ids mean something else there."""
    found = loaded.tokenizer_fingerprints(load_tokenizer(loaded.tokenizer_path))
    if wanted not in found:
        raise DataError(
            f"the generator of {folder} was trained with another tokenizer ({found[0][:12]}) than the data set's ({wanted[:12]})",
            hint=f"prepare the data again: discern prepare TEXT --out DATA --tokenizer {loaded.tokenizer_path}",
        )


def _masked_language_model(folder: Path, loaded: LoadedModel) -> Network:
    ordered = sorted(loaded.networks.items(), key=lambda item: item[0] != "generator")
    for _, network in ordered:
        if isinstance(network.head, LanguageHead):
            return network
    raise ConfigError(
        f"{folder} holds no masked language model: its {' and '.join(loaded.networks)} predicts no words",
        hint="give a run of objective 'rtd' or 'mlm', or what `discern export RUN --out DIR --network generator` writes",
    )


def _parameters(network: Network) -> dict[str, Parameter]:
    parts = {"encoder": network.encoder, "head": network.head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.named_parameters()}


def _sizes(network: Network) -> str:
    config = network.encoder.config
    return f"{config.num_layers} layers of {config.hidden_size}, embeddings of {network.encoder.embeddings.embedding_size}"
