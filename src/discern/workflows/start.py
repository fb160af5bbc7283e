"""Weights to go on from: those of a run, of an export, or of a Hugging Face ELECTRA, BERT or XLNet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from discern.data.extension import pieces_of_added
from discern.data.shards import TokenData
from discern.data.tokenizer import load_tokenizer, vocab_size
from discern.errors import ConfigError, DataError
from discern.interop.config_json import read_mark
from discern.interop.families import ENCODER_TYPES, family_in, name_of
from discern.model.network import Network
from discern.objectives.base import Objective
from discern.workflows.models import check_tokenizer, fingerprints_of, folder_config, networks_beside, settings_of, tokenizer_in
from discern.workflows.runs import is_run, load_run
from discern.workflows.settings import PretrainConfig


@dataclass(frozen=True)
class Start:
    """What is at hand to go on from, float32, on the CPU.

    Attributes:
        folder: where it is from.
        description: what it is, in words.
        networks: by name, the main one first; one without a pre-training head has an `nn.Identity` there.
        objective: of a run, with its weights; None of anything else.
        config: of a run, or of an export that holds its settings; None of somebody else's model.
        step: of the weights; None where nobody knows.
        tokenizer_path: a file or folder that `load_tokenizer` takes.
        tokenizer_fingerprints: of the tokenizers that give its ids.
        entries: of that tokenizer; the word table may have more rows, which no id ever names.
        weights: sha256 over all weights.
    """

    folder: Path
    description: str
    networks: Mapping[str, Network]
    objective: Objective | None
    config: PretrainConfig | None
    step: int | None
    tokenizer_path: Path
    tokenizer_fingerprints: tuple[str, ...]
    entries: int
    weights: str

    @property
    def main(self) -> Network:
        """The network that decides on the sizes."""
        return next(iter(self.networks.values()))

    def mark(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {"model": str(self.folder.resolve()), "description": self.description, "weights": self.weights}

    def added_pieces(self, data: TokenData) -> list[list[int]]:
        """What each token that a data set's tokenizer has beyond the model's consists of, in ids of the model.

        Raises:
            DataError: its tokenizer is neither the model's nor that one with tokens added behind.
        """
        if data.tokenizer_fingerprint in self.tokenizer_fingerprints:
            return []
        found = pieces_of_added(load_tokenizer(self.tokenizer_path), data.tokenizer())
        if found is None:
            raise DataError(
                f"{data.folder} was made with another tokenizer ({data.tokenizer_fingerprint[:12]}) than {self.folder} "
                f"({self.tokenizer_fingerprints[0][:12]}): its ids mean other words",
                hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {self.tokenizer_path}",
            )
        return found


def read_start(folder: Path, *, warn: Callable[[str], None]) -> Start:
    """The networks in a folder, with all that is known of them.

    Args:
        folder: a run, an export, or a Hugging Face ELECTRA, BERT or XLNet with any head or none.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        DataError: the folder holds neither a run nor a model, or no tokenizer, or one with more entries than the model.
        CheckpointError: weights are missing or damaged, or those of something else than an ELECTRA, BERT or XLNet.
        ConfigError: it is a two-tower generator alone, or the settings of an export are damaged.
    """
    if is_run(folder):
        run = load_run(folder, warn=warn)
        return Start(
            folder=folder,
            description=f"run {folder} at step {run.step:,}",
            networks=run.objective.networks(),
            objective=run.objective,
            config=run.config,
            step=run.step,
            tokenizer_path=run.tokenizer_path,
            tokenizer_fingerprints=(run.record["tokenizer_fingerprint"],),
            entries=run.vocabulary.size,
            weights=_digest({"objective": run.objective}),
        )
    config = folder_config(folder)
    if config["model_type"] not in ENCODER_TYPES:
        raise ConfigError(
            f"{folder} has only the two towers, and such training can only be continued from a run",
            hint="give the run itself, or an ELECTRA, BERT or XLNet folder",
        )
    mark = read_mark(config)
    networks = _networks(folder, config, mark)
    tokenizer = tokenizer_in(folder)
    check_tokenizer(tokenizer, next(iter(networks.values())), folder)
    return Start(
        folder=folder,
        description=_describe(folder, config, mark),
        networks=networks,
        objective=None,
        config=settings_of(folder, mark),
        step=mark.get("step"),
        tokenizer_path=folder,
        tokenizer_fingerprints=fingerprints_of(mark.get("tokenizer_fingerprint"), tokenizer),
        entries=vocab_size(tokenizer),
        weights=_digest({name: nn.ModuleList(network.parts()) for name, network in networks.items()}),
    )


def _networks(folder: Path, config: Mapping[str, Any], mark: Mapping[str, Any]) -> dict[str, Network]:
    """All networks of a folder, the one at its root first."""
    first = next(iter(mark.get("networks") or []), None)
    family = family_in(folder)
    # Somebody else's model may have any head, and its weights any form.
    root = family.network(folder) if "objective" in mark else family.with_head(folder)
    return {first or name_of(root, config["model_type"]): root} | networks_beside(folder)


def _describe(folder: Path, config: Mapping[str, Any], mark: Mapping[str, Any]) -> str:
    if "objective" not in mark and mark:
        return f"import {folder}"
    step = mark.get("step")
    return f"Hugging Face {config['model_type']} folder {folder}" if step is None else f"export {folder} of step {step:,}"


def _digest(modules: Mapping[str, nn.Module]) -> str:
    """sha256 over names, shapes and values of all parameters, which are on the CPU."""
    digest = hashlib.sha256()
    for name, module in modules.items():
        for key, value in module.named_parameters():
            digest.update(f"{name}.{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().contiguous().numpy().data)
    return digest.hexdigest()
