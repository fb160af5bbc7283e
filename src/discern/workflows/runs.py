"""A run's folder: what stands in it, and loading the networks of one."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy
import tokenizers
import torch
from pydantic import Field, model_validator

from discern import __version__, kernels
from discern.corruption import MASKINGS_OF_WORDS
from discern.data.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.objectives.config import PositionsConfig
from discern.records import Record, read_text, understood
from discern.records import read_record as read_record_of
from discern.training import checkpoint
from discern.training.memory import machine_memory
from discern.types import SpecialTokens
from discern.workflows.configuration import read_written_config
from discern.workflows.settings import PretrainConfig

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, CHECKPOINTS = "config.toml", "run.json", "tokenizer.json", "checkpoints"
FINETUNED_FILE = "finetuned.json"
COUNTS_FILE = "token-counts.txt"
_FEWEST_TOKENS_A_WORD = 1.01
EVALUATION_FILE = "evaluation.json"
FORMAT = 1
TEXT_LICENSE = "text_license"
"""Key of records, and of the mark of exports, for the license of the text that a model was pre-trained on."""

Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
"""Of a token, in a record."""


@dataclass(frozen=True)
class LoadedRun:
    """The networks of a run at its newest sound checkpoint.

    Attributes:
        folder: of the run.
        config: resolved.
        objective: with its weights, in evaluation mode, float32, on the CPU; without what it carries from step to step.
        step: of the checkpoint.
        vocabulary: of the tokenizer.
        tokenizer_path: the run's tokenizer.json.
        record: the run's run.json: data, fingerprints, versions.
    """

    folder: Path
    config: PretrainConfig
    objective: Objective
    step: int
    vocabulary: Vocabulary
    tokenizer_path: Path
    record: dict[str, Any]


def is_finetuned(folder: Path) -> bool:
    """Whether a folder holds a fine-tuning, which is no run."""
    return (folder / FINETUNED_FILE).is_file()


def is_run(folder: Path) -> bool:
    """True where a folder holds a run."""
    return (folder / CONFIG_FILE).is_file() and (folder / RECORD_FILE).is_file()


def load_run(folder: Path, *, warn: Callable[[str], None]) -> LoadedRun:
    """A run's networks.

    Args:
        warn: told of damaged checkpoints that were passed over.

    Raises:
        DataError: the folder holds no run, or one of its files is damaged.
        CheckpointError: it holds no sound checkpoint.
    """
    record = read_record(folder)
    config = read_written_config(folder / CONFIG_FILE)
    vocabulary = Vocabulary(record["vocab_size"], special_in(record), _read_counts(folder, record["vocab_size"]))
    contents = checkpoint.load_newest(folder / CHECKPOINTS, warn, carry=False)
    if contents is None:
        raise CheckpointError(
            f"{folder} has no checkpoint yet",
            hint="let `discern pretrain` reach train.checkpoint_every_steps, or stop it with Ctrl-C",
        )
    # Before a table of that size is made.
    if all(tensor.shape[:1] != (vocabulary.size,) for tensor in contents.model.values()):
        raise CheckpointError(
            f"{folder / RECORD_FILE} has a vocab_size of {vocabulary.size:,}, but no weight of the checkpoint has that many rows",
            hint="the file is damaged: copy it back",
        )
    objective = build_objective(config, vocabulary)
    checkpoint.load_model_tensors(objective, contents.model, str(folder))
    return LoadedRun(folder, config, objective.eval(), contents.step, vocabulary, folder / TOKENIZER_FILE, record)


def special_in(record: Mapping[str, Any]) -> SpecialTokens:
    """The ids of the special tokens that run.json names."""
    return SpecialTokens(
        **{role: record["special_tokens"][role] for role in _Special.model_fields if role in record["special_tokens"]}
    )


def vocabulary_of(data: TokenData) -> Vocabulary:
    """What an objective must know of a data set: its words, and how often each stands in the training split."""
    return Vocabulary(data.vocab_size, data.special_tokens, torch.from_numpy(data.token_counts()))


def check_words(config: PretrainConfig, data: TokenData) -> None:
    """Raise where a masking of words would choose single tokens, as the data set knows hardly any word of several.

    Raises:
        ConfigError: so it is; the hint says how to store words.
    """
    objective, found = config.objective, data.manifest.statistics.tokens_per_word
    if isinstance(objective, PositionsConfig) and objective.masking in MASKINGS_OF_WORDS and found < _FEWEST_TOKENS_A_WORD:
        raise ConfigError(
            f"objective.masking '{objective.masking}' chooses whole words, but in {data.folder} nearly every token is one "
            f"({found:.3f} tokens a word)",
            hint="Chinese: prepare the data again with --segmenter jieba, which leaves the ids as they are; "
            "otherwise set objective.masking=uniform, which does the same here",
        )


def counts_text(data: TokenData) -> str:
    """What a run's folder keeps of how often each token occurs in its training split: one number a line."""
    return "".join(f"{count}\n" for count in data.token_counts().tolist())


def _read_counts(folder: Path, entries: int) -> torch.Tensor | None:
    """What `counts_text` was; None in runs made before it was.

    Raises:
        DataError: the file is damaged, or not of a vocabulary of so many entries.
    """
    path = folder / COUNTS_FILE
    if not path.is_file():
        return None
    hint = "copy the file back, or remove it: objectives that use token frequencies need it"
    with understood(path, hint=hint):
        counts = [int(line) for line in read_text(path, hint=hint).split()]
        if len(counts) != entries or not all(0 <= count < 2**63 for count in counts):
            raise ValueError(f"expected {entries:,} counts, one for each entry of the vocabulary, found {len(counts):,} numbers")
        return torch.tensor(counts)


def build_objective(config: PretrainConfig, vocabulary: Vocabulary) -> Objective:
    """The objective that a configuration describes, its weights not yet filled."""
    settings = BuildSettings(config.model, vocabulary, config.train.gradient_checkpointing)
    objective: Objective = objectives.load(config.objective.name)(config.objective, settings)
    return objective


# Weights, gradients and the two moments of AdamW, in float32.
_BYTES_A_PARAMETER = 16


def check_parameters(config: PretrainConfig, vocabulary: Vocabulary, device: torch.device) -> None:
    """Make sure that the machine can hold what is trained, before it is asked to.

    Raises:
        ConfigError: the parameters with their gradients and moments alone exceed the memory of the device.
    """
    present = machine_memory(device)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_objective(config, vocabulary).parameters())
    if present is not None and count * _BYTES_A_PARAMETER > present:
        named = ("num_layers", "hidden_size", "feedforward_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in named)
        raise ConfigError(
            f"{count:,} parameters ({sizes}) take {count * _BYTES_A_PARAMETER / 1e9:,.1f} GB with gradients and optimizer state, "
            f"and {'this machine' if device.type == 'cpu' else device} has {present / 1e9:,.1f} GB",
            hint="lower one of these sizes; `discern pretrain --dry-run` shows what a configuration needs",
        )


def read_record(folder: Path) -> dict[str, Any]:
    """run.json.

    Raises:
        DataError: there is none, or it is damaged or of another format.
    """
    if not is_run(folder):
        state = "does not exist" if not folder.exists() else f"holds no {CONFIG_FILE} and {RECORD_FILE}"
        raise DataError(f"{folder} is not a run: it {state}", hint="a run is what `discern pretrain --out RUN` makes")
    hint = "copy the file back, or train the run again: the checkpoints cannot be used without it"
    return read_record_of(folder / RECORD_FILE, _Run, hint=hint, version=FORMAT)


class _Special(Record):
    pad: Id
    unk: Id
    cls: Id
    sep: Id
    mask: Id
    eod: Id | None = None


class _Statistics(Record):
    documents: Annotated[int, Field(ge=0)] = 0
    duplicates: Annotated[int, Field(ge=0)] = 0
    tokens: Annotated[int, Field(ge=0)] = 0
    unknown_fraction: float | None = None


class _Start(Record):
    model: str
    description: str
    weights: str


class _Replay(Record):
    data: str
    data_fingerprint: str
    share: float


class _Run(Record):
    """What run.json must hold."""

    format: int
    data: str
    data_fingerprint: str = ""
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    special_tokens: _Special
    statistics: _Statistics = Field(default_factory=_Statistics)
    versions: dict[str, str] = Field(default_factory=dict)
    arithmetic: dict[str, Any] = Field(default_factory=dict)
    start: _Start | None = None
    replay: _Replay | None = None
    discern: str = ""

    @model_validator(mode="after")
    def _special_tokens_are_entries(self) -> _Run:
        beyond = [role for role, number in self.special_tokens if isinstance(number, int) and number >= self.vocab_size]
        if beyond:
            raise ValueError(f"special_tokens.{beyond[0]} is beyond the {self.vocab_size:,} entries of vocab_size")
        return self


def arithmetic(device: torch.device, precision: str) -> dict[str, Any]:
    """What decides the last digits of a run, besides its settings."""
    fused = device.type == "cpu" and kernels.load_kernels().library is not None
    return {"device": device.type, "precision": precision, "kernels": fused, "threads": torch.get_num_threads()}


def make_record(data: TokenData, objective: Objective, computed: dict[str, Any]) -> dict[str, Any]:
    """What made a run: its data set, tokenizer, arithmetic and library versions."""
    said = {"language": "language", "license": TEXT_LICENSE}
    told = {theirs: value for ours, theirs in said.items() if (value := data.manifest.configuration.get(ours)) is not None}
    return {
        "format": FORMAT,
        "discern": __version__,
        "data": str(data.folder.resolve()),
        "data_fingerprint": data.fingerprint,
        "tokenizer_fingerprint": data.tokenizer_fingerprint,
        "vocab_size": data.vocab_size,
        "special_tokens": asdict(data.special_tokens),
        "statistics": data.manifest.statistics.model_dump(),
        "parameters": sum(parameter.numel() for parameter in objective.parameters()),
        "arithmetic": computed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "tokenizers": tokenizers.__version__,
        },
    } | told
