"""A run's folder: what stands in it, and loading the networks of one."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch

from discern import __version__, kernels
from discern.artifacts.files import write_text
from discern.corruption import MASKINGS_OF_WORDS
from discern.data.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.objectives.config import PositionsConfig
from discern.training import checkpoint
from discern.training.memory import machine_memory
from discern.types import SpecialTokens
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.settings import PretrainConfig

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, CHECKPOINTS = "config.toml", "run.json", "tokenizer.json", "checkpoints"
FINETUNED_FILE = "finetuned.json"
COUNTS_FILE = "token-counts.txt"
_FEWEST_TOKENS_A_WORD = 1.01
EVALUATION_FILE = "evaluation.json"
FORMAT = 1
TEXT_LICENSE = "text_license"
"""Key of records, and of the mark of exports, for the license of the text that a model was pre-trained on."""


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
        DataError: the folder holds no run.
        CheckpointError: it holds no sound checkpoint.
    """
    record = read_record(folder)
    config = load_pretrain_config(folder / CONFIG_FILE, None, []).config
    vocabulary = Vocabulary(record["vocab_size"], SpecialTokens(**record["special_tokens"]), _read_counts(folder))
    contents = checkpoint.load_newest(folder / CHECKPOINTS, warn, carry=False)
    if contents is None:
        raise CheckpointError(
            f"{folder} has no checkpoint yet",
            hint="let `discern pretrain` reach train.checkpoint_every_steps, or stop it with Ctrl-C",
        )
    objective = build_objective(config, vocabulary)
    checkpoint.load_model_tensors(objective, contents.model, str(folder))
    return LoadedRun(folder, config, objective.eval(), contents.step, vocabulary, folder / TOKENIZER_FILE, record)


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


def write_counts(folder: Path, data: TokenData) -> None:
    """Keep in a run's folder how often each token occurs in its training split, one number a line."""
    write_text(folder / COUNTS_FILE, "".join(f"{count}\n" for count in data.token_counts().tolist()))


def _read_counts(folder: Path) -> torch.Tensor | None:
    """What `write_counts` kept; None in runs made before it was."""
    path = folder / COUNTS_FILE
    return torch.tensor([int(line) for line in path.read_text().split()]) if path.is_file() else None


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
            hint="lower one of these sizes; `discern pretrain --dry-run` tells what a configuration would take",
        )


def read_record(folder: Path) -> dict[str, Any]:
    """run.json.

    Raises:
        DataError: there is none, or of another format.
    """
    if not is_run(folder):
        state = "does not exist" if not folder.exists() else f"holds no {CONFIG_FILE} and {RECORD_FILE}"
        raise DataError(f"{folder} is not a run: it {state}", hint="a run is what `discern pretrain --out RUN` makes")
    record: dict[str, Any] = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise DataError(f"{folder} has format {record.get('format')}; this version of discern reads {FORMAT}")
    return record


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
