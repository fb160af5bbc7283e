"""The files of a run's folder, and its record run.json: what the run was trained on, and what affects its rounding."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

import numpy
import tokenizers
import torch
from pydantic import Field

from discern import __version__, kernels
from discern.data.batching.mixture import MixedData, open_data, sources_of, weighted
from discern.data.dataset.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.folder import PROVENANCE, RUN_RECORD, LoadedEncoder, ModelFolder, Provenance, encoder_alone
from discern.models.attention import span_obstacle
from discern.models.base import Network
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.storage.checksums import Record, has_file, read_json, read_text, understood
from discern.training import checkpoint
from discern.training.config import PretrainConfig, read_written_config
from discern.types import SpecialTokens

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, CHECKPOINTS = "config.toml", RUN_RECORD, "tokenizer.json", "checkpoints"
COUNTS_FILE = "token-counts.txt"
EVALUATION_FILE, BLIMP_FILE = "evaluation.json", "blimp.json"
FORMAT = 1
_HUB_DATASET = re.compile(r"hf:(?://datasets/)?([\w.-]+(?:/[\w.-]+)?)")

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
    return read_json(folder / RECORD_FILE, _Run, hint=hint, version=FORMAT)


class _Special(Record):
    pad: Id
    unk: Id
    cls: Id
    sep: Id
    mask: Id
    eod: Id | None = None


class _Run(Record):
    """The required content of run.json."""

    format: int
    data: list[str]
    data_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, lt=2**31)]
    special_tokens: _Special
    statistics: dict[str, Any]
    versions: dict[str, str]
    arithmetic: dict[str, Any]
    start: dict[str, str] | None = None
    discern: str
    overlap: list[dict[str, Any]] | None = None
    mixture: dict[str, float] | None = None
    provenance: dict[str, list[str]] = Field(default_factory=dict)


def special_in(record: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens in a run's record."""
    return SpecialTokens(**record["special_tokens"])


def arithmetic(device: torch.device, precision: str, objective: Objective, processes: int) -> dict[str, Any]:
    """What affects rounding in a run besides its settings: device, precision, kernels and threads.

    On a GPU also how the networks of `objective` compute attention, and the number of processes if there are several.
    """
    fused = device.type == "cpu" and kernels.load_kernels().library is not None
    found = {"device": device.type, "precision": precision, "kernels": fused, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["attention"] = "varlen" if span_obstacle(objective, device, precision) is None else "sdpa"
    return found | ({"processes": processes} if processes > 1 else {})


def make_record(
    data: TokenData, objective: Objective, computed: dict[str, Any], earlier: Sequence[Provenance] = ()
) -> dict[str, Any]:
    """The content of run.json: data set, tokenizer, provenance, settings that affect rounding, and library versions.

    Args:
        computed: see `arithmetic`.
        earlier: provenance of the models whose weights the run starts from.
    """
    manifests = [source.manifest for source in sources_of(data).values()]
    own: Mapping[str, Sequence[Any]] = {
        "languages": [each.configuration.get("language") for each in manifests],
        "licenses": [each.configuration.get("license") for each in manifests],
        "datasets": [found[1] for each in manifests for name in each.inputs if (found := _HUB_DATASET.match(name))],
        "base_models": [],
    }
    overlap = data.manifest.overlap
    provenance = {
        key: list(dict.fromkeys(value for each in (*earlier, own) for value in each.get(key, ()) if value)) for key in own
    }
    return {
        "format": FORMAT,
        "discern": __version__,
        "data": [source.location for source in sources_of(data).values()],
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
        PROVENANCE: {key: values for key, values in provenance.items() if values},
        "mixture": data.weights if isinstance(data, MixedData) else {},
        "overlap": overlap and [each.model_dump(mode="json", exclude={"found"}) for each in overlap],
    }


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

    def open_data(self) -> TokenData:
        return weighted(open_data(self.record["data"]), self.config.data)

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
    def tokenizer_fingerprints(self) -> tuple[str, ...]:
        """Only the fingerprint in run.json: the ids are those of the data set, even if tokenizer.json has changed."""
        return (self.record["tokenizer_fingerprint"],)

    @property
    def max_length(self) -> int:
        return self.config.data.sequence_length

    def networks(self, *, beside: bool = True) -> Mapping[str, Network]:
        """The networks by name, the one to fine-tune first; a run always has all of them."""
        return self.objective.networks()

    @cached_property
    def encoder(self) -> LoadedEncoder:
        return self._loaded(encoder_alone(next(iter(self.networks().values()))), self.max_length, self.description)

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
        objective = build_objective(config, vocabulary)
        checkpoint.load_model_tensors(objective, contents.weights, str(self.folder))
        return objective.eval(), contents.step, contents.state.get("tokens")


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
    run = RunFolder(folder, warn=warn)
    _ = run.objective  # so that errors are raised here
    return run


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
