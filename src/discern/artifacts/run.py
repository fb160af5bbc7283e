"""The files of a run's folder, and its record run.json: what the run was trained on, and what affects its rounding."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

import numpy
import tokenizers
import torch
from pydantic import Field, model_validator

from discern import __version__, kernels
from discern.artifacts.encoder import LoadedEncoder, loaded_encoder
from discern.artifacts.model_folder import TEXT_LICENSE, ModelFolder
from discern.data.dataset.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.models.base import Network
from discern.models.embeddings import Disentangled
from discern.models.unpadding import attention_path
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.storage.checksums import Record, has_file, read_text, understood
from discern.storage.checksums import read_record as read_record_of
from discern.training import checkpoint
from discern.training.pretrain_config import PretrainConfig, read_written_config
from discern.types import SpecialTokens

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, CHECKPOINTS = "config.toml", "run.json", "tokenizer.json", "checkpoints"
COUNTS_FILE = "token-counts.txt"
EVALUATION_FILE, BLIMP_FILE = "evaluation.json", "blimp.json"
FORMAT = 1

Id: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
"""A token id in a record."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a pre-training run, possibly without its record."""
    return has_file(folder, RECORD_FILE)


def read_record(folder: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        DataError: the folder is not a run, or the file is damaged or has another format.
    """
    if not is_run(folder):
        state = "does not exist" if not folder.exists() else f"holds no {RECORD_FILE}"
        raise DataError(
            f"{folder} is not a run: it {state}", hint="give the folder of a run, made by `discern pretrain --out RUN`"
        )
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
    documents: Annotated[int, Field(ge=0)]
    duplicates: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    unknown_fraction: float


class _Start(Record):
    model: str
    description: str
    weights: str


class _Replay(Record):
    data: str
    data_fingerprint: str
    share: float


class _Overlap(Record):
    file: str
    checked: Annotated[int, Field(ge=0)]
    too_short: Annotated[int, Field(ge=0)]
    overlapping: Annotated[int, Field(ge=0)]
    share: float | None


class _Run(Record):
    """The required content of run.json."""

    format: int
    data: str
    data_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    special_tokens: _Special
    statistics: _Statistics
    versions: dict[str, str]
    arithmetic: dict[str, Any]
    start: _Start | None = None
    replay: _Replay | None = None
    discern: str
    overlap: list[_Overlap] | None = None

    @model_validator(mode="after")
    def _special_tokens_are_entries(self) -> _Run:
        beyond = [role for role, number in self.special_tokens if isinstance(number, int) and number >= self.vocab_size]
        if beyond:
            raise ValueError(f"special_tokens.{beyond[0]} is beyond the {self.vocab_size:,} entries of vocab_size")
        return self


def special_in(record: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens in a run's record."""
    return SpecialTokens(
        **{role: record["special_tokens"][role] for role in _Special.model_fields if role in record["special_tokens"]}
    )


def arithmetic(device: torch.device, precision: str, objective: Objective | None = None, processes: int = 1) -> dict[str, Any]:
    """What affects rounding in a run besides its settings: device, precision, kernels and threads.

    On a GPU also how the networks of `objective` compute attention, and the number of processes if there are several.
    """
    fused = device.type == "cpu" and kernels.load_kernels().library is not None
    path = None if objective is None else attention_path(objective, device, precision)
    return {
        "device": device.type,
        "precision": precision,
        "kernels": fused,
        "threads": torch.get_num_threads(),
        **({} if path is None else {"attention": path.name}),
        **({"processes": processes} if processes > 1 else {}),
    }


def make_record(data: TokenData, objective: Objective, computed: dict[str, Any]) -> dict[str, Any]:
    """The content of run.json: data set, tokenizer, settings that affect rounding, and library versions."""
    said = {"language": "language", "license": TEXT_LICENSE}
    told: dict[str, Any] = {
        theirs: value for ours, theirs in said.items() if (value := data.manifest.configuration.get(ours)) is not None
    }
    if (overlap := data.manifest.overlap) is not None:
        told["overlap"] = [each.model_dump(mode="json", exclude={"found"}) for each in overlap]
    return {
        "format": FORMAT,
        "discern": __version__,
        "data": data.location,
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


FINETUNED_FILE = "finetuned.json"
_FEWEST_TOKENS_A_WORD = 1.01


@final
class RunFolder(ModelFolder):
    """The folder of a pre-training run, with the weights of its newest intact checkpoint: their average if the run keeps one.

    Args:
        folder: path of the folder.
        warn: called with a message for each damaged checkpoint that is skipped.
    """

    kind = "run"

    def __init__(self, folder: Path, *, warn: Callable[[str], None]) -> None:
        super().__init__(folder)
        self._warn = warn

    def load(self) -> RunFolder:
        """Read the newest intact checkpoint now, so that errors are raised here; returns the run itself."""
        _ = self._checkpoint
        return self

    @property
    def description(self) -> str:
        average = ", average of its weights" if self.config.train.weight_average else ""
        return f"run {self.folder} at step {self.step:,}{average}"

    @cached_property
    def record(self) -> dict[str, Any]:
        """Content of run.json: data, fingerprints, versions.

        Raises:
            DataError: the folder is not a run, or the file is damaged.
        """
        return read_record(self.folder)

    @cached_property
    def config(self) -> PretrainConfig:
        """The resolved configuration."""
        return read_written_config(self.folder / CONFIG_FILE)

    @property
    def objective(self) -> Objective:
        """The objective with its weights, but without the state that it carries from step to step.

        Raises:
            CheckpointError: the run has no intact checkpoint.
        """
        return self._checkpoint[0]

    @property
    def whole_objective(self) -> Objective:
        return self.objective

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self._checkpoint[1]

    @property
    def tokens(self) -> int | None:
        """Number of real tokens read up to the checkpoint; None if it is not recorded."""
        return self._checkpoint[2]

    @property
    def data(self) -> Path:
        return Path(self.record["data"])

    @property
    def language(self) -> str | None:
        return self.record.get("language")

    @property
    def text_license(self) -> str | None:
        return self.record.get(TEXT_LICENSE)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Size, special tokens and token counts of the vocabulary."""
        entries = self.record["vocab_size"]
        return Vocabulary(entries, special_in(self.record), read_counts(self.folder, entries))

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE

    @property
    def num_entries(self) -> int:
        return self.vocabulary.size

    @property
    def trained_with(self) -> str:
        fingerprint: str = self.record["tokenizer_fingerprint"]
        return fingerprint

    @property
    def tokenizer_fingerprints(self) -> tuple[str, ...]:
        """Only the fingerprint in run.json: the ids are those of the data set, even if tokenizer.json has changed."""
        return (self.trained_with,)

    @property
    def max_length(self) -> int:
        return self.config.data.sequence_length

    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        """The networks by name, the one to fine-tune first; a run always has all of them."""
        return self.objective.networks()

    @property
    def encoder(self) -> LoadedEncoder:
        encoder = next(iter(self.networks().values())).encoder
        embeddings = encoder.embeddings
        if isinstance(embeddings, Disentangled):
            encoder = copy.deepcopy(encoder)  # the objective keeps its own
            encoder.embeddings = embeddings.merged()
        return loaded_encoder(
            encoder,
            self.tokenizer_path,
            self.max_length,
            self.description,
            language=self.language,
            text_license=self.text_license,
        )

    @cached_property
    def _checkpoint(self) -> tuple[Objective, int, int | None]:
        """The objective at the newest intact checkpoint, its step and the tokens read until then."""
        vocabulary, config = self.vocabulary, self.config  # read first, because it shows whether this is a run
        contents = checkpoint.load_newest(self.folder / CHECKPOINTS, self._warn, carry=False)
        if contents is None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint yet",
                hint="let `discern pretrain` reach train.checkpoint_every_steps, or stop it with Ctrl-C, which saves a "
                "checkpoint",
            )
        # Checked first, because a damaged record could ask for a table that does not fit into memory.
        if all(tensor.shape[:1] != (vocabulary.size,) for tensor in contents.model.values()):
            raise CheckpointError(
                f"{self.folder / RECORD_FILE} has a vocab_size of {vocabulary.size:,}, but no weight of the checkpoint has "
                "this number of rows",
                hint="the file is damaged: copy it back",
            )
        objective = build_objective(config, vocabulary)
        checkpoint.load_model_tensors(objective, contents.weights, str(self.folder))
        return objective.eval(), contents.step, contents.state.get("tokens")


def is_finetuned(folder: Path) -> bool:
    """Whether a folder holds a fine-tuned model, possibly without its record."""
    return has_file(folder, FINETUNED_FILE)


def load_run(folder: Path, *, warn: Callable[[str], None]) -> RunFolder:
    """A run at its newest intact checkpoint.

    Args:
        warn: called with a message for each damaged checkpoint that is skipped.

    Returns:
        The run, with `folder`, `config`, `objective`, `step`, `vocabulary`, `tokenizer_path` and `record`. The objective is in
        evaluation mode, float32, on the CPU, without the state that it carries from step to step.

    Raises:
        DataError: the folder is not a run, or one of its files is damaged.
        CheckpointError: it has no intact checkpoint.
    """
    return RunFolder(folder, warn=warn).load()


def vocabulary_of(data: TokenData) -> Vocabulary:
    """The vocabulary of a data set, with the number of occurrences of each token in its training split."""
    return Vocabulary(data.vocab_size, data.special_tokens, torch.from_numpy(data.token_counts()))


def check_words(config: PretrainConfig, data: TokenData) -> None:
    """Refuse to mask whole words if nearly every word of the data set is a single token.

    Raises:
        ConfigError: whole words would be the same as single tokens; the hint explains how to store words.
    """
    objective, found = config.objective, data.manifest.statistics.tokens_per_word
    if objective.word_masking is not None and found < _FEWEST_TOKENS_A_WORD:
        raise ConfigError(
            f"objective.masking '{objective.word_masking}' chooses whole words, but in {data.folder} nearly every token is one "
            f"({found:.3f} tokens per word)",
            hint="Chinese: prepare the data again with --segmenter jieba, which does not change the ids; "
            "otherwise set objective.masking=uniform, which is equivalent here",
        )


def counts_text(data: TokenData) -> str:
    """The number of occurrences of each token in the training split, one per line, as stored in a run's folder."""
    return "".join(f"{count}\n" for count in data.token_counts().tolist())


def read_counts(folder: Path, entries: int) -> torch.Tensor:
    """Read what `counts_text` wrote.

    Raises:
        DataError: the file is damaged, or its number of entries differs from that of the vocabulary.
    """
    path = folder / COUNTS_FILE
    hint = "copy the file back: objectives that use token frequencies need it"
    with understood(path, hint=hint):
        counts = [int(line) for line in read_text(path, hint=hint).split()]
        if len(counts) != entries or not all(0 <= count < 2**63 for count in counts):
            raise ValueError(f"expected {entries:,} counts, one for each entry of the vocabulary, found {len(counts):,} numbers")
        return torch.tensor(counts)


def build_objective(config: PretrainConfig, vocabulary: Vocabulary) -> Objective:
    """Build the objective that a configuration describes, without weights."""
    settings = BuildSettings(config.model, vocabulary, config.train.gradient_checkpointing)
    objective: Objective = objectives.load(config.objective.name)(config.objective, settings)
    return objective


# Weights, gradients and the two moments of AdamW, in float32.
_BYTES_A_PARAMETER = 16
# Before weights are divided, each process has them whole, and a copy of them.
_BYTES_BEFORE_DIVIDING = 8


def machine_memory(device: torch.device) -> int | None:
    """Bytes of memory of the GPU, or else of the machine or the limit of its container; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # no such name on this system
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else ""
    return min(installed, int(allowed)) if allowed.isdecimal() else installed


def check_parameters(config: PretrainConfig, vocabulary: Vocabulary, device: torch.device, processes: int = 1) -> None:
    """Make sure that the parameters, their gradients and the optimizer state fit into the memory of the device.

    Args:
        processes: number of processes that train together; on the CPU, they share the memory.

    Raises:
        ConfigError: they do not fit.
    """
    present = machine_memory(device)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_objective(config, vocabulary).parameters())
    shards = processes if config.train.divides_weights(processes) and device.type != "cpu" else 1
    needed = count * max(_BYTES_A_PARAMETER / shards, _BYTES_BEFORE_DIVIDING if shards > 1 else 0)
    if present is not None and needed > present:
        named = ("num_layers", "hidden_size", "feedforward_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in named)
        raise ConfigError(
            f"{count:,} parameters ({sizes}) take {needed / 1e9:,.1f} GB with gradients and optimizer state, "
            f"but {'this machine' if device.type == 'cpu' else device} has {present / 1e9:,.1f} GB",
            hint="lower one of these sizes; `discern pretrain --dry-run` shows what a configuration needs",
        )
