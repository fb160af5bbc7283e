"""The files of a run's folder, and its record run.json: what the run was trained on, and what affects its rounding."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy
import tokenizers
import torch
from pydantic import Field, model_validator

from discern import __version__, kernels
from discern.artifacts.model_folder import TEXT_LICENSE
from discern.data.dataset.shards import TokenData
from discern.errors import DataError
from discern.models.span_attention import attention_path
from discern.objectives.base import Objective
from discern.storage.checksums import has_file
from discern.storage.records import Record
from discern.storage.records import read_record as read_record_of
from discern.types import SpecialTokens

CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, CHECKPOINTS = "config.toml", "run.json", "tokenizer.json", "checkpoints"
COUNTS_FILE = "token-counts.txt"
EVALUATION_FILE = "evaluation.json"
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
