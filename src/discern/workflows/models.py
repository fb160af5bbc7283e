"""The networks in a folder, whatever kind of folder: a run, an export, or any Hugging Face ELECTRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from discern.data.tokenizer import fingerprint, load_tokenizer, special_tokens, vocab_size
from discern.errors import CheckpointError, ConfigError, DataError
from discern.interop.config_json import read_huggingface_config, read_mark
from discern.interop.families import NETWORK_TYPES, family_in, family_of, name_of
from discern.interop.folder import SETTINGS_NAME
from discern.interop.names import CONFIG_NAME
from discern.interop.tokenizer import read_max_length
from discern.model.embeddings import DisentangledEmbeddings
from discern.model.network import Network
from discern.objectives.base import Objective, Vocabulary
from discern.objectives.config import ObjectiveConfig
from discern.workflows.configuration import read_written_config
from discern.workflows.runs import build_objective, is_finetuned, is_run, load_run
from discern.workflows.settings import PretrainConfig


@dataclass(frozen=True)
class LoadedModel:
    """Networks to use, in evaluation mode, float32, on the CPU.

    Attributes:
        networks: by name, the one that one fine-tunes first.
        tokenizer_path: a file or folder that `load_tokenizer` takes.
        max_length: positions they were trained on, [CLS] and [SEP] included.
        trained_with: fingerprint of the tokenizer that they were trained with; None where nobody knows.
        objective: that they were trained by; None where nobody knows.
        step: of the weights; None where nobody knows.
    """

    networks: Mapping[str, Network]
    tokenizer_path: Path
    max_length: int
    trained_with: str | None
    objective: ObjectiveConfig | None
    step: int | None

    def tokenizer_fingerprints(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """Of the tokenizers that give its ids, the one it was trained with first.

        Args:
            tokenizer: the one at `tokenizer_path`.
        """
        return fingerprints_of(self.trained_with, tokenizer)


@dataclass(frozen=True)
class TrainedObjective:
    """An objective with the weights of a run, and what one must know to measure it.

    Attributes:
        objective: in evaluation mode, float32, on the CPU.
        config: of the run.
        step: of the weights; 0 where nobody knows.
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


def load_model(folder: Path, *, beside: bool = False, warn: Callable[[str], None]) -> LoadedModel:
    """The networks in a folder: all of a run, of another folder the one at its root.

    Args:
        beside: also those that stand in folders of their names within an export, see `networks_beside`.
        warn: told of damaged checkpoints that were passed over.

    Raises:
        DataError: the folder holds neither a run nor a model, or no tokenizer that fits.
        CheckpointError: its weights are missing or damaged, or those of something else than an ELECTRA.
    """
    if is_run(folder):
        run = load_run(folder, warn=warn)
        length = run.config.data.sequence_length
        trained_with = run.record["tokenizer_fingerprint"]
        return LoadedModel(run.objective.networks(), run.tokenizer_path, length, trained_with, run.config.objective, run.step)
    config = folder_config(folder)
    mark = read_mark(config)
    network = family_in(folder).network(folder)
    named = mark.get("networks") or [name_of(network, config["model_type"])]
    networks = {named[0]: network} | (networks_beside(folder) if beside else {})
    check_tokenizer(tokenizer_in(folder), network, folder)
    length = read_max_length(folder, network.encoder.config.max_positions)
    settings = settings_of(folder, mark)
    objective = settings.objective if settings is not None else None
    return LoadedModel(networks, folder, length, mark.get("tokenizer_fingerprint"), objective, mark.get("step"))


def tokenizer_in(folder: Path) -> Tokenizer:
    """The tokenizer of the model in a folder that is no run.

    Raises:
        DataError: there is none, or it is damaged.
    """
    names = ("tokenizer.json", "vocab.txt")
    if not any((folder / name).is_file() for name in names):
        above = folder.resolve().parent
        whole = any((above / name).is_file() for name in names) and (above / CONFIG_NAME).is_file()
        hint = f"it is part of a model that has one: give {above}" if whole else f"put the model's own {names[0]} there"
        raise DataError(f"{folder} has no tokenizer: neither {' nor '.join(names)}", hint=hint)
    return load_tokenizer(folder)


def check_tokenizer(tokenizer: Tokenizer, network: Network, folder: Path) -> None:
    """Make sure that every id has a row in the word table.

    Raises:
        DataError: it has not, so the tokenizer is another model's.
    """
    check_rows(tokenizer, network.encoder.embeddings.vocab_size, folder)


def check_rows(tokenizer: Tokenizer, rows: int, folder: Path) -> None:
    """As `check_tokenizer`, given the number of rows of the word table."""
    entries = vocab_size(tokenizer)
    if entries > rows:
        raise DataError(
            f"{folder}: the tokenizer has {entries:,} entries, the embeddings {rows:,} rows",
            hint="put the tokenizer beside the model that it was trained with: tokenizer.json or vocab.txt of the same download",
        )


def networks_beside(folder: Path) -> dict[str, Network]:
    """The further networks of a folder that is no run: those that an export or an import says it has, each in the folder of
    its name; of somebody else's a generator in such a folder.

    Raises:
        CheckpointError: the weights of one are missing or damaged.
    """
    named = read_mark(folder_config(folder)).get("networks")
    if named is None:
        named = ["", "generator"] if (folder / "generator" / CONFIG_NAME).is_file() else [""]
    for name in named[1:]:
        if not (folder / name).is_dir():
            raise CheckpointError(
                f"{folder} lacks the folder '{name}', which its {CONFIG_NAME} names",
                hint=f"a copy of an export needs every file of it; discern export {folder} --out DIR makes one of the "
                f"{named[0]} alone",
            )
    return {name: family_in(folder / name).network(folder / name) for name in named[1:]}


def settings_of(folder: Path, mark: Mapping[str, Any]) -> PretrainConfig | None:
    """What the networks of an export were trained by; None of an import, whose settings are what its shapes tell.

    Args:
        mark: what config.json says of us, see `read_mark`.

    Raises:
        ConfigError: the settings are damaged.
    """
    settings = folder / SETTINGS_NAME
    return read_written_config(settings) if "objective" in mark and settings.is_file() else None


def fingerprints_of(trained_with: str | None, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Of the tokenizers that give a model's ids, the one it was trained with first.

    An export declares special tokens that the original may have as ordinary entries; the ids are the same.
    """
    return tuple(dict.fromkeys(found for found in (trained_with, fingerprint(tokenizer)) if found is not None))


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
        judges = not mark and "discriminator" in load_model(folder, warn=warn).networks
        missing = "the generator and the settings" if judges else "the settings"
        raise ConfigError(
            f"{folder} is a model without {missing} it was trained with ({SETTINGS_NAME}), so there is nothing to measure it by",
            hint="give a run, or what `discern export RUN --out DIR --all-networks` writes",
        )
    config = read_written_config(folder / SETTINGS_NAME)
    tokenizer = tokenizer_in(folder)
    objective = build_objective(config, Vocabulary(model["vocab_size"], special_tokens(tokenizer)))
    _fill(objective, folder, mark["networks"])
    fingerprints = fingerprints_of(mark["tokenizer_fingerprint"], tokenizer)
    return TrainedObjective(objective.eval(), config, mark.get("step", 0), folder, fingerprints, None)


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


def folder_config(folder: Path, families: Sequence[str] = NETWORK_TYPES) -> dict[str, Any]:
    """config.json of a folder that is no run.

    Args:
        families: values of `model_type` to accept.

    Raises:
        DataError: there is none, or the folder holds a fine-tuning.
        CheckpointError: it cannot be read, or is that of another family.
    """
    if is_finetuned(folder):
        raise DataError(
            f"{folder} was fine-tuned for a task, and says the task's answers",
            hint=f"discern predict {folder} INPUT, or give the model that it was made from",
        )
    if not (folder / CONFIG_NAME).is_file():
        state = "does not exist" if not folder.exists() else f"holds neither a run nor a {CONFIG_NAME}"
        raise DataError(f"{folder} {state}", hint="give the folder of a run, or what `discern export RUN --out DIR` wrote")
    return read_huggingface_config(folder, families)
