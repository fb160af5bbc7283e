"""A labeled file of three sentences, and a fine-tuning on it that takes a second; arguments that tests vary with `replace`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from discern.finetuning import plan as planning, run as finetuning
from discern.finetuning.plan import FinetunePlan
from discern.finetuning.settings import Recipe
from discern.model_files.folder import choose_encoder
from discern.progress import Progress, Silent

ROWS = [("the model reads the file", "good"), ("a tensor of shape", "bad"), ("returns none", "so-so")]
FAST = ("train.max_steps=60", "optimizer.learning_rate=3e-3", "finetune.dropout=0", "train.sequences_per_step=12")


@dataclass(frozen=True)
class Finetuning:
    """Arguments of `discern.finetuning.run.finetune`."""

    model: str
    out: Path
    tasks: Sequence[tuple[str, Path]] = ()
    config: Path | None = None
    overrides: Sequence[str] = ()
    recipe: Recipe = "auto"
    seeds: int = 1
    untrained: bool = False
    tokenizer: Path | None = None
    submission: Path | None = None
    debug: bool = False
    device: str = "auto"
    baselines: bool = True
    overwrite: bool = False
    sweep: Sequence[str] = ()


class Notes(Silent):
    """Collects the messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def finetune(request: Finetuning, progress: Progress) -> dict[str, Any]:
    return finetuning.finetune(**vars(request), progress=progress)


def prepare_finetuning(request: Finetuning, progress: Progress) -> FinetunePlan:
    """What `finetune` does before it trains."""
    loaded = choose_encoder(request.model, request.tokenizer, untrained=request.untrained, warn=progress.note)
    settings = planning.resolve_settings(loaded, request.tasks, request.config, request.overrides, request.recipe, progress)
    submits = request.submission is not None
    device = torch.device("cpu")
    return planning.read_rows(loaded, settings, request.out, progress, device, debug=request.debug, submits=submits)


def with_settings(request: Finetuning, *overrides: str) -> Finetuning:
    """The request with further settings."""
    return replace(request, overrides=(*request.overrides, *overrides))


def write_csv(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("review", "stars")) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def small_request(model: Path, folder: Path) -> Finetuning:
    """Fine-tune a model on files in a folder, into its `out`."""
    train = write_csv(folder / "train.csv", ROWS * 20)
    dev = write_csv(folder / "dev.csv", ROWS * 4)
    files = (f"files.train='{train}'", f"files.dev='{dev}'", "files.text=review", "files.label=stars")
    return Finetuning(str(model), folder / "out", overrides=(*files, *FAST))


def run(request: Finetuning) -> dict[str, Any]:
    return finetune(request, Silent())
