"""The networks in a folder, whatever kind of folder: a run, an export, or any Hugging Face ELECTRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from discern.data.tokenizer import fingerprint, load_tokenizer, special_tokens
from discern.errors import ConfigError, DataError
from discern.interop.families import PRETRAINED_TYPES, family_in, family_of
from discern.interop.folder import SETTINGS_NAME
from discern.interop.huggingface import read_huggingface_config, read_mark
from discern.interop.names import CONFIG_NAME
from discern.interop.tokenizer import read_max_length
from discern.model.embeddings import DisentangledEmbeddings
from discern.model.network import Network
from discern.objectives.base import Objective, Vocabulary
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.runs import build_objective, is_run, load_run
from discern.workflows.settings import PretrainConfig


@dataclass(frozen=True)
class LoadedModel:
    """Networks to use, in evaluation mode, float32, on the CPU.

    Attributes:
        networks: by name, the one that one fine-tunes first; all of a run, of another folder the one at its root.
        tokenizer_path: a file or folder that `load_tokenizer` takes.
        max_length: positions they were trained on, [CLS] and [SEP] included.
    """

    networks: Mapping[str, Network]
    tokenizer_path: Path
    max_length: int


@dataclass(frozen=True)
class TrainedObjective:
    """An objective with the weights of a run, and what one must know to measure it.

    Attributes:
        objective: in evaluation mode, float32, on the CPU.
        config: of the run.
        step: of the weights.
        tokenizer_path: a file or folder that `load_tokenizer` takes.
        tokenizer_fingerprints: of the tokenizers that give its ids; the first is the one it was trained with.
        data: the data set that it was trained on, where that is known.
    """

    objective: Objective
    config: PretrainConfig
    step: int
    tokenizer_path: Path
    tokenizer_fingerprints: tuple[str, ...]
    data: Path | None


def load_model(folder: Path, *, warn: Callable[[str], None]) -> LoadedModel:
    """The networks in a folder.

    Args:
        warn: told of damaged checkpoints that were passed over.

    Raises:
        DataError: the folder holds neither a run nor a model.
        CheckpointError: its weights are missing or damaged, or those of something else than an ELECTRA.
    """
    if is_run(folder):
        run = load_run(folder, warn=warn)
        length = min(run.config.data.sequence_length, run.config.model.max_positions)
        return LoadedModel(run.objective.networks(), run.tokenizer_path, length)
    mark = read_mark(folder_config(folder))
    family = family_in(folder)
    named = mark.get("networks") or [family.network_name(folder)]
    network = family.network(folder)
    return LoadedModel({named[0]: network}, folder, read_max_length(folder, network.encoder.config.max_positions))


def load_objective(folder: Path, *, warn: Callable[[str], None]) -> TrainedObjective:
    """The objective of a run, or of an export that holds all its networks.

    Args:
        warn: told of damaged checkpoints that were passed over.

    Raises:
        ConfigError: the folder holds a model, but not all that its objective consists of.
        DataError: it holds neither a run nor a model.
        CheckpointError: its weights are missing or damaged.
    """
    if is_run(folder):
        run = load_run(folder, warn=warn)
        trained_with, data = run.record["tokenizer_fingerprint"], Path(run.record["data"])
        return TrainedObjective(run.objective, run.config, run.step, run.tokenizer_path, (trained_with,), data)
    model = folder_config(folder)
    mark = read_mark(model)
    if not mark or not (folder / SETTINGS_NAME).is_file():
        judges = not mark and family_in(folder).network_name(folder) == "discriminator"
        missing = "the generator and the settings" if judges else "the settings"
        raise ConfigError(
            f"{folder} is a model without {missing} it was trained with ({SETTINGS_NAME}), so there is nothing to measure it by",
            hint="give a run, or what `discern export RUN --out DIR --all-networks` writes",
        )
    config = load_pretrain_config(folder / SETTINGS_NAME, None).config
    tokenizer = load_tokenizer(folder)
    objective = build_objective(config, Vocabulary(model["vocab_size"], special_tokens(tokenizer)))
    _fill(objective, folder, mark["networks"])
    # The export declares special tokens that the original may have as ordinary entries; the ids are the same.
    fingerprints = (mark["tokenizer_fingerprint"], fingerprint(tokenizer))
    return TrainedObjective(objective.eval(), config, mark["step"], folder, fingerprints, None)


def _fill(objective: Objective, folder: Path, present: list[str]) -> None:
    """Load each of the objective's networks from the root of an export or from the folder of its name."""
    networks = objective.networks()
    missing = [name for name in networks if name not in present]
    if missing:
        raise ConfigError(
            f"{folder} holds the {present[0]} alone, and measuring it needs the {' and the '.join(missing)} too",
            hint="export the run again: discern export RUN --out DIR --all-networks",
        )
    held = {id(tensor) for network in networks.values() for tensor in _tensors(network)}
    lost = [name for name, tensor in [*objective.named_parameters(), *objective.named_buffers()] if id(tensor) not in held]
    if lost:
        raise ConfigError(
            f"{folder} is an export, and measuring this objective needs what no export holds: {', '.join(lost[:3])}",
            hint="give the run itself: discern evaluate RUN",
        )
    # Those that read another's embeddings last.
    for name in sorted(networks, key=lambda name: isinstance(networks[name].encoder.embeddings, DisentangledEmbeddings)):
        family_of(networks[name].encoder).fill(networks[name], folder if name == present[0] else folder / name)


def _tensors(network: Network) -> Iterator[Tensor]:
    """Parameters and buffers of what an export holds."""
    for part in (network.encoder, network.head, network.bilinear):
        if part is not None:
            yield from part.parameters()
            yield from part.buffers()


def folder_config(folder: Path, families: Sequence[str] = PRETRAINED_TYPES) -> dict[str, Any]:
    """config.json of a folder that is no run.

    Args:
        families: values of `model_type` to accept.

    Raises:
        DataError: there is none.
        CheckpointError: it cannot be read, or is that of another family.
    """
    if not (folder / CONFIG_NAME).is_file():
        state = "does not exist" if not folder.exists() else f"holds neither a run nor a {CONFIG_NAME}"
        raise DataError(f"{folder} {state}", hint="give the folder of a run, or what `discern export RUN --out DIR` wrote")
    return read_huggingface_config(folder, families)
